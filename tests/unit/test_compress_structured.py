"""Structured pruning: a smaller model computes what the masked one does, with every cache, with as many weights."""

from copy import deepcopy

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

import gptlite
from gptlite.cache.block_store import BlockStore
from gptlite.cache.contract import Cache
from gptlite.cache.dense import DynamicCache, RingCache, StaticCache
from gptlite.cache.paged import PagedCache
from gptlite.cache.radix import RadixStore
from gptlite.cache.reuse import PrefixCache
from gptlite.checkpoint import load_checkpoint, save_checkpoint
from gptlite.compress.masked import mask
from gptlite.compress.structured import Kept, cut_linear, describe, is_uniform, kept_kv_heads, prune, pruned_params
from gptlite.config import GPTConfig
from gptlite.data import CharTokenizer
from gptlite.generate import generate
from gptlite.model import GPTlite
from gptlite.sampling import SamplingParams
from gptlite.variants.mla import to_latent

TOKENS = torch.randint(23, (3, 14), generator=torch.Generator().manual_seed(2))
ODD = torch.tensor([0, 2, 3, 7, 11, 12, 19])  # channels


def make_model(n_kv_heads: int = 6, dtype: torch.dtype = torch.float64, n_layers: int = 3) -> GPTlite:
    """Six heads of 4 on a width of 20, with weights and biases large enough for sharp attention."""
    torch.manual_seed(1)
    config = GPTConfig(23, 32, n_layers=n_layers, d_model=20, n_heads=6, d_head=4, n_kv_heads=n_kv_heads, d_ff=31)
    model = GPTlite(config).to(dtype).eval()
    for parameter in model.parameters():
        torch.nn.init.normal_(parameter, std=0.3)
    return model


def ragged(n_layers: int = 3) -> tuple[list[torch.Tensor], list[torch.Tensor]]:
    """Other heads and neurons in each block, and another number of them."""
    heads = [torch.tensor(h) for h in ([1, 4], [0, 2, 3, 5], [3])]
    neurons = [torch.arange(0, 31, 2), torch.tensor([30]), torch.arange(7, 20)]
    return heads[:n_layers], neurons[:n_layers]


HEADS, NEURONS = ragged()
KEPT = {
    "heads": Kept(heads=HEADS),
    "neurons": Kept(neurons=NEURONS),
    "channels": Kept(channels=ODD),
    "blocks": Kept(blocks=torch.tensor([0, 2])),
    "heads and neurons": Kept(heads=HEADS, neurons=NEURONS),
    "channels and blocks": Kept(channels=ODD, blocks=torch.tensor([1])),
    "all": Kept(HEADS, NEURONS, ODD, torch.tensor([0, 1])),
    "one of each": Kept([torch.tensor([5])] * 3, [torch.tensor([9])] * 3, torch.tensor([3, 4]), torch.tensor([2])),
}
GROUPED = {
    "whole groups": Kept(heads=[torch.tensor(h) for h in ([0, 1], [2, 3, 4, 5], [0, 1, 2, 3])]),
    "evenly within groups": Kept(heads=[torch.tensor(h) for h in ([0, 3, 4], [1, 2, 5], [0, 1, 2, 3, 4, 5])]),
    "one of one group": Kept(heads=[torch.tensor([4])] * 3, channels=ODD),
}
TOLERANCE = {torch.float64: 1e-10, torch.float32: 1e-5}  # sums of fewer terms in another order


@pytest.mark.parametrize("dtype", [torch.float64, torch.float32])
@pytest.mark.parametrize("name", KEPT)
@torch.no_grad()
def test_pruned_equals_masked(name: str, dtype: torch.dtype) -> None:
    model, kept = make_model(dtype=dtype), KEPT[name]
    small, masked = prune(model, kept), mask(model, kept)
    full = model(TOKENS)
    assert (small(TOKENS) - masked(TOKENS)).abs().max() <= TOLERANCE[dtype] * full.abs().max()
    assert (masked(TOKENS) - full).abs().max() > 1e-3  # something was removed at all
    assert masked.n_params == model.n_params > small.n_params


@pytest.mark.parametrize("name", GROUPED)
@torch.no_grad()
def test_pruned_equals_masked_with_grouped_heads(name: str) -> None:
    model, kept = make_model(n_kv_heads=3), GROUPED[name]
    small = prune(model, kept)
    assert (small(TOKENS) - mask(model, kept)(TOKENS)).abs().max() <= 1e-10
    assert small.n_params == pruned_params(model.config, kept)
    for block, heads in zip(small.blocks, kept.heads):
        assert block.mha.kv_shape == (len(set((heads // 2).tolist())), 4, 4)


@pytest.mark.parametrize("name", KEPT)
def test_parameters_are_those_of_the_closed_form(name: str) -> None:
    model = make_model()
    assert prune(model, KEPT[name]).n_params == pruned_params(model.config, KEPT[name])
    assert model.n_params == pruned_params(model.config, Kept())


@torch.no_grad()
def test_the_trained_model_at_half_its_heads_and_neurons() -> None:
    model, _ = gptlite.load("gptlite")
    kept = Kept([torch.tensor([0, 3, 4, 7])] * 6, [torch.arange(0, 1024, 2)] * 6)
    tokens = torch.randint(74, (2, 100), generator=torch.Generator().manual_seed(0))
    small = prune(model, kept)
    assert (small(tokens) - mask(model, kept)(tokens)).abs().max() < 1e-4  # logits near 20, so 1e-5 of them
    # 6 blocks: 4 * 32 * 257 * 3 + 256 * 129 and 512 * 257 + 256 * 513, two norms; embeddings, last norm and head
    block = 3 * 128 * 257 + 256 * 129 + 512 * 257 + 256 * 513 + 4 * 256
    assert small.n_params == 6 * block + 74 * 256 + 256 * 256 + 2 * 256 + 74 * 257


CACHES = {
    "dynamic": lambda model: DynamicCache(model),
    "static": lambda model: StaticCache(model, 1, 32, bucket=8),
    "ring": lambda model: RingCache(model, 1, chunk=8),
    "prefix": lambda model: PrefixCache(model, 1, 32, BlockStore(6, 4), bucket=8),
    "radix": lambda model: PrefixCache(model, 1, 32, RadixStore(30), bucket=8),
    "paged": lambda model: PagedCache(model, 12, 4),
}


@pytest.mark.parametrize("name", CACHES)
@pytest.mark.parametrize("kept", ["heads and neurons", "all"])
def test_a_pruned_model_generates_with_every_cache(name: str, kept: str) -> None:
    model = prune(make_model(), KEPT[kept])
    if name == "ring":
        for block in model.blocks:
            block.mha.window = 8
    cache: Cache = CACHES[name](model)
    greedy = SamplingParams(temperature=0.0)
    prompt = TOKENS[:1, :8]
    assert torch.equal(generate(model, prompt, 12, greedy, cache), generate(model, prompt, 12, greedy))
    if name == "static":
        sizes = [layer.shape[-3] * layer.shape[-1] for layer in cache.k]
        assert sizes == [4 * len(heads) for heads in KEPT[kept].heads[: len(sizes)]]


def test_the_model_stays_and_the_copy_shares_nothing_with_it() -> None:
    model = make_model()
    before = deepcopy(model.state_dict())
    small = prune(model, KEPT["all"])
    with torch.no_grad():
        for parameter in small.parameters():
            parameter.add_(1)
            assert parameter.requires_grad
    assert all(torch.equal(model.state_dict()[name], value) for name, value in before.items())
    assert model.config.n_layers == 3


def test_keeping_all_changes_no_bit() -> None:
    model = make_model()
    everything = Kept([torch.arange(6)] * 3, [torch.arange(31)] * 3, torch.arange(20), torch.arange(3))
    for kept in (Kept(), everything):
        small = prune(model, kept)
        assert all(torch.equal(a, b) for a, b in zip(small.state_dict().values(), model.state_dict().values()))
        assert small.config == model.config


def test_a_uniform_pruned_model_is_saved_and_read_again(tmp_path) -> None:
    model = prune(
        make_model(dtype=torch.float32), Kept([torch.tensor([0, 5])] * 3, channels=ODD, blocks=torch.arange(2))
    )
    assert is_uniform(model)
    assert model.config == describe(model)
    assert (model.config.n_layers, model.config.d_model, model.config.n_heads, model.config.d_ff) == (2, 7, 2, 31)
    tokenizer = CharTokenizer("abcdefghijklmnopqrstuvw")
    save_checkpoint(tmp_path / "small.safetensors", model, tokenizer)
    again, _ = load_checkpoint(tmp_path / "small.safetensors")
    assert torch.equal(again(TOKENS), model.half().float()(TOKENS))


def test_a_model_whose_blocks_differ_is_not_saved_as_if_they_did_not(tmp_path) -> None:
    model = prune(make_model(), KEPT["heads"])
    assert not is_uniform(model)
    assert model.config.n_heads == 4  # the largest
    with pytest.raises(ValueError, match="its config says"):
        save_checkpoint(tmp_path / "mixed.safetensors", model, CharTokenizer("abcdefghijklmnopqrstuvw"))
    assert not list(tmp_path.iterdir())


BAD = {
    "no head left": (Kept(heads=[torch.tensor([], dtype=torch.int64)] * 3), "heads of block 0 to keep have shape"),
    "out of order": (Kept(heads=[torch.tensor([3, 1])] * 3), "must ascend within 0 to 5"),
    "twice": (Kept(neurons=[torch.tensor([3, 3])] * 3), r"neurons of block 0 to keep are \[3, 3\]"),
    "out of range": (Kept(channels=torch.tensor([0, 20])), "channels to keep are .* within 0 to 19"),
    "a mask for indices": (
        Kept(heads=[torch.tensor([False, True])] * 3),
        "heads of block 0 to keep are torch.bool, indices",
    ),
    "no whole numbers": (Kept(channels=torch.tensor([0.0, 2.0])), "channels to keep are torch.float32, indices"),
    "negative": (Kept(blocks=torch.tensor([-1, 1])), "blocks to keep"),
    "too few blocks": (Kept(heads=[torch.tensor([0])] * 2), "heads has indices for 2 blocks, the model has 3"),
}


@pytest.mark.parametrize("name", BAD)
def test_what_cannot_be_kept_is_refused(name: str) -> None:
    kept, message = BAD[name]
    for cut in (prune, mask):
        with pytest.raises(ValueError, match=message):
            cut(make_model(), kept)


def test_query_heads_that_do_not_share_their_kv_heads_evenly_are_refused() -> None:
    model = make_model(n_kv_heads=3)
    with pytest.raises(ValueError, match=r"heads of block 0: query heads \[0, 1, 2\] leave \[2, 1, 0\] of the 2 that"):
        prune(model, Kept(heads=[torch.tensor([0, 1, 2])] * 3))
    assert kept_kv_heads(model.blocks[0].mha, torch.tensor([2, 4])).tolist() == [1, 2]


def test_heads_of_latent_attention_and_other_layers_are_refused() -> None:
    with pytest.raises(ValueError, match="LatentAttention makes its keys in a way of its own"):
        prune(to_latent(make_model(), 8), Kept(heads=[torch.tensor([0])] * 3))
    model = make_model()
    layer = model.blocks[1].ffwd.net[0]
    other = torch.nn.Module()
    other.in_features, other.out_features = layer.in_features, layer.out_features
    model.blocks[1].ffwd.net[0] = other
    with pytest.raises(ValueError, match=r"blocks\.1\.ffwd\.net\.0 is a Module, only plain linear layers"):
        prune(model, Kept())


def test_a_linear_layer_without_bias_can_be_cut() -> None:
    linear = torch.nn.Linear(5, 4, bias=False)
    cut = cut_linear(linear, torch.tensor([1, 3]), torch.tensor([0, 4]))
    assert torch.equal(cut.weight, linear.weight[[1, 3]][:, [0, 4]])
    assert cut.bias is None


@st.composite
def some_kept(draw) -> Kept:
    def part(n: int) -> torch.Tensor:
        return torch.tensor(sorted(draw(st.sets(st.integers(0, n - 1), min_size=1))))

    heads = [part(6) for _ in range(2)] if draw(st.booleans()) else None
    neurons = [part(31) for _ in range(2)] if draw(st.booleans()) else None
    return Kept(heads, neurons, part(20) if draw(st.booleans()) else None, part(2) if draw(st.booleans()) else None)


@settings(max_examples=40, deadline=None)
@given(some_kept())
@torch.no_grad()
def test_any_choice_equals_its_mask_and_its_count(kept: Kept) -> None:
    model = make_model(n_layers=2)
    small, tokens = prune(model, kept), TOKENS[:1, :9]
    close = torch.allclose(small(tokens), mask(model, kept)(tokens), rtol=1e-9, atol=1e-9)
    assert close
    assert small.n_params == pruned_params(model.config, kept)
