"""The charts of the chapter on batching draw what the recordings say."""

import json

import pytest
import vl_convert
from drawn import draw, marks, words

from gptlite.notebook.explorers_batching import KINDS, LATENCIES, rate_in_words, seat_timeline, serving_tradeoff
from gptlite.notebook.recordings import recorded
from gptlite.record import Recording

MACHINE = {"name": "TestCPU", "kind": "cpu", "cores": 2, "threads": 2, "memory_bytes": 2**34, "system": "Linux"}


@pytest.fixture(scope="module")
def trace() -> Recording:
    return recorded("seat-trace")[0]


@pytest.mark.parametrize("load", range(3))
@pytest.mark.parametrize("policy", range(2))
@pytest.mark.parametrize("step", [17, 500])
def test_the_timeline_draws_the_spans_up_to_the_step(trace: Recording, policy: int, load: int, step: int) -> None:
    one = trace.data["traces"][2 * load + policy]
    longest = max(len(other["given"]) for other in trace.data["traces"])
    step = min(step, longest)
    view = 60
    left = max(0, step - view)
    scene = draw(seat_timeline(trace), policy=policy, load=load, step=step, view=view)
    shown = [span for span in one["spans"] if span[2] < step and span[3] > left]
    bars = [item for item in marks(scene, "rect") if item.get("width", 0) > 0 and item.get("height", 0) > 5]
    assert len(bars) == len(shown)
    scale = 1000 / max(view, step - left)
    expected = sorted(round((min(span[3], step) - max(span[2], left)) * scale) for span in shown)
    assert sorted(round(bar["width"]) for bar in bars) == pytest.approx(expected, abs=1)
    at = min(step, len(one["given"])) - 1
    share = one["given"][at] / (at + 1) / one["seats"]
    lines = words(scene)
    assert f"{one['given'][at]} tokens given out, on {100 * share:.0f}% of the seats" in lines
    assert f"{one['finished'][at]} of {one['requests']} requests finished, {one['waiting'][at]} waiting" in lines


def test_the_timeline_says_its_end_in_words(trace: Recording) -> None:
    text = repr(seat_timeline(trace))
    for one in trace.data["traces"]:
        assert f"{one['policy']}, {one['load']}: {one['given'][-1]} tokens by step {len(one['given'])}" in text


def test_the_timeline_names_its_kinds(trace: Recording) -> None:
    svg = seat_timeline(trace).still()
    assert all(words in svg for words in KINDS.values())


def test_a_recording_without_a_trace_is_refused(trace: Recording) -> None:
    with pytest.raises(ValueError, match="no traces, it must be one of the sweep 'seat-trace'"):
        seat_timeline(Recording("decode", {}))
    with pytest.raises(ValueError, match="recordings is empty"):
        serving_tradeoff([])


def measured() -> Recording:
    served = []
    for rate in (5.0, 1000.0):
        for i, batch in enumerate((1, 2, 4, 8)):
            row = {"rate": rate, "batch": batch, "throughput": 100.0 * (i + 1) if rate > 5 else 90.0 + i}
            for q in (50, 90, 99):
                row |= {f"tpot_p{q}": 0.01 * (i + 1) * q / 50, f"ttft_p{q}": 0.4 / (i + 1) * q / 50, f"latency_p{q}": 1}
            served.append(row | {"steps": 3, "utilisation": 0.5, "overhead": 0.1})
    params = {"model": "gptlite", "device": "cpu", "dtype": "float32"}
    return Recording(
        "batching", params, MACHINE, {"gptlite": "0", "python": "3", "torch": "2"}, data={"served": served}
    )


@pytest.mark.parametrize(
    ("what", "times", "best"),
    [
        (0, 1, "at most 1: 100 token/s, 10 ms"),
        (0, 3, "at most 4: 300 token/s, 30 ms"),
        (0, 20, "at most 8: 400 token/s, 40 ms"),
        (2, 1, "at most 8: 400 token/s, 100 ms"),
    ],
)
def test_the_ring_marks_the_highest_throughput_within_the_limit(what: int, times: float, best: str) -> None:
    scene = draw(serving_tradeoff([measured()]), rate=1, what=what, times=times)
    assert best in words(scene)
    assert {"1", "2", "4", "8"} <= set(words(scene))


def test_the_book_has_a_recording_of_every_rate_and_latency() -> None:
    explorer = serving_tradeoff(recorded("batching"))
    for recording in recorded("batching"):
        assert recording.complete and len(recording.data["served"]) == len(recording.points)
        for point, one in zip(recording.points, recording.data["served"], strict=True):
            assert point.at == {"rate": one["rate"], "batch": one["batch"]}
            assert one["tpot_p50"] == pytest.approx(point.median, abs=1e-6)
            assert all(one[name] > 0 for name, *_ in LATENCIES.values())
            assert 0 < one["utilisation"] <= 1 and 0 < one["overhead"] < 1
    assert f"all at once, at most {recording.params['batches'][-1]}" in repr(explorer)


@pytest.mark.parametrize("which", ["timeline", "tradeoff"])
def test_the_charts_are_described(trace: Recording, which: str) -> None:
    explorer = seat_timeline(trace) if which == "timeline" else serving_tradeoff([measured()])
    assert len(explorer.alt_text) > 150 and explorer.caption.endswith(".")
    assert "<svg" in vl_convert.vegalite_to_svg(json.loads(json.dumps(explorer.spec)) | {"width": 400})


def test_rates_in_words() -> None:
    assert rate_in_words(24.0) == "24 requests per s" and rate_in_words(1000.0) == "all at once"
