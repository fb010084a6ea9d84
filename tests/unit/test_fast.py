"""Packed and split weights and a compiled step compute the same: with grouped heads, for one token as for many."""

import copy
from collections.abc import Callable, Iterator

import pytest
import torch
from torch import nn

import gptlite
from gptlite.cache.contract import whole_batch
from gptlite.cache.dense import DynamicCache, StaticCache
from gptlite.cache.paged import PagedCache
from gptlite.checkpoint import save_checkpoint
from gptlite.config import GPTConfig
from gptlite.data import CharTokenizer
from gptlite.fast import (
    MIN_WEIGHTS,
    JoinedAttention,
    JoinedLinear,
    PackedLinear,
    SplitLinear,
    compile_step,
    pack,
    split,
)
from gptlite.generate import decode_step, prefill
from gptlite.model import GPTlite
from gptlite.sampling import GREEDY
from gptlite.serving.engine import Engine
from gptlite.serving.sequence import Request
from gptlite.variants.mla import to_latent
from gptlite.variants.swap import swap_attention

# widths that no block size divides
LARGE = {"vocab_size": 50, "context_length": 32, "n_layers": 2, "d_model": 200, "n_heads": 6, "d_head": 40}


def make(**changes: int) -> GPTlite:
    torch.manual_seed(0)
    return GPTlite(GPTConfig(**{**LARGE, "n_kv_heads": 3, **changes})).eval()


@pytest.fixture
def model() -> GPTlite:
    return make(n_kv_heads=6, d_ff=800)


@pytest.fixture
def two_threads() -> Iterator[None]:
    """Split weights have a part for each thread there is when they are made."""
    before = torch.get_num_threads()
    torch.set_num_threads(2)
    yield
    torch.set_num_threads(before)


pytestmark = pytest.mark.usefixtures("two_threads")
LAYERS = pytest.mark.parametrize("kind", [PackedLinear, SplitLinear])
WAYS = pytest.mark.parametrize("way", [pack, split])
Way = Callable[[GPTlite], GPTlite]


@LAYERS
@pytest.mark.parametrize("n_tokens", [1, 2, 5, 16, 130])
def test_joined_layers_equal_the_layers_one_after_the_other(n_tokens: int, kind: type[JoinedLinear]) -> None:
    torch.manual_seed(0)
    layers = [nn.Linear(37, 19), nn.Linear(37, 5, bias=False), nn.Linear(37, 64)]
    x = torch.randn(n_tokens, 37)
    expected = torch.cat([layer(x) for layer in layers], dim=-1)
    joined = kind(*layers)
    assert (joined.in_features, joined.out_features, joined.sizes) == (37, 88, [19, 5, 64])
    # sums of 37 products of size 1, rounded in another order
    torch.testing.assert_close(joined(x), expected, rtol=0, atol=1e-5)


@LAYERS
@pytest.mark.parametrize("shape", [(2, 4, 8), (1, 1, 8), (8,)], ids=str)
def test_leading_dimensions_stay(kind: type[JoinedLinear], shape: tuple[int, ...]) -> None:
    layer, x = nn.Linear(8, 6), torch.randn(shape)
    torch.testing.assert_close(kind(layer)(x), layer(x), rtol=0, atol=1e-6)


@pytest.mark.parametrize("n_threads, n_out, n_parts", [(1, 12, 1), (2, 12, 2), (2, 7, 1), (4, 6, 2), (3, 12, 3)])
def test_a_split_layer_has_equal_parts_of_whole_rows(n_threads: int, n_out: int, n_parts: int) -> None:
    torch.set_num_threads(n_threads)
    layer, x = nn.Linear(9, n_out), torch.randn(1, 9)
    parts = SplitLinear(layer)
    assert parts.weights.shape == (n_parts, 9, n_out // n_parts)
    assert parts.weights.untyped_storage().data_ptr() == parts.weight.untyped_storage().data_ptr()  # nothing copied
    torch.testing.assert_close(parts(x), layer(x), rtol=0, atol=1e-6)


def test_only_one_token_is_multiplied_in_parts(monkeypatch: pytest.MonkeyPatch) -> None:
    layer, seen = nn.Linear(8, 6), []
    parts, product = SplitLinear(layer), torch.baddbmm
    monkeypatch.setattr(torch, "baddbmm", lambda *args: seen.append(1) or product(*args))
    parts(torch.randn(2, 8))
    assert not seen
    parts(torch.randn(1, 8))
    assert seen


@WAYS
@pytest.mark.parametrize("n_kv_heads", [1, 3, 6])
@pytest.mark.parametrize("shape", [(3, 20), (1, 1)], ids=str)
def test_the_logits_stay(n_kv_heads: int, way: Way, shape: tuple[int, int]) -> None:
    model = make(n_kv_heads=n_kv_heads, d_ff=800)
    tokens = torch.randint(50, shape)
    expected, shapes = model(tokens), [block.mha.kv_shape for block in model.blocks]
    assert way(model) is model
    assert [block.mha.kv_shape for block in model.blocks] == shapes
    assert sum(isinstance(module, JoinedLinear) for module in model.modules()) >= 2 * 2
    torch.testing.assert_close(model(tokens), expected, rtol=0, atol=1e-5)


def test_a_copy_of_a_split_layer_has_one_weight_of_its_own() -> None:
    layer, x = SplitLinear(nn.Linear(8, 6)), torch.randn(1, 8)
    other = copy.deepcopy(layer)
    assert other.weights.untyped_storage().data_ptr() == other.weight.untyped_storage().data_ptr()
    other.weight.zero_()
    torch.testing.assert_close(other(x)[0], layer.bias)
    assert not torch.equal(layer(x)[0], layer.bias)


@WAYS
def test_the_trained_models_logits_stay(way: Way) -> None:
    model, tokenizer = gptlite.load("gptlite")
    tokens = tokenizer.encode("KING HENRY:\nNow, sir, what make you here?")[None]
    expected = model(tokens)
    packed = way(copy.deepcopy(model))
    assert all(isinstance(block.mha, JoinedAttention) for block in packed.blocks)
    # logits up to 28: a unit in the last place is 2e-6, and either way of rounding is as right as the other
    torch.testing.assert_close(packed(tokens), expected, rtol=1e-5, atol=1e-5)


@WAYS
@pytest.mark.parametrize("n_rows", [1, 2])
@pytest.mark.parametrize("make_cache", [DynamicCache, lambda m: StaticCache(m, 2, 30), lambda m: PagedCache(m, 40)])
def test_every_cache_generates_the_same(model: GPTlite, make_cache, n_rows: int, way: Way) -> None:
    prompt = torch.randint(50, (n_rows, 7))
    expected = gptlite.generate(model, prompt, 20, GREEDY)
    packed = way(model)
    assert torch.equal(gptlite.generate(packed, prompt, 20, GREEDY, make_cache(packed)), expected)


@WAYS
def test_a_window_and_a_variants_own_mix_stay(model: GPTlite, way: Way) -> None:
    class Doubled(type(model.blocks[0].mha)):  # type: ignore[misc]
        def mix(self, q, k, v, q_pos, k_pos, mask):
            return 2 * super().mix(q, k, v, q_pos, k_pos, mask)

    for block in model.blocks:
        block.mha.__class__, block.mha.window = Doubled, 4
    tokens = torch.randint(50, (2, 12))
    expected = model(tokens)
    torch.testing.assert_close(way(model)(tokens), expected, rtol=0, atol=1e-5)
    assert all(isinstance(block.mha, JoinedAttention) and block.mha.window == 4 for block in model.blocks)


def test_an_attention_with_a_projection_of_its_own_keeps_it(model: GPTlite) -> None:
    class Halved(type(model.blocks[0].mha)):  # type: ignore[misc]
        def project(self, x):
            q, k, v = super().project(x)
            return q / 2, k, v

    for block in model.blocks:
        block.mha.__class__ = Halved
    tokens = torch.randint(50, (2, 12))
    expected = model(tokens)
    torch.testing.assert_close(pack(model)(tokens), expected, rtol=0, atol=1e-5)
    assert all(type(block.mha) is Halved for block in model.blocks)


def test_small_layers_and_other_projections_stay_as_they_are() -> None:
    small = pack(make(d_model=24, n_heads=4, d_head=8, n_kv_heads=2))
    assert not any(isinstance(module, PackedLinear) for module in small.modules())
    latent = to_latent(make(n_kv_heads=6), 100)
    tokens = torch.randint(50, (2, 9))
    expected, kinds = latent(tokens), [type(block.mha) for block in latent.blocks]
    torch.testing.assert_close(pack(latent)(tokens), expected, rtol=0, atol=1e-5)
    assert [type(block.mha) for block in latent.blocks] == kinds
    assert latent.blocks[0].ffwd.net[0].in_features * latent.blocks[0].ffwd.net[0].out_features >= MIN_WEIGHTS
    assert isinstance(latent.blocks[0].ffwd.net[0], PackedLinear)


@WAYS
def test_the_joined_weights_leave_the_parameters(model: GPTlite, way: Way) -> None:
    before = model.n_params
    way(model)
    weights = sum(m.in_features * m.out_features + len(m.bias) for m in model.modules() if isinstance(m, JoinedLinear))
    assert model.n_params == before - weights


@pytest.mark.parametrize("way, done", [(pack, "packed"), (split, "split")])
def test_what_is_packed_or_split_is_not_saved(model: GPTlite, tmp_path, way: Way, done: str) -> None:
    with pytest.raises(ValueError, match=f"{done} weights are not saved: save the model before it is {done}"):
        save_checkpoint(tmp_path / "packed.safetensors", way(model), CharTokenizer("".join(map(chr, range(40, 90)))))
    assert not list(tmp_path.iterdir())


def test_what_cannot_be_packed_is_refused_and_stays_whole(model: GPTlite, monkeypatch: pytest.MonkeyPatch) -> None:
    wide = copy.deepcopy(model).double()
    with pytest.raises(ValueError, match=r"a layer in torch\.float64 on cpu cannot be packed"):
        pack(wide)
    assert not any(isinstance(module, JoinedLinear) for module in wide.modules())
    with pytest.raises(ValueError, match=r"a layer in torch\.float64 on cpu cannot be split"):
        split(wide)
    assert not any(isinstance(module, JoinedLinear) for module in wide.modules())
    with pytest.raises(ValueError, match="a Identity cannot be packed"):
        PackedLinear(nn.Identity())  # type: ignore[arg-type]
    monkeypatch.setattr(torch.backends.mkldnn, "is_available", lambda: False)
    with pytest.raises(ValueError, match="has no oneDNN"):
        pack(model)
    assert split(model) is model  # which needs none


def test_packing_after_a_swap_keeps_the_swapped_attention(model: GPTlite) -> None:
    swap_attention(model, lambda mha: mha)
    model.fc_out = nn.Linear(200, MIN_WEIGHTS // 200 + 1)
    assert all(isinstance(block.mha, JoinedAttention) for block in pack(model).blocks)
    # packing twice changes nothing more, also where the head is packed
    kinds = [type(block.mha) for block in model.blocks]
    assert [type(block.mha) for block in pack(model).blocks] == kinds


@pytest.fixture
def few_programs() -> Iterator[None]:
    torch._dynamo.reset()
    torch._dynamo.utils.counters.clear()
    yield
    torch._dynamo.reset()


@pytest.mark.slow
def test_a_compiled_step_generates_the_same_with_one_program(few_programs: None) -> None:
    model = make(n_layers=1, vocab_size=700)  # enough for the head to be compiled too
    prompt = torch.randint(50, (2, 5))
    compiled = compile_step(model, autotune=False)
    counter = torch._dynamo.utils.counters["stats"]
    counts = []
    for n_new in (3, 20, 27):  # a longer cache is another shape, which is left open from then on
        expected = gptlite.generate(model, prompt, n_new, GREEDY)
        assert torch.equal(gptlite.generate(compiled, prompt, n_new, GREEDY, StaticCache(model, 2, 32)), expected)
        counts.append(counter["unique_graphs"])
    assert counts == [2, 2, 2]  # the body's and the head's, for every T from 6 to 31
    caches = [StaticCache(model, 2, 32) for _ in range(2)]
    found, plain = (
        [prefill(m, prompt, c), decode_step(m, torch.tensor([3, 7]), c)] for m, c in zip((compiled, model), caches)
    )
    torch.testing.assert_close(found, plain, rtol=0, atol=1e-5)
    assert counter["unique_graphs"] == 2


@pytest.mark.slow
def test_an_engine_whose_batch_changes_decodes_with_one_program(few_programs: None) -> None:
    model = make(n_layers=1, vocab_size=700)
    compiled = compile_step(model, autotune=False)
    requests = [Request([7 * i + 1, 3], n_new, GREEDY) for i, n_new in enumerate((3, 9, 1, 14, 6, 2, 11))]
    alone = [gptlite.generate(model, torch.tensor([r.prompt]), r.n_new, GREEDY)[0, 2:].tolist() for r in requests]
    engine = Engine(compiled, StaticCache(model, 4, 20), max_batch=4, trace=True)
    sequences = [engine.add(request) for request in requests]
    engine.run()
    assert [sequence.output for sequence in sequences] == alone
    assert len({len(record.rows) for record in engine.trace}) == 4  # batches of every size
    # the body's, and the head's for 1, 2 and 4 rows
    assert torch._dynamo.utils.counters["stats"]["unique_graphs"] == 4


def test_a_small_head_stays_as_it_is() -> None:
    model = make(n_layers=1)
    assert "head" not in vars(compile_step(model, autotune=False))


def test_a_compiled_head_gives_the_rows_that_it_is_given(few_programs: None) -> None:
    model = make(n_layers=1, vocab_size=700)
    head = compile_step(model, autotune=False).head
    for n in (1, 3, 4, 7, 129):
        hidden = torch.randn(2 * n, 200)[::2]  # rows that lie apart, as after a prefill
        torch.testing.assert_close(head(hidden), model.head(hidden), rtol=0, atol=1e-5)
    torch.testing.assert_close(head(hidden[None]), model.head(hidden[None]), rtol=0, atol=0)
    assert torch._dynamo.utils.counters["stats"]["unique_graphs"] == 3  # for 1, 4 and 8


def test_steps_that_are_no_decode_step_run_as_they_did(few_programs: None) -> None:
    model = make(n_layers=1)
    compiled = compile_step(model, autotune=False)
    tokens = torch.randint(50, (2, 9))
    whole = [whole_batch(torch.arange(9).expand(2, 9))]
    assert torch.equal(compiled.run(tokens.flatten(), whole), model.run(tokens.flatten(), whole))
    cache = PagedCache(model, 40)
    assert torch.equal(prefill(compiled, tokens, cache, chunk=4).argmax(-1), model(tokens)[:, -1].argmax(-1))
    # nor does a cache without lines give a step of one shape
    before = torch._dynamo.utils.counters["stats"]["unique_graphs"]
    compiled.run(tokens[:, 0], cache.prepare(range(2), torch.tensor([[9], [9]])), cache)
    assert torch._dynamo.utils.counters["stats"]["unique_graphs"] == before


def test_what_cannot_be_compiled_is_refused(model: GPTlite) -> None:
    with pytest.raises(ValueError, match="training mode"):
        compile_step(copy.deepcopy(model).train())
    with pytest.raises(ValueError, match="the model is split"):
        compile_step(split(copy.deepcopy(model)))
    with pytest.raises(ValueError, match="the model is packed"):
        compile_step(pack(model))
