"""The serving engine: whatever comes when, each request's tokens are those of the plain loop for it alone."""

from dataclasses import dataclass

import pytest
import torch
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st
from serving_help import CACHES, Pairs, bank, solo, tiny

from gptlite.cache.paged import PagedCache
from gptlite.serving.arrivals import StepClock
from gptlite.serving.engine import Engine
from gptlite.serving.sequence import Sequence


@dataclass
class Plan:
    """A random run: who comes before which step, who is cancelled when, and with what means they are served."""

    arrivals: list[tuple[int, int]]  # steps since the one before, index in the bank
    cancelled: dict[int, int]  # number of the request -> steps after its arrival
    max_batch: int
    budget: int | None
    preemption: str
    room: int


plans = st.builds(
    Plan,
    st.lists(st.tuples(st.integers(0, 4), st.integers(0, 239)), min_size=1, max_size=9),
    st.dictionaries(st.integers(0, 8), st.integers(0, 12), max_size=3),
    st.integers(1, 4),
    st.none() | st.integers(0, 8),
    st.sampled_from(["recompute", "swap"]),
    st.integers(0, 6),
)
thousands = settings(
    max_examples=500, deadline=None, derandomize=True, database=None, suppress_health_check=list(HealthCheck)
)


def play(plan: Plan, make_cache, dtype: torch.dtype = torch.float64, **options) -> tuple[Engine, list[Sequence]]:
    """Runs a plan to its end, with the invariants checked after every step."""
    model = tiny(dtype)
    cache = make_cache(model, plan.room)
    budget = None if plan.budget is None else plan.max_batch + plan.budget
    engine = Engine(
        model,
        cache,
        plan.max_batch,
        budget,
        plan.preemption,
        tokenizer=Pairs(),
        clock=StepClock(),
        trace=True,
        **options,
    )
    due, when = [], 0
    for gap, index in plan.arrivals:
        when += gap
        due.append((when, bank()[index]))
    sequences: list[Sequence] = []
    received: dict[Sequence, list[int]] = {}
    for step in range(2000):
        while len(sequences) < len(due) and due[len(sequences)][0] <= step:
            sequences.append(engine.add(due[len(sequences)][1]))
        for number, after in plan.cancelled.items():
            if number < len(sequences) and step == due[number][0] + after:
                engine.cancel(sequences[number])
        gone = [s for s in sequences if s.reason == "cancelled"]
        for output in engine.step():
            assert not output.finished or output.sequence.finished
            received.setdefault(output.sequence, []).extend(output.tokens)
        engine.check()
        assert not any(cache.next_position(s.key) for s in gone), "a cancelled sequence keeps its memory"
        if len(sequences) == len(due) and not engine.busy:
            break
    else:
        raise AssertionError("somebody starves")
    for sequence in sequences:
        assert received.get(sequence, []) == sequence.output, "the stream is not the output"
    return engine, sequences


def assert_nothing_is_left(engine: Engine) -> None:
    cache = engine.cache
    assert cache.positions == {}
    if isinstance(cache, PagedCache):
        assert cache.free_blocks == cache.n_blocks


def assert_solo(sequence: Sequence) -> None:
    tokens, text = solo(sequence.request, sequence.key[1])
    if sequence.reason == "cancelled":
        assert sequence.output == tokens[: len(sequence.output)]
    else:
        assert sequence.output == tokens
        if sequence.request.stop:
            assert sequence.text == text


@pytest.mark.slow
@pytest.mark.parametrize("kind", CACHES)
def test_every_request_equals_its_solo_run(kind: str) -> None:
    seen = {"preempted": 0, "cancelled": 0, "stop": 0, "length": 0, "waited": 0, "pieces": 0, "cached": 0}

    @thousands
    @given(plans)
    def check(plan: Plan) -> None:
        engine, sequences = play(plan, CACHES[kind])
        assert_nothing_is_left(engine)
        first_seen = [key for step in engine.trace for key, _, _ in step.rows]
        order = list(dict.fromkeys(first_seen))
        assert order == sorted(order), "somebody who came later ran earlier"
        for sequence in sequences:
            assert_solo(sequence)
            seen[sequence.reason] += 1
            seen["preempted"] += sequence.n_preempted
            seen["cached"] += sequence.n_cached
        seen["waited"] += sum(step.n_waiting for step in engine.trace)
        seen["pieces"] += sum(n > 1 and key not in step.sampled for step in engine.trace for key, n, _ in step.rows)

    check()
    # the cases are hard enough to mean something
    never = {"cached"} if "shared" not in kind else set()
    never |= {"preempted"} if kind == "two lines" else set()
    assert {name for name, count in seen.items() if not count} == never, seen


@pytest.mark.slow
@pytest.mark.parametrize("kind", CACHES)
def test_the_logits_equal_the_plain_model_in_fp32(kind: str) -> None:
    @settings(thousands, max_examples=100)
    @given(plans)
    def check(plan: Plan) -> None:
        _, sequences = play(plan, CACHES[kind], torch.float32, keep_logits=True)
        for sequence in sequences:
            if sequence.logits:
                with torch.inference_mode():
                    expected = tiny(torch.float32)(torch.tensor([sequence.tokens]))[0, sequence.n_prompt - 1 : -1]
                # the tolerance of DESIGN for any cache in fp32
                torch.testing.assert_close(torch.stack(sequence.logits), expected, rtol=0, atol=1e-5)

    check()
