"""The arithmetic of speculative decoding, the acceptance along a text, and the comparison of drafters."""

import itertools

import pytest
import torch
from speculative_help import VOCAB, HostileDrafter, RandomDrafter, make_target

from gptlite.sampling import GREEDY, SamplingParams, probabilities
from gptlite.speculative.acceptance import acceptance_along, logits_along
from gptlite.speculative.compare import Timed, compare
from gptlite.speculative.decode import Verdict, speculate
from gptlite.speculative.drafters import ModelDrafter
from gptlite.speculative.theory import (
    Tally,
    acceptance_from_tokens,
    best_n_draft,
    expected_tokens,
    overlap,
    speedup,
)


def test_expected_tokens_by_enumeration_of_all_outcomes():
    for acceptance, n_draft in itertools.product((0.0, 0.3, 0.8, 1.0), (0, 1, 4)):
        mean = 0.0
        for outcome in itertools.product((True, False), repeat=n_draft):
            chance, kept = 1.0, 0
            for ok in outcome:
                chance *= acceptance if ok else 1 - acceptance
            while kept < n_draft and outcome[kept]:
                kept += 1
            mean += chance * (kept + 1)
        assert expected_tokens(acceptance, n_draft) == pytest.approx(mean)
    assert expected_tokens(0.8, 4) == pytest.approx((1 - 0.8**5) / 0.2)


def test_speedup_and_the_best_number_of_drafts():
    assert speedup(0.8, 4, 0.1) == pytest.approx(3.3616 / 1.4)
    assert speedup(0.8, 4, 0.1, 1.2) == pytest.approx(3.3616 / 1.6)
    assert speedup(0.5, 0, 0.3) == 1
    for acceptance, c in ((0.8, 0.2), (0.95, 0.01), (0.6, 0.1), (0.2, 0.5)):
        best = best_n_draft(acceptance, c)
        assert all(speedup(acceptance, best, c) >= speedup(acceptance, n, c) - 1e-12 for n in range(33))
    assert best_n_draft(0.3, 0.4) == 0 and best_n_draft(0.5, 0.5) == 0 and best_n_draft(1.0, 0.0) == 32
    assert best_n_draft(0.51, 0.5) == 1


def test_acceptance_is_recovered_from_tokens_per_round():
    for acceptance, n_draft in itertools.product((0.0, 0.25, 0.9, 1.0), (1, 5)):
        assert acceptance_from_tokens(expected_tokens(acceptance, n_draft), n_draft) == pytest.approx(acceptance)
    for message, call in (
        ("5.1 tokens per round", lambda: acceptance_from_tokens(5.1, 4)),
        ("n_draft is 0", lambda: acceptance_from_tokens(1.0, 0)),
        ("acceptance is 1.5", lambda: expected_tokens(1.5, 4)),
        ("n_draft is -2", lambda: expected_tokens(0.5, -2)),
        ("cost_ratio is -0.1", lambda: speedup(0.5, 4, -0.1)),
        ("cost_ratio is nan", lambda: speedup(0.5, 4, float("nan"))),
        ("longest is 0", lambda: best_n_draft(0.5, 0.1, 0)),
    ):
        with pytest.raises(ValueError, match=message):
            call()


def test_the_tally_counts_tried_drafts_and_leaves_short_rounds_out():
    trace = [
        [Verdict(0, [1, 2, 3], None, [0, 1, 2], 5)],  # all kept: 3 tried
        [Verdict(0, [1, 2, 3], None, [0], 5), Verdict(1, [1, 2, 3], None, [], 5)],  # 2 and 1 tried
        [Verdict(0, [1], None, [0], 5)],  # at the end of a text
    ]
    tally = Tally(trace, 3)
    assert (tally.rounds, tally.drafted, tally.kept, tally.tried) == (3, 9, 4, 6)
    assert tally.acceptance == pytest.approx(4 / 6) and tally.tokens_per_round == pytest.approx(7 / 3)
    assert Tally(trace).rounds == 4 and Tally([]).acceptance == 0


def test_overlap_is_one_minus_the_total_variation():
    p, q = torch.tensor([0.5, 0.3, 0.2]), torch.tensor([0.2, 0.3, 0.5])
    assert overlap(p, q).item() == pytest.approx(0.7) == pytest.approx(1 - 0.5 * float((p - q).abs().sum()))


def test_acceptance_along_a_text_is_the_overlap_after_what_a_window_holds():
    target, draft = make_target(), make_target(2, 1)
    text = torch.randint(VOCAB, (100,), generator=torch.Generator().manual_seed(0))
    params = SamplingParams(0.8)
    p, q = (logits_along(model, text, context=16) for model in (target, draft))
    along = acceptance_along(p, q, params)
    assert p.shape == (99, VOCAB) and along.shape == (99,)
    for i in (0, 5, 15, 16, 23, 24, 98):  # the one at i is token i + 1
        before = 0 if i < 16 else (i // 8) * 8 - 8  # windows begin every 8 tokens, and give their second half
        with torch.inference_mode():
            rows = [probabilities(one(text[None, before : i + 1])[0, -1:], params) for one in (target, draft)]
        assert along[i].item() == pytest.approx(overlap(*rows).item(), abs=1e-9)
    greedy = acceptance_along(p, q, GREEDY)
    assert torch.equal(greedy, (p.argmax(-1) == q.argmax(-1)).double())
    with pytest.raises(ValueError, match="at least 2 tokens"):
        logits_along(target, text[:1])
    with pytest.raises(ValueError, match="context is 99"):
        logits_along(target, text, context=99)


def ticking(step=1.0):
    ticks = itertools.count()
    return lambda: step * next(ticks)


def test_a_comparison_pairs_runs_and_counts_the_drafters_own_time():
    target = make_target()
    prompts = [torch.tensor([[1, 2, 3]]), torch.tensor([[4, 5]])]
    drafters = {"right": HostileDrafter(target, lambda text: 99), "random": RandomDrafter()}
    found = compare(target, drafters, prompts, 20, 4, clock=ticking())
    right = found["right"]
    assert right.equal and found["random"].equal
    assert right.tally.acceptance == 1 and right.tally.tokens_per_round == 5
    assert len(right.plain) == len(right.speculative) == 2 and right.plain == [1, 1]
    # a clock that moves by one at each look: two looks around each proposal and each keep, two around the whole run,
    # and four rounds, since after the first token 19 come as 5, 5, 5 and 4
    assert right.proposing == [8, 8] and right.speculative == [17, 17]
    assert right.propose_share == pytest.approx(8 / 17) and right.speedup == pytest.approx(1 / 17)
    row = right.row("right")
    assert row["drafter"] == "right" and row["acceptance"] == 1 and row["tokens per round"] == 5
    assert row["speed-up (times)"] == round(right.speedup, 2)
    # the last round had room for 3 drafts: it is no part of the acceptance, and of the price of a draft it is
    assert right.tally.drafted == 24 and right.drafted == 30
    assert row["drafting (ms per drafted token)"] == round(1e3 * 16 / 30, 3)


def test_a_timed_drafter_drafts_what_the_other_does():
    target = make_target()
    prompt = torch.tensor([[1, 2, 3]])
    timed = Timed(ModelDrafter(make_target(2, 1)), torch.device("cpu"), ticking())
    params = SamplingParams(0.9)
    own = speculate(target, prompt, 20, timed, 3, params, seed=2)
    assert torch.equal(own, speculate(target, prompt, 20, ModelDrafter(make_target(2, 1)), 3, params, seed=2))
    assert timed.seconds > 0 and timed.drafter.cache.next_position(0) == 0
