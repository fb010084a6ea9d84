"""The charts of the chapter on the roofline draw what `gptlite.arithmetic` computes, for every setting."""

import json
import sys

import pytest
import vl_convert
from drawn import PLOT, draw, marks, words
from playwright.sync_api import sync_playwright

from gptlite.arithmetic import (
    attention_share,
    crossover_last_token,
    crossover_prefill,
    decode_costs,
    kv_budget,
    kv_bytes,
    kv_bytes_per_token,
    largest_batch,
    n_params,
    prefill_costs,
    shipped_models,
    step_bound,
    total,
)
from gptlite.hardware import gpu, gpus
from gptlite.notebook.explorers_roofline import LONGEST, measured_steps, memory_budget, roofline, share_of_attention
from gptlite.record import Point, Recording

MODELS, CARDS = list(shipped_models()), list(gpus())


def along(position, length, low, high):
    """The value at a position of a logarithmic axis."""
    return low * (high / low) ** (position / length)


@pytest.fixture(scope="module")
def roof():
    return roofline()


@pytest.fixture(scope="module")
def budget():
    return memory_budget()


def each_model(*settings):
    """Every model with one of the settings, and those that are not plain with all of them."""
    odd = [name for name in ("DeepSeek-V3", "Gemma 3 1B", "Mixtral 8x7B") for _ in settings]
    pairs = {(name, settings[i % len(settings)]) for i, name in enumerate(MODELS + odd)}
    return pytest.mark.parametrize(("name", "setting"), sorted(pairs))


@each_model((1, 128), (3, 5120), (64, 32_768))
def test_the_roofline_draws_the_costs_of_every_model(roof, name, setting):
    batch, context = setting
    card = gpus()[CARDS[(batch + len(name)) % len(CARDS)]]
    values = {
        "model": MODELS.index(name), "card": CARDS.index(card.name), "batch": batch, "context": context
    }  # fmt: skip
    shape, lines = shipped_models()[name], words(draw(roof, **values))
    for phase, costs in (("decode", decode_costs), ("prefill", prefill_costs)):
        cost = total(costs(shape, batch, context))
        seconds, limit = step_bound(cost, card.peak_flops, card.bandwidth)
        share = 1 if limit == "compute" else cost.intensity / card.ridge_point
        assert f"{phase}: {cost.intensity:,.1f} FLOP/B, {1e3 * seconds:,.1f} ms" in lines
        assert f"{phase}, {share:.1%} of peak" in lines
    assert f"ridge point {card.ridge_point:.0f}" in lines
    held = 2 * n_params(shape) + batch * kv_bytes(shape, context)
    assert ("more than its memory holds" in lines) == (held > card.memory_bytes)


def test_the_points_lie_on_the_roof(roof):
    card, shape = gpu("A100 80GB SXM"), shipped_models()["Llama 3.1 8B"]
    scene = draw(roof, card=CARDS.index(card.name), batch=16, context=2048)
    points = marks(scene, "symbol")
    for point, costs in zip(points, (decode_costs, prefill_costs), strict=True):
        intensity = total(costs(shape, 16, 2048)).intensity
        assert along(point["x"], PLOT, 0.5, 50_000) == pytest.approx(intensity, rel=1e-6)
        tflops = min(card.peak_flops, card.bandwidth * intensity) / 1e12
        assert along(point["y"], 340, 4000, 0.1) == pytest.approx(tflops, rel=1e-6)
    [rule] = marks(scene, "rule")
    assert along(rule["x"], PLOT, 0.5, 50_000) == pytest.approx(card.ridge_point, rel=1e-6)


@each_model((1024, 2), (4096, 1), (131_072, 0.5))
def test_the_budget_draws_what_fits(budget, name, setting):
    (context, width), shape = setting, shipped_models()[name]
    card = gpu("H200 SXM")
    values = {
        "model": MODELS.index(name), "card": CARDS.index(card.name), "context": context, "value_bytes": width
    }  # fmt: skip
    fits = largest_batch(shape, context, card.memory_bytes, bytes_per_value=width)
    left = kv_budget(shape, card.memory_bytes)
    scene = draw(budget, **values)
    lines = words(scene)
    per_token = kv_bytes_per_token(shape, width) / 1024
    assert f"{per_token:,.1f} KiB per token, {kv_bytes(shape, context, width) / 1e9:,.2f} GB each" in lines
    room = f"{left / 1e9:,.1f} GB left" if left > 0 else "they do not fit"
    assert f"weights {2 * n_params(shape) / 1e9:,.1f} GB, {room}" in lines
    assert f"{fits:,} sequence{'' if fits == 1 else 's'}" in lines
    points = marks(scene, "symbol")
    assert len(points) == (fits > 0)
    for point in points:
        assert along(point["x"], PLOT, 1024, LONGEST) == pytest.approx(context)
        assert along(point["y"], 320, 10_000, 1) == pytest.approx(min(fits, 10_000), rel=1e-6)


def test_shares_and_crossovers_are_those_of_arithmetic():
    explorer = share_of_attention()
    names = next(c["bind"]["labels"] for c in explorer.controls if c["name"] == "model")
    assert not {"DeepSeek-V3", "Mixtral 8x7B", "Gemma 2 9B"} & set(names)  # the formulas don't count these
    for name in names:
        shape = shipped_models()[name]
        scene = draw(explorer, model=names.index(name), context=7168)
        crossings = marks(scene, "symbol", "layer_3")
        ends = [crossover_prefill(shape), crossover_last_token(shape)]
        assert [along(item["x"], PLOT, 512, 2**19) for item in crossings] == pytest.approx(ends, rel=1e-6)
        assert [item["y"] for item in crossings] == [170, 170]  # half of 340 px
        # the last token of a prompt sees twice as many keys as the average one
        heights = [1 - item["y"] / 340 for item in marks(scene, "symbol", "layer_4")]
        assert heights == pytest.approx([attention_share(shape, 7168), attention_share(shape, 2 * 7168)])
        [rule] = marks(scene, "rule", "layer_1")
        assert along(rule["x"], PLOT, 512, 2**19) == pytest.approx(6 * shape.d_model)


def test_curves_pass_through_the_points():
    explorer, shape = share_of_attention(), shipped_models()["Llama 3.1 8B"]
    points = marks(draw(explorer), "line")  # of both curves, one after the other
    assert len(points) == 2 * 41
    for i, point in enumerate(points):
        n = along(point["x"], PLOT, 512, 2**19) * (1 if i < 41 else 2)
        assert 1 - point["y"] / 340 == pytest.approx(attention_share(shape, round(n)), abs=1e-3)


def recording(name, factor):
    points = [
        Point({"what": "matrix product"}, [2 / factor, 1 / factor], flops=100e9),
        Point({"what": "copy"}, [1 / factor], bytes=10e9),
        Point({"batch": 4, "context": 9}, [3.0, 1.0, 1.0], flops=5e9, bytes=5e9),
        Point({"batch": 1, "length": 32}, [1.0], flops=50e9, bytes=1e9),
    ]
    return Recording("roofline", {"preset": "gpt2", "dtype": "float32"}, {"name": name}, points=points)


def test_recorded_steps_stand_where_they_were_measured():
    explorer = measured_steps([recording("A", 1), recording("B", 2)])
    facts = "\n".join(explorer.facts)
    assert "A, gpt2 in float32: ridge point 10.0 FLOP per byte" in facts
    assert "decode, batch 4, context 9: 1.0 FLOP/B, 5.0 GFLOP/s, 50% of the roof" in facts
    assert "prefill of 32 tokens: 50.0 FLOP/B, 50.0 GFLOP/s, 25% of the roof" in facts  # of B, twice as fast
    for machine in (0, 1):
        scene = draw(explorer, machine=machine)
        points = marks(scene, "symbol", "layer_1")
        assert [along(item["x"], PLOT, 0.1, 10_000) for item in points] == pytest.approx([1, 50], rel=1e-6)
        bottom, corner, top = sorted((item["x"], item["y"]) for item in marks(scene, "line"))
        assert along(corner[0], PLOT, 0.1, 10_000) == pytest.approx(10, rel=1e-6)
        assert corner[1] == top[1] < bottom[1]
        assert {"4", "32"} <= set(words(scene))
    with pytest.raises(ValueError, match="the recording on A has no roof"):
        measured_steps([Recording("roofline", {}, {"name": "A"})])


def test_unknown_choices_are_named():
    with pytest.raises(ValueError, match=r"GPU is 'H1', it must be one of V100"):
        roofline(card="H1")
    with pytest.raises(ValueError, match=r"Model is 'Llama', it must be one of DeepSeek"):
        memory_budget(model="Llama")
    with pytest.raises(ValueError, match=r"Model is 'Mixtral 8x7B'"):
        share_of_attention("Mixtral 8x7B")


@pytest.mark.parametrize("make", [roofline, memory_budget, share_of_attention])
def test_the_output_is_small_and_the_same_in_every_run(make):
    bundle = make()._repr_mimebundle_()
    assert bundle == make()._repr_mimebundle_()
    assert len(json.dumps(bundle)) < 120_000
    assert all(control["bind"]["name"].strip() for control in make().controls)


@pytest.fixture(scope="module")
def chromium(request):
    sys.path.insert(0, str(request.config.rootpath / "tools"))
    from browser import browser

    with sync_playwright() as playwright:
        flags = ["--no-sandbox", "--disable-gpu", "--disable-background-networking"]
        chrome = playwright.chromium.launch(executable_path=browser(), args=flags)
        yield chrome
        chrome.close()


def open_page(chromium, explorer):
    """The explorer in a page of a phone's width, without a network: Vega is part of the page."""
    page = chromium.new_page(viewport={"width": 390, "height": 900})
    page.route("**/*", lambda route: route.abort())
    page.set_content("<!doctype html><html><head></head><body></body></html>")
    page.add_script_tag(content="(function(){" + vl_convert.javascript_bundle() + "})();")
    page.evaluate(
        "html => document.body.append(document.createRange().createContextualFragment(html))", explorer._repr_html_()
    )
    page.wait_for_selector("figure.is-live .gptlite-chart svg")
    return page


MOVE = """async (values) => {
  const figure = document.querySelector("figure");
  const start = performance.now();
  for (const [name, value] of Object.entries(values)) {
    const input = figure.querySelector(`[name="${name}"]`);
    if (input.tagName === "SELECT") input.selectedIndex = value; else input.value = value;
    input.dispatchEvent(new Event(input.tagName === "SELECT" ? "change" : "input"));
  }
  await figure.view.runAsync();
  const words = [...figure.querySelectorAll(".gptlite-chart text")].map((text) => text.textContent);
  return [words, (performance.now() - start) / Object.keys(values).length];
}"""
MOVES = {
    roofline: [{"batch": 1 + 50 * i, "context": 1024 * (1 + i), "model": i, "card": 2 * i} for i in range(5)],
    memory_budget: [{"context": 1024 * (1 + 8 * i), "model": 2 * i, "card": 20 - i} for i in range(5)],
    share_of_attention: [{"context": 1024 * (1 + 9 * i), "model": i} for i in range(5)],
}


@pytest.mark.alone
@pytest.mark.parametrize("make", MOVES, ids=lambda make: make.__name__)
def test_a_moved_slider_is_answered_in_time_and_by_the_keyboard(chromium, make):
    explorer = make()
    page = open_page(chromium, explorer)
    times = []
    for values in MOVES[make]:
        found, ms = page.evaluate(MOVE, values)
        times.append(ms)
        assert set(words(draw(explorer, **values))) <= set(found)
    assert sorted(times)[len(times) // 2] < 100, f"a moved slider is answered after {times} ms"
    slider = page.locator('input[name="context"]')
    slider.focus()
    before, low = slider.input_value(), page.locator(".gptlite-chart svg").inner_html()
    page.keyboard.press("ArrowLeft")
    assert slider.input_value() != before
    page.wait_for_function("html => document.querySelector('.gptlite-chart svg').innerHTML !== html", arg=low)
    assert page.evaluate("document.documentElement.scrollWidth") <= 390
    page.close()
