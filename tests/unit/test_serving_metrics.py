"""Arrivals, clocks and metrics by numbers worked out by hand, and the trace of an engine's steps."""

import time
from statistics import mean

import numpy as np
import pytest
import torch
from serving_help import tiny

from gptlite.cache.dense import DynamicCache
from gptlite.sampling import GREEDY
from gptlite.serving.arrivals import (
    Arrival,
    StepClock,
    TraceRow,
    WallClock,
    load_trace,
    mixed_lengths,
    mixed_requests,
    poisson,
    poisson_times,
    save_trace,
)
from gptlite.serving.engine import Engine
from gptlite.serving.metrics import (
    StepRecord,
    gaps,
    overhead,
    percentile,
    summary,
    throughput,
    tpot,
    ttft,
    utilisation,
)
from gptlite.serving.sequence import Request, Sequence


def served(arrived: float, times: list[float]) -> Sequence:
    sequence = Sequence(Request([1], max(1, len(times))), (0, 0), arrived)
    sequence.times = times
    return sequence


def test_the_metrics_of_a_request_by_hand() -> None:
    one = served(2.0, [5.0, 5.5, 6.0, 8.0])
    assert (ttft(one), tpot(one), gaps(one)) == (3.0, 1.0, [0.5, 0.5, 2.0])
    other = served(4.0, [10.0])
    assert np.isnan(tpot(other)) and gaps(other) == []
    assert throughput([one, other]) == 5 / 8
    found = summary([one, other, served(0.0, [])], percentiles=(50,))
    assert found == {"ttft_p50": 4.5, "tpot_p50": 1.0, "latency_p50": 6.0, "throughput": 5 / 8}


def test_nothing_served_gives_no_number() -> None:
    assert summary([])["throughput"] == 0 and np.isnan(summary([])["ttft_p50"])
    assert throughput([served(1.0, [1.0])]) == float("inf")
    assert utilisation([], 4) == 0 and overhead([]) == 0


@pytest.mark.parametrize("q", [0, 10, 50, 90, 99, 100])
def test_percentiles_are_those_of_numpy(q: float) -> None:
    values = torch.rand(37, generator=torch.Generator().manual_seed(1), dtype=torch.float64).tolist()
    assert percentile(values, q) == pytest.approx(np.percentile(values, q), rel=1e-12)
    assert percentile([3.0], q) == 3.0


def test_shares_of_steps_by_hand() -> None:
    def step(n: int, model: float) -> StepRecord:
        parts = {"schedule": 1.0, "prepare": 1.0, "model": model, "sample": 2.0}
        return StepRecord(0.0, sampled=[(i, 0) for i in range(n)], parts=parts)

    assert utilisation([step(4, 1), step(1, 1), step(1, 1)], 4) == 0.5
    assert overhead([step(1, 4.0), step(1, 8.0)]) == 8 / 20


def test_poisson_gaps_are_exponential() -> None:
    times = poisson_times(4.0, 4000, seed=3)
    apart = np.diff([0.0, *times])
    assert times == sorted(times) and min(apart) >= 0
    assert mean(apart) == pytest.approx(1 / 4, rel=0.05)  # its deviation is 1.6 %
    assert np.mean(apart > 1 / 4) == pytest.approx(np.exp(-1), abs=0.03)  # four deviations
    assert times == poisson_times(4.0, 4000, seed=3) != poisson_times(4.0, 4000, seed=4)
    assert poisson_times(float("inf"), 3) == [0.0, 0.0, 0.0]


def test_mixed_lengths_have_uniform_logarithms() -> None:
    lengths = mixed_lengths(4000, 4, 64, seed=1)
    assert min(lengths) == 4 and max(lengths) == 64
    assert np.mean(np.array(lengths) < 16) == pytest.approx(np.log(16 / 4) / np.log(65 / 4), abs=0.03)
    assert mixed_lengths(5, 7, 7) == [7] * 5


def test_mixed_requests_are_cut_from_the_text() -> None:
    text = torch.arange(50)
    requests = mixed_requests(text, 30, (3, 20), (2, 9), GREEDY, seed=2)
    for i, request in enumerate(requests):
        first = int(request.tokens[0])
        assert request.prompt == list(range(first, first + len(request.prompt)))
        assert 3 <= len(request.prompt) <= 20 and 2 <= request.n_new <= 9
        assert request.params is GREEDY and request.seed == 2 + i


def test_a_trace_survives_its_file(tmp_path) -> None:
    rows = [TraceRow(0.0, 3, 5), TraceRow(0.25, 1, 2), TraceRow(0.25, 9, 1)]
    save_trace(rows, tmp_path / "trace.jsonl")
    assert load_trace(tmp_path / "trace.jsonl") == rows


def test_requests_arrive_at_their_times() -> None:
    """Steps of two seconds: who comes at 3 sits down in the step that begins at 4; then nobody is there until 20."""
    engine = Engine(tiny(), DynamicCache(tiny()), 2, clock=StepClock(2.0), trace=True)
    requests = [Request([i], 2, GREEDY) for i in range(3)]
    sequences = engine.serve([Arrival(t, r) for t, r in zip((0, 3, 20), requests, strict=True)])
    assert [s.times for s in sequences] == [[2, 4], [6, 8], [22, 24]]
    assert [s.arrived for s in sequences] == [0, 3, 20]
    assert [ttft(s) for s in sequences] == [2, 3, 2]


def test_a_step_clock_never_goes_back() -> None:
    clock = StepClock(2)
    clock.tick([1, 1])
    clock.wait_until(1)
    assert clock.now() == 2
    clock.wait_until(5)
    assert clock.now() == 5


def test_a_step_clock_may_count_tokens() -> None:
    engine = Engine(tiny(), DynamicCache(tiny()), 2, clock=StepClock(sum), trace=True)
    sequence = engine.add(Request([1, 2, 3], 2, GREEDY))
    engine.run()
    assert sequence.times == [3, 4]
    assert all(step.parts["model"] == 0 for step in engine.trace)  # its time passes after the model


def test_the_wall_clock_waits_and_its_parts_add_up() -> None:
    clock = WallClock()
    clock.wait_until(0.02)
    assert 0.02 <= clock.now() < 5
    before = time.perf_counter()
    clock.wait_until(0.0)  # past
    assert time.perf_counter() - before < 1
    engine = Engine(tiny(), DynamicCache(tiny()), 2, trace=True)
    engine.serve(poisson([Request([1, 2], 3), Request([3], 4)], rate=1000.0))
    for step in engine.trace:
        assert step.end - step.start == pytest.approx(sum(step.parts.values()))
        assert min(step.parts.values()) >= 0


@pytest.mark.parametrize("trace", [True, False])
def test_a_traced_step_counts_what_the_device_still_computes_as_the_models(monkeypatch, trace: bool) -> None:
    """A GPU that answers at once and is done 2 seconds later: a traced step waits for it before it samples."""
    clock = StepClock(0)
    monkeypatch.setattr("gptlite.serving.engine.synchronize", lambda device: clock.wait_until(clock.now() + 2))
    engine = Engine(tiny(), DynamicCache(tiny()), 2, clock=clock, trace=trace)
    engine.add(Request([1, 2], 3, GREEDY))
    engine.run()
    assert clock.now() == (6 if trace else 0)
    assert not trace or all(
        step.parts == {"schedule": 0, "prepare": 0, "model": 2, "sample": 0} for step in engine.trace
    )
