import json
import re
import sys
from html.parser import HTMLParser

import altair as alt
import nbformat
import pytest
import torch
import vl_convert
from drawn import PLOT
from drawn import marks as drawn_marks
from playwright.sync_api import sync_playwright

from gptlite.arithmetic import ModelShape, decode_costs, total
from gptlite.config import preset
from gptlite.hardware import gpu
from gptlite.notebook.chart import MIME, Explorer
from gptlite.notebook.explorers import SHOWN, front_page, next_character
from gptlite.sampling import SamplingParams, probabilities

CHARS = "\n !',.abcdefghijklmnopqrstuvwxyz"


def recorded(*rows):
    prompts = [{"prompt": f"PROMPT {i}:\n", "logits": row} for i, row in enumerate(rows)]
    return {"chars": CHARS[: len(rows[0])], "prompts": prompts}


def gaussian(seed=0):
    return (torch.randn(len(CHARS), generator=torch.Generator().manual_seed(seed)) * 3).round(decimals=4).tolist()


def marks(explorer, kind, layer="layer", **values):
    """Items of the drawn marks of one kind (and layer), with the sliders at these values, all characters shown."""
    spec = json.loads(json.dumps(explorer.spec).replace(f"datum.rank <= {SHOWN}", "true"))
    spec["width"] = PLOT
    for param in spec["params"]:
        if param["name"] in values:
            param["value"] = values.pop(param["name"])
    assert not values, f"no such control: {values}"
    return drawn_marks(vl_convert.vegalite_to_scenegraph(spec), kind, layer)


def drawn(explorer, **values):
    """Probabilities of all characters, by the lengths of the bars, in the order of the bars."""
    bars = sorted(marks(explorer, "rect", "layer_0", **values), key=lambda item: item["y"])
    begin, end = explorer.spec["layer"][0]["encoding"]["x"]["scale"]["domain"]  # what the width of the plot stands for
    assert begin == 0
    return torch.tensor([bar.get("width", 0) / PLOT * end for bar in bars], dtype=torch.float64)


SETTINGS = [
    (0, 32, 1),
    (0, 5, 0.55),
    (0.05, 32, 0.9),
    (0.7, 32, 1),
    (0.7, 5, 0.55),
    (1, 1, 1),
    (1, 32, 0.9),
    (1, 32, 0.01),
    (1, 5, 1),
    (2, 32, 1),
    (2, 32, 0.9),
    (2, 5, 0.55),
]


@pytest.mark.parametrize(("temperature", "top_k", "top_p"), SETTINGS)
def test_the_chart_draws_what_sampling_computes(temperature, top_k, top_p):
    rows = [gaussian(seed=1), gaussian(seed=2)]
    explorer = next_character(recorded(*rows))
    prompt = int(top_k == 5)
    logits = torch.tensor([rows[prompt]], dtype=torch.float64)
    expected = probabilities(logits, SamplingParams(temperature, top_k, top_p))[0]
    got = drawn(explorer, prompt=prompt, temperature=temperature, top_k=top_k, top_p=top_p)
    order = logits[0].argsort(descending=True, stable=True)
    torch.testing.assert_close(got, expected[order], atol=1e-6, rtol=0)


def test_ties_and_exact_hits_are_those_of_sampling():
    equal = next_character(recorded([2.0, 2.0, 2.0, 2.0]))
    assert drawn(equal, top_p=0.5).tolist() == [0.5, 0.5, 0, 0]  # an exact hit keeps no more
    assert drawn(equal, top_p=0.51).tolist() == pytest.approx([1 / 3, 1 / 3, 1 / 3, 0])
    assert drawn(equal, temperature=0).tolist() == [1, 0, 0, 0]
    tied = next_character(recorded([2.0, 1.0, 1.0, 0.0]))
    assert (drawn(tied, top_k=2) > 0).tolist() == [True, True, True, False]
    for values in ({"top_p": 0.5}, {"top_p": 0.51}, {"temperature": 0}):
        expected = probabilities(torch.full((1, 4), 2.0), SamplingParams(**{"temperature": 1, **values}))[0]
        assert drawn(equal, **values).tolist() == pytest.approx(expected.tolist())


def test_the_chart_counts_what_stays_and_its_entropy():
    row = gaussian()
    p = probabilities(torch.tensor([row], dtype=torch.float64), SamplingParams(0.8, 7, 0.95))[0]
    entropy = -(p[p > 0] * p[p > 0].log2()).sum()
    texts = [
        item["text"] for item in marks(next_character(recorded(row)), "text", temperature=0.8, top_k=7, top_p=0.95)
    ]
    assert f"{int((p > 0).sum())} kept, entropy {entropy:.2f} bits" in texts


def test_logits_that_do_not_fit_the_vocabulary_are_refused():
    with pytest.raises(ValueError, match=r"3 logits after 'A', 2 are needed"):
        next_character({"chars": "ab", "prompts": [{"prompt": "A", "logits": [1, 2, 3]}]})


@pytest.mark.parametrize(
    ("model", "context", "batch", "w", "kv"),
    [(0, 128, 1, 2, 2), (1, 1024, 8, 2, 2), (2, 1024, 8, 2, 2), (2, 32_768, 64, 0.5, 1), (0, 4096, 200, 4, 2)],
)
def test_the_front_page_draws_what_arithmetic_computes(model, context, batch, w, kv):
    values = {"model": model, "context": context, "batch": batch, "weight_bytes": w, "value_bytes": kv}
    [point] = marks(front_page(), "symbol", **values)
    shape = ModelShape.of(preset(("gpt2", "1b", "7b")[model]))
    expected = total(decode_costs(shape, batch, context, bytes_per_weight=w, bytes_per_value=kv)).intensity
    # both axes are logarithmic: y from 1000 down to 0.2 over 320 px, x from 1 to 256
    assert 1000 * (0.2 / 1000) ** (point["y"] / 320) == pytest.approx(expected, rel=1e-6)
    assert 256 ** (point["x"] / PLOT) == pytest.approx(batch, rel=1e-6)


def test_the_front_page_draws_the_ridge_points():
    rules = sorted(item["y"] for item in marks(front_page(), "rule"))
    expected = sorted((gpu(n).ridge_point for n in ("RTX 2080 Ti", "A100 80GB SXM", "H100 SXM")), reverse=True)
    assert [1000 * (0.2 / 1000) ** (y / 320) for y in rules] == pytest.approx(expected, rel=1e-6)


class Outline(HTMLParser):
    """Ids, references to ids, and scripts with a source."""

    def __init__(self, text):
        super().__init__()
        self.ids, self.sources, self.tags = [], [], []
        self.feed(text)

    def handle_starttag(self, tag, attrs):
        attrs = dict(attrs)
        self.tags.append((tag, attrs))
        self.ids += [attrs["id"]] if "id" in attrs else []
        self.sources += [attrs["src"]] if "src" in attrs else []


@pytest.fixture(params=["next", "front"])
def explorer(request):
    return next_character(recorded(gaussian(), gaussian(seed=3))) if request.param == "next" else front_page()


def test_output_is_the_same_in_every_run_and_valid_in_a_notebook(explorer):
    bundle = explorer._repr_mimebundle_()
    again = (
        next_character(recorded(gaussian(), gaussian(seed=3))) if "next" in explorer.name else front_page()
    )._repr_mimebundle_()
    assert bundle == again
    assert set(bundle) == {MIME, "text/html", "text/plain"} and MIME == "application/vnd.vegalite.v6+json"
    output = nbformat.v4.new_output("execute_result", bundle, execution_count=1)
    nbformat.validate(nbformat.v4.new_notebook(cells=[nbformat.v4.new_code_cell("", outputs=[output])]))
    assert not re.search(r"0x[0-9a-f]{6,}|/home/|/tmp/", json.dumps(bundle))


def test_html_names_the_chart_and_loads_nothing_by_itself(explorer):
    html = explorer._repr_html_()
    outline = Outline(html)
    assert len(outline.ids) == len(set(outline.ids)) and all(i.startswith(explorer.element_id) for i in outline.ids)
    for reference in re.findall(r"url\(#([^)]*)\)", html):
        assert reference in outline.ids
    assert not outline.sources
    figure = next(attrs for tag, attrs in outline.tags if tag == "figure")
    svg = next(attrs for tag, attrs in outline.tags if tag == "svg")
    assert figure["aria-label"] == explorer.alt_text and svg["role"] == "img"
    assert set(svg["aria-labelledby"].split()) <= set(outline.ids)
    assert {"title", "desc", "figcaption"} <= {tag for tag, _ in outline.tags}
    data = re.search(r'<script type="application/json">(.*?)</script>', html, re.S)[1]
    assert json.loads(data) == explorer.spec


def test_text_of_a_chart_cannot_end_its_script():
    hostile = recorded(gaussian())
    hostile["prompts"][0]["prompt"] = "</script><b>"
    html = next_character(hostile)._repr_html_()
    assert "<b>" not in html and html.count("</script>") == 2
    data = re.search(r'<script type="application/json">(.*?)</script>', html, re.S)[1]
    assert json.loads(data)["params"][0]["bind"]["labels"] == ["</script><b>"]


def test_ids_inside_the_picture_are_its_own():
    rows = alt.Data(values=[{"x": 1, "y": 2}, {"x": 2, "y": 3}])
    chart = alt.Chart(rows).mark_line(clip=True).encode(x="x:Q", y="y:Q").properties(width="container")
    html = Explorer("clipped", chart, "A line", "It rises.")._repr_html_()
    references = re.findall(r"url\(#([^)]*)\)", html)
    assert references and set(references) <= set(Outline(html).ids)
    assert all(reference.startswith("explorer-clipped-") for reference in references)


def test_a_control_without_a_label_is_refused():
    chart = (
        alt.Chart(alt.Data(values=[{}]))
        .mark_bar()
        .add_params(alt.param(name="p", value=1, bind=alt.binding_range(min=0, max=1)))
    )
    with pytest.raises(ValueError, match="control 'p' of explorer 'x' has no label"):
        Explorer("x", chart, "alt", "caption")


def test_the_text_form_lists_controls_and_facts():
    lines = repr(next_character(recorded(gaussian()))).splitlines()
    assert lines[0].startswith("Explorer next-character: ")
    assert lines[1] == "  Prompt: one of PROMPT 0:⏎; now PROMPT 0:⏎"
    assert lines[2] == "  Temperature: 0 to 2 in steps of 0.05, now 1"
    best = max(range(len(CHARS)), key=gaussian().__getitem__)
    assert lines[-1] == f"  after PROMPT 0:⏎: most likely {CHARS[best]}, logit {gaussian()[best]:.3f}"


@pytest.fixture(scope="module")
def chromium(request):
    sys.path.insert(0, str(request.config.rootpath / "tools"))
    from browser import browser

    with sync_playwright() as playwright:
        flags = ["--no-sandbox", "--disable-gpu", "--disable-background-networking"]
        chrome = playwright.chromium.launch(executable_path=browser(), args=flags)
        yield chrome
        chrome.close()


def open_page(chromium, head, explorer):
    """The explorer in a page whose only network is a stand-in for the public host. Returns: the page, what it asked."""
    page, asked = chromium.new_page(viewport={"width": 390, "height": 900}), []
    bundle = "(function(){" + vl_convert.javascript_bundle() + "})();"

    def answer(route):
        url = route.request.url
        if url == "http://book/":
            route.fulfill(
                body=f"<!doctype html><html><head>{head}</head><body>{explorer._repr_html_()}", content_type="text/html"
            )
            return
        asked.append(url)
        route.fulfill(body=bundle if "vega-embed" in url else "", content_type="text/javascript")

    page.route("**/*", answer)
    page.goto("http://book/")
    return page, asked


def test_outside_the_book_it_draws_itself_and_answers_the_keyboard(chromium, explorer):
    page, asked = open_page(chromium, "", explorer)
    page.wait_for_selector("figure.is-live .gptlite-chart svg")
    assert [url.split("/npm/")[1].split("@")[0] for url in asked] == ["vega", "vega-lite", "vega-embed"]
    assert not page.locator(".gptlite-still").is_visible()
    before = page.locator(".gptlite-chart svg").inner_html()
    slider = page.locator("input[type=range]").nth(0)
    slider.focus()
    page.keyboard.press("ArrowRight")
    page.wait_for_function("html => document.querySelector('.gptlite-chart svg').innerHTML !== html", arg=before)
    assert page.evaluate("document.documentElement.scrollWidth") <= 390


MOVE = """async (values) => {
  const figure = document.querySelector("figure");
  const start = performance.now();
  for (const [name, value] of Object.entries(values)) {
    const input = figure.querySelector(`[name="${name}"]`);
    if (input.tagName === "SELECT") input.selectedIndex = value; else input.value = value;
    input.dispatchEvent(new Event(input.tagName === "SELECT" ? "change" : "input"));
  }
  await figure.view.runAsync();
  const rows = figure.view.data("data_0").map((row) => [row.prompt, row.token, row.probability]);
  return [rows, (performance.now() - start) / Object.keys(values).length];
}"""


@pytest.mark.alone
def test_moved_sliders_give_the_numbers_of_sampling(chromium):
    rows = [gaussian(seed=1), gaussian(seed=2)]
    page, _ = open_page(chromium, "", next_character(recorded(*rows)))
    page.wait_for_selector("figure.is-live .gptlite-chart svg")
    times = []
    moves = [(0, 0.7, 5, 0.55), (1, 2, 32, 0.9), (0, 0, 32, 1), (0, 1, 7, 1), (1, 0.05, 1, 1), (1, 1, 32, 1)]
    for prompt, temperature, top_k, top_p in moves:
        values = {"prompt": prompt, "temperature": temperature, "top_k": top_k, "top_p": top_p}
        found, ms = page.evaluate(MOVE, values)
        times.append(ms)
        got = torch.zeros(len(CHARS), dtype=torch.float64)
        for row_prompt, token, probability in found:
            assert row_prompt == prompt
            got[token] = probability
        logits = torch.tensor([rows[prompt]], dtype=torch.float64)
        expected = probabilities(logits, SamplingParams(temperature, top_k, top_p))[0]
        torch.testing.assert_close(got, expected, atol=1e-6, rtol=0)
    assert sorted(times)[len(times) // 2] < 100, f"a moved slider is answered after {times} ms"


def test_inside_the_book_it_leaves_drawing_to_the_mount(chromium, explorer):
    page, asked = open_page(chromium, '<script src="_static/mount.js?v=1"></script>', explorer)
    page.wait_for_load_state("networkidle")
    assert asked == ["http://book/_static/mount.js?v=1"]
    assert page.locator(".gptlite-still svg").is_visible()


def test_where_nothing_can_be_fetched_the_picture_stays(chromium, explorer):
    page = chromium.new_page()
    page.route("**/*", lambda route: route.abort())
    page.set_content(explorer._repr_html_())
    page.wait_for_function("document.querySelector('.gptlite-chart').textContent.includes('still picture')")
    assert page.locator(".gptlite-still svg").is_visible()
