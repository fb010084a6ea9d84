"""One contract, every cache: whatever the plan of steps, the logits are those of the model without a cache."""

import random

import pytest
import torch
import torch._dynamo.testing
from torch import Tensor

from gptlite.cache.block_store import BlockStore
from gptlite.cache.contract import Cache
from gptlite.cache.dense import DynamicCache, RingCache, StaticCache
from gptlite.cache.paged import PagedCache
from gptlite.cache.quantized import QuantizedCache
from gptlite.cache.quantized_paged import QuantizedPagedCache
from gptlite.cache.radix import RadixStore
from gptlite.cache.reuse import PrefixCache
from gptlite.config import GPTConfig
from gptlite.model import GPTlite
from gptlite.quantize.kv import KVFormat, Recipe, Rule
from gptlite.variants.mla import to_latent

CONTEXT, VOCAB, MAX_CHUNK = 48, 23, 6

# the books of the quantised caches, with codes that round nothing; what rounds has a contract test of its own
UNROUNDED = Recipe(KVFormat("plain"), KVFormat("plain"), Rule(0, 4), Rule(5, 1))

# a new cache joins by its line here: (window of the model or None, how to make it)
CACHES = {
    "dynamic": (None, lambda model, n: DynamicCache(model)),
    "dynamic, window": (5, lambda model, n: DynamicCache(model)),
    "static": (None, lambda model, n: StaticCache(model, n, CONTEXT, bucket=16)),
    "static, one bucket": (None, lambda model, n: StaticCache(model, n, CONTEXT, bucket=CONTEXT)),
    "static, as far as it is filled": (None, lambda model, n: StaticCache(model, n, CONTEXT)),
    "ring": (5, lambda model, n: RingCache(model, n, chunk=MAX_CHUNK)),
    "prefix, blocks": (None, lambda model, n: PrefixCache(model, n, CONTEXT, BlockStore(6, 4), bucket=16)),
    "prefix, radix tree": (None, lambda model, n: PrefixCache(model, n, CONTEXT, RadixStore(30), bucket=16)),
    "paged": (None, lambda model, n: PagedCache(model, 64)),
    "paged, window, a page a split": (5, lambda model, n: PagedCache(model, 64, 4, pages_per_split=1)),
    "paged, tiny blocks": (None, lambda model, n: PagedCache(model, 128, 3, pages_per_split=2)),
    "paged, prefix caching": (None, lambda model, n: PagedCache(model, 128, 3, True, pages_per_split=2)),
    "quantized, unrounded": (None, lambda model, n: QuantizedCache(model, UNROUNDED, tile=5)),
    "quantized, unrounded, window": (5, lambda model, n: QuantizedCache(model, UNROUNDED)),
    "quantized pool, unrounded": (
        None,
        lambda model, n: QuantizedPagedCache(model, UNROUNDED, 64, 60, 3, chunk=8, pages_per_split=2),
    ),
    "quantized pool, unrounded, window": (5, lambda model, n: QuantizedPagedCache(model, UNROUNDED, 64, 60, 2, 8)),
}

# and those that are tried once more on a model with latent attention, whose keys hold the values too
LATENT = ("dynamic", "static", "ring", "prefix, blocks", "paged", "paged, tiny blocks")
LATENT += ("static, as far as it is filled", "quantized, unrounded", "quantized pool, unrounded")


def make_model(window: int | None = None, dtype: torch.dtype = torch.float64) -> GPTlite:
    """Grouped heads, a width that is not heads times head size, and weights large enough for sharp attention."""
    torch.manual_seed(1)
    model = GPTlite(GPTConfig(VOCAB, CONTEXT, n_layers=2, d_model=20, n_heads=6, d_head=4, n_kv_heads=3)).eval()
    for parameter in model.parameters():
        torch.nn.init.normal_(parameter, std=0.3)
    for block in model.blocks:
        block.mha.window = window
    return model.to(dtype)


@pytest.fixture(params=[*CACHES, *(f"latent: {name}" for name in LATENT)])
def pair(request: pytest.FixtureRequest) -> tuple[GPTlite, Cache]:
    window, make = CACHES[request.param.removeprefix("latent: ")]
    model = make_model(window)
    if request.param.startswith("latent: "):
        model = to_latent(model, 7)
    return model, make(model, 4)


@torch.inference_mode()
def plain(model: GPTlite, text: list[int]) -> Tensor:
    """Logits [V] after the last token of a text, without a cache."""
    return model(torch.tensor([text]))[0, -1]


@torch.inference_mode()
def step(
    model: GPTlite,
    cache: Cache,
    rows: dict[str, list[int]],
    positions: dict[str, list[int]],
    parents: dict[str, list[int]] | None = None,
) -> dict[str, Tensor]:
    """One packed step: tokens and positions per sequence -> logits [S, V] per sequence."""
    trees = None if parents is None else [parents.get(key) for key in rows]
    packed = torch.tensor([token for row in rows.values() for token in row])
    assert cache.fits({key: sum(p >= 0 for p in positions[key]) for key in rows})
    segments = cache.prepare(list(rows), [torch.tensor(positions[key]) for key in rows], trees, packed)
    logits = model.head(model.run(packed, segments, cache))
    return dict(zip(rows, logits.split([len(row) for row in rows.values()]), strict=True))


def chunk_of(rng: random.Random, text: list[int], n: int, holes: int) -> tuple[list[int], list[int]]:
    """n random tokens that follow a text, with holes put anywhere between them."""
    row = [(rng.randrange(VOCAB), len(text) + i) for i in range(n)]
    for _ in range(holes):
        row.insert(rng.randrange(len(row) + 1), (rng.randrange(VOCAB), -1))
    return [token for token, _ in row], [position for _, position in row]


@pytest.mark.parametrize("seed", range(4))
def test_random_plans_equal_the_model_without_a_cache(pair: tuple[GPTlite, Cache], seed: int) -> None:
    model, cache = pair
    rng = random.Random(seed)
    texts: dict[str, list[int]] = {}
    seen = dict.fromkeys(("chunk", "decode", "hole", "fork", "free", "keep some", "keep none", "unequal"), 0)
    for _ in range(40):
        names = [name for name in "abcd" if len(texts.get(name, [])) < CONTEXT - 2 * MAX_CHUNK]
        chosen = rng.sample(names, rng.randint(1, len(names))) if names else []
        rows, positions = {}, {}
        for name in chosen:
            text = texts.setdefault(name, [])
            n = rng.choice([0, 1, 1, 1, 2, MAX_CHUNK]) if text else rng.randint(1, MAX_CHUNK)
            holes = rng.choice([0, 0, 1, 3]) if n else 2  # a row of nothing but holes is idle
            rows[name], positions[name] = chunk_of(rng, text, n, holes)
            seen["decode" if n == 1 else "chunk"] += 1
            seen["hole"] += bool(holes)
        seen["unequal"] += len({len(row) for row in rows.values()}) > 1
        if rows:
            logits = step(model, cache, rows, positions)
            for name in rows:
                real = [i for i, position in enumerate(positions[name]) if position >= 0]
                texts[name] += [rows[name][i] for i in real]
                if real:
                    with torch.inference_mode():
                        expected = model(torch.tensor([texts[name]]))[0, -len(real) :]
                    torch.testing.assert_close(logits[name][real], expected, rtol=0, atol=1e-9)
        for name in chosen:
            n = sum(position >= 0 for position in positions[name])
            kept = rng.randint(0, n)
            if rng.random() < 0.4:
                cache.keep([name], [kept])
                texts[name] = texts[name][: len(texts[name]) - n + kept]
                seen["keep none" if kept == 0 else "keep some"] += kept < n
        name = rng.choice("abcd")
        if name in texts and (not names or rng.random() < 0.3):
            cache.free(name)
            del texts[name]
            seen["free"] += 1
        source = rng.choice(sorted(texts)) if texts else None
        if source and name not in texts and rng.random() < 0.6:
            cache.fork(source, name)
            texts[name] = list(texts[source])
            seen["fork"] += 1
        for name in texts:
            assert cache.next_position(name) == len(texts[name])
    assert all(seen.values()), f"the plan never tried {[what for what, n in seen.items() if not n]}"


def random_tree(rng: random.Random, n: int) -> tuple[list[int], list[int]]:
    """Parents and depths of n drafts, several of them siblings."""
    parents = [rng.randrange(-1, i) for i in range(n)]
    depths: list[int] = []
    for parent in parents:
        depths.append(0 if parent < 0 else depths[parent] + 1)
    return parents, depths


@pytest.mark.parametrize("seed", range(6))
def test_a_tree_sees_its_own_path_and_only_the_kept_path_stays(pair: tuple[GPTlite, Cache], seed: int) -> None:
    model, cache = pair
    rng = random.Random(100 + seed)
    texts: dict[str, list[int]] = {name: [] for name in "abc"}
    rows, positions = {}, {}
    for n, name in enumerate(texts, 1):
        rows[name], positions[name] = chunk_of(rng, [], n, 0)
        texts[name] = list(rows[name])
    step(model, cache, rows, positions)
    for _ in range(5):
        # a and b draft trees of unequal size, c is a plain run of tokens in the same step
        rows, positions, parents = {}, {}, {}
        for name, n in (("a", MAX_CHUNK), ("b", rng.randint(2, MAX_CHUNK)), ("c", 2)):
            rows[name], positions[name] = chunk_of(rng, texts[name], n, 0)
            if name != "c":
                parents[name], depths = random_tree(rng, n)
                positions[name] = [len(texts[name]) + depth for depth in depths]
        logits = step(model, cache, rows, positions, parents)
        kept = []
        for name, row in rows.items():
            tree = parents.get(name, list(range(-1, len(row) - 1)))
            paths: list[list[int]] = []
            for i, parent in enumerate(tree):
                paths.append([*(paths[parent] if parent >= 0 else []), i])
                text = texts[name] + [row[j] for j in paths[i]]
                torch.testing.assert_close(logits[name][i], plain(model, text), rtol=0, atol=1e-9)
            path = rng.choice([*paths, []])
            kept.append(path)
            texts[name] += [row[j] for j in path]
        cache.keep(list(rows), kept)
        assert [cache.next_position(name) for name in texts] == [len(text) for text in texts.values()]


@pytest.mark.parametrize("side", ["left", "right"])
def test_padded_rows_of_a_batch_equal_the_rows_alone(pair: tuple[GPTlite, Cache], side: str) -> None:
    model, cache = pair
    rng = random.Random(3)
    texts = {name: chunk_of(rng, [], n, 0)[0] for name, n in (("a", 2), ("b", 5), ("c", 4))}
    S = 5
    rows, positions = {}, {}
    for name, text in texts.items():
        pad = [0] * (S - len(text))
        numbers = list(range(len(text)))
        rows[name] = pad + text if side == "left" else text + pad
        positions[name] = [-1] * len(pad) + numbers if side == "left" else numbers + [-1] * len(pad)
    logits = step(model, cache, rows, positions)
    for name, text in texts.items():
        real = [i for i, position in enumerate(positions[name]) if position >= 0]
        for n, i in enumerate(real, 1):
            torch.testing.assert_close(logits[name][i], plain(model, text[:n]), rtol=0, atol=1e-9)
    for name in texts:
        texts[name].append(7)
    logits = step(model, cache, {key: [7] for key in texts}, {name: [len(text) - 1] for name, text in texts.items()})
    for name, text in texts.items():
        torch.testing.assert_close(logits[name][0], plain(model, text), rtol=0, atol=1e-9)


@pytest.mark.parametrize("kind", ["dynamic", "static", "ring"])
def test_full_one_by_one_and_random_chunks_agree_in_fp32(kind: str) -> None:
    """The figure of the contract: 1e-5 in fp32, on logits of size one or so."""
    window, make = CACHES[kind]
    model = make_model(window, torch.float32)
    with torch.no_grad():
        for parameter in model.parameters():
            parameter.mul_(0.3)  # logits about one, as a trained model has, so that 1e-5 is a few units of fp32
    text = chunk_of(random.Random(5), [], 40, 0)[0]
    full = model(torch.tensor([text])).detach()[0]  # [n, V]
    rng = random.Random(6)
    for sizes in ([1] * 40, [MAX_CHUNK] * 6 + [4], [rng.randint(1, 4) for _ in range(10)]):
        cache, done = make(model, 1), 0
        for size in sizes:
            new = list(range(done, done + size))
            logits = step(model, cache, {"a": [text[i] for i in new]}, {"a": new})["a"]
            torch.testing.assert_close(logits, full[new], rtol=0, atol=1e-5)
            done += size


def test_a_refused_step_changes_nothing(pair: tuple[GPTlite, Cache]) -> None:
    model, cache = pair
    text = [3, 1, 4]
    step(model, cache, {"a": text}, {"a": [0, 1, 2]})
    refused = [
        (["a", "a"], [[3], [4]], None),  # the same sequence twice
        (["a", "b"], [[3]], None),  # a row without positions
        (["b", "a"], [[0], []], None),  # a row without tokens
        (["b", "a"], [[0], [3, 4]], [None, [1, -1]]),  # a parent that comes later
        (["b", "a"], [[0], [3, 4]], [None, [-1]]),  # a tree of another size
        (["b", "a"], [[0], [3.0]], None),  # positions that are no integers
        (["b", "a"], [[[0]], [[3]]], None),  # or have an axis too many
    ]
    if isinstance(cache, StaticCache):
        refused += [
            (["b", "a"], [[0], list(range(3, 60))], None),  # more than a line, or than the ring's chunk
            ([*"bcdef"], [[0]] * 5, None),  # more sequences than lines
        ]
    for keys, positions, parents in refused:
        with pytest.raises(ValueError):
            cache.prepare(keys, [torch.tensor(row) for row in positions], parents)
        assert cache.next_position("a") == 3
        assert cache.next_position("b") == 0
    for whole in (torch.zeros(2, 0, dtype=torch.int64), torch.zeros(2, dtype=torch.int64), torch.zeros(2, 1)):
        with pytest.raises(ValueError, match=r"no new tokens|must be integers"):
            cache.prepare(["a", "b"], whole)
        assert cache.next_position("a") == 3
    logits = step(model, cache, {"a": [5], "b": [2]}, {"a": [3], "b": [0]})
    torch.testing.assert_close(logits["a"][0], plain(model, [*text, 5]), rtol=0, atol=1e-9)
    torch.testing.assert_close(logits["b"][0], plain(model, [2]), rtol=0, atol=1e-9)


def test_sequences_that_are_not_there_are_named(pair: tuple[GPTlite, Cache]) -> None:
    model, cache = pair
    step(model, cache, {"a": [1, 2]}, {"a": [0, 1]})
    for call in (
        lambda: cache.free("ghost"),
        lambda: cache.fork("ghost", "b"),
        lambda: cache.export("ghost"),
        lambda: cache.keep(["ghost"], [0]),
    ):
        with pytest.raises(ValueError, match="ghost"):
            call()
    for kept in (3, -1, [2], [1, 0], [0, 0]):
        with pytest.raises(ValueError, match="cannot keep"):
            cache.keep(["a"], [kept])
    for sequences, kept in ((["a"], [1, 1]), (["a", "a"], [1, 1]), (["a"], [])):
        with pytest.raises(ValueError, match=r"one for each, none twice"):
            cache.keep(sequences, kept)
    for call in (lambda: cache.fork("a", "a"), lambda: cache.load("a", cache.export("a"))):
        with pytest.raises(ValueError, match="already holds"):
            call()
    assert cache.next_position("a") == 2


def test_a_forked_sibling_is_left_bit_identical(pair: tuple[GPTlite, Cache]) -> None:
    model, cache = pair
    step(model, cache, {"a": [1, 2, 3]}, {"a": [0, 1, 2]})
    cache.fork("a", "b")
    before = cache.export("a")
    step(model, cache, {"b": [9, 9]}, {"b": [3, 4]})
    cache.keep(["b"], [1])
    after = cache.export("a")
    assert before.keys() == after.keys()
    for name in before:
        assert torch.equal(before[name], after[name]), name


@pytest.mark.parametrize("target", ["dynamic", "static"])
def test_an_exported_sequence_goes_on_in_another_cache(pair: tuple[GPTlite, Cache], target: str) -> None:
    model, cache = pair
    text = [2, 7, 1, 8, 2]
    step(model, cache, {"x": [4], "a": text}, {"x": [0], "a": list(range(5))})
    state = cache.export("a")
    other = CACHES[target][1](model, 2)
    other.load("moved", state)
    assert other.next_position("moved") == 5
    logits = step(model, other, {"moved": [6]}, {"moved": [5]})["moved"][0]
    torch.testing.assert_close(logits, plain(model, [*text, 6]), rtol=0, atol=1e-9)
    holes, unplaced = {**state, "k_pos": state["k_pos"] - 1}, {**state, "k_pos": state["k_pos"].double()}
    without = {name: part for name, part in state.items() if name != "k_pos"}
    del state["v.1"]
    for broken, match in ((state, r"v\.1"), (holes, "no holes"), (unplaced, "integers"), (without, "no k_pos")):
        with pytest.raises(ValueError, match=match):
            other.load("broken", broken)
        assert other.next_position("broken") == 0


def test_what_lies_in_unused_memory_is_never_read() -> None:
    """Slots that were never written, or belonged to someone else, hold large values; nothing may see them."""
    model = make_model()
    cache = StaticCache(model, 2, CONTEXT, bucket=16)
    for store in (*cache.k, *cache.v):
        store.fill_(1e6)
    logits = step(model, cache, {"a": [1, 2], "b": [5, 0]}, {"a": [0, 1], "b": [0, -1]})
    torch.testing.assert_close(logits["a"][1], plain(model, [1, 2]), rtol=0, atol=1e-9)
    torch.testing.assert_close(logits["b"][0], plain(model, [5]), rtol=0, atol=1e-9)
    assert torch.isfinite(logits["b"]).all()


@pytest.mark.parametrize("kind", ["static", "static, as far as it is filled", "static, one bucket"])
def test_a_token_that_comes_late_does_not_see_what_follows_it(kind: str) -> None:
    """The last slot that is written need not hold the last position: nothing may be taken for visible by its slot."""
    model = make_model()
    cache = CACHES[kind][1](model, 2)
    step(model, cache, {"a": [1, 2], "b": [3, 4]}, {"a": [0, 1], "b": [0, 1]})
    # one token each: the last of its row so far, then one before it
    step(model, cache, {"a": [5], "b": [6]}, {"a": [3], "b": [2]})
    logits = step(model, cache, {"a": [7], "b": [8]}, {"a": [2], "b": [3]})
    torch.testing.assert_close(logits["a"][0], plain(model, [1, 2, 7]), rtol=0, atol=1e-9)
    torch.testing.assert_close(logits["b"][0], plain(model, [3, 4, 6, 8]), rtol=0, atol=1e-9)


@pytest.mark.parametrize("steps", [[1, 1, 1], [2, 1], [1, 2, 1, 1]])
def test_a_row_shorter_than_its_neighbours_sees_no_one_elses_length(steps: list[int]) -> None:
    """Rows of one step that have different lengths are read to the longest: the rest must stay masked."""
    model = make_model()
    cache = StaticCache(model, 2, CONTEXT)
    texts = {"a": [4, 9, 1, 3], "b": [2]}
    step(model, cache, texts, {"a": [0, 1, 2, 3], "b": [0]})
    for n in steps:
        new = {key: [(7 * len(text) + i) % VOCAB for i in range(n)] for key, text in texts.items()}
        logits = step(model, cache, new, {key: [len(texts[key]) + i for i in range(n)] for key in texts})
        texts = {key: text + new[key] for key, text in texts.items()}
        for key, text in texts.items():
            torch.testing.assert_close(logits[key][-1], plain(model, text), rtol=0, atol=1e-9)


@pytest.mark.parametrize("kind", ["static", "static, one bucket", "ring"])
def test_a_line_whose_last_sequence_was_nan_serves_the_next_one(kind: str) -> None:
    window, make = CACHES[kind]
    model = make_model(window)
    cache = make(model, 1)
    step(model, cache, {"a": [1, 2, 3, 4]}, {"a": [0, 1, 2, 3]})
    for store in (*cache.k, *cache.v):  # as after an overflow in 16 bits
        store[:, :, :4] = float("nan")
    cache.free("a")
    logits = step(model, cache, {"b": [5, 6]}, {"b": [0, 1]})["b"]
    torch.testing.assert_close(logits[1], plain(model, [5, 6]), rtol=0, atol=1e-9)


def test_an_all_zero_key_is_still_a_key(pair: tuple[GPTlite, Cache]) -> None:
    model, cache = pair
    with torch.no_grad():
        for block in model.blocks:
            for parameter in getattr(block.mha, "key_proj", getattr(block.mha, "latent_proj", None)).parameters():
                parameter.zero_()
    step(model, cache, {"a": [1, 2, 3]}, {"a": [0, 1, 2]})
    logits = step(model, cache, {"a": [4]}, {"a": [3]})["a"][0]
    torch.testing.assert_close(logits, plain(model, [1, 2, 3, 4]), rtol=0, atol=1e-9)


def test_a_window_of_w_is_w_keys_and_the_ring_holds_w_plus_c_minus_1() -> None:
    model = make_model(window=5)
    cache = RingCache(model, 1, chunk=3)
    assert cache.max_tokens == 7
    assert cache.k[0].shape[2] == 8  # and the spare slot
    text = list(range(20))
    for i in range(0, 18, 3):
        logits = step(model, cache, {"a": text[i : i + 3]}, {"a": [i, i + 1, i + 2]})["a"]
    # the last token sees itself and four more per layer: through two layers nothing before position 17 - 8 matters
    other = [(token + 1) % VOCAB for token in text[:9]] + text[9:18]
    torch.testing.assert_close(logits[-1], plain(model, other), rtol=0, atol=1e-9)
    with pytest.raises(AssertionError):  # but position 9 does
        torch.testing.assert_close(logits[-1], plain(model, [*other[:9], 22, *other[10:]]), rtol=0, atol=1e-9)
    assert cache.fits({"a": 3}) and not cache.fits({"a": 4})
    with pytest.raises(ValueError, match="4 new tokens"):
        cache.prepare(["a"], [torch.tensor([18, 19, 20, 21])])


@pytest.mark.parametrize("kind", ["static", "static, as far as it is filled", "ring", "prefix, blocks"])
def test_a_step_over_all_lines_is_the_same_step(kind: str) -> None:
    window, make = CACHES[kind]
    model = make_model(window)
    one, other = make(model, 5), make(model, 5)
    texts = {"a": [1, 2], "b": [3], "c": [4, 5, 6], "d": [7]}
    for cache in (one, other):
        step(model, cache, texts, {key: list(range(len(text))) for key, text in texts.items()})
        cache.free("b")  # a line in the middle has nobody
    for names in (["d", "a", "c"], ["c"], ["a", "c"], ["d", "c", "a"], ["a", "b", "c", "d", "e"]):
        tokens = torch.arange(3, 3 + len(names))
        positions = torch.tensor([[cache.next_position(key)] for key in names])
        (segment,) = one.prepare(names, positions)
        whole = one.whole(segment)
        assert whole is not None and whole.positions.shape == (5, 1) and whole.span == slice(0, 5)
        # what stands in the rows of nobody must not matter
        everyone = torch.full((5,), VOCAB - 1).index_copy(0, segment.lines, tokens)
        hidden = model.run(everyone, [whole], one)[segment.lines]
        expected = model.run(tokens, other.prepare(names, positions), other)
        torch.testing.assert_close(hidden, expected, rtol=0, atol=1e-9)


def test_a_cache_without_lines_has_no_step_over_all_of_them() -> None:
    model = make_model()
    for cache in (DynamicCache(model), PagedCache(model, 8, 4)):
        (segment,) = cache.prepare(["a"], torch.tensor([[0]]))
        assert cache.whole(segment) is None


@pytest.mark.parametrize("kind", ["static", "static, one bucket", "ring"])
def test_decoding_compiles_to_a_constant_number_of_graphs(kind: str) -> None:
    window, make = CACHES[kind]
    model = make_model(window)
    cache = make(model, 4)
    names = ["a", "b", "c"]
    texts = {name: [i, i + 1] for i, name in enumerate(names)}
    step(model, cache, texts, {key: [0, 1] for key in names})
    counter = torch._dynamo.testing.CompileCounter()
    torch._dynamo.reset()
    run = torch.compile(model.run, backend=counter, fullgraph=True)
    frames = []
    with torch.inference_mode():
        for n in range(2, 42):
            for name in names:
                texts[name].append((n * 5) % VOCAB)
            segments = cache.prepare(names, torch.full((3, 1), n))
            hidden = run(torch.tensor([texts[name][-1] for name in names]), segments, cache)
            frames.append(counter.frame_count)
        logits = model.head(hidden)
    # one graph for the first bucket, at most one more that is general in T
    assert frames[0] == 1
    assert frames[-1] <= 2
    assert len(set(frames[20:])) == 1
    for name, found in zip(names, logits, strict=True):
        torch.testing.assert_close(found, plain(model, texts[name]), rtol=0, atol=1e-9)
