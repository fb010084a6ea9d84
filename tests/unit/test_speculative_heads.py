"""Heads: what each of them guesses, that training them helps and leaves the trunk alone, and typical acceptance."""

import pytest
import torch
from speculative_help import VOCAB, make_target, untrained
from test_speculative_verify import p_value

from gptlite.sampling import SamplingParams, probabilities
from gptlite.speculative.drafters import Text
from gptlite.speculative.eagle import EagleDrafter, EagleHeads
from gptlite.speculative.heads import Heads, block_config, trunk_states
from gptlite.speculative.heads_train import agreement, train_heads
from gptlite.speculative.medusa import MedusaHeads
from gptlite.speculative.mtp import MTPHeads
from gptlite.speculative.self_draft import ExitHeads
from gptlite.speculative.typical import verify_typical
from gptlite.speculative.verify import verify
from gptlite.train import TrainSettings

KINDS = {
    "medusa": (lambda m: MedusaHeads(m, 2), [1, 2]),
    "eagle": (lambda m: EagleHeads(m), [1]),
    "mtp": (lambda m: MTPHeads(m, 3), [1, 2, 3]),
    "exit": (lambda m: ExitHeads(m, [1]), [0]),
}
SETTINGS = TrainSettings(
    60, batch_size=4, lr=0.01, optimizer="adamw", warmup=5, weight_decay=0.0, seed=1, save_every=20
)


@pytest.fixture(scope="module")
def target():
    return make_target(context=24).float()


@pytest.fixture(scope="module")
def text():
    """A text that repeats itself with a little noise, so that there is something to learn."""
    generator = torch.Generator().manual_seed(0)
    tokens = torch.arange(600) % 7
    return torch.where(
        torch.rand(600, generator=generator) < 0.1, torch.randint(VOCAB, (600,), generator=generator), tokens
    )


def test_trunk_states_are_those_of_the_model(target, text):
    windows = text[:48].view(2, 24)
    states = trunk_states(target, windows)
    torch.testing.assert_close(target.head(states.hidden), target(windows))
    assert len(states.layers) == len(target.blocks) and states.layers[0].shape == (2, 24, 20)


@pytest.mark.parametrize("kind", KINDS)
def test_a_guess_stands_where_it_says_and_sees_no_later_token(target, text, kind):
    """Changing a token changes no guess that is made before it is known, and some that are made after."""
    make, ahead = KINDS[kind]
    heads = make(target)
    for parameter in heads.parameters():
        parameter.data.add_(0.05 * torch.randn(parameter.shape, generator=torch.Generator().manual_seed(1)))
    heads.eval()
    x, y = text[None, :24], text[None, 1:25]
    at = 12
    changed = torch.cat([x, y[:, -1:]], 1).clone()
    changed[0, at] = (changed[0, at] + 1) % VOCAB
    with torch.inference_mode():
        before = heads.guesses(target, trunk_states(target, x), y)
        after = heads.guesses(target, trunk_states(target, changed[:, :-1]), changed[:, 1:])
    assert [guess.ahead for guess in before] == ahead
    for old, new in zip(before, after, strict=True):
        assert old.logits.shape == (1, 24 - old.ahead, VOCAB)
        # the position from which the changed token is known: a chain has read up to `ahead` tokens further
        known = at - (old.ahead if kind in ("eagle", "mtp") else 0)
        moved = (old.logits - new.logits).abs().amax(-1)[0] > 1e-5
        assert not moved[:known].any() and moved[known]


@pytest.mark.parametrize("kind", KINDS)
def test_training_makes_heads_agree_with_the_trunk_and_leaves_it_alone(target, text, kind):
    torch.manual_seed(0)
    make, ahead = KINDS[kind]
    heads = make(target)
    untouched = {name: weight.clone() for name, weight in target.state_dict().items()}
    before = agreement(target, heads, text)
    seen = []
    curve = train_heads(target, heads, text, SETTINGS, on_step=lambda step, loss: seen.append((step, loss)))
    after = agreement(target, heads, text)
    assert [row["ahead"] for row in after] == ahead
    for old, new in zip(before, after, strict=True):
        assert 1 - new["overlap"] < 0.9 * (1 - old["overlap"]) and 0 <= new["top"] <= 1
    assert all(torch.equal(untouched[name], weight) for name, weight in target.state_dict().items())
    assert [step for step, _ in seen] == list(range(1, 61)) and [row[0] for row in curve] == [1920, 3840, 5760]
    assert curve[-1][1] < curve[0][1] and curve[0][1] == pytest.approx(
        sum(loss for _, loss in seen[:20]) / 20, abs=1e-4
    )
    assert not heads.training and not target.training and all(p.requires_grad for p in target.parameters())


def test_agreement_is_what_its_words_say(target, text):
    """Of an exit head that is the whole trunk's norm and output on the last but one layer, by definition."""
    heads = untrained(ExitHeads, target.double(), [1])
    [found] = agreement(target, heads, text[:49])
    with torch.inference_mode():
        states = trunk_states(target, text[:48].view(2, 24))
        p = target.head(states.hidden).softmax(-1)
        q = heads.guesses(target, states, text[1:49].view(2, 24))[0].logits.softmax(-1)
    assert found["overlap"] == pytest.approx((1 - 0.5 * (p - q).abs().sum(-1)).mean().item(), abs=1e-4)
    assert found["top"] == pytest.approx((p.argmax(-1) == q.argmax(-1)).double().mean().item(), abs=1e-4)
    target.float()


def test_trained_together_the_trunk_moves_and_learns_the_text(text):
    torch.manual_seed(0)
    model = make_target(context=24).float()
    for parameter in model.parameters():
        parameter.data.mul_(0.2)
    heads = MTPHeads(model, 2)
    first = model.fc_out.weight.clone()
    train_heads(model, heads, text, SETTINGS, together=0.3)
    assert not torch.equal(model.fc_out.weight, first)
    rows = agreement(model, heads, text)
    assert rows[0]["top"] > 0.8 and rows[1]["top"] > 0.8  # the text repeats itself


@pytest.mark.parametrize("weight", [-0.1, float("nan"), float("inf")])
def test_a_weight_of_no_use_is_refused(target, text, weight):
    with pytest.raises(ValueError, match="together is"):
        train_heads(target, MedusaHeads(target, 1), text, SETTINGS, together=weight)


def test_a_text_shorter_than_a_window_is_refused(target, text):
    heads = MedusaHeads(target, 1)
    with pytest.raises(ValueError, match="a window of 24 needs at least 25"):
        agreement(target, heads, text[:24])
    with pytest.raises(ValueError, match="a window of 24 needs at least 25"):
        train_heads(target, heads, text[:24], SETTINGS)


def test_a_run_that_diverges_says_so(target, text):
    heads = MedusaHeads(target, 1)
    heads.outs[0].bias.data[0] = float("inf")
    with pytest.raises(ValueError, match=r"the loss of step 1 is nan: choose a learning rate below 0\.01"):
        train_heads(target, heads, text, SETTINGS)


def test_the_start_of_heads_is_what_they_can_pass_on(target, text):
    """Untrained Medusa heads say what the trunk says, and an untrained exit is the trunk cut short."""
    states = trunk_states(target, text[None, :24])
    same = MedusaHeads(target, 2)(states.hidden)  # [1, 24, K, V]
    for k in range(2):
        torch.testing.assert_close(same[:, :, k], target.head(states.hidden))
    [guess] = ExitHeads(target, [1]).guesses(target, states, text[None, 1:25])
    torch.testing.assert_close(guess.logits, target.head(target.ln(states.layers[0])))


def test_one_more_block_has_the_last_ones_shape(target):
    config = block_config(target)
    assert (config.d_model, config.n_heads, config.d_head, config.n_kv_heads) == (20, 6, 4, 3)
    assert Heads(n_heads=2).sizes == {"n_heads": 2} and Heads().n_params == 0


# -- EAGLE pairs the feature of a token with the token after it -----------------------------------------------------


def eagle_by_hand(model):
    """A head whose block does nothing, so that a guessed feature is twice the token's embedding and the feature."""
    heads = EagleHeads(model).to(model.fc_out.weight).eval()
    block, identity = heads.blocks[0], torch.eye(model.config.d_model)
    for parameter in (*block.mha.out_proj.parameters(), *block.ffwd.net[2].parameters(), heads.combine.fc.bias):
        parameter.data.zero_()
    heads.combine.fc.weight.data.copy_(torch.cat([2 * identity, identity], dim=1))
    return heads


def next_feature(model, feature, token, position):
    """What `eagle_by_hand` makes of a feature and the token after it, at that token's position."""
    return 2 * (model.token_embedding.weight[token] + model.position_embedding.weight[position]) + feature


def test_eagle_reads_the_feature_of_a_token_with_the_token_after_it(text):
    model = make_target(context=24)
    states = trunk_states(model, text[None, :24])
    [guess] = eagle_by_hand(model).guesses(model, states, text[None, 1:25])
    for i in range(23):
        feature = next_feature(model, states.hidden[0, i], text[i + 1], i + 1)
        torch.testing.assert_close(guess.logits[0, i], model.head(feature), rtol=0, atol=1e-9)  # fp64


def test_an_eagle_chain_goes_on_from_the_targets_features_and_then_from_its_own(text):
    """Two rounds by hand: each distribution follows from the token before it and the feature before that token."""
    model = make_target(context=24)
    drafter = EagleDrafter(model, eagle_by_hand(model))
    one = Text("one", text[:12].tolist(), 12, SamplingParams(1.3))
    read = 0  # tokens whose features the drafter has been given
    for came in (text[12:14].tolist(), []):  # what follows each round: two tokens, which bring two features
        with torch.inference_mode():
            features = trunk_states(model, torch.tensor([one.tokens[:-1]])).hidden[0]  # [n - 1, d]
            draft = drafter.propose([one], 3, [features[read:]])
            feature, read, tokens = features[-1], len(features), list(one.tokens)
            assert len(draft.tokens[0]) == 3
            for token, q in zip(draft.tokens[0], draft.probs[0], strict=True):
                feature = next_feature(model, feature, tokens[-1], len(tokens) - 1)
                expected = (model.head(feature) / 1.3).softmax(-1)
                torch.testing.assert_close(q, expected, rtol=0, atol=1e-9)  # fp64
                tokens.append(token)
        one.tokens += came


def test_an_eagle_drafter_guesses_what_its_head_guesses_over_the_whole_text(text):
    """With attention, so that every pair of the text counts and not the last one alone."""
    model = make_target(context=24)
    heads = untrained(EagleHeads, model)
    tokens = text[:14]
    with torch.inference_mode():
        states = trunk_states(model, tokens[None])
        [guess] = heads.guesses(model, states, text[None, 1:15])
        draft = EagleDrafter(model, heads).propose([Text("one", tokens.tolist(), 9)], 1, [states.hidden[0, :-1]])
    torch.testing.assert_close(draft.probs[0, 0], guess.logits[0, -1].softmax(-1), rtol=0, atol=1e-9)  # fp64


# -- typical acceptance ---------------------------------------------------------------------------------------------


def typical_by_hand(p, tokens, parents, epsilon, delta):
    """The longest path all of whose drafts pass the bound, by trying all paths."""
    best = []
    for node in range(len(tokens)):
        path = [node]
        while parents[path[0]] >= 0:
            path.insert(0, parents[path[0]])
        good = True
        for i in path:
            row = p[parents[i] + 1]
            entropy = -sum(float(x) * float(x.log()) for x in row if x > 0)
            good = good and row[tokens[i]] > min(epsilon, delta * torch.tensor(-entropy).exp())
        if good and len(path) > len(best):
            best = path
    return best


def test_typical_acceptance_keeps_the_longest_typical_path():
    generator = torch.Generator().manual_seed(0)
    trees = [[-1, 0, 1, 2], [-1, -1, 0, 1], [-1, 0, 0, 1]]
    for trial in range(60):
        parents = trees[trial % 3]
        p = probabilities(3 * torch.randn(5, 6, generator=generator).double(), SamplingParams())
        tokens = torch.randint(6, (4,), generator=generator)
        epsilon, delta = ((0.09, 0.3), (0.3, 0.6), (1.0, 1.0))[trial % 3]
        u = torch.tensor([0.0], dtype=torch.float64)
        kept, following = verify_typical(p[None], tokens[None], u, torch.tensor([parents]), epsilon, delta)
        path = typical_by_hand(p, tokens.tolist(), parents, epsilon, delta)
        assert kept[0].nonzero()[:, 0].tolist() == path
        assert following.item() == p[path[-1] + 1 if path else 0].nonzero()[0].item()  # u = 0: the first that can come
    chain = verify_typical(p[None], tokens[None], u, None)
    as_tree = verify_typical(p[None], tokens[None], u, torch.tensor([[-1, 0, 1, 2]]))
    assert torch.equal(chain[0], as_tree[0]) and torch.equal(chain[1], as_tree[1])
    assert not verify_typical(p[None], torch.full((1, 4), -1), u)[0].any()
    flat = torch.full((1, 4, 6), 1 / 6, dtype=torch.float64)  # every draft is typical, and the longer path wins
    kept, _ = verify_typical(flat, torch.tensor([[0, 1, 2]]), u, torch.tensor([[-1, -1, 0]]))
    assert kept.tolist() == [[True, False, True]]


def test_typical_acceptance_does_not_keep_the_targets_law_and_rejection_sampling_does():
    """The same drafts, the same chi-square test: 20,000 first tokens against the target's distribution."""
    n = 20_000
    p = torch.tensor([0.5, 0.3, 0.15, 0.05], dtype=torch.float64).expand(n, 2, 4)
    q = torch.tensor([0.25, 0.25, 0.25, 0.25], dtype=torch.float64)
    u = torch.rand(n, 3, generator=torch.Generator().manual_seed(0), dtype=torch.float64)
    tokens = (u[:, :1] * 4).long()  # drawn from q
    values = {}
    for name in ("rejection", "typical"):
        if name == "rejection":
            kept, following = verify(p, q.expand(n, 1, 4), tokens, u[:, 1:])
        else:
            kept, following = verify_typical(p, tokens, u[:, 2])
        first = torch.where(kept[:, 0], tokens[:, 0], following)
        values[name] = p_value(torch.bincount(first, minlength=4).tolist(), p[0, 0].tolist())
    assert values["rejection"] > 0.001 and values["typical"] < 1e-6


@pytest.mark.parametrize("bounds", [(0.0, 0.3), (1.1, 0.3), (float("nan"), 0.3)])
def test_bounds_of_no_use_are_refused(bounds):
    p, tokens, u = torch.ones(1, 2, 3) / 3, torch.zeros(1, 1, dtype=torch.int64), torch.zeros(1)
    with pytest.raises(ValueError, match="epsilon is"):
        verify_typical(p, tokens, u, None, *bounds)
    with pytest.raises(ValueError, match="delta is"):
        verify_typical(p, tokens, u, None, *reversed(bounds))
    with pytest.raises(ValueError, match="for 1 drafts of 1 rows"):
        verify_typical(p[:, :1], tokens, u)
