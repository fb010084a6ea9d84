"""Caches of codes: their own contract, against a reference that quantises all keys and values of a text at once."""

import random
from collections.abc import Callable

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from test_cache_contract import CONTEXT, MAX_CHUNK, VOCAB, chunk_of, make_model, random_tree, step
from torch import Tensor

from gptlite.cache.contract import Cache
from gptlite.cache.dense import DynamicCache
from gptlite.cache.paged import PagedCache
from gptlite.cache.quantized import QuantizedCache
from gptlite.cache.quantized_paged import QuantizedPagedCache
from gptlite.cache.quantized_text import QuantizedText
from gptlite.config import GPTConfig
from gptlite.generate import decode_step, generate, prefill
from gptlite.model import GPTlite
from gptlite.quantize.kv import KVFormat, Recipe, Rule, recipe
from gptlite.variants.mla import to_latent

EVEN4, EVEN2 = KVFormat("even", 4, "channel", 2), KVFormat("even", 2, "channel", 3)
KIVI4 = Recipe(EVEN4, KVFormat("even", 4, "token", 2), Rule(0, 4), Rule(4, 1))  # D is 4: two groups of 2
KIVI2 = Recipe(EVEN2, KVFormat("even", 2, "token", 3), Rule(0, 6), Rule(6, 1))  # groups of 3 and 1
INT8 = Recipe(*[KVFormat("even", 8, symmetric=True)] * 2, Rule(0, 1), Rule(0, 1))
FP8 = Recipe(*[KVFormat("fp8")] * 2, Rule(0, 3), Rule(2, 1))
POOLED2 = Recipe(EVEN2, KVFormat("even", 2, "token", 3), Rule(0, 3), Rule(4, 1))

# window, recipe that the reference follows, and the cache
LOSSY: dict[str, tuple[int | None, Recipe, Callable[[GPTlite, Recipe], Cache]]] = {
    "int8": (None, INT8, lambda model, r: QuantizedCache(model, r)),
    "fp8": (None, FP8, lambda model, r: QuantizedCache(model, r, tile=4)),
    "KIVI, 4 bits": (None, KIVI4, lambda model, r: QuantizedCache(model, r, tile=5)),
    "KIVI, 2 bits": (None, KIVI2, lambda model, r: QuantizedCache(model, r, tile=7)),
    "KIVI, 2 bits, window": (5, KIVI2, lambda model, r: QuantizedCache(model, r)),
    "pool, int8": (None, INT8.in_blocks(2), lambda model, r: QuantizedPagedCache(model, INT8, 64, 60, 2, 8)),
    "pool, 2 bits": (
        None,
        POOLED2.in_blocks(3),
        lambda model, r: QuantizedPagedCache(model, POOLED2, 64, 60, 3, 8, pages_per_split=2),
    ),
    "pool, fp8, window": (5, FP8.in_blocks(3), lambda model, r: QuantizedPagedCache(model, FP8, 64, 60, 3, 8, 1)),
}


@pytest.fixture(params=LOSSY)
def lossy(request: pytest.FixtureRequest) -> tuple[GPTlite, Recipe, Cache]:
    window, rules, make = LOSSY[request.param]
    model = make_model(window)
    return model, rules, make(model, rules)


# -- the reference: written apart from the package, one group after the other -------------------------------------


def rounded_group(values: Tensor, form: KVFormat) -> Tensor:
    """A group of values [g] on its own grid, with numbers of 16 bits beside the codes."""
    if form.symmetric:
        largest = max(abs(float(v)) for v in values)
        size = largest / 127 if largest else 1.0
        stored = float(torch.tensor(size, dtype=torch.float16))
        return torch.tensor([round(float(v) / size) * stored for v in values], dtype=torch.float64)
    low, high, top = float(values.min()), float(values.max()), 2**form.bits - 1
    size = (high - low) / top if high > low else 1.0
    stored, least = (float(torch.tensor(number, dtype=torch.float16)) for number in (size, low))
    return torch.tensor([round((float(v) - low) / size) * stored + least for v in values], dtype=torch.float64)


def rounded(x: Tensor, form: KVFormat) -> Tensor:
    """All keys or values of a text [G, n, D], quantised in one shot; an unfinished group of tokens is left alone."""
    if form.kind == "fp8":
        return x.to(torch.float8_e4m3fn).double()
    out = x.clone()
    for g in range(x.shape[0]):
        if form.per == "channel":
            for begin in range(0, x.shape[1] - form.group + 1, form.group):
                for d in range(x.shape[2]):
                    part = x[g, begin : begin + form.group, d]
                    out[g, begin : begin + form.group, d] = rounded_group(part, form)
        else:
            width = form.group or x.shape[2]
            for t in range(x.shape[1]):
                for begin in range(0, x.shape[2], width):
                    out[g, t, begin : begin + width] = rounded_group(x[g, t, begin : begin + width], form)
    return out


@torch.inference_mode()
def reference(model: GPTlite, rules: Recipe, text: list[int], final: list[int]) -> Tensor:
    """Logits [n, V] of a text whose token i was read when its first final[i] tokens were final."""
    n = len(text)
    x = model.token_embedding.weight[text] + model.position_embedding.weight[:n]
    for block in model.blocks:
        mha = block.mha
        q, k, v = (part.transpose(0, 1) for part in mha.project(block.ln1(x)))  # [heads, n, D]
        codes_k, codes_v = rounded(k, rules.keys), rounded(v, rules.values)
        out = torch.zeros_like(q)
        for i in range(n):
            n_k = max(0, final[i] - rules.key_rule.recent) // rules.key_rule.step * rules.key_rule.step
            n_v = max(0, final[i] - rules.value_rule.recent) // rules.value_rule.step * rules.value_rule.step
            first = 0 if mha.window is None else max(0, i + 1 - mha.window)
            keys = torch.cat([codes_k[:, :n_k], k[:, n_k:]], 1)[:, first : i + 1]
            values = torch.cat([codes_v[:, :n_v], v[:, n_v:]], 1)[:, first : i + 1]
            for h in range(len(q)):
                g = h * len(k) // len(q)
                weights = ((keys[g] @ q[h, i]) / 2).softmax(0)  # D is 4
                out[h, i] = weights @ values[g]
        x = x + mha.out_proj(out.transpose(0, 1).flatten(1))
        x = x + block.ffwd(block.ln2(x))
    return model.fc_out(model.ln(x))


# fp64: nothing but the order of sums lies between the two
def close(found: Tensor, expected: Tensor) -> None:
    torch.testing.assert_close(found, expected, rtol=0, atol=1e-9)


@pytest.mark.parametrize("seed", range(2))
def test_random_plans_equal_one_shot_quantisation(lossy: tuple[GPTlite, Recipe, Cache], seed: int) -> None:
    """Chunks, decodes, holes, forks, frees and `keep`, as in the contract of exact caches."""
    model, rules, cache = lossy
    rng = random.Random(seed)
    texts: dict[str, list[int]] = {}
    final: dict[str, list[int]] = {}
    coded = 0
    for _ in range(24):
        names = [name for name in "abc" if len(texts.get(name, [])) < CONTEXT - 2 * MAX_CHUNK]
        chosen = rng.sample(names, rng.randint(1, len(names))) if names else []
        rows, positions = {}, {}
        for name in chosen:
            text = texts.setdefault(name, [])
            n = rng.choice([0, 1, 1, 2, MAX_CHUNK]) if text else rng.randint(1, MAX_CHUNK)
            rows[name], positions[name] = chunk_of(rng, text, n, rng.choice([0, 0, 1, 3]) if n else 2)
        if rows:
            logits = step(model, cache, rows, positions)
            for name in rows:
                real = [i for i, position in enumerate(positions[name]) if position >= 0]
                final.setdefault(name, []).extend([len(texts[name])] * len(real))
                texts[name] += [rows[name][i] for i in real]
                coded += rules.key_rule.n_quantized(len(texts[name]) - len(real))
                if real:
                    close(logits[name][real], reference(model, rules, texts[name], final[name])[-len(real) :])
        for name in chosen:
            n = sum(position >= 0 for position in positions[name])
            if rng.random() < 0.4:
                left = len(texts[name]) - n + rng.randint(0, n)
                cache.keep([name], [left - len(texts[name]) + n])
                texts[name], final[name] = texts[name][:left], final.get(name, [])[:left]
        name = rng.choice("abc")
        if name in texts and (not names or rng.random() < 0.2):
            cache.free(name)
            del texts[name]
            final.pop(name, None)
        source = rng.choice(sorted(texts)) if texts else None
        if source and name not in texts and rng.random() < 0.6:
            cache.fork(source, name)
            texts[name], final[name] = list(texts[source]), list(final.get(source, []))
        for name in texts:
            assert cache.next_position(name) == len(texts[name])
        if isinstance(cache, PagedCache):
            cache.check()
    assert coded > 0  # else nothing was tried


@pytest.mark.parametrize("seed", range(2))
def test_a_tree_of_drafts_sees_codes_below_it_and_its_rejected_part_never_reaches_them(
    lossy: tuple[GPTlite, Recipe, Cache], seed: int
) -> None:
    model, rules, cache = lossy
    rng = random.Random(50 + seed)
    text, _ = chunk_of(rng, [], MAX_CHUNK, 0)
    step(model, cache, {"a": text}, {"a": list(range(len(text)))})
    final = [0] * len(text)
    for _ in range(4):
        tokens, _ = chunk_of(rng, text, MAX_CHUNK, 0)
        parents, depths = random_tree(rng, MAX_CHUNK)
        begin = len(text)
        logits = step(model, cache, {"a": tokens}, {"a": [begin + depth for depth in depths]}, {"a": parents})["a"]
        paths: list[list[int]] = []
        for i, parent in enumerate(parents):
            paths.append([*(paths[parent] if parent >= 0 else []), i])
            path = [tokens[j] for j in paths[i]]
            close(logits[i], reference(model, rules, text + path, final + [begin] * len(path))[-1])
        path = rng.choice(paths)
        cache.keep(["a"], [path])
        text, final = text + [tokens[j] for j in path], final + [begin] * len(path)


# -- KIVI's rule --------------------------------------------------------------------------------------------------


def fed(cache: QuantizedCache, keys: Tensor, values: Tensor, sizes: list[int]) -> None:
    """Feeds made-up keys and values [layers, G, n, D] in steps of these sizes."""
    begin = 0
    for size in sizes:
        (segment,) = cache.prepare(["a"], torch.arange(begin, begin + size)[None])
        for layer in range(len(keys)):
            part = slice(begin, begin + size)
            cache.update(layer, keys[layer, None, :, part], values[layer, None, :, part], segment)
        begin += size


@pytest.mark.parametrize("name", ["int8", "fp8", "kivi4", "kivi2"])
@given(cuts=st.lists(st.integers(1, 40), min_size=1, max_size=6))
@settings(max_examples=12, deadline=None)
def test_fed_in_any_pieces_equals_one_shot_bit_for_bit(name: str, cuts: list[int]) -> None:
    """The same codes and scales, whatever the steps: fed token by token, in pieces, or all at once."""
    model = make_model(dtype=torch.float32)
    rules = recipe(name, residual=8, group=4)
    n = sum(cuts)
    generator = torch.Generator().manual_seed(n)
    keys, values = (torch.randn(2, 3, n + 1, 4, generator=generator) for _ in range(2))
    caches = []
    for sizes in ([*cuts, 1], [1] * (n + 1), [n, 1]):
        cache = QuantizedCache(model, rules)
        fed(cache, keys, values, sizes)
        caches.append(cache)
    for other in caches[1:]:
        for lines, others in ((caches[0].keys, other.keys), (caches[0].values, other.values)):
            assert lines["a"].n == others["a"].n
            for mine, yours in zip((*lines["a"].codes, lines["a"].rest), (*others["a"].codes, others["a"].rest)):
                assert all(torch.equal(a, b) for a, b in zip(mine, yours, strict=True))
    n_k, n_v = rules.key_rule.n_quantized(n), rules.value_rule.n_quantized(n)
    for layer in range(2):  # and they are those of the whole, quantised once
        whole = (
            (keys[layer, :, :n_k], rules.keys, caches[0].keys),
            (values[layer, :, :n_v], rules.values, caches[0].values),
        )
        for part, form, lines in whole:
            if part.shape[1]:
                assert all(torch.equal(a, b) for a, b in zip(lines["a"].codes[layer], form.encode(part), strict=True))


@pytest.mark.parametrize("R", [4, 12])
def test_the_residual_never_exceeds_its_bound_and_reaches_it(R: int) -> None:
    model = make_model()
    rules = recipe("kivi2", residual=R, group=4)
    cache = QuantizedCache(model, rules)
    most_k = most_v = 0
    rng = random.Random(R)
    n = 0
    while n < 44:
        size = min(rng.choice([1, 1, 1, 3]), 44 - n)
        step(model, cache, {"a": [1] * size}, {"a": list(range(n, n + size))})
        n += size
        k, v = (lines["a"].rest[0].shape[1] for lines in (cache.keys, cache.values))
        assert k <= rules.key_rule.bound(size) == R - 1 + size
        assert v <= rules.value_rule.bound(size) == R + size
        assert k + cache.keys["a"].n == v + cache.values["a"].n == n
        assert cache.keys["a"].n % R == 0
        if size == 1:
            most_k, most_v = max(most_k, k), max(most_v, v)
    assert (most_k, most_v) == (R, R + 1)


def test_what_is_quantised_stays_so_and_what_may_be_taken_back_is_not() -> None:
    model = make_model()
    cache = QuantizedCache(model, INT8)
    step(model, cache, {"a": [1, 2, 3]}, {"a": [0, 1, 2]})
    assert cache.keys["a"].n == 0  # the step's own tokens may still be taken back
    cache.keep(["a"], [1])
    step(model, cache, {"a": [4, 5]}, {"a": [1, 2]})
    assert cache.keys["a"].n == cache.values["a"].n == 1
    cache.keep(["a"], [0])
    assert cache.next_position("a") == 1 and cache.keys["a"].rest[0].shape[1] == 0


# -- one row of a batch is the row alone --------------------------------------------------------------------------


@pytest.mark.parametrize("side", ["left", "right", "none"])
def test_batch_and_padding_do_not_change_a_row(lossy: tuple[GPTlite, Recipe, Cache], side: str) -> None:
    """Fresh caches of the same kind: what a row's codes are does not depend on who shares the step."""
    model, rules, cache = lossy
    rng = random.Random(9)
    lengths = (7, 7, 7) if side == "none" else (2, 7, 5)
    texts = {name: chunk_of(rng, [], n, 0)[0] for name, n in zip("abc", lengths)}
    S = max(lengths)
    rows, positions = {}, {}
    for name, text in texts.items():
        pad, numbers = [0] * (S - len(text)), list(range(len(text)))
        rows[name] = pad + text if side == "left" else text + pad
        positions[name] = [-1] * len(pad) + numbers if side == "left" else numbers + [-1] * len(pad)
    step(model, cache, rows, positions)
    final = {name: [0] * len(text) for name, text in texts.items()}
    for token in range(8):
        for name, text in texts.items():
            final[name].append(len(text))
            text.append((3 * token + len(text)) % VOCAB)
        logits = step(
            model, cache, {key: [text[-1]] for key, text in texts.items()}, {k: [len(t) - 1] for k, t in texts.items()}
        )
    for name, text in texts.items():
        close(logits[name][0], reference(model, rules, text, final[name])[-1])


def test_bits_of_a_row_are_the_same_alone_and_in_a_batch() -> None:
    model = make_model(dtype=torch.float32)
    rng = random.Random(2)
    texts = {name: chunk_of(rng, [], 20, 0)[0] for name in "abc"}
    keys = torch.randn(2, 3, 20, 4, generator=torch.Generator().manual_seed(1))
    alone, together = QuantizedCache(model, KIVI2), QuantizedCache(model, KIVI2)
    for i in range(20):
        (segment,) = together.prepare([*texts], torch.full((3, 1), i))
        (own,) = alone.prepare(["b"], torch.tensor([[i]]))
        for layer in range(2):
            new = keys[layer, None, :, i : i + 1]
            together.update(layer, torch.cat([new + 1, new, new - 1]), torch.cat([new - 1, new, new + 1]), segment)
            alone.update(layer, new, new, own)
    for mine, yours in ((alone.keys["b"], together.keys["b"]), (alone.values["b"], together.values["b"])):
        assert mine.n == yours.n > 0
        for a, b in zip((*mine.codes, mine.rest), (*yours.codes, yours.rest), strict=True):
            assert all(torch.equal(x, y) for x, y in zip(a, b, strict=True))


# -- state that goes and comes ------------------------------------------------------------------------------------


@pytest.mark.parametrize("dtype", [torch.float64, torch.float32])
def test_loading_what_was_exported_makes_the_same_codes_again(lossy, dtype: torch.dtype) -> None:
    _, rules, _ = lossy
    model = make_model(dtype=dtype)
    cache, other = QuantizedCache(model, rules), QuantizedCache(model, rules)
    text = [i % VOCAB for i in range(30)]
    for i in range(0, 30, 5):
        step(model, cache, {"a": text[i : i + 5]}, {"a": list(range(i, i + 5))})
    other.load("b", cache.export("a"))
    step(model, cache, {"a": [3]}, {"a": [30]})  # quantises what the last step left
    step(model, other, {"b": [3]}, {"b": [30]})
    for mine, yours in ((cache.keys["a"], other.keys["b"]), (cache.values["a"], other.values["b"])):
        assert mine.n == yours.n > 0
        for a, b in zip(mine.codes, yours.codes, strict=True):
            assert all(torch.equal(x, y) for x, y in zip(a, b, strict=True))


def test_a_state_goes_from_a_pool_to_a_dense_cache_and_back() -> None:
    model, rules = make_model(), POOLED2.in_blocks(3)
    pool = QuantizedPagedCache(model, POOLED2, 20, 20, 3, 8)
    dense = QuantizedCache(model, rules)
    text = [i % VOCAB for i in range(20)]
    for i in range(0, 20, 5):
        step(model, pool, {"a": text[i : i + 5]}, {"a": list(range(i, i + 5))})
    dense.load("a", pool.export("a"))
    again = QuantizedPagedCache(model, POOLED2, 20, 20, 3, 8)
    again.load("a", dense.export("a"))
    again.check()
    logits = [step(model, cache, {"a": [2]}, {"a": [20]})["a"] for cache in (pool, dense, again)]
    close(logits[1], logits[0])
    close(logits[2], logits[0])
    assert again.table_of_codes("a") and dense.keys["a"].n == 3 * len(again.table_of_codes("a"))


# -- bytes --------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("name", ["plain", "int8", "fp8", "kivi4", "kivi2"])
def test_memory_counted_is_memory_held(name: str) -> None:
    config = GPTConfig(VOCAB, 256, n_layers=2, d_model=24, n_heads=4, d_head=32, n_kv_heads=2)
    torch.manual_seed(0)
    model = GPTlite(config).eval()
    rules = recipe(name, residual=32, group=32)
    cache = QuantizedCache(model, rules)
    prefill(model, torch.zeros(1, 200, dtype=torch.int64), cache)
    decode_step(model, torch.tensor([1]), cache)  # 200 tokens are final
    n_k, n_v = rules.key_rule.n_quantized(200), rules.value_rule.n_quantized(200)
    per_token = {"plain": 128, "int8": 32 + 2, "fp8": 32, "kivi4": 16 + 4, "kivi2": 8 + 4}[name]  # by hand, D = 32
    plain = 4 * 32 * ((201 - n_k) + (201 - n_v))
    assert cache.nbytes == 2 * 2 * (per_token * (n_k + n_v) + plain)
    shapes = [block.mha.kv_shape for block in model.blocks]
    assert rules.token_bytes(shapes, plain_bytes=4) == 2 * 2 * 2 * per_token
    loaded = QuantizedCache(model, rules)
    loaded.load(0, cache.export(0))
    for one in (cache, loaded):  # no view keeps more than it shows
        held = [t for line in (one.keys[0], one.values[0]) for parts in (*line.codes, line.rest) for t in parts]
        assert sum(t.untyped_storage().nbytes() for t in held) == one.nbytes
    pool = QuantizedPagedCache(model, rules, 6, 4, 32, 32)
    assert pool.nbytes == 2 * 2 * 32 * (7 * 2 * per_token + 5 * 2 * 4 * 32)


def test_two_bits_are_packed_four_to_a_byte() -> None:
    codes, scale, least = KVFormat("even", 2, "channel", 32).encode(torch.randn(3, 64, 16))
    assert (codes.dtype, tuple(codes.shape)) == (torch.uint8, (3, 64, 4))
    assert scale.dtype == least.dtype == torch.float16 and tuple(scale.shape) == tuple(least.shape) == (3, 2, 16)


def test_a_pool_is_sized_by_its_bytes() -> None:
    model = make_model(dtype=torch.float32)
    options = {"recipe": POOLED2, "n_recent": 8, "block_size": 3, "chunk": 4}
    pool = QuantizedPagedCache.sized(model, memory_bytes=20_000, **options)
    one_more = 3 * POOLED2.token_bytes(pool.shapes, 4)
    assert pool.nbytes <= 20_000 < pool.nbytes + one_more
    assert pool.longest == 3 * pool.n_code_blocks
    with pytest.raises(ValueError, match="too few"):
        QuantizedPagedCache.sized(model, memory_bytes=5_000, **options)
    with pytest.raises(ValueError, match="fraction"):
        QuantizedPagedCache.sized(model, fraction=1.5, **options)


# -- the pool -----------------------------------------------------------------------------------------------------


def test_forks_share_codes_that_are_made_once() -> None:
    model = make_model()
    pool = QuantizedPagedCache(model, INT8, 10, 10, 2, 8)
    step(model, pool, {"a": [1, 2, 3, 4, 5]}, {"a": list(range(5))})
    pool.fork("a", "b")  # before anything is quantised
    assert pool.table_of_codes("a") == []
    step(model, pool, {"a": [6], "b": [7]}, {"a": [5], "b": [5]})
    assert pool.table_of_codes("a") == pool.table_of_codes("b") == [0, 1]
    assert pool.code_pool.references[:2] == [2, 2]
    pool.fork("b", "c")
    assert pool.code_pool.references[:2] == [3, 3]
    before = [part.clone() for pair in pool.pools for half in pair for part in half.codes]
    step(model, pool, {"c": [1, 1]}, {"c": [6, 7]})
    for old, pair_part in zip(before, (part for pair in pool.pools for half in pair for part in half.codes)):
        assert torch.equal(old[:2], pair_part[:2])  # a block of codes never changes
    pool.check()
    for name in "abc":
        pool.free(name)
    assert (pool.free_blocks, pool.code_pool.free) == (10, 10)
    pool.check()


def test_a_pool_refuses_what_has_no_room_and_stays_as_it_was() -> None:
    model = make_model()
    pool = QuantizedPagedCache(model, INT8, 2, 6, 2, 4)
    for i in range(0, 4, 2):
        step(model, pool, {"a": [1, 2]}, {"a": [i, i + 1]})
    assert pool.fits({"a": 2})
    step(model, pool, {"a": [1, 2]}, {"a": [4, 5]})
    before = pool.export("a"), pool.table_of_codes("a"), pool.table("a")
    assert not pool.fits({"a": 1})
    with pytest.raises(ValueError, match="needs 1 blocks of codes of 2 tokens, 0 are free"):
        pool.prepare(["a"], torch.tensor([[6]]))
    with pytest.raises(ValueError, match="'b' has 5 new tokens, a step takes 4"):
        pool.prepare(["b"], torch.arange(5)[None])
    for name in "bcd":
        pool.load(name, {key: part[:0] if key == "k_pos" else part[:, :0] for key, part in before[0].items()})
    with pytest.raises(ValueError, match="recent of 2 tokens"):
        pool.prepare(list("bcd"), torch.arange(4).expand(3, 4))
    assert (pool.table_of_codes("a"), pool.table("a")) == before[1:]
    assert all(torch.equal(part, before[0][key]) for key, part in pool.export("a").items())
    pool.keep(["a"], [0])  # the last step can still be taken back
    assert pool.next_position("a") == 4
    with pytest.raises(ValueError, match="needs 3 blocks of codes"):
        pool.load(
            "e",
            {key: torch.zeros(6, dtype=torch.int64) if key == "k_pos" else torch.zeros(3, 6, 4) for key in before[0]},
        )
    pool.check()


def test_a_rejected_draft_leaves_no_trace_in_the_codes() -> None:
    model = make_model()
    for make in (lambda: QuantizedCache(model, INT8), lambda: QuantizedPagedCache(model, INT8, 30, 30, 2, 8)):
        states = []
        for drafts in ([], [9, 9, 9, 9]):
            cache = make()
            step(model, cache, {"a": [1, 2, 3, 4]}, {"a": [0, 1, 2, 3]})
            if drafts:
                step(model, cache, {"a": [5, *drafts]}, {"a": [4, 5, 6, 7, 8]})
                cache.keep(["a"], [1])
            else:
                step(model, cache, {"a": [5]}, {"a": [4]})
            step(model, cache, {"a": [6]}, {"a": [5]})
            states.append(cache.export("a"))
        for name, part in states[0].items():
            torch.testing.assert_close(part, states[1][name], rtol=0, atol=1e-12)  # a batched product sums otherwise


def test_speculation_sees_the_past_in_no_fewer_bits_than_plain_decoding() -> None:
    """What a draft of a step finds as codes is what the step's first token finds, never more."""
    for rules in (KIVI2, INT8, POOLED2.in_blocks(3)):
        for rule in (rules.key_rule, rules.value_rule):
            for begin in range(20):
                assert all(rule.n_quantized(begin) <= rule.n_quantized(begin + i) for i in range(6))


# -- whole texts, latents, generation -----------------------------------------------------------------------------


@pytest.mark.parametrize("rules", [KIVI4, KIVI2, INT8, FP8])
@pytest.mark.parametrize("window", [None, 5])
def test_a_whole_text_at_once_equals_token_by_token(rules: Recipe, window: int | None) -> None:
    model = make_model(window)
    text = torch.tensor([[(7 * i + b) % VOCAB for i in range(30)] for b in range(2)])
    with torch.inference_mode():
        at_once = model(text, cache=QuantizedText(rules))
        cache = QuantizedCache(model, rules)
        one_by_one = torch.cat([model(text[:, i : i + 1], cache=cache) for i in range(30)], 1)
        exact = model(text)
    close(at_once, one_by_one)
    close(at_once[0], reference(model, rules, text[0].tolist(), list(range(30))))
    assert (at_once - exact).abs().max() > 1e-6  # something was rounded


def test_a_whole_text_refuses_what_it_cannot_measure() -> None:
    model = make_model()
    text = QuantizedText(KIVI2)
    for positions, parents in (
        (torch.tensor([[0, 2]]), None),
        ([torch.tensor([0, 1])], None),
        (torch.tensor([[0, 1]]), [[-1, 0]]),
    ):
        with pytest.raises(ValueError, match="read whole"):
            text.prepare([0], positions, parents)
    with pytest.raises(ValueError, match="LatentAttention mixes in its own way"):
        to_latent(model, 7)(torch.tensor([[1, 2]]), cache=text)


def test_latents_are_quantised_too() -> None:
    model = to_latent(make_model(), 7)
    rules = Recipe(*[KVFormat("even", 8, symmetric=True)] * 2, Rule(0, 1), Rule(0, 1))
    text = [i % VOCAB for i in range(20)]
    exact = model(torch.tensor([text])).detach()[0, -1]
    for cache in (QuantizedCache(model, rules), QuantizedPagedCache(model, rules, 20, 20, 2, 8)):
        for i, token in enumerate(text):
            logits = step(model, cache, {"a": [token]}, {"a": [i]})["a"][0]
        assert 1e-6 < (logits - exact).abs().max() < 0.1 * exact.abs().max()  # 8 bits: near, not equal
    dense = DynamicCache(model)
    step(model, dense, {"a": text}, {"a": list(range(20))})
    quantized = QuantizedCache(model, rules)
    step(model, quantized, {"a": text}, {"a": list(range(20))})
    step(model, quantized, {"a": [1]}, {"a": [20]})
    assert quantized.nbytes < dense.nbytes / 3  # 7 bytes and a scale of 2 for 56


def test_generation_runs_and_a_second_time_gives_the_same() -> None:
    model = make_model()
    prompt = torch.tensor([[1, 2, 3], [4, 5, 6]])
    for make in (lambda: QuantizedCache(model, KIVI2), lambda: QuantizedPagedCache(model, POOLED2, 40, 30, 3, 2)):
        first, second = (generate(model, prompt, 20, cache=make(), seed=3) for _ in range(2))
        assert torch.equal(first, second)
        alone = generate(model, prompt[1:], 20, cache=make(), seed=4)
        assert torch.equal(first[1:], alone)
