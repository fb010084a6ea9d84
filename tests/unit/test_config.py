"""The shape of a model: defaults, presets, and bad values that are refused by name."""

import json

import pytest
import torch

from gptlite.config import PRESETS, GPTConfig, preset
from gptlite.model import GPTlite

SHAPE = {"vocab_size": 11, "context_length": 8, "n_layers": 2, "d_model": 12, "n_heads": 4, "d_head": 5}


def test_what_is_left_out_has_the_usual_values():
    config = GPTConfig(**SHAPE)
    assert (config.n_kv_heads, config.d_ff, config.dropout) == (4, 48, 0.0)


def test_a_config_is_frozen_and_comparable():
    config = GPTConfig(**SHAPE)
    with pytest.raises(AttributeError):
        config.d_model = 3
    assert config == GPTConfig(**SHAPE, n_kv_heads=4, d_ff=48)
    assert config != GPTConfig(**SHAPE, n_kv_heads=2)


@pytest.mark.parametrize("field", [*SHAPE, "n_kv_heads", "d_ff"])
@pytest.mark.parametrize("value", [0, -1, 1.5, "3", True])
def test_a_bad_size_is_named(field, value):
    with pytest.raises(ValueError, match=rf"^{field} is .*at least 1$"):
        GPTConfig(**{**SHAPE, field: value})


@pytest.mark.parametrize("value", [1, 1.0, -0.1, float("nan"), "a", None, True])
def test_a_bad_dropout_is_named(value):
    with pytest.raises(ValueError, match=r"^dropout is .*\[0, 1\)$"):
        GPTConfig(**SHAPE, dropout=value)


def test_kv_heads_divide_heads():
    for n_kv_heads in (1, 2, 4):
        assert GPTConfig(**SHAPE, n_kv_heads=n_kv_heads).n_kv_heads == n_kv_heads
    with pytest.raises(ValueError, match="n_kv_heads is 3, it must divide n_heads, which is 4"):
        GPTConfig(**SHAPE, n_kv_heads=3)
    with pytest.raises(ValueError, match="n_kv_heads is 8"):
        GPTConfig(**SHAPE, n_kv_heads=8)


def test_through_json_and_back():
    config = GPTConfig(**SHAPE, n_kv_heads=2, d_ff=7, dropout=0.25)
    assert GPTConfig.from_dict(json.loads(json.dumps(config.to_dict()))) == config


def test_a_dict_that_is_no_config():
    with pytest.raises(ValueError, match="unknown config field 'rotary'"):
        GPTConfig.from_dict({**SHAPE, "rotary": True})
    with pytest.raises(ValueError, match=r"incomplete.*d_head"):
        GPTConfig.from_dict({name: value for name, value in SHAPE.items() if name != "d_head"})


@pytest.mark.parametrize(
    ("name", "millions"),
    # the sizes that the book states: counted here from the shapes of the matrices alone
    [("gptlite", 4.8), ("gpt2", 162), ("1b", 1200), ("7b", 6700)],
)
def test_the_presets_have_the_sizes_that_the_book_states(name, millions):
    with torch.device("meta"):
        n_params = GPTlite(preset(name)).n_params
    assert n_params / 1e6 == pytest.approx(millions, rel=0.04)


def test_presets_can_be_changed_and_are_not_touched():
    assert preset("gpt2", context_length=4096).context_length == 4096
    assert preset("gpt2") == PRESETS["gpt2"]
    assert preset("gpt2").context_length == 1024
    assert preset("nano", n_kv_heads=1).n_kv_heads == 1


def test_what_follows_from_a_changed_field_follows():
    assert preset("gpt2", n_heads=24).n_kv_heads == 24
    assert preset("7b", n_heads=64).n_kv_heads == 8
    assert preset("gpt2", d_model=512).d_ff == 2048
    assert preset("gpt2", d_model=512, d_ff=100, n_kv_heads=3).d_ff == 100
    for name, config in PRESETS.items():
        assert preset(name) == config


def test_an_unknown_preset_or_change_is_refused():
    with pytest.raises(ValueError, match="no preset 'gpt5', there are nano, gptlite, draft, gpt2, 1b, 7b"):
        preset("gpt5")
    with pytest.raises(ValueError, match="cannot be changed so"):
        preset("nano", depth=3)
    with pytest.raises(ValueError, match="n_layers is 0"):
        preset("nano", n_layers=0)
