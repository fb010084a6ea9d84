"""Drafters without a draft model: their law is the target's, drafts are what they say, and caches come along."""

import itertools
import random

import pytest
import torch
from speculative_help import CONTEXT, DRAFTERS, VOCAB, make_target, untrained
from test_speculative_verify import p_value

from gptlite.cache.contract import whole_batch
from gptlite.cache.dense import StaticCache
from gptlite.cache.paged import PagedCache
from gptlite.generate import generate
from gptlite.sampling import GREEDY, SamplingParams, probabilities
from gptlite.speculative.decode import Speculator, rounds, speculate
from gptlite.speculative.drafters import Draft, Drafter, ModelDrafter, Text
from gptlite.speculative.eagle import EagleDrafter, EagleHeads
from gptlite.speculative.heads import trunk_states
from gptlite.speculative.lookup import LookupDrafter, last_match
from gptlite.speculative.medusa import MedusaDrafter, MedusaHeads
from gptlite.speculative.mtp import MTPDrafter, MTPHeads
from gptlite.speculative.self_draft import ExitHeads, choose_blocks, early_exit, with_blocks
from gptlite.speculative.tree import Tree, product_tree

OWN = ("look-up", "skipped layers", "early exit", "Medusa, chain", "Medusa, tree", "EAGLE, chain", "EAGLE, tree", "MTP")


@pytest.fixture(scope="module")
def target():
    return make_target(n_layers=3)


# -- the law --------------------------------------------------------------------------------------------------------

V, N_TEXTS = 4, 600  # per setting; 3,600 for each drafter, 28,800 in all
SETTINGS = [SamplingParams(t, top_p=p) for t in (0.5, 1.0, 1.5) for p in (1.0, 0.8)]


def small_target():
    model = make_target(5, 2, V, 8)
    model.fc_out.weight.data *= 0.4
    return model


def counts_and_law(target, drafter, n_texts, settings=SETTINGS):
    """Of texts of three tokens after a prompt that repeats itself: their counts by setting, and their exact law."""
    n, prompt = n_texts * len(settings), [2, 1, 2]
    texts = [Text(i, list(prompt), 3, settings[i % len(settings)], seed=i) for i in range(n)]
    for _ in rounds(Speculator(target, drafter, StaticCache(target, n, 24, bucket=4), 2), texts):
        pass
    every = torch.tensor(list(itertools.product(range(V), repeat=3)))
    with torch.inference_mode():
        logits = target(torch.cat([torch.tensor([prompt]).expand(len(every), -1), every[:, :-1]], 1))[:, 2:]
    counts, exact = [], []
    for i, params in enumerate(settings):
        probs = probabilities(logits.flatten(0, 1), params).unflatten(0, (len(every), 3))
        exact.append(probs.gather(-1, every[..., None])[..., 0].prod(1).tolist())
        drawn = torch.tensor([text.tokens[3:] for text in texts[i :: len(settings)]])
        counts.append(torch.bincount(drawn @ torch.tensor([V * V, V, 1]), minlength=V**3).tolist())
    return counts, exact


LAW = {
    "look-up": lambda m, n: LookupDrafter(2, 1),
    "skipped layers": lambda m, n: ModelDrafter(with_blocks(m, [1]), n),
    "early exit": lambda m, n: ModelDrafter(early_exit(m, untrained(ExitHeads, m, [1]), 1), n),
    "Medusa, chain": lambda m, n: MedusaDrafter(untrained(MedusaHeads, m, 2)),
    "Medusa, tree": lambda m, n: MedusaDrafter(untrained(MedusaHeads, m, 2), 6),
    "EAGLE, chain": lambda m, n: EagleDrafter(m, untrained(EagleHeads, m), n),
    "EAGLE, tree": lambda m, n: EagleDrafter(m, untrained(EagleHeads, m), n, 6, 2),
    "MTP": lambda m, n: MTPDrafter(m, untrained(MTPHeads, m, 2), n),
}


@pytest.mark.parametrize("name", LAW)
def test_sampled_texts_have_the_targets_law(name):
    """Fixed seeds, and 3,600 texts of three tokens for each drafter against all 64 of them, enumerated."""
    target = small_target()
    counts, exact = counts_and_law(target, LAW[name](target, N_TEXTS * len(SETTINGS)), N_TEXTS)
    for params, seen, probs in zip(SETTINGS, counts, exact, strict=True):
        assert p_value(seen, probs) > 0.001, params
    share = 1 / len(SETTINGS)
    assert p_value([n for seen in counts for n in seen], [share * prob for probs in exact for prob in probs]) > 0.001


class Overconfident(Drafter):
    """Says of the drafts of heads that they come from a colder distribution than they do."""

    wants_hidden = True

    def __init__(self, drafter):
        self.drafter = drafter

    def propose(self, texts, n_draft, hidden=None):
        draft = self.drafter.propose(texts, n_draft, hidden)
        probs = draft.probs**3
        return Draft(draft.tokens, probs / probs.sum(-1, keepdim=True).clamp(min=1e-300))


def test_the_same_test_sees_heads_that_lie_about_q():
    target = small_target()
    drafter = Overconfident(MedusaDrafter(untrained(MedusaHeads, target, 2)))
    counts, exact = counts_and_law(target, drafter, 2500, [SamplingParams(1.5)])
    assert p_value(counts[0], exact[0]) < 1e-6


# -- look-up --------------------------------------------------------------------------------------------------------


def plain_match(tokens, longest, shortest):
    """The same by definition: every length, every place."""
    for n in range(longest, shortest - 1, -1):
        for begin in range(len(tokens) - n - 1, -1, -1):
            if len(tokens) > n and tokens[begin : begin + n] == tokens[-n:]:
                return begin + n
    return None


def test_the_look_up_finds_what_the_definition_finds():
    rng = random.Random(0)
    for _ in range(400):
        tokens = [rng.randrange(rng.choice((2, 4))) for _ in range(rng.randrange(1, 20))]
        longest = rng.randrange(1, 6)
        shortest = rng.randrange(1, longest + 1)
        assert last_match(tokens, longest, shortest) == plain_match(tokens, longest, shortest), tokens


def test_the_look_up_takes_any_token_number():
    for token in (0, 10, 55_296, 60_000, 128_255):  # among them those that are no characters of their own
        assert last_match([token, 7, 1, token], 3, 1) == 1
    assert last_match([5, 5, 5], 3, 1) == 2  # the match may reach into the ending
    assert last_match([1, 2, 3], 3, 1) is None and last_match([4], 3, 1) is None


def test_the_look_up_never_drafts_deeper_than_a_text_has_room():
    texts = [Text(0, [1, 2, 3, 4, 5, 1, 2], 2), Text(1, [1, 2, 3, 4, 5, 1, 2], 30)]
    assert LookupDrafter(3, 1).propose(texts, 9).tokens == [[3], [3, 4, 5, 1, 2]]
    assert LookupDrafter(3, 3).propose(texts, 9).tokens == [[], []]


# -- want of room ---------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("temperature", [0.0, 1.0])
@pytest.mark.parametrize("name", OWN)
def test_a_draft_that_was_cut_is_verified_with_the_probabilities_that_are_left(target, name, temperature):
    for n_blocks, most in ((4, 0), (5, 1), (6, 2)):  # of two tokens: those of two texts of 4, and what the drafts get
        texts = [Text(b, [1, 2, 1], 6, SamplingParams(temperature), seed=b) for b in range(2)]
        speculator = Speculator(target, DRAFTERS[name](target, 2), PagedCache(target, n_blocks, 2), 4)
        speculator.begin(texts)
        for verdict in speculator.step(texts):
            assert len(verdict.drafts) <= most
            assert verdict.q is None or len(verdict.q) == len(verdict.drafts)
            assert verdict.p is None or len(verdict.p) == len(verdict.drafts) + 1


# -- drafters that keep caches ----------------------------------------------------------------------------------------


@pytest.mark.parametrize("name", OWN)
def test_any_depth_gives_the_targets_greedy_tokens(target, name):
    prompt = torch.tensor([[3, 1, 4, 1, 5], [9, 2, 6, 5, 3]])
    expected = generate(target, prompt, CONTEXT - 4, GREEDY)
    drafter = DRAFTERS[name](target, 2)
    for n_draft in (1, 2, 20):  # a drafter can be used again
        assert torch.equal(speculate(target, prompt, CONTEXT - 4, drafter, n_draft, GREEDY), expected), n_draft


@pytest.mark.parametrize("name", OWN)
def test_drafts_after_a_round_are_those_of_a_drafter_that_reads_the_text_anew(target, name):
    """Whatever was drafted and rejected before, nothing of it is left in a drafter's caches."""
    params = SamplingParams(1.3)
    old = DRAFTERS[name](target, 2)
    texts = [Text(b, [1 + b, 2, 3, 1, 2], 34, params, seed=b) for b in range(2)]
    seen = []

    class Watched(Drafter):
        wants_hidden = True

        def propose(self, texts, n_draft, hidden=None):
            states = [text._generator.get_state() for text in texts]
            numbers = [list(text._numbers) for text in texts]
            draft = old.propose(texts, n_draft, hidden)
            fresh = DRAFTERS[name](target, 2)
            with torch.inference_mode():
                whole = []
                for text in texts:
                    read = torch.tensor(text.tokens[:-1])[None]
                    whole.append(trunk_states(target, read).hidden[0])
            for text, state, row in zip(texts, states, numbers, strict=True):
                text._generator.set_state(state)
                text._numbers = row
            anew = fresh.propose(texts, n_draft, whole)
            assert anew.tokens == draft.tokens and anew.parents == draft.parents
            if draft.probs is not None:
                torch.testing.assert_close(anew.probs, draft.probs, rtol=1e-9, atol=1e-12)  # fp64
            seen.append(draft)
            return draft

        def keep(self, texts, kept):
            old.keep(texts, kept)

        def free(self, text):
            old.free(text)

    kept = [
        len(v.kept) for vs in rounds(Speculator(target, Watched(), StaticCache(target, 2, 60), 3), texts) for v in vs
    ]
    assert len(seen) > 5 and (max(kept) > min(kept) or name == "look-up")


@pytest.mark.parametrize("name", ("EAGLE, chain", "EAGLE, tree", "MTP"))
def test_a_freed_text_leaves_no_trace_in_the_drafter(target, name):
    drafter = DRAFTERS[name](target, 1)
    for seed in range(3):  # more texts than it has lines
        speculate(target, torch.tensor([[1, 2]]), 20, drafter, 3, seed=seed)
    caches = drafter.caches if name == "MTP" else [drafter.cache]
    assert not any(cache.positions for cache in caches)
    drafter.free(Text("never seen", [1], 1))


# -- trees ------------------------------------------------------------------------------------------------------------


def test_the_product_tree_holds_the_most_probable_paths():
    generator = torch.Generator().manual_seed(0)
    for n_nodes in (1, 2, 5, 17, 200):
        probs = torch.rand(3, 5, generator=generator, dtype=torch.float64).softmax(-1)
        tree = product_tree(probs, n_nodes)
        values = sorted(
            (probs[range(n), path].prod().item() for n in (1, 2, 3) for path in itertools.product(range(5), repeat=n)),
            reverse=True,
        )
        assert tree.values == pytest.approx(values[:n_nodes])
        assert all(parent < node for node, parent in enumerate(tree.parents))
        paths = [path_of(tree, node) for node in range(len(tree.tokens))]
        assert len(set(paths)) == len(paths)  # no path twice
        for path, value in zip(paths, tree.values, strict=True):
            assert probs[range(len(path)), path].prod().item() == pytest.approx(value)


def path_of(tree, node):
    path = []
    while node >= 0:
        path.append(tree.tokens[node])
        node = tree.parents[node]
    return tuple(reversed(path))


def test_the_best_of_a_tree_is_a_tree():
    tree = Tree()
    for token, parent, value in ((1, -1, 0.5), (2, -1, 0.3), (3, 0, 0.2), (4, 0, 0.3), (5, 3, 0.29), (6, 1, 0.01)):
        tree.add(token, parent, value)
    best = tree.best(4)
    assert (best.tokens, best.parents) == ([1, 2, 4, 5], [-1, -1, 0, 2])
    assert tree.best(99).tokens == [1, 2, 4, 5, 3, 6] and Tree().best(3).tokens == []


def test_the_best_tree_expects_at_least_what_a_chain_of_as_many_nodes_does():
    generator = torch.Generator().manual_seed(1)
    for _ in range(50):
        probs = (4 * torch.randn(4, 6, generator=generator, dtype=torch.float64)).softmax(-1)
        for n in range(1, 5):
            chain = probs.amax(-1).cumprod(0)[:n].sum().item()
            assert sum(product_tree(probs, n).values) >= chain - 1e-12


# -- self-drafting ----------------------------------------------------------------------------------------------------


def test_a_draft_of_the_targets_own_blocks_shares_its_weights(target):
    small = with_blocks(target, [0, 2])
    assert len(small.blocks) == small.config.n_layers == 2 and len(target.blocks) == 3
    own = {p.data_ptr() for p in target.parameters()}
    assert {p.data_ptr() for p in small.parameters()} <= own
    tokens = torch.tensor([[1, 2, 3]])
    torch.testing.assert_close(with_blocks(target, [0, 1, 2])(tokens), target(tokens), rtol=0, atol=0)
    for layers in ([], [1, 0], [0, 0], [3], [-1]):
        with pytest.raises(ValueError, match="must be some of 0 to 2"):
            with_blocks(target, layers)


def test_a_way_out_is_the_first_blocks_an_adapter_and_the_shared_head(target):
    heads = untrained(ExitHeads, target, [1, 2])
    tokens = torch.tensor([[1, 2, 3]])
    for place, layer in enumerate((1, 2)):
        out = early_exit(target, heads, layer)
        x = target.token_embedding(tokens[0]) + target.position_embedding(torch.arange(3))
        for number, block in enumerate(target.blocks[:layer]):
            x = block(x, [whole_batch(torch.arange(3)[None])], None, number)
        expected = target.fc_out(heads.norms[place](x + heads.blocks[place](x)))
        torch.testing.assert_close(out(tokens)[0], expected, rtol=1e-12, atol=1e-12)  # fp64, the same sums
    assert isinstance(target.ln, torch.nn.LayerNorm)  # the target is as it was
    with pytest.raises(ValueError, match="no way out after 3 blocks, there are those after \\[1, 2\\]"):
        early_exit(target, heads, 3)
    for layers in ([0], [3], [1, 1]):
        with pytest.raises(ValueError, match="each must be 1 to 2, and come once"):
            ExitHeads(target, layers)


def test_the_chosen_blocks_are_the_best_ones(target):
    tokens = torch.randint(VOCAB, (2, 20), generator=torch.Generator().manual_seed(0))
    # the middle block is made to do nothing, so that leaving it out costs nothing
    lazy = make_target(n_layers=3)
    for linear in (lazy.blocks[1].mha.out_proj, lazy.blocks[1].ffwd.net[2]):
        linear.weight.data.zero_()
        linear.bias.data.zero_()
    assert choose_blocks(lazy, tokens, 1) == [0, 2]
    assert len(choose_blocks(lazy, tokens, 2)) == 1
    for n in (0, 3):
        with pytest.raises(ValueError, match="n_skipped is"):
            choose_blocks(lazy, tokens, n)


@pytest.mark.parametrize(
    ("make", "message"),
    [
        (lambda m: LookupDrafter(0, 0), "longest is 0"),
        (lambda m: LookupDrafter(2, 3), "longest is 2, it must be at least shortest, which is 3"),
        (lambda m: MedusaDrafter(untrained(MedusaHeads, m, 2), -1), "n_nodes is -1"),
        (lambda m: EagleDrafter(m, untrained(EagleHeads, m), 0), "n_sequences is 0"),
        (lambda m: EagleDrafter(m, untrained(EagleHeads, m), 1, 4, 0), "width is 0"),
        (lambda m: product_tree(torch.ones(1, 2), 0), "n_nodes is 0"),
    ],
)
def test_numbers_of_no_use_are_refused(target, make, message):
    with pytest.raises(ValueError, match=message):
        make(target)
