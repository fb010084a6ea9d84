"""Speculative decoding: greedy is the target's greedy whatever drafts, and a batch is its rows alone."""

import random

import pytest
import torch
from speculative_help import CACHES, CONTEXT, DRAFTERS, VOCAB, HostileDrafter, RandomDrafter, cycle, make_target

from gptlite.cache.dense import DynamicCache, StaticCache
from gptlite.cache.paged import PagedCache
from gptlite.generate import generate
from gptlite.sampling import GREEDY, SamplingParams
from gptlite.speculative.decode import Speculator, rounds, speculate
from gptlite.speculative.drafters import Draft, Drafter, ModelDrafter, Text
from gptlite.speculative.theory import Tally, expected_tokens

LENGTHS = (1, 9, 3, 17, 5, 2, 30, 12)  # of the prompts of a batch


@pytest.fixture(scope="module")
def target():
    return make_target()


@pytest.fixture(scope="module")
def greedy(target):
    """Prompts of unequal lengths, and each one's greedy text to the end of the context, by the plain loop."""
    rng = random.Random(0)
    prompts = [[rng.randrange(VOCAB) for _ in range(n)] for n in LENGTHS]
    return [
        (prompt, generate(target, torch.tensor([prompt]), CONTEXT + 1 - len(prompt), GREEDY)[0].tolist())
        for prompt in prompts
    ]


@pytest.mark.parametrize("batch", [1, 8])
@pytest.mark.parametrize("cache", CACHES)
@pytest.mark.parametrize("drafter", DRAFTERS)
def test_greedy_is_the_targets_greedy_for_any_drafter_cache_and_batch(target, greedy, drafter, cache, batch):
    """In fp64, to the last token that the context has room for."""
    chosen = greedy if batch == 8 else greedy[1:2]
    texts = [Text(i, list(prompt), CONTEXT + 1 - len(prompt), GREEDY) for i, (prompt, _) in enumerate(chosen)]
    store = CACHES[cache](target, batch)
    proposes = DRAFTERS[drafter](target, batch)
    n_rounds = 0
    for verdicts in rounds(Speculator(target, proposes, store, 4), texts):
        n_rounds += 1
        for verdict in verdicts:
            # what the cache holds is the text without its last token, and the rejected drafts are gone
            text = texts[verdict.key]
            if not text.finished:
                assert store.next_position(text.key) == len(text.tokens) - 1
        if isinstance(store, PagedCache):
            store.check()
    for text, (_, expected) in zip(texts, greedy if batch == 8 else greedy[1:2], strict=True):
        assert text.tokens == expected
    assert all(store.next_position(text.key) == 0 for text in texts)
    if isinstance(store, PagedCache):
        assert store.free_blocks == store.n_blocks
    longest = max(len(text.tokens) - n for text, n in zip(texts, LENGTHS[: len(texts)], strict=True))
    if drafter in ("always right", "the target itself") and batch == 1:
        assert n_rounds == -(-(CONTEXT - LENGTHS[1]) // 5)  # the first token comes of the prompt
    assert n_rounds < longest + LENGTHS[1]


def test_the_targets_text_depends_on_what_its_cache_holds(greedy):
    """One that said the same token over and over would hide a cache that kept the wrong drafts."""
    assert all(len(set(text[len(prompt) :])) > (CONTEXT - len(prompt)) / 5 for prompt, text in greedy)


def test_the_hostile_drafters_are_accepted_as_often_as_they_say(target, greedy):
    counts = {}
    for name in DRAFTERS:
        trace = []
        prompt = torch.tensor([greedy[1][0]])
        speculate(target, prompt, 30, DRAFTERS[name](target, 1), 4, GREEDY, trace=trace)
        counts[name] = {len(verdict.kept) for verdicts in trace[:-1] for verdict in verdicts}
    assert counts["always wrong"] == {0} and counts["always right"] == counts["the target itself"] == {4}
    assert counts["none to all right"] == counts["tree, none to all right"] == {0, 1, 2, 3, 4}


@pytest.mark.parametrize("n_draft", [1, 2, 7, 60])
def test_any_number_of_drafts_gives_the_same_tokens(target, greedy, n_draft):
    prompt, expected = greedy[2]
    for name in ("draft model", "none to all right", "tree, none to all right"):
        out = speculate(target, torch.tensor([prompt]), 40, DRAFTERS[name](target, 1), n_draft, GREEDY)
        assert out[0].tolist() == expected[: len(prompt) + 40], name


@pytest.mark.parametrize("temperature", [0.0, 0.8])
def test_without_drafts_it_is_the_plain_loop(target, temperature):
    prompts = torch.tensor([[3, 1, 4], [1, 5, 9]])
    params = SamplingParams(temperature, top_p=0.9)
    plain = generate(target, prompts, 20, params, seed=5)
    assert torch.equal(speculate(target, prompts, 20, RandomDrafter(), 0, params, seed=5), plain)
    assert torch.equal(speculate(target, prompts, 0, RandomDrafter(), 4, params), prompts)
    assert torch.equal(speculate(target, prompts, 1, RandomDrafter(), 4, params, seed=5), plain[:, :4])


@pytest.mark.parametrize("cache", CACHES)
@pytest.mark.parametrize("drafter", DRAFTERS)
def test_a_batch_of_any_params_is_its_rows_alone(target, drafter, cache):
    """Each text has its own random numbers, so who shares its batch changes nothing; temperatures may be mixed."""
    rng = random.Random(1)
    params = [SamplingParams(t, top_p=p) for t, p in ((1.0, 1.0), (0.0, 1.0), (0.7, 0.8), (1.5, 1.0))]
    prompts = [[rng.randrange(VOCAB) for _ in range(n)] for n in (2, 11, 5, 7)]

    def run(rows):
        texts = [Text(b, list(prompts[b]), 14 + b, params[b], seed=10 + b) for b in rows]
        trace = list(rounds(Speculator(target, DRAFTERS[drafter](target, 4), CACHES[cache](target, 4), 3), texts))
        return {text.key: text.tokens for text in texts}, trace

    together, trace = run(range(4))
    for b in range(4):
        assert run([b])[0][b] == together[b]
    kept = [{verdict.key: len(verdict.kept) for verdict in verdicts} for verdicts in trace]
    if drafter in ("draft model", "none to all right"):
        assert any(len(set(counts.values())) > 1 for counts in kept)  # rows did accept different counts


def test_the_drafts_cache_catches_up_and_rolls_back(target):
    """Drafted by the target itself, every draft is right only if the draft's cache is."""
    drafter = ModelDrafter(target)

    class Spoiled(Drafter):
        """Makes the last of the drafts wrong in every second round, so that both caches must take it back."""

        n = 0

        def propose(self, texts, n_draft, hidden=None):
            draft = drafter.propose(texts, n_draft)
            self.n += 1
            if self.n % 2 and len(draft.tokens[0]) > 1:
                draft.tokens[0][1] = (draft.tokens[0][1] + 1) % VOCAB
            return draft

        def keep(self, texts, kept):
            drafter.keep(texts, kept)
            # what it holds is a part of the text, and at most one token of it is missing
            held = drafter.cache.next_position(texts[0].key)
            assert held in (len(texts[0].tokens) - 1, len(texts[0].tokens) - 2)

        def free(self, text):
            drafter.free(text)

    prompt = torch.tensor([[3, 1, 4, 1, 5]])
    trace = []
    out = speculate(target, prompt, 40, Spoiled(), 3, GREEDY, trace=trace)
    assert torch.equal(out, generate(target, prompt, 40, GREEDY))
    assert [len(verdicts[0].kept) for verdicts in trace[:8]] == [1, 3] * 4
    assert drafter.cache.next_position(0) == 0  # and it is forgotten at the end


def test_verdicts_hold_what_was_drafted_and_emitted(target):
    trace = []
    prompt = torch.tensor([[2, 7, 1]])
    out = speculate(target, prompt, 25, ModelDrafter(make_target(2, 1)), 4, SamplingParams(0.7), seed=3, trace=trace)
    emitted = [token for verdicts in trace for token in verdicts[0].emitted]
    assert out[0, 4:].tolist() == emitted
    for (verdict,) in trace:
        n = len(verdict.drafts)
        assert verdict.p.shape == (n + 1, VOCAB) and verdict.kept == list(range(len(verdict.kept)))
        torch.testing.assert_close(verdict.p.sum(-1), torch.ones(n + 1, dtype=torch.float64))
        assert n == 0 or verdict.q.shape == (n, VOCAB)
        assert all(verdict.q[i, token] > 0 for i, token in enumerate(verdict.drafts))


def test_hidden_states_are_those_of_the_tokens_that_were_read(target):
    """A drafter that wants them gets, per text, one state for every token but the last, each of them once."""
    seen = []

    class Wants(HostileDrafter):
        wants_hidden = True

        def propose(self, texts, n_draft, hidden=None):
            seen.append([states.clone() for states in hidden])
            return super().propose(texts, n_draft)

    prompts = torch.tensor([[2, 7, 1], [3, 3, 8]])
    out = speculate(target, prompts, 12, Wants(target, cycle), 3, GREEDY)
    with torch.inference_mode():
        for b in range(2):
            got = torch.cat([states[b] for states in seen if b < len(states)][:3])
            positions = torch.arange(len(out[b]))[None]
            cache = DynamicCache(target)
            segments = cache.prepare([0], positions)
            full = target.run(out[b], segments, cache)
            torch.testing.assert_close(got, full[: len(got)], rtol=0, atol=1e-10)


@pytest.mark.parametrize("acceptance", [0.3, 0.6, 0.9])
def test_tokens_per_round_follow_the_formula(acceptance):
    """A drafter that is right with a known probability: within 5 %, over rounds that drafted in full."""
    model = make_target(context=512)
    for parameter in model.parameters():
        parameter.data = parameter.data.float()
    prompts = torch.arange(16)[:, None]
    whole = generate(model, prompts, 400, GREEDY, StaticCache(model, 16, 512))
    known = {b: row.tolist() for b, row in enumerate(whole)}
    generator = torch.Generator().manual_seed(7)

    class Synthetic(Drafter):
        def propose(self, texts, n_draft, hidden=None):
            drafts = []
            for text in texts:
                n = min(n_draft, text.room)
                right = torch.rand(n, generator=generator) < acceptance
                best = known[text.key][len(text.tokens) : len(text.tokens) + n]
                drafts.append([t if ok else (t + 1) % VOCAB for t, ok in zip(best, right.tolist(), strict=True)])
            return Draft(drafts)

    trace = []
    out = speculate(model, prompts, 400, Synthetic(), 4, GREEDY, StaticCache(model, 16, 512), trace=trace)
    # logits of one token and of five may differ in the last bit, and a near-tie may turn
    assert (out == whole).all(1).float().mean() > 0.8
    tally = Tally(trace, 4)
    assert tally.rounds > 900
    assert abs(tally.tokens_per_round / expected_tokens(acceptance, 4) - 1) < 0.05
    assert abs(tally.acceptance - acceptance) < 0.05


def test_what_makes_no_sense_is_refused_in_one_line(target):
    prompt = torch.tensor([[1, 2, 3]])
    held = StaticCache(target, 1, CONTEXT)
    generate(target, prompt, 2, GREEDY, held)
    cases = [
        ("it must be \\[B, n\\]", lambda: speculate(target, prompt[0], 4, RandomDrafter())),
        ("n_new is -1", lambda: speculate(target, prompt, -1, RandomDrafter())),
        ("n_draft is -1", lambda: speculate(target, prompt, 4, RandomDrafter(), -1)),
        ("n_draft is 2.5", lambda: speculate(target, prompt, 4, RandomDrafter(), 2.5)),
        ("needs 49, the context window holds 48", lambda: speculate(target, prompt, 47, RandomDrafter())),
        (
            "needs 12, the cache holds 10",
            lambda: speculate(target, prompt, 10, RandomDrafter(), cache=StaticCache(target, 1, 10)),
        ),
        ("token 99 is outside", lambda: speculate(target, torch.tensor([[1, 99]]), 4, RandomDrafter())),
        (
            "a vocabulary of 9 tokens, the target one of 23",
            lambda: speculate(target, prompt, 4, ModelDrafter(make_target(2, 1, vocab_size=9))),
        ),
        ("the cache already holds text 0", lambda: speculate(target, prompt, 4, RandomDrafter(), cache=held)),
        ("has no prompt", lambda: Text(0, [], 3)),
        ("n_new is 0", lambda: Text(0, [1], 0)),
        ("max_batch is 0", lambda: ModelDrafter(target, 0)),
    ]
    for message, call in cases:
        with pytest.raises(ValueError, match=message):
            call()


def test_a_drafter_that_goes_too_deep_is_refused(target):
    class TooDeep(Drafter):
        def propose(self, texts, n_draft, hidden=None):
            return Draft([[1] * 9 for _ in texts])

    with pytest.raises(ValueError, match="has drafts 9 deep, it has room for 3"):
        speculate(target, torch.tensor([[1, 2]]), 5, TooDeep(), 4, GREEDY)


@pytest.mark.parametrize("ends", ["an error", "nobody asks on"])
def test_a_generation_that_is_broken_off_leaves_nothing_in_the_caches(target, greedy, ends):
    """Else the next text of the same name would go on from the tokens of this one."""
    drafter, cache = ModelDrafter(make_target(2, 1)), StaticCache(target, 1, CONTEXT)
    texts = [Text(0, list(greedy[3][0]), 20, GREEDY)]
    running = rounds(Speculator(target, drafter, cache, 3), texts)
    next(running)
    if ends == "an error":
        texts[0].tokens[-1] = VOCAB + 1  # what no model can read
        with pytest.raises((ValueError, IndexError)):
            next(running)
    else:
        running.close()
    assert cache.next_position(0) == drafter.cache.next_position(0) == 0
    prompt, expected = greedy[2]
    out = speculate(target, torch.tensor([prompt]), 12, drafter, 3, GREEDY, cache)
    assert out[0].tolist() == expected[: len(prompt) + 12]


def test_nan_is_an_error_and_not_a_token(target):
    broken = make_target()
    broken.fc_out.bias.data[3] = float("nan")
    for params in (GREEDY, SamplingParams(1.0)):
        with pytest.raises(ValueError, match="NaN"):
            speculate(broken, torch.tensor([[1, 2]]), 5, RandomDrafter(), 2, params)
