"""The book's own Sphinx extensions: the list of techniques, and the docstrings of the package."""

import pytest
import yaml
from built_book import ROOT, load_script

techniques = load_script(ROOT / "book" / "_ext" / "techniques.py")
docstrings = load_script(ROOT / "book" / "_ext" / "docstrings.py")
LIST = ROOT / "book" / "techniques.yml"


def test_the_list_loads_in_its_order() -> None:
    assert list(techniques.load(LIST))[:2] == ["gptlite", "sampling"]


@pytest.mark.parametrize(
    ("change", "message"),
    [
        ({"phase": "training"}, "phase is 'training'"),
        ({"reduces": ["time"]}, "reduces 'time'"),
        ({"papers": []}, r"papers is \[\]"),
        ({"exact": True}, "exact is True, it must be a str"),
        ({"stacks": {"vLLM": "yes"}}, "stacks are"),
        ({"colour": "blue"}, r"missing or unknown fields \['colour'\]"),
    ],
)
def test_a_wrong_entry_is_refused(change: dict, message: str, tmp_path) -> None:
    entry = yaml.safe_load(LIST.read_text(encoding="utf-8"))[0] | change
    path = tmp_path / "techniques.yml"
    path.write_text(yaml.safe_dump([entry], sort_keys=False), encoding="utf-8")
    with pytest.raises(ValueError, match=f"technique 'gptlite': {message}"):
        techniques.load(path)


def test_an_entry_twice_is_refused(tmp_path) -> None:
    path = tmp_path / "techniques.yml"
    path.write_text(LIST.read_text(encoding="utf-8") * 2, encoding="utf-8")
    with pytest.raises(ValueError, match="technique 'gptlite' stands there twice"):
        techniques.load(path)


def test_a_docstring_becomes_fields() -> None:
    written = [
        "Normalise {cite}`zhang2019rms`, as `x / norm`s do.",
        "",
        "Args:",
        "    x, y: activations [..., d] of *any* kind_;",
        "        computed in fp32.",
        "Returns: [..., d]. Raises: ValueError when `d` is 0.",
        "",
        "More prose.",
    ]
    assert [line for line in docstrings.convert(written) if line] == [
        r"Normalise :cite:`zhang2019rms`, as ``x / norm``\ s do.",
        r":param x: activations [..., d] of \*any\* kind\_;",
        r":param y: activations [..., d] of \*any\* kind\_;",
        "    computed in fp32.",
        ":returns: [..., d].",
        ":raises: ValueError when ``d`` is 0.",
        "More prose.",
    ]
