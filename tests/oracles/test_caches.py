"""Caches against two oracles, over chunkings drawn at random: the model without a cache, and those of transformers."""

from collections.abc import Callable
from pathlib import Path

import pytest
import torch
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st
from torch import Tensor
from transformers import DynamicCache as HFDynamicCache
from transformers import OPTForCausalLM
from transformers import StaticCache as HFStaticCache

from gptlite.cache.contract import Cache
from gptlite.cache.dense import DynamicCache, RingCache, StaticCache
from gptlite.config import GPTConfig
from gptlite.data import CharTokenizer
from gptlite.model import GPTlite

Exported = tuple[GPTlite, CharTokenizer, Path]
AsOPT = Callable[..., OPTForCausalLM]
CONTEXT, VOCAB = 40, 29
SETTINGS = settings(deadline=None, max_examples=25, suppress_health_check=[HealthCheck.function_scoped_fixture])
CHUNKS = st.lists(st.integers(1, 9), min_size=1, max_size=CONTEXT).map(lambda sizes: _cut(sizes))


def _cut(sizes: list[int]) -> list[int]:
    """The sizes up to the context length, the last one shortened so that they end there at most."""
    kept: list[int] = []
    for size in sizes:
        size = min(size, CONTEXT - sum(kept))
        if size:
            kept.append(size)
    return kept


@st.composite
def models(draw: st.DrawFn) -> GPTlite:
    """Models of random shape: grouped heads, a width that is not heads times head size, with or without a window."""
    G = draw(st.integers(1, 3))
    config = GPTConfig(
        VOCAB,
        CONTEXT,
        n_layers=draw(st.integers(1, 3)),
        d_model=draw(st.sampled_from([12, 20, 32])),
        n_heads=G * draw(st.integers(1, 3)),
        d_head=draw(st.sampled_from([3, 4, 8])),
        n_kv_heads=G,
    )
    torch.manual_seed(draw(st.integers(0, 100)))
    model = GPTlite(config).eval()
    with torch.no_grad():
        for parameter in model.parameters():
            torch.nn.init.normal_(parameter, std=0.1)  # logits of size one, so that 1e-5 is a few units of fp32
    return model


@torch.inference_mode()
def in_chunks(model: GPTlite, cache: Cache, tokens: Tensor, sizes: list[int]) -> Tensor:
    """Logits [B, n, V] of a batch that is read in chunks on top of the cache."""
    return torch.cat([model(part, cache=cache) for part in tokens.split(sizes, dim=1)], dim=1)


def random_tokens(B: int, n: int, vocabulary: int = VOCAB) -> Tensor:
    return torch.randint(vocabulary, (B, n), generator=torch.Generator().manual_seed(n))


@SETTINGS
@given(model=models(), sizes=CHUNKS, B=st.integers(1, 3), bucket=st.integers(1, 50))
def test_any_chunking_gives_the_plain_models_logits(model: GPTlite, sizes: list[int], B: int, bucket: int) -> None:
    """1e-5 in fp32, the figure of the contract: the same sums in another order."""
    tokens = random_tokens(B, sum(sizes))
    with torch.inference_mode():
        plain = model(tokens)
    for cache in (DynamicCache(model), StaticCache(model, B, CONTEXT, bucket)):
        torch.testing.assert_close(in_chunks(model, cache, tokens, sizes), plain, rtol=0, atol=1e-5)


@SETTINGS
@given(model=models(), sizes=CHUNKS, B=st.integers(1, 3), window=st.integers(1, 12))
def test_any_chunking_over_a_ring_gives_the_windowed_models_logits(
    model: GPTlite, sizes: list[int], B: int, window: int
) -> None:
    for block in model.blocks:
        block.mha.window = window
    tokens = random_tokens(B, sum(sizes))
    with torch.inference_mode():
        plain = model(tokens)
    cache = RingCache(model, B, chunk=max(sizes))
    torch.testing.assert_close(in_chunks(model, cache, tokens, sizes), plain, rtol=0, atol=1e-5)


@SETTINGS
@given(model=models(), sizes=CHUNKS, data=st.data())
def test_a_sequence_that_moves_between_caches_at_any_point_goes_on(
    model: GPTlite, sizes: list[int], data: st.DataObject
) -> None:
    """Export from one kind and load into another, after any chunk: the rest of the logits are the plain model's."""
    tokens = random_tokens(1, sum(sizes))
    with torch.inference_mode():
        plain = model(tokens)
    first, second = data.draw(st.permutations([DynamicCache(model), StaticCache(model, 2, CONTEXT)]))
    at = data.draw(st.integers(0, len(sizes)))
    if not at:
        return
    done = in_chunks(model, first, tokens[:, : sum(sizes[:at])], sizes[:at])
    second.load(0, first.export(0))
    first.free(0)
    if at < len(sizes):
        rest = in_chunks(model, second, tokens[:, sum(sizes[:at]) :], sizes[at:])
        done = torch.cat([done, rest], dim=1)
    torch.testing.assert_close(done, plain[:, : done.shape[1]], rtol=0, atol=1e-5)


@pytest.mark.parametrize("kind", ["dynamic", "static"])
@SETTINGS
@given(sizes=CHUNKS)
def test_transformers_caches_give_the_same_logits_after_every_chunk(
    exported: Exported, opt: OPTForCausalLM, kind: str, sizes: list[int]
) -> None:
    model, tokenizer, _ = exported
    B, n = 2, sum(sizes)
    tokens = random_tokens(B, n, tokenizer.vocab_size)
    ours: Cache = DynamicCache(model) if kind == "dynamic" else StaticCache(model, B, CONTEXT)
    theirs = HFDynamicCache() if kind == "dynamic" else HFStaticCache(opt.config, max_cache_len=CONTEXT)
    for part in tokens.split(sizes, dim=1):
        with torch.inference_mode():
            logits = model(part, cache=ours)
            want = opt(part, cache=theirs, use_cache=True).logits
        torch.testing.assert_close(logits, want, rtol=0, atol=1e-5)
        assert theirs.get_seq_length() == ours.next_position(0)


@pytest.fixture(scope="module")
def opt(exported: Exported, as_opt: AsOPT) -> OPTForCausalLM:
    """The exported model, as transformers loads it."""
    return as_opt(exported[2])
