"""The charts of the chapter on prefill and decode draw what `gptlite.arithmetic` and the recordings say."""

import json
import re
import sys

import pytest
import vl_convert
from drawn import draw, marks, words
from playwright.sync_api import sync_playwright

from gptlite.arithmetic import Cost, ModelShape, decode_costs, prefill_costs, step_bound, total
from gptlite.config import preset
from gptlite.hardware import gpu, gpus
from gptlite.notebook import recordings
from gptlite.notebook.explorers_prefill import (
    BATCHES,
    batch_tradeoff,
    request_bound,
    request_timeline,
)
from gptlite.notebook.recordings import recorded, roof_of
from gptlite.record import Point, Recording

PRESETS, CARDS = ("gpt2", "1b", "7b"), list(gpus())


def seconds(text):
    """The first time in a line, in seconds."""
    number, unit = re.search(r"([\d.,]+) (ms|s)\b", text).groups()
    return float(number.replace(",", "")) * {"ms": 1e-3, "s": 1}[unit]


def machine(name="TestCPU", kind="cpu", threads=2):
    return {"name": name, "kind": kind, "cores": 2, "threads": threads, "memory_bytes": 2**34, "system": "Linux"}


def decode_recording(name="TestCPU", kind="cpu", dtype="float32", contexts=(64, 256), batches=(1, 2, 4, 8)):
    """Made-up times that rise with batch and context; batch 8 is slower per token than batch 4 at the long context."""
    times = {64: (0.010, 0.011, 0.014, 0.020), 256: (0.011, 0.013, 0.018, 0.040)}
    points = [
        Point({"batch": B, "context": n}, [t, 3 * t, 0.5 * t], flops=B * 1e8, bytes=3e8 + B * n * 1e4)
        for n in contexts
        for B, t in zip((1, 2, 4, 8), times[n], strict=True)
        if B in batches
    ]
    params = {"device": kind, "dtype": dtype, "preset": "gpt2"}
    return Recording("decode", params, machine(name, kind), {"gptlite": "0", "python": "3", "torch": "2"}, points)


def roof_recording(name="TestCPU", dtype="float32"):
    points = [
        Point({"what": "matrix product"}, [0.02, 0.01], flops=2e9),
        Point({"what": "copy"}, [0.05, 0.04], bytes=2e9),
    ]
    return Recording("roof", {"device": "cpu", "dtype": dtype}, machine(name), points=points)


# -- one request --------------------------------------------------------------------------------------------------


def test_the_bound_of_a_request_is_the_sum_of_its_steps():
    shape, card = ModelShape.of(preset("1b")), gpu("L4")

    def least(cost):
        return max(total(cost).flops / card.peak_flops, total(cost).bytes / card.bandwidth)

    ttft, decode, uncached = request_bound(shape, 100, 3, "L4")
    assert ttft == least(prefill_costs(shape, 1, 100))
    assert decode == pytest.approx(least(decode_costs(shape, 1, 101)) + least(decode_costs(shape, 1, 102)), rel=1e-12)
    assert uncached == pytest.approx(sum(least(prefill_costs(shape, 1, n)) for n in (100, 101, 102)), rel=1e-12)


@pytest.mark.parametrize(
    ("model", "card", "prompt", "answer"),
    [(0, 3, 64, 16), (1, 13, 1024, 256), (2, 17, 1024, 256), (2, 2, 8192, 1024), (0, 20, 8192, 16), (1, 0, 64, 1024)],
)
def test_the_timeline_draws_what_arithmetic_computes(model, card, prompt, answer):
    shape, name = ModelShape.of(preset(PRESETS[model])), CARDS[card]
    scene = draw(request_timeline(), model=model, card=card, prompt=prompt, answer=answer)
    expected = {
        which: request_bound(shape, n, m, name)
        for which, n, m in (
            ("this request", prompt, answer),
            ("prompt × 2", 2 * prompt, answer),
            ("answer × 2", prompt, 2 * answer),
        )
    }
    bars = sorted(marks(scene, "rect", "layer_0"), key=lambda item: (item["y"], item["x"]))
    widths = [item["width"] for item in bars]
    times = [t for ttft, decode, _ in expected.values() for t in (ttft, decode)]
    assert len(widths) == 6
    assert [w / widths[5] for w in widths] == pytest.approx([t / times[5] for t in times], rel=1e-6)

    ttft, decode, uncached = expected["this request"]
    lines = {text.split()[0]: text for text in words(scene)}
    assert seconds(lines["TTFT"]) == pytest.approx(ttft, rel=5e-3)
    assert lines["TTFT"].endswith(
        step_bound(total(prefill_costs(shape, 1, prompt)), gpu(name).peak_flops, gpu(name).bandwidth)[1]
    )
    assert seconds(lines["TPOT"]) == pytest.approx(decode / (answer - 1), rel=5e-3)
    assert seconds(lines["the"]) == pytest.approx(ttft + decode, rel=5e-3)
    assert seconds(lines["without"]) == pytest.approx(uncached, rel=5e-3)
    assert f"{uncached / (ttft + decode):,.1f} times as long" in lines["without"]


@pytest.mark.parametrize("card", CARDS)
def test_a_single_sequence_decodes_at_the_limit_of_memory_on_every_gpu(card):
    for name in PRESETS:
        shape = ModelShape.of(preset(name))
        for context in (1, 20_000):
            cost = total(decode_costs(shape, 1, context))
            assert step_bound(cost, gpu(card).peak_flops, gpu(card).bandwidth)[1] == "memory"


# -- batches ------------------------------------------------------------------------------------------------------


def rows(explorer):
    return explorer.spec["data"]["values"]


def test_measured_and_bound_are_those_of_the_recording():
    recording = decode_recording()
    found = rows(batch_tradeoff([recording], [roof_recording()]))
    for point in recording.points:
        at = {
            row["kind"]: row for row in found
            if (row["machine"], row["context"], row["batch"]) == (0, point.at["context"], point.at["batch"])
        }  # fmt: skip
        assert at["measured"]["tpot"] == pytest.approx(1e3 * point.median)
        assert at["measured"]["throughput"] == pytest.approx(point.at["batch"] / point.median)
        least = max(point.flops / 2e11, point.bytes / 5e10)  # of the best samples, 2e9 in 0.01 and in 0.04 s
        assert at["bound"]["tpot"] == pytest.approx(1e3 * least)
        assert (at["measured"]["own"], at["bound"]["own"]) == (True, False)


def test_machines_by_arithmetic_are_those_of_the_bound():
    explorer = batch_tradeoff([decode_recording()], by_arithmetic=[("H100 SXM", "7b")])
    found = [row for row in rows(explorer) if row["machine"] == 1]
    assert {(row["context"], row["batch"]) for row in found} == {(n, B) for n in (64, 256) for B in BATCHES}
    card = gpu("H100 SXM")
    for row in found:
        cost = total(decode_costs(ModelShape.of(preset("7b")), row["batch"], row["context"]))
        t = max(cost.flops / card.peak_flops, cost.bytes / card.bandwidth)
        assert (row["tpot"], row["throughput"]) == (pytest.approx(1e3 * t), pytest.approx(row["batch"] / t))


@pytest.mark.parametrize("context", [64, 256])
@pytest.mark.parametrize("times", [1, 1.2, 1.5, 2, 4, 6])
def test_the_ring_is_the_best_batch_that_meets_the_limit(context, times):
    recording = decode_recording()
    scene = draw(batch_tradeoff([recording]), context=context, times=times)
    tpots = {point.at["batch"]: point.median for point in recording.points if point.at["context"] == context}
    best = max((B for B in tpots if tpots[B] <= times * tpots[1]), key=lambda B: B / tpots[B])
    [line] = [text for text in words(scene) if str(text).startswith("batch ")]
    assert line.startswith(f"batch {best}: ") and seconds(line) == pytest.approx(tpots[best], rel=5e-3)
    rate = float(re.search(r"([\d,.]+) token/s", line)[1].replace(",", ""))
    assert rate == pytest.approx(best / tpots[best], rel=5e-3)
    assert f"{best / tpots[best] * tpots[1]:.3g} × batch 1" in line
    # x is linear: the rule stands at times the first point's place, if that is inside the plot
    firsts = sorted(item["x"] for item in marks(scene, "symbol", "layer_2"))
    [rule] = [item["x"] for item in marks(scene, "rule", "layer_0")]
    assert rule == pytest.approx(times * firsts[0], rel=1e-6)


def test_the_reader_chooses_among_machines():
    explorer = batch_tradeoff([decode_recording(), decode_recording("OtherCPU")], by_arithmetic=[("L4", "1b")])
    [menu] = [control["bind"]["labels"] for control in explorer.controls if control["name"] == "machine"]
    assert menu == [
        "TestCPU, gpt2 in fp32, measured",
        "OtherCPU, gpt2 in fp32, measured",
        "L4, 1b in 16 bits, bound only",
    ]
    ends = "batch 1: 10 ms, 100 token/s; batch 8: 20 ms, 400 token/s"
    assert f"TestCPU, gpt2 in fp32, measured, context 64: {ends}" in repr(explorer)


def test_a_context_that_was_left_out_is_no_curve():
    some = decode_recording("OtherCPU", contexts=(64,))
    found = rows(batch_tradeoff([decode_recording(), some], by_arithmetic=[]))
    assert {row["context"] for row in found if row["machine"] == 1} == {64}
    with pytest.raises(ValueError, match="recordings is empty"):
        batch_tradeoff([])


def test_the_roof_is_that_of_the_same_machine_or_of_the_data_sheet():
    roofs = [roof_recording("OtherCPU"), roof_recording(dtype="bfloat16"), roof_recording()]
    assert roof_of(decode_recording(), roofs) == (2e11, 5e10)
    assert roof_of(decode_recording(), roofs[:2]) is None
    card = gpu("H100 SXM")
    sheet = (card.peak_flops, card.bandwidth)
    assert roof_of(decode_recording("NVIDIA H100 80GB HBM3", "cuda", "bfloat16")) == sheet
    assert (
        roof_of(decode_recording("NVIDIA H100 80GB HBM3", "cuda", "float32")) is None
    )  # the sheet's peak is of 16 bits
    assert roof_of(decode_recording("NVIDIA H100 80GB HBM3", "cpu", "bfloat16")) is None


# -- the book's recordings ----------------------------------------------------------------------------------------


@pytest.mark.parametrize("sweep", ["prefill", "decode", "roof"])
def test_the_book_has_recordings_and_every_sample_of_them(sweep):
    for recording in recorded(sweep):
        assert recording.name == sweep and recording.complete and not recording.left_out
        assert all(len(point.samples) >= 3 for point in recording.points)


def test_recorded_work_is_that_of_arithmetic():
    for sweep, costs in (("prefill", prefill_costs), ("decode", decode_costs)):
        for recording in recorded(sweep):
            width = {"float32": 4, "bfloat16": 2, "float16": 2}[recording.params["dtype"]]
            shape = ModelShape.of(preset(recording.params["preset"]))
            for point in recording.points:
                n = point.at.get("length", point.at.get("context"))
                cost = total(costs(shape, point.at["batch"], n, bytes_per_weight=width, bytes_per_value=width))
                assert Cost(point.flops, point.bytes) == Cost(pytest.approx(cost.flops), pytest.approx(cost.bytes))


def test_the_default_recording_comes_first_and_a_missing_one_is_named(monkeypatch, tmp_path):
    monkeypatch.setattr(recordings, "FOLDERS", (tmp_path / "none", tmp_path))
    for name, file in (("A", "decode-a.json"), ("B", "decode.json"), ("C", "decoded.json")):
        recording = decode_recording(name)
        recording.complete = True
        recording.save(tmp_path / file)
    assert [recording.machine["name"] for recording in recorded("decode")] == ["B", "A"]
    with pytest.raises(ValueError, match="no recording of 'prefill': make one with `gptlite record prefill`"):
        recorded("prefill")


# -- in a page ----------------------------------------------------------------------------------------------------


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
PAGES = {
    "request-timeline": (
        request_timeline,
        [{"prompt": 64 + 1088 * i, "answer": 1024 - 128 * i, "model": i % 3, "card": 2 * i} for i in range(8)],
    ),
    "batch-tradeoff": (
        lambda: batch_tradeoff([decode_recording(), decode_recording("OtherCPU")], [roof_recording()]),
        [{"times": 1 + 0.5 * i, "context": i % 2, "machine": i % 4} for i in range(8)],
    ),
}


@pytest.mark.alone
@pytest.mark.slow
@pytest.mark.parametrize("name", PAGES)
def test_a_moved_slider_is_answered_in_time_and_by_the_keyboard(chromium, name):
    make, moves = PAGES[name]
    explorer = make()
    page = open_page(chromium, explorer)
    times = []
    for values in moves:
        found, ms = page.evaluate(MOVE, values)
        times.append(ms)
        set_to = {**values, "context": (64, 256)[values["context"]]} if "context" in values else values
        own = [text for text in words(draw(explorer, **set_to)) if re.search(" (ms|s),| after ", str(text))]
        assert own and set(own) <= set(found)
    assert sorted(times)[len(times) // 2] < 100, f"a moved slider is answered after {times} ms"
    slider = page.locator("input[type=range]").first
    slider.focus()
    before, drawn = slider.input_value(), page.locator(".gptlite-chart svg").inner_html()
    page.keyboard.press("ArrowLeft")
    assert slider.input_value() != before
    page.wait_for_function("html => document.querySelector('.gptlite-chart svg').innerHTML !== html", arg=drawn)
    assert page.evaluate("document.documentElement.scrollWidth") <= 390
    page.close()


@pytest.mark.parametrize("name", PAGES)
def test_the_output_is_the_same_in_every_run_and_not_too_heavy(name):
    make, _ = PAGES[name]
    bundle = make()._repr_mimebundle_()
    assert bundle == make()._repr_mimebundle_()
    assert len(json.dumps(bundle)) < 120_000
