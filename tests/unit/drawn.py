"""Reads a chart as it is drawn: Vega's own scene, with the controls at given values."""

import json

import vl_convert

PLOT = 1000  # px, width of the plot in which places are read


def draw(explorer, **values):
    """The drawn chart's scene, with the controls at these values."""
    spec = json.loads(json.dumps(explorer.spec))
    spec["width"] = PLOT
    for param in spec["params"]:
        if param["name"] in values:
            param["value"] = values.pop(param["name"])
    assert not values, f"no such control: {values}"
    return vl_convert.vegalite_to_scenegraph(spec)


def marks(scene, kind, layer="layer"):
    """Items of the drawn marks of one kind and layer."""
    found = []

    def walk(node):
        if isinstance(node, dict):
            if node.get("marktype") == kind and (node.get("name") or "").startswith(layer):
                found.extend(node["items"])
            node = list(node.values())
        if isinstance(node, list):
            for child in node:
                walk(child)

    walk(scene)
    return found


def words(scene):
    """All lines of text in the plot."""
    return [item["text"] for item in marks(scene, "text") if item.get("text")]
