"""Hard concrete gates against their closed forms, and gates that feel what the loss feels."""

import pytest
import torch

from gptlite.compress.learned_masks import budget_shift, gated, hard_concrete, learn_masks, open_probability
from gptlite.compress.structured import Kept, ffn_layers, prune
from gptlite.config import GPTConfig
from gptlite.model import GPTlite

TEXT = torch.randint(23, (400,), generator=torch.Generator().manual_seed(3))


def make_model() -> GPTlite:
    torch.manual_seed(1)
    model = GPTlite(GPTConfig(23, 16, n_layers=2, d_model=20, n_heads=4, d_head=6, d_ff=15)).eval()
    for parameter in model.parameters():
        torch.nn.init.normal_(parameter, std=0.3)
    return model


def test_gates_lie_in_0_to_1_and_are_open_as_often_as_the_closed_form_says() -> None:
    u = (torch.arange(100_000) + 0.5) / 100_000  # all quantiles, so that nothing is left to chance
    for location in (-3.0, -0.5, 0.0, 1.0, 3.0):
        gates = hard_concrete(torch.full_like(u, location), u)
        assert gates.min() >= 0
        assert gates.max() <= 1
        assert float((gates > 0).float().mean()) == pytest.approx(
            float(open_probability(torch.tensor(location))), abs=2e-4
        )
        assert (gates == 0).any()
        assert (gates == 1).any()


@pytest.mark.parametrize("n_open", [0.5, 3.0, 6.9])
def test_a_shift_holds_the_number_of_open_gates(n_open: float) -> None:
    location = torch.randn(7, generator=torch.Generator().manual_seed(0)) * 4 + 10
    shift = budget_shift(location, n_open)
    assert float(open_probability(location + shift).sum()) == pytest.approx(n_open, abs=1e-3)
    for n in (0, 7, 8):
        with pytest.raises(ValueError, match=f"{n} gates are to be open, it must be between 0 and 7"):
            budget_shift(location, n)


@torch.no_grad()
def test_closed_gates_are_pruned_structures_and_nothing_of_them_stays() -> None:
    model, tokens = make_model(), TEXT[:16][None]
    heads, neurons = torch.tensor([1.0, 0, 0, 1]), (torch.arange(15) % 3 == 0).float()
    small = prune(model, Kept([torch.tensor([0, 3])] * 2, [torch.arange(0, 15, 3)] * 2))
    plain = model(tokens)
    with gated(model, [heads] * 2, [neurons] * 2):
        assert torch.allclose(model(tokens), small(tokens), atol=1e-5)
    assert torch.equal(model(tokens), plain)
    with gated(model, [torch.ones(4)] * 2, [torch.ones(15)] * 2):
        assert torch.equal(model(tokens), plain)


def test_gates_of_what_does_nothing_feel_nothing_and_the_weights_stay() -> None:
    model = make_model()
    with torch.no_grad():
        for i, block in enumerate(model.blocks):
            block.mha.out_proj.weight[:, 6 * i : 6 * i + 6] = 0  # head 0, then head 1
            ffn_layers(block)[1].weight[:, 5 * i : 5 * i + 5] = 0
    before = {name: value.clone() for name, value in model.state_dict().items()}
    steps = []
    scores = learn_masks(model, TEXT, (1, 5), 8, on_step=lambda step, loss: steps.append(step))
    for i, (heads, neurons) in enumerate(zip(scores.heads, scores.neurons)):
        assert (heads == 0).nonzero().flatten().tolist() == [i]
        assert (neurons[5 * i : 5 * i + 5] == 0).all()
        assert (neurons != 0).sum() >= 5
    assert steps == list(range(1, 9))
    assert all(torch.equal(model.state_dict()[name], value) for name, value in before.items())
    assert all(p.grad is None for p in model.parameters())


def test_the_same_seed_learns_the_same_masks() -> None:
    one, same, other = (learn_masks(make_model(), TEXT, (2, 5), 6, seed=seed).heads[0] for seed in (0, 0, 1))
    assert torch.equal(one, same)
    assert not torch.equal(one, other)


def test_bad_arguments_are_named() -> None:
    model = make_model()
    for n_open in ((4, 5), (2, 15), (0, 5)):
        with pytest.raises(ValueError, match="heads and neurons are to stay, it must be below"):
            learn_masks(model, TEXT, n_open, 5)
    with pytest.raises(ValueError, match="steps is 0"):
        learn_masks(model, TEXT, (2, 5), 0)
