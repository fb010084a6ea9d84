"""Verification keeps the target's distribution: chi-square tests, and the proof that these tests can fail."""

import itertools
import math

import pytest
import torch
from speculative_help import make_target

from gptlite.cache.dense import StaticCache
from gptlite.sampling import SamplingParams, probabilities, sample
from gptlite.speculative import verify as module
from gptlite.speculative.decode import Speculator, rounds
from gptlite.speculative.drafters import Draft, Drafter, ModelDrafter, Text
from gptlite.speculative.verify import verify, verify_greedy

V = 4
N_SAMPLES = 20_000
SETTINGS = [SamplingParams(t, top_p=p) for t in (0.5, 1.0, 1.5) for p in (1.0, 0.8)]
NAMES = [f"temperature {params.temperature}, top-p {params.top_p}" for params in SETTINGS]


def p_value(counts, probs):
    """Of a chi-square test of counts against exact probabilities; cells expected below 5 are taken together.

    The tail comes of Wilson and Hilferty's cube root, good to a few percent of itself here.
    """
    n = sum(counts)
    cells = sorted(zip(probs, counts, strict=True))
    if any(count and not prob for prob, count in cells):
        return 0.0  # what cannot be was seen
    merged, prob, count = [], 0.0, 0
    for p, c in cells:
        prob, count = prob + p, count + c
        if n * prob >= 5:
            merged.append((prob, count))
            prob, count = 0.0, 0
    if prob:
        merged[-1] = (merged[-1][0] + prob, merged[-1][1] + count)
    statistic = sum((c - n * p) ** 2 / (n * p) for p, c in merged)
    k = len(merged) - 1
    z = ((statistic / k) ** (1 / 3) - (1 - 2 / (9 * k))) / math.sqrt(2 / (9 * k))
    return 0.5 * math.erfc(z / math.sqrt(2))


def tables(params, seed=0):
    """The next-token distributions of a target and of a drafter, by the last token [V, V] each."""
    generator = torch.Generator().manual_seed(seed)
    return [probabilities(2 * torch.randn(V, V, generator=generator).double(), params) for _ in range(2)]


def draft_chain(q_table, n, u):
    tokens, probs = [torch.zeros(len(u), dtype=torch.int64)], []
    for i in range(n):
        probs.append(q_table[tokens[-1]])
        tokens.append(sample(probs[-1], u[:, i]))
    return torch.stack(tokens[1:], 1), torch.stack(probs, 1)


def round_of_chains(p_table, q_table, n_draft=2, claimed=None, check=verify):
    """Counts of the first two tokens after token 0, over many rounds; the second is the target's where a round ended.

    Args:
        claimed: the distributions that the drafts are said to come from; None means those that they do.
    """
    generator = torch.Generator().manual_seed(1)
    u = torch.rand(N_SAMPLES, 2 * n_draft + 2, generator=generator, dtype=torch.float64)
    tokens, q = draft_chain(q_table, n_draft, u)
    if claimed is not None:
        q = torch.stack([claimed[t] for t in torch.cat([torch.zeros_like(tokens[:, :1]), tokens[:, :-1]], 1).T], 1)
    before = torch.cat([torch.zeros_like(tokens[:, :1]), tokens], 1)  # [B, n + 1]
    kept, following = check(p_table[before], q, tokens, u[:, n_draft:-1])
    return first_two(p_table, kept, tokens, following, u[:, -1])


def first_two(p_table, kept, tokens, following, u):
    first = torch.where(kept[:, 0], tokens[:, 0], following)
    inside = torch.where(kept[:, 1], tokens[:, 1], following)
    second = torch.where(kept[:, 0], inside, sample(p_table[first], u))
    return torch.bincount(first * V + second, minlength=V * V).tolist()


def law(p_table):
    """Exact probabilities of the first two tokens after token 0."""
    return [float(p_table[0, a] * p_table[a, b]) for a, b in itertools.product(range(V), repeat=2)]


@pytest.mark.parametrize("params", SETTINGS, ids=NAMES)
def test_two_tokens_of_a_round_have_the_targets_law(params):
    p_table, q_table = tables(params)
    assert p_value(round_of_chains(p_table, q_table), law(p_table)) > 0.001


def broken_residual(p, q, x, i):
    return p


def broken_chain(p, q, tokens, u):
    """Accepts with probability min(1, q / p) instead of min(1, p / q)."""
    p_x, q_x = (part.gather(-1, tokens[..., None])[..., 0] for part in (p[:, :-1], q))
    accepted = u[:, :-1] * p_x < q_x
    kept = accepted.cumprod(1).bool()
    n = kept.sum(1)
    rows = torch.arange(len(p))
    rest = module._residual(p[rows, n], q, tokens[..., None], n.clamp(max=tokens.shape[1] - 1))
    return kept, sample(torch.where((n < tokens.shape[1])[:, None], rest, p[rows, n]), u[:, -1])


@pytest.mark.parametrize("params", SETTINGS, ids=NAMES)
def test_the_chi_square_test_sees_a_broken_residual_or_ratio_or_q(params, monkeypatch):
    p_table, q_table = tables(params)
    assert p_value(round_of_chains(p_table, q_table, check=lambda *a: broken_chain(*a)), law(p_table)) < 1e-6
    # drafts of another temperature than the one they are said to be of
    other = torch.softmax(q_table.clamp(min=1e-9).log() * 0.5, -1)
    assert p_value(round_of_chains(p_table, other, claimed=q_table), law(p_table)) < 1e-6
    monkeypatch.setattr(module, "_residual", broken_residual)
    assert p_value(round_of_chains(p_table, q_table), law(p_table)) < 1e-6


def drawn_tree(q_table, u, distinct):
    """Two siblings after token 0 and two children of the first of them, drawn from q, with or without repetition."""

    def second(q, first):
        return torch.scatter(q, 1, first[:, None], 0.0) if distinct else q

    q0 = q_table[torch.zeros(len(u), dtype=torch.int64)]
    a = sample(q0, u[:, 0])
    qb = second(q0, a)
    qb = qb / qb.sum(-1, keepdim=True)
    b = sample(qb, u[:, 1])
    qc = q_table[a]
    c = sample(qc, u[:, 2])
    qd = second(qc, c)
    qd = qd / qd.sum(-1, keepdim=True)
    d = sample(qd, u[:, 3])
    tokens = torch.stack([a, b, c, d], 1)
    parents = torch.tensor([[-1, -1, 0, 0]]).expand(len(u), -1)
    return tokens, torch.stack([q0, qb, qc, qd], 1), parents


@pytest.mark.parametrize("distinct", [False, True])
@pytest.mark.parametrize("params", [SETTINGS[0], SETTINGS[2], SETTINGS[4]], ids=lambda p: str(p.temperature))
def test_a_tree_has_the_targets_law_with_and_without_repeated_siblings(params, distinct, monkeypatch):
    p_table, q_table = tables(params, seed=3)
    generator = torch.Generator().manual_seed(2)
    u = torch.rand(N_SAMPLES, 10, generator=generator, dtype=torch.float64)
    tokens, q, parents = drawn_tree(q_table, u, distinct)
    p = p_table[torch.cat([torch.zeros_like(tokens[:, :1]), tokens], 1)]  # [B, 5, V]

    def counts(**changed):
        kept, following = verify(p, q, tokens, u[:, 4:9], parents)
        assert bool(((kept[:, 0] & kept[:, 1]) | (kept[:, 2] & kept[:, 3])).any()) is False
        first = torch.where(kept[:, 0], tokens[:, 0], torch.where(kept[:, 1], tokens[:, 1], following))
        deeper = torch.where(kept[:, 2], tokens[:, 2], torch.where(kept[:, 3], tokens[:, 3], following))
        inside = torch.where(kept[:, 1], following, deeper)
        drawn = sample(p_table[first], u[:, 9])
        second = torch.where(kept[:, 0] | kept[:, 1], inside, drawn)
        return torch.bincount(first * V + second, minlength=V * V).tolist()

    assert p_value(counts(), law(p_table)) > 0.001
    monkeypatch.setattr(module, "_residual", broken_residual)
    assert p_value(counts(), law(p_table)) < 1e-6


N_TEXTS = 4_000  # of each setting, all in one batch


def three_tokens(settings, make_drafter):
    """Of texts of three tokens after token 2, of all settings in one batch: their counts, and their exact law."""
    target, draft = make_target(5, 1, V, 8), make_target(6, 1, V, 8)
    for model in (target, draft):
        model.fc_out.weight.data *= 0.4
    n = N_TEXTS * len(settings)
    texts = [Text(i, [2], 3, settings[i % len(settings)], seed=i) for i in range(n)]
    loop = Speculator(target, make_drafter(draft, n), StaticCache(target, n, 8, bucket=4), 2)
    assert sum(1 for _ in rounds(loop, texts)) == 2  # some were done in one round, others needed two
    every = torch.tensor(list(itertools.product(range(V), repeat=3)))
    with torch.inference_mode():
        logits = target(torch.cat([torch.full((len(every), 1), 2), every[:, :-1]], 1))  # [V^3, 3, V]
    counts, exact = [], []
    for i, params in enumerate(settings):
        probs = probabilities(logits.flatten(0, 1), params).unflatten(0, (len(every), 3))
        exact.append(probs.gather(-1, every[..., None])[..., 0].prod(1).tolist())
        drawn = torch.tensor([text.tokens[1:] for text in texts[i :: len(settings)]])
        counts.append(torch.bincount(drawn @ torch.tensor([V * V, V, 1]), minlength=V**3).tolist())
    return counts, exact


@pytest.mark.slow
def test_the_whole_loop_has_the_targets_law():
    """24,000 texts through draft model, caches and verification, against all texts of three tokens, enumerated."""
    counts, exact = three_tokens(SETTINGS, ModelDrafter)
    for name, seen, probs in zip(NAMES, counts, exact, strict=True):
        assert p_value(seen, probs) > 0.001, name
    share = 1 / len(SETTINGS)
    assert p_value([n for seen in counts for n in seen], [share * prob for probs in exact for prob in probs]) > 0.001


class Lying(Drafter):
    """Says that its drafts come from a colder distribution than they do."""

    def __init__(self, model, n):
        self.honest = ModelDrafter(model, n)

    def propose(self, texts, n_draft, hidden=None):
        draft = self.honest.propose(texts, n_draft)
        return Draft(draft.tokens, draft.probs**4 / (draft.probs**4).sum(-1, keepdim=True).clamp(min=1e-300))


def test_the_loops_test_sees_a_drafter_that_lies_about_q():
    counts, exact = three_tokens([SamplingParams(1.5)], Lying)
    assert p_value(counts[0], exact[0]) < 1e-6


def test_a_chain_is_a_tree_of_one_path():
    generator = torch.Generator().manual_seed(4)
    B, n, vocab = 500, 5, 6
    p = probabilities(torch.randn(B * (n + 1), vocab, generator=generator), SamplingParams(0.7, top_p=0.8))
    q = probabilities(torch.randn(B * n, vocab, generator=generator), SamplingParams(0.7))
    p, q = p.unflatten(0, (B, n + 1)), q.unflatten(0, (B, n))
    tokens = torch.randint(vocab, (B, n), generator=generator)
    for b in range(B):  # rows of unequal lengths
        tokens[b, b % (n + 1) :] = -1
    u = torch.rand(B, n + 1, generator=generator, dtype=torch.float64)
    parents = torch.arange(-1, n - 1).expand(B, -1)
    for drafted in (q, None):
        kept, following = verify(p, drafted, tokens, u)
        as_tree, after = verify(p, drafted, tokens, u, parents)
        assert torch.equal(kept, as_tree) and torch.equal(following, after)
        assert not kept[tokens < 0].any()


def test_equal_distributions_accept_everything_and_divide_nothing_by_nothing():
    p = torch.tensor([[0.5, 0.5, 0.0, 0.0]]).expand(1000, 4)
    u = torch.linspace(0, 1 - 2**-53, 1000, dtype=torch.float64)[:, None].expand(-1, 2)
    tokens = torch.arange(1000)[:, None] % 2
    kept, following = verify(p[:, None].expand(-1, 2, -1), p[:, None], tokens, u)
    assert kept.all() and following.max() <= 1
    # a token that neither can give is no draft of either; said to be one, it is rejected and nothing breaks
    kept, following = verify(p[:, None].expand(-1, 2, -1), p[:, None], torch.full_like(tokens, 3), u)
    assert not kept.any() and following.max() <= 1


def test_a_token_of_zero_target_probability_is_never_accepted():
    p = torch.tensor([[0.0, 0.3, 0.7]]).expand(4, 2, 3)
    q = torch.tensor([[1.0, 0.0, 0.0]]).expand(4, 1, 3)
    u = torch.tensor([[0.0, 0.1], [0.0, 0.9], [0.5, 0.2], [1 - 2**-53, 1 - 2**-53]], dtype=torch.float64)
    for drafted in (q, None):
        for parents in (None, torch.full((4, 1), -1)):
            kept, following = verify(p, drafted, torch.zeros(4, 1, dtype=torch.int64), u, parents)
            assert not kept.any() and following.tolist() == [1, 2, 1, 2]


def test_a_rejection_that_is_rounding_alone_draws_from_the_target():
    """p and q differ in the last bit and the draft is the token where p is smaller: nothing is left of p - q."""
    p = torch.tensor([[0.25, 0.75]], dtype=torch.float64)
    q = torch.tensor([[0.25 + 2**-54, 0.75]], dtype=torch.float64)
    u = torch.tensor([[1 - 2**-53, 0.9]], dtype=torch.float64)
    q_wide = q.clone()
    q_wide[0, 0] = torch.nextafter(q_wide[0, 0], torch.tensor(1.0, dtype=torch.float64))
    kept, following = verify(p[:, None].expand(-1, 2, -1), q_wide[:, None], torch.tensor([[0]]), u)
    assert following.item() in (0, 1)
    assert kept.item() or following.item() == 1


def test_the_greedy_limit_is_verification_of_one_hots():
    generator = torch.Generator().manual_seed(5)
    B, n, vocab = 200, 4, 3
    logits = torch.randn(B, n + 1, vocab, generator=generator)
    p = torch.nn.functional.one_hot(logits.argmax(-1), vocab).double()
    tokens = torch.randint(vocab, (B, n), generator=generator)
    u = torch.rand(B, n + 1, generator=generator, dtype=torch.float64)
    trees = [[-1, -1, 0, 1], [-1, 0, 0, 2], None]
    for tree in trees:
        parents = None if tree is None else torch.tensor([tree]).expand(B, -1)
        kept, following = verify(p, None, tokens, u, parents)
        for b in range(B):
            path, token = verify_greedy(logits[b].argmax(-1).tolist(), tokens[b].tolist(), tree)
            assert kept[b].nonzero()[:, 0].tolist() == path and following[b] == token


def test_shapes_that_disagree_are_refused():
    p, q, tokens, u = torch.ones(2, 4, 5), torch.ones(2, 3, 5), torch.zeros(2, 3, dtype=torch.int64), torch.zeros(2, 4)
    verify(p, q, tokens, u)
    for message, changed in (
        ("p has shape \\(2, 3, 5\\), for 3 drafts it must be \\(2, 4, 5\\)", (p[:, :3], q, tokens, u)),
        ("q has shape", (p, q[..., :4], tokens, u)),
        ("u has shape", (p, q, tokens, u[:, :3])),
        ("parents has shape", (p, q, tokens, u, tokens[:, :2])),
    ):
        with pytest.raises(ValueError, match=message):
            verify(*changed)
