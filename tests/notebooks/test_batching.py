"""What the chapter on batching prints is what an independent count gives; its exercises are checked well."""

import json
import re
from pathlib import Path

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from gptlite.arithmetic import ModelShape, n_params
from gptlite.cache.dense import StaticCache
from gptlite.config import GPTConfig, preset
from gptlite.model import GPTlite
from gptlite.notebook import checks_batching as checks
from gptlite.notebook.recordings import recorded
from gptlite.sampling import GREEDY
from gptlite.serving.arrivals import Arrival, StepClock
from gptlite.serving.engine import Engine
from gptlite.serving.metrics import percentile
from gptlite.serving.scheduler import Scheduler
from gptlite.serving.sequence import Request

CHAPTER = Path(__file__).resolve().parents[2] / "chapters" / "07_batching.ipynb"
CELLS = json.loads(CHAPTER.read_text(encoding="utf-8"))["cells"]
PROSE = "\n".join("".join(cell["source"]) for cell in CELLS if cell["cell_type"] == "markdown")


@pytest.fixture(scope="module")
def printed() -> str:
    """All text that the cells of the chapter print."""
    outputs = [output for cell in CELLS if cell["cell_type"] == "code" for output in cell["outputs"]]
    texts = [output.get("text") or output.get("data", {}).get("text/plain", "") for output in outputs]
    return "\n".join("".join(text) for text in texts)


def row(printed: str, title: str, first: str) -> list[str]:
    """The words after the first column, of one row of a table."""
    table = printed[printed.index(title) :]
    line = next(line for line in table.splitlines() if line.strip().startswith(first))
    return line.strip().removeprefix(first).split()


def test_the_question_is_answered(printed: str) -> None:
    """From the recorded seats alone: the answers, the longest of each group of four, the busiest of four seats."""
    static, continuous = recorded("seat-trace")[0].data["traces"][:2]
    answers: dict[int, int] = {}
    seats: dict[int, list[int]] = {}
    for seat, request, begin, end, _ in sorted(continuous["spans"], key=lambda span: span[2]):
        answers[request] = answers.get(request, 0) + end - begin
        seats.setdefault(seat, [])
        seats[seat] += [request] if request not in seats[seat] else []
    in_order = [answers[i] for i in range(16)]
    groups = [max(in_order[i : i + 4]) for i in range(0, 16, 4)]
    busiest = max(([answers[i] for i in requests] for requests in seats.values()), key=sum)
    assert sorted(in_order)[-2:] == [34, 35] and in_order.count(2) == 3 and sum(in_order) == 193
    assert "Two of the answers are 34 and 35 tokens long, three others end after two." in PROSE
    assert groups == [34, 35, 26, 10] and "groups have 34, 35, 26 and 10 tokens, 105 steps together" in PROSE
    assert busiest == [34, 26] and "writes 34 tokens and then 26, which is 60" in PROSE
    assert (static["steps"], continuous["steps"], -(-193 // 4)) == (sum(groups), sum(busiest), 49) == (105, 60, 49)
    assert "static batching: 193 tokens in 105 steps\ncontinuous batching: 193 tokens in 60 steps" in printed


def test_every_answer_equals_its_solo_run(printed: str) -> None:
    for name in ("static", "continuous", "in pieces", "small pool, recomputed", "small pool, swapped"):
        steps, preemptions, *equal = row(printed, "The same sixteen requests in fp64", name)
        assert " ".join(equal) == "16 of 16" and int(steps) > 0
        assert (int(preemptions) > 0) == name.startswith("small pool")
    assert "NOT the solo run" not in printed
    assert "over the largest logit: equal to within 1e-05" in printed


def test_what_the_users_feel(printed: str) -> None:
    """Static batching makes the unlucky wait longer, and changes nothing in TPOT."""
    static, continuous = (
        [float(word) for word in row(printed, "40 requests at random times", name)] for name in ("static", "continuous")
    )
    assert all(a > b for a, b in zip(static[:3], continuous[:3], strict=True))
    assert static[3:6] == continuous[3:6] == [1, 1, 1] and static[6] < continuous[6]


def test_the_gain_is_between_the_longest_answer_and_the_mean(printed: str) -> None:
    gains = []
    for name in ("all 12", "10 to 14", "1 to 23", "most 4, some 40"):
        static, continuous, least, gain = (float(word) for word in row(printed, "Steps for 24 requests", name))
        assert static >= continuous >= least and gain == pytest.approx(static / continuous, abs=5e-3)
        gains.append(gain)
    assert gains == sorted(gains) and gains[0] == 1


@pytest.mark.parametrize(("n", "smallest"), [(128, 802), (2048, 51)])
def test_the_exercise_on_what_is_not_shared(n: int, smallest: int) -> None:
    """8 KV heads of 128 numbers in 32 layers, in 2 bytes each, for keys and for values."""
    weights, per_token = n_params(ModelShape.of(preset("7b"))), 2 * 32 * 8 * 128 * 2
    assert per_token == 131_072 and round(weights / 1e9, 2) == 6.72
    assert next(batch for batch in range(1, 1000) if batch * n * per_token > 2 * weights) == smallest
    assert round(2 * weights / (n * per_token)) == {128: 801, 2048: 50}[n]  # FLOP/B at most
    assert str(smallest) in PROSE


# -- exercises --------------------------------------------------------------------------------------------------------


def of_groups(answers, seats):
    return sum(max(answers[i : i + seats]) for i in range(0, len(answers), seats))


def longest_first(answers, seats):
    free = [0] * seats
    for n_new in sorted(answers, reverse=True):
        free[free.index(min(free))] += n_new
    return max(free)


def round_robin(answers, seats):
    return max(sum(answers[seat::seats]) for seat in range(seats))


@pytest.mark.parametrize("wrong", [of_groups, longest_first, round_robin])
def test_wrong_steps_get_a_counterexample(capsys, wrong) -> None:
    checks.check_continuous_steps(wrong)
    assert re.fullmatch(r"not yet: answers .* on \d seats? gives \d+, right is \d+\n", capsys.readouterr().out)


def above_the_rate(rate, n_new, step):
    return min((batch for batch, seconds in step.items() if batch / seconds > rate * n_new), default=None)


def of_requests(rate, n_new, step):
    return min((batch for batch, seconds in step.items() if batch / seconds >= rate), default=None)


def largest_when_none(rate, n_new, step):
    return min((batch for batch, seconds in step.items() if batch / seconds >= rate * n_new), default=max(step))


def by_rows(rate, n_new, step):
    return min((batch for batch, seconds in step.items() if batch / min(step.values()) >= rate * n_new), default=None)


@pytest.mark.parametrize("wrong", [above_the_rate, of_requests, largest_when_none, by_rows])
def test_a_wrong_number_of_seats_gets_a_counterexample(capsys, wrong) -> None:
    checks.check_seats_needed(wrong)
    assert re.match(r"not yet: .* gives (\d+|None), right is (\d+|None)\n", capsys.readouterr().out)


def tiny() -> GPTlite:
    torch.manual_seed(0)
    return GPTlite(GPTConfig(7, 64, n_layers=1, d_model=8, n_heads=2, d_head=4)).eval()


@settings(max_examples=25, deadline=None, derandomize=True, database=None)
@given(st.lists(st.integers(1, 9), min_size=1, max_size=12), st.integers(1, 4))
def test_the_engine_takes_the_steps_that_the_exercise_counts(answers: list[int], seats: int) -> None:
    model = tiny()
    engine = Engine(model, StaticCache(model, seats, 64), seats, clock=StepClock())
    engine.serve([Arrival(0, Request([1], n_new, GREEDY)) for n_new in answers])
    free = [0] * seats
    for n_new in answers:
        free[free.index(min(free))] += n_new
    assert engine.n_steps == max(free)


def test_shortest_first_does_what_its_solution_says() -> None:
    """The mean latency falls, the largest rises, and the tokens stay what they were."""
    code = re.search(r"```python\n(class ShortestFirst.*?)^```", PROSE, re.M | re.S)
    assert code
    space: dict = {"Scheduler": Scheduler}
    exec(compile(code[1], "exercise 5", "exec"), space)
    model = tiny()
    arrivals = [Arrival(2 * i, Request([i % 7, 1], 40 if i == 3 else 4 + i % 5, GREEDY)) for i in range(30)]
    latencies, tokens = [], []
    for kind in (Scheduler, space["ShortestFirst"]):
        cache = StaticCache(model, 2, 64)
        engine = Engine(model, cache, scheduler=kind(cache, 2), clock=StepClock())
        sequences = engine.serve(arrivals)
        latencies.append([s.times[-1] - s.arrived for s in sequences])
        tokens.append([s.output for s in sequences])
    first, shortest = latencies
    assert tokens[0] == tokens[1]
    assert sum(shortest) < sum(first) and percentile(shortest, 99) > percentile(first, 99)
