"""Quantised keys and values against transformers' QuantizedCache over optimum-quanto, and fp8 against ml_dtypes."""

import ml_dtypes
import numpy as np
import pytest
import torch
from optimum.quanto.library.extensions import get_extension
from transformers import LlamaConfig
from transformers.cache_utils import QuantizedCache as HFQuantizedCache

from gptlite.cache.quantized import QuantizedCache
from gptlite.config import GPTConfig
from gptlite.model import GPTlite
from gptlite.quantize.kv import KVFormat, Recipe, Rule
from gptlite.quantize.pack import unpack

LAYERS, G, D, R, GROUP = 2, 2, 32, 32, 16


def unpacked(packed, bits):
    """quanto's layout: the first rows in the lowest bits of all bytes, the next ones above them."""
    return torch.cat([packed >> (bits * i) & (2**bits - 1) for i in range(8 // bits)])


@pytest.fixture(autouse=True)
def no_compiler(monkeypatch):
    """The unpacking in Python, instead of the C++ that quanto would compile for two minutes on first use."""

    class Plain:
        unpack = staticmethod(unpacked)

    monkeypatch.setattr(get_extension("quanto_cpp"), "_lib", Plain)


def theirs(bits):
    config = LlamaConfig(
        hidden_size=G * D, num_hidden_layers=LAYERS, num_attention_heads=G, num_key_value_heads=G, head_dim=D
    )
    # axis -1 with groups of tokens is a scale per channel, axis 0 with groups of channels one per token
    return HFQuantizedCache(
        "quanto", config, nbits=bits, axis_key=-1, axis_value=0, q_group_size=GROUP, residual_length=R
    )


def stream(n, seed=0):
    generator = torch.Generator().manual_seed(seed)
    keys, values = (torch.randn(LAYERS, 1, G, n, D, generator=generator) for _ in range(2))
    keys[..., 5] += 6  # a channel that stands out
    return keys, values


@pytest.mark.parametrize("bits", [4, 2])
def test_codes_are_those_of_quanto(bits):
    keys, values = stream(R)
    other = theirs(bits)
    for layer in range(LAYERS):
        other.update(keys[layer], values[layer], layer)
    for layer in range(LAYERS):
        for what, form, x in (
            (other.layers[layer]._quantized_keys, KVFormat("even", bits, "channel", GROUP), keys[layer]),
            (other.layers[layer]._quantized_values, KVFormat("even", bits, "token", GROUP), values[layer]),
        ):
            codes, scale, least = form.encode(x)
            mine = unpack(codes, bits, D)
            their = unpacked(what._data._data, bits)[: what._data.shape[0]]
            if form.per == "token":
                their, their_scale = their.reshape(mine.shape), what._scale.reshape(scale.shape)
                their_shift = what._shift.reshape(scale.shape)
            else:  # [group, channels * groups of tokens]
                shape = (GROUP, D, G * R // GROUP)
                their = their.reshape(shape).permute(2, 0, 1).reshape(mine.shape)
                their_scale, their_shift = (
                    part.reshape(D, -1).T.reshape(scale.shape) for part in (what._scale, what._shift)
                )
            # a value half-way between two codes may go to either, since quanto adds before it divides
            assert (mine != their).float().mean() < 1e-4
            torch.testing.assert_close(scale.float(), their_scale, rtol=2**-11, atol=2**-24)  # fp16 beside fp32
            torch.testing.assert_close(least.float(), -their_shift, rtol=2**-11, atol=2**-24)


@pytest.mark.parametrize("bits", [4, 2])
def test_a_stream_of_decode_steps_gives_the_keys_and_values_that_transformers_gives(bits):
    """Both quantise R tokens when R have gathered, so that every step attends to the same roundings."""
    n = 4 * R - 3
    keys, values = stream(n, seed=1)
    other = theirs(bits)
    model = GPTlite(GPTConfig(11, 256, n_layers=LAYERS, d_model=20, n_heads=G, d_head=D, n_kv_heads=G))
    rules = Recipe(
        KVFormat("even", bits, "channel", GROUP), KVFormat("even", bits, "token", GROUP), Rule(0, R), Rule(0, R)
    )
    cache = QuantizedCache(model, rules)
    begin = 0
    for size in (R, *[1] * (n - R)):
        (segment,) = cache.prepare(["a"], torch.arange(begin, begin + size)[None])
        for layer in range(LAYERS):
            new = slice(begin, begin + size)
            k, v = keys[layer][:, :, new], values[layer][:, :, new]
            k_mine, v_mine, _ = cache.update(layer, k, v, segment)
            k_their, v_their = other.update(k, v, layer)
            # fp16 scales against fp32: a code of up to 15 times a step of up to 1, and a least value of up to 8
            torch.testing.assert_close(k_mine, k_their, rtol=0, atol=2**-6)
            torch.testing.assert_close(v_mine, v_their, rtol=0, atol=2**-6)
        begin += size
    assert cache.keys["a"].n == 3 * R


def test_fp8_is_that_of_ml_dtypes():
    x = 100 * torch.randn(4, 50, 16, generator=torch.Generator().manual_seed(2))
    their = x.clamp(-448, 448).numpy().astype(ml_dtypes.float8_e4m3fn).astype(np.float32)
    assert np.array_equal(KVFormat("fp8").rounded(x).numpy(), their)
