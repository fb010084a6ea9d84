"""Linear layers are replaced where they stand, and calibration shows what the model itself feeds them."""

import pytest
import torch
from torch import Tensor, nn

from gptlite.config import GPTConfig
from gptlite.layers import BlockInputs, calibrate, linear_layers, replace_linear
from gptlite.model import GPTlite

CONFIG = GPTConfig(23, 16, n_layers=2, d_model=20, n_heads=6, d_head=4, n_kv_heads=3, dropout=0.3)
NAMES = ["mha.query_proj", "mha.key_proj", "mha.value_proj", "mha.out_proj", "ffwd.net.0", "ffwd.net.2"]


@pytest.fixture
def model() -> GPTlite:
    torch.manual_seed(0)
    return GPTlite(CONFIG).eval()


@pytest.fixture
def batches() -> list[Tensor]:
    torch.manual_seed(1)
    return [torch.randint(23, (2, 9)), torch.randint(23, (1, 16))]  # unequal on purpose


class Twice(nn.Linear):
    """A linear layer that doubles what the one it replaces gave."""

    def __init__(self, old: nn.Linear) -> None:
        super().__init__(old.in_features, old.out_features)
        self.load_state_dict(old.state_dict())

    def forward(self, x: Tensor) -> Tensor:
        return 2 * super().forward(x)


def test_the_layers_have_the_names_of_the_state_dict_in_the_order_of_the_step(model: GPTlite) -> None:
    names = [f"blocks.{i}.{name}" for i in range(2) for name in NAMES]
    assert list(linear_layers(model)) == names
    assert list(linear_layers(model, head=True)) == [*names, "fc_out"]
    assert {f"{name}.weight" for name in names} <= set(model.state_dict())


def test_replacing_a_layer_by_itself_changes_nothing(model: GPTlite, batches: list[Tensor]) -> None:
    before = model(batches[0])
    assert replace_linear(model, lambda name, layer: layer, head=True) is model
    torch.testing.assert_close(model(batches[0]), before, rtol=0, atol=0)


def test_every_layer_is_replaced_once_and_keeps_its_mode(model: GPTlite) -> None:
    seen = []
    replace_linear(model.train(), lambda name, layer: seen.append(name) or Twice(layer))
    assert seen == list(linear_layers(model))
    assert all(isinstance(layer, Twice) and layer.training for layer in linear_layers(model).values())
    assert type(model.fc_out) is nn.Linear


def test_the_head_is_replaced_when_asked(model: GPTlite, batches: list[Tensor]) -> None:
    before = model(batches[0])
    replace_linear(model, lambda name, layer: Twice(layer) if name == "fc_out" else layer, head=True)
    torch.testing.assert_close(model(batches[0]), 2 * before)


@pytest.mark.parametrize("wrong", [nn.Linear(3, 20), nn.Linear(20, 3), nn.Identity()])
def test_a_layer_of_another_shape_is_refused(model: GPTlite, wrong: nn.Module) -> None:
    before = model.blocks[0].mha.query_proj
    with pytest.raises(ValueError, match=r"the new blocks\.0\.mha\.query_proj has shape"):
        replace_linear(model, lambda name, layer: wrong)
    assert model.blocks[0].mha.query_proj is before


@torch.no_grad()
def inputs_by_hooks(model: GPTlite, batches: list[Tensor]) -> dict[str, Tensor]:
    """What the plain call feeds each layer, seen by hooks of the test's own: [n_tokens, d_in]."""
    seen: dict[str, list[Tensor]] = {name: [] for name in linear_layers(model)}
    hooks = [
        layer.register_forward_hook(lambda _, args, out, name=name: seen[name].append(args[0]))
        for name, layer in linear_layers(model).items()
    ]
    for tokens in batches:
        model(tokens)
    for hook in hooks:
        hook.remove()
    return {name: torch.cat(parts) for name, parts in seen.items()}


def test_calibration_shows_what_the_plain_call_feeds_each_layer(model: GPTlite, batches: list[Tensor]) -> None:
    expected = inputs_by_hooks(model, batches)
    shown: dict[str, Tensor] = {}
    for i, part in enumerate(calibrate(model, batches)):
        assert (part.index, part.block) == (i, model.blocks[i])
        shown |= part.inputs
    assert shown.keys() == expected.keys()
    for name, inputs in shown.items():
        assert inputs.shape == (2 * 9 + 16, linear_layers(model)[name].in_features)
        torch.testing.assert_close(inputs, expected[name], rtol=0, atol=1e-6)  # one order of sums, fp32


def test_later_blocks_see_what_the_changed_block_puts_out(model: GPTlite, batches: list[Tensor]) -> None:
    shown: dict[str, Tensor] = {}

    def zero(part: BlockInputs) -> None:
        nn.init.zeros_(part.block.ffwd.net[2].weight)

    for part in calibrate(model, batches):
        shown |= part.inputs
        zero(part)
    expected = inputs_by_hooks(model, batches)  # of the model as it is now
    name = "blocks.1.mha.query_proj"
    torch.testing.assert_close(shown[name], expected[name], rtol=0, atol=1e-6)


def test_calibration_leaves_no_hooks_and_no_gradients(model: GPTlite, batches: list[Tensor]) -> None:
    for part in calibrate(model, batches):
        assert not any(x.requires_grad for x in part.inputs.values())
    assert not any(layer._forward_pre_hooks for layer in linear_layers(model).values())


def test_calibration_refuses_what_makes_no_sense(model: GPTlite, batches: list[Tensor]) -> None:
    with pytest.raises(ValueError, match="calibration got 0 batches"):
        next(calibrate(model, []))
    with pytest.raises(ValueError, match="model is in training mode"):
        next(calibrate(model.train(), batches))
    with pytest.raises(ValueError, match="token 23 is outside the vocabulary"):
        next(calibrate(model.eval(), [torch.full((1, 4), 23)]))
