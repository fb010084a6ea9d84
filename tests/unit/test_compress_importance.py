"""Importance of structures against models in which the answer is known, and against gates differentiated by hand."""

from copy import deepcopy

import pytest
import torch
import torch.nn.functional as F

from gptlite.compress.depth import block_costs, block_influence, choose_blocks
from gptlite.compress.importance import CRITERIA, calibration_batches, choose, choose_heads, structure_scores
from gptlite.compress.learned_masks import gated
from gptlite.compress.structured import Kept, ffn_layers, prune
from gptlite.config import GPTConfig
from gptlite.measure import validation_loss
from gptlite.model import GPTlite

BATCHES = list(torch.randint(23, (2, 3, 12), generator=torch.Generator().manual_seed(2)))
TEXT = torch.randint(23, (200,), generator=torch.Generator().manual_seed(3))


def make_model(n_kv_heads: int = 4, n_layers: int = 3) -> GPTlite:
    """Four heads of 6 on a width of 20, in fp64."""
    torch.manual_seed(1)
    config = GPTConfig(23, 16, n_layers, d_model=20, n_heads=4, d_head=6, n_kv_heads=n_kv_heads, d_ff=15)
    model = GPTlite(config).double().eval()
    for parameter in model.parameters():
        torch.nn.init.normal_(parameter, std=0.3)
    return model


def silenced() -> GPTlite:
    """A model in which head 2, neuron 7 and channel 11 of every block do nothing at all."""
    model = make_model()
    with torch.no_grad():
        for embedding in (model.token_embedding, model.position_embedding):
            embedding.weight[:, 11] = 0
        for block in model.blocks:
            mha, (into, out_of) = block.mha, ffn_layers(block)
            for part in (mha.query_proj, mha.key_proj, mha.value_proj):
                part.weight[12:18] = 0
                part.bias[12:18] = 0
            mha.out_proj.weight[:, 12:18] = 0
            into.weight[7], into.bias[7], out_of.weight[:, 7] = 0, -1, 0
            for writer in (mha.out_proj, out_of):
                writer.weight[11], writer.bias[11] = 0, 0
            for norm in (block.ln1, block.ln2):
                norm.weight[11], norm.bias[11] = 0, 0
            for reader in (mha.query_proj, mha.key_proj, mha.value_proj, into):
                reader.weight[:, 11] = 0
        model.fc_out.weight[:, 11] = 0
    return model


@pytest.mark.parametrize("by", [criterion for criterion in CRITERIA if criterion != "random"])
def test_what_does_nothing_is_the_least_important(by: str) -> None:
    scores = structure_scores(silenced(), BATCHES, by)
    for heads, neurons in zip(scores.heads, scores.neurons):
        assert heads.argmin() == 2
        assert neurons[7] == neurons.min()  # a ReLU may silence others too
    assert scores.channels.argmin() == 11
    assert [len(part) for part in (*scores.heads, *scores.neurons, scores.channels)] == [4] * 3 + [15] * 3 + [20]


def test_activation_is_the_mean_size_of_what_a_structure_puts_out() -> None:
    model = make_model(n_layers=1)
    seen = {}
    block = model.blocks[0]
    block.mha.out_proj.register_forward_pre_hook(lambda _, args: seen.update(heads=args[0]))
    block.ffwd.net[1].register_forward_hook(lambda _, args, out: seen.update(neurons=out))
    with torch.no_grad():
        model(torch.cat(BATCHES))
    heads = seen["heads"].view(-1, 4, 6).square().sum(-1).sqrt().mean(0)
    neurons = seen["neurons"].flatten(0, -2).mean(0)
    scores = structure_scores(model, BATCHES, "activation")
    assert torch.allclose(scores.heads[0].double(), heads, rtol=1e-5)  # calibration gives fp32
    assert torch.allclose(scores.neurons[0].double(), neurons, rtol=1e-5)


def test_taylor_is_the_derivative_of_a_gate() -> None:
    model = make_model()
    scores = structure_scores(model, BATCHES, "taylor")
    expected = torch.zeros(4, dtype=torch.float64)
    neurons = torch.zeros(15, dtype=torch.float64)
    for window in torch.cat(BATCHES):
        gates = [torch.ones(4, dtype=torch.float64, requires_grad=True) for _ in range(3)]
        others = [torch.ones(15, dtype=torch.float64, requires_grad=True) for _ in range(3)]
        with gated(model, gates, others):
            loss = F.cross_entropy(model(window[None, :-1])[0].float(), window[1:])
        grads = torch.autograd.grad(loss, [gates[1], others[1]])
        expected += grads[0].abs() / 6
        neurons += grads[1].abs() / 6
    assert torch.allclose(scores.heads[1].double(), expected, rtol=1e-4)
    assert torch.allclose(scores.neurons[1].double(), neurons, rtol=1e-4, atol=1e-8)
    assert all(p.grad is None for p in model.parameters())
    frozen = make_model().requires_grad_(False)
    assert torch.allclose(structure_scores(frozen, BATCHES, "taylor").heads[1], scores.heads[1])


def test_the_random_criterion_depends_on_its_seed_alone() -> None:
    model = make_model()
    one, same, other = (structure_scores(model, BATCHES, "random", seed).heads[0] for seed in (0, 0, 1))
    assert torch.equal(one, same)
    assert not torch.equal(one, other)
    with pytest.raises(ValueError, match="by is 'taste'"):
        structure_scores(model, BATCHES, "taste")


def test_heads_are_chosen_so_that_they_can_be_kept_together() -> None:
    scores = torch.tensor([5.0, 1, 4, 9, 2, 3])
    assert choose_heads(scores, 6, 3).tolist() == [0, 2, 3]
    assert choose_heads(scores, 3, 3).tolist() == [0, 3, 5]  # the best of each pair
    assert choose_heads(scores, 3, 4, whole=True).tolist() == [0, 1, 2, 3]  # pairs weigh 6, 13 and 5
    assert choose_heads(scores, 1, 2).tolist() == [0, 3]
    refused = {(6, 0, False): "it must be 1 to 6", (6, 7, False): "it must be 1 to 6"}
    refused |= {(3, 4, False): "each of the 3 KV heads", (3, 3, True): "whole groups have 2"}
    for arguments, message in refused.items():
        with pytest.raises(ValueError, match=message):
            choose_heads(scores, *arguments)


@pytest.mark.parametrize(("n_kv_heads", "whole"), [(4, False), (2, False), (2, True)])
def test_a_choice_can_be_pruned(n_kv_heads: int, whole: bool) -> None:
    model = make_model(n_kv_heads)
    kept = choose(structure_scores(model, BATCHES), model, 2, 5, 9, whole)
    small = prune(model, kept)
    assert (small.config.n_heads, small.config.d_ff, small.config.d_model) == (2, 5, 9)
    assert small.config.n_kv_heads == (1 if whole else 2)
    assert choose(structure_scores(model, BATCHES), model) == Kept()
    refused = {
        (0, 16, 0): "16 neurons are to be kept, it must be 1 to 15",
        (0, 0, 21): "21 channels",
        (0, -1, 0): "-1 neurons",
    }
    for sizes, message in refused.items():
        with pytest.raises(ValueError, match=message):
            choose(structure_scores(model, BATCHES), model, *sizes)


def test_block_influence_is_one_minus_the_cosine_and_zero_for_a_block_that_does_nothing() -> None:
    model = make_model()
    with torch.no_grad():
        for part in (model.blocks[1].mha.out_proj, ffn_layers(model.blocks[1])[1]):
            part.weight.zero_()
            part.bias.zero_()
        for block in (model.blocks[2],):  # turns the stream round
            ffn_layers(block)[1].weight.zero_()
            ffn_layers(block)[1].bias.zero_()
    influence = block_influence(model, BATCHES)
    assert influence[1].abs() < 1e-6
    assert influence[0] > 0.01
    streams = []
    model.blocks[0].register_forward_hook(lambda _, args, out: streams.extend((args[0], out)))
    with torch.no_grad():
        model(BATCHES[0])
    x, y = (part.double() for part in streams)
    by_hand = 1 - ((x * y).sum(-1) / (x.norm(dim=-1) * y.norm(dim=-1))).mean()
    assert block_influence(model, BATCHES[:1])[0] == pytest.approx(float(by_hand), abs=1e-5)


def test_blocks_go_by_what_their_removal_costs() -> None:
    model = make_model()
    costs = block_costs(model, TEXT)
    for gone, cost in enumerate(costs):
        left = deepcopy(model)
        del left.blocks[gone]
        assert cost == pytest.approx(validation_loss(left, TEXT), abs=1e-9)
    assert block_costs(model, TEXT, [0, 2]) == [
        pytest.approx(validation_loss(prune(model, Kept(blocks=torch.tensor([b]))), TEXT)) for b in (2, 0)
    ]
    two = [b for b in range(3) if b != costs.index(min(costs))]
    assert choose_blocks(model, TEXT, 2).tolist() == two
    pair = block_costs(model, TEXT, two)
    assert choose_blocks(model, TEXT, 1).tolist() == [two[1 - pair.index(min(pair))]]
    assert choose_blocks(model, TEXT, 3).tolist() == [0, 1, 2]
    for n in (0, 4):
        with pytest.raises(ValueError, match=f"{n} blocks are to be kept, it must be 1 to 3"):
            choose_blocks(model, TEXT, n)
    with pytest.raises(ValueError, match="1 block is there"):
        block_costs(model, TEXT, [0])


def test_calibration_windows_are_spread_over_the_text() -> None:
    batches = calibration_batches(torch.arange(100), 10, 7, batch_size=3)
    assert [tuple(batch.shape) for batch in batches] == [(3, 10), (3, 10), (1, 10)]
    starts = torch.cat(batches)[:, 0]
    assert (starts[0], starts[-1]) == (0, 90)
    assert torch.cat(calibration_batches(torch.arange(25), 10, 64)).shape == (2, 10)  # as many as there is room for
    with pytest.raises(ValueError, match="the text has 9 tokens, a window needs 10"):
        calibration_batches(torch.arange(9), 10)
    with pytest.raises(ValueError, match="n_windows is 0, it must be at least 1"):
        calibration_batches(torch.arange(25), 10, 0)


def test_without_batches_nothing_is_judged() -> None:
    model = make_model()
    for judge in (
        block_influence,
        lambda *of: structure_scores(*of, "activation"),
        lambda *of: structure_scores(*of, "taylor"),
    ):
        with pytest.raises(ValueError, match="at least 1"):
            judge(model, [])
