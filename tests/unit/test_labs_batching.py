"""The lab and the sweeps of the chapter on batching measure what their inputs ask for."""

import pytest
import torch

from gptlite import hardware
from gptlite.arithmetic import ModelShape, kv_bytes, n_params
from gptlite.checkpoint import load
from gptlite.config import preset
from gptlite.notebook.labs_batching import ServingLab
from gptlite.notebook.recordings import recorded
from gptlite.serving.metrics import StepRecord
from gptlite.sweeps.batching import LOADS, POLICIES, seat_spans, seat_trace, workload


def lab(**settings) -> ServingLab:
    one = ServingLab("cpu")
    for name, value in settings.items():
        one.inputs[name].value = value
    return one


def test_the_lab_serves_each_largest_batch() -> None:
    one = lab(largest=4, requests=8).run()
    assert one.state == "done", one.message
    assert [point.at for point in one.recording.points] == [{"rate": 1000.0, "batch": B} for B in (1, 2, 4)]
    assert all(len(point.samples) == 8 for point in one.recording.points)
    rows = one.rows(one.recording)
    assert [row["At most at once"] for row in rows] == [1, 2, 4]
    n_new = sum(request.n_new for request in workload("gptlite", 8, "cpu", torch.float32)[1])
    assert rows[0]["Steps"] == n_new  # one after the other, a step for each token
    assert rows[0]["Steps"] > rows[1]["Steps"] > rows[2]["Steps"]
    assert "Throughput (token/s) against Median TPOT (ms)" in one._repr_html_()


def test_memory_holds_weights_keys_and_values() -> None:
    settings = {"model": "1b", "largest": 64, "rate": 1.0, "requests": 8}
    shape = ModelShape.of(preset("1b"))
    least = 4 * n_params(shape) + 64 * kv_bytes(shape, 160, 4)
    assert least < ServingLab("cpu").needed_bytes(settings) < 1.5 * least


def test_too_little_memory_names_the_largest_batch_that_fits(monkeypatch) -> None:
    one = lab(model="gpt2", largest=256)
    free = one.needed_bytes({**one.settings, "largest": 32})
    monkeypatch.setattr(hardware, "free_bytes", lambda device: free)
    one.run()
    assert one.state == "failed" and one.message.endswith("the largest Largest batch that fits is 32")


def test_seats_by_hand() -> None:
    """Two seats: request 1 takes the seat of 0 after it has ended; 2 follows 1, which was preempted for a step."""
    a, b, c = (0, 0), (1, 0), (2, 0)
    steps = [
        ([(a, 3, 3), (c, 2, 2)], [a, c]),
        ([(a, 1, 1), (c, 1, 1)], [a, c]),
        ([(c, 1, 0), (b, 4, 4)], []),
        ([(c, 1, 0), (b, 1, 1)], [b]),
    ]
    trace = [StepRecord(float(i), rows=rows, sampled=sampled) for i, (rows, sampled) in enumerate(steps)]
    assert seat_spans(trace, 2) == [
        [0, 0, 0, 1, "prefill"],
        [1, 2, 0, 1, "prefill"],
        [0, 0, 1, 2, "decode"],
        [1, 2, 1, 2, "decode"],
        [1, 2, 2, 4, "idle"],
        [0, 1, 2, 3, "prefill"],
        [0, 1, 3, 4, "decode"],
    ]


@pytest.mark.parametrize("load_name", LOADS)
def test_the_recorded_trace_is_what_the_engine_does(load_name: str) -> None:
    model, tokenizer = load("gptlite")
    text = tokenizer.encode("To be, or not to be, that is the question:\n")
    traces = recorded("seat-trace")[0].data["traces"]
    for policy in POLICIES:
        now = seat_trace(model, text, policy, load_name)
        assert now == next(one for one in traces if (one["policy"], one["load"]) == (policy, load_name))
        seats: dict[int, list] = {}
        for seat, _, begin, end, _ in now["spans"]:
            assert all(end <= b or begin >= e for b, e in seats.setdefault(seat, []))
            seats[seat].append((begin, end))
        # a token for each step of a span that is not idle: no prompt is read in pieces here
        assert now["given"][-1] == sum(end - begin for _, _, begin, end, kind in now["spans"] if kind != "idle")
        assert now["finished"][-1] == now["requests"] and now["waiting"][-1] == 0
