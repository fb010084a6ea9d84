"""A faster layout computes the same."""

import torch

from gptlite.config import GPTConfig
from gptlite.fast import order_weights
from gptlite.model import GPTlite


def test_ordered_weights_keep_names_shapes_values_and_logits() -> None:
    torch.manual_seed(0)
    model = GPTlite(GPTConfig(50, 32, n_layers=2, d_model=24, n_heads=4, d_head=8, n_kv_heads=2)).eval()
    tokens = torch.randint(50, (2, 9))
    before, logits = {name: t.clone() for name, t in model.state_dict().items()}, model(tokens)
    assert order_weights(model) is model
    after = model.state_dict()
    assert list(after) == list(before)
    for name, tensor in before.items():
        assert torch.equal(after[name], tensor), name
    # the sums are rounded in another order, so a few units of fp32 are allowed
    torch.testing.assert_close(model(tokens), logits, rtol=0, atol=1e-6)


def test_only_wide_layers_are_stored_by_columns() -> None:
    model = order_weights(GPTlite(GPTConfig(50, 32, n_layers=1, d_model=24, n_heads=4, d_head=8, n_kv_heads=2)))
    block = model.blocks[0]
    for wide in (model.fc_out, block.ffwd.net[0], block.mha.query_proj):
        assert wide.weight.stride() == (1, wide.out_features)
    for narrow in (block.ffwd.net[2], block.mha.key_proj, block.mha.out_proj):
        assert narrow.weight.is_contiguous()
