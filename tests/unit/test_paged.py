"""The paged cache: its books balance, shared blocks stay what they are, and attention reads through the table."""

from itertools import pairwise

import pytest
import torch
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st
from test_cache_contract import VOCAB, make_model, plain, step
from torch.utils._python_dispatch import TorchDispatchMode

from gptlite import hardware
from gptlite.attention import attend, visible
from gptlite.cache.dense import StaticCache
from gptlite.cache.paged import PagedCache, bytes_per_token
from gptlite.cache.splits import PagedSegment, attend_splits, split_pages
from gptlite.config import GPTConfig
from gptlite.model import GPTlite

MODEL = make_model()
MODEL32 = make_model(dtype=torch.float32)
with torch.no_grad():
    for parameter in MODEL32.parameters():
        parameter.mul_(0.3)  # logits about one, so that 1e-5 is a few units of fp32
WINDOWED = make_model(window=5)


def extend(model, cache, rows):
    """A step that adds tokens to the ends of sequences; returns their logits [S, V]."""
    return step(
        model, cache, rows, {key: [cache.next_position(key) + i for i in range(len(row))] for key, row in rows.items()}
    )


def close(found, expected, model=MODEL):
    # 1e-5 in fp32 is the contract's figure, 1e-9 in fp64 leaves no room for anything but rounding
    torch.testing.assert_close(found, expected, rtol=0, atol=1e-9 if found.dtype == torch.float64 else 1e-5)


# -- the books ----------------------------------------------------------------------------------------------------


def test_blocks_are_taken_on_demand_and_the_lowest_free_one_first():
    cache = PagedCache(MODEL, 8, block_size=4)
    assert (cache.free_blocks, cache.longest, cache.blocks_for(0), cache.blocks_for(4), cache.blocks_for(5)) == (
        8, 32, 0, 1, 2,
    )  # fmt: skip
    extend(MODEL, cache, {"a": [1] * 4, "b": [2] * 5})
    assert (cache.table("a"), cache.table("b"), cache.free_blocks) == ([0], [1, 2], 5)
    extend(MODEL, cache, {"a": [1], "b": [2]})
    assert (cache.table("a"), cache.table("b")) == ([0, 3], [1, 2])
    cache.free("a")
    extend(MODEL, cache, {"b": [2] * 3})
    assert cache.table("b") == [1, 2, 0]
    cache.check()
    cache.free("b")
    assert cache.free_blocks == 8


def test_a_shared_block_is_copied_by_all_that_write_it_but_the_last():
    cache = PagedCache(MODEL, 8, block_size=4)
    extend(MODEL, cache, {"a": [1, 2, 3, 4, 5, 6]})
    for name in "bc":
        cache.fork("a", name)
    assert cache.pool.references[:2] == [3, 3] and cache.free_blocks == 6
    extend(MODEL, cache, {"a": [7], "b": [8], "c": [9]})
    # the full block stays shared; two of three copied the other one, and the last went on in it
    assert [cache.table(name) for name in "abc"] == [[0, 2], [0, 3], [0, 1]]
    assert cache.pool.references[:4] == [3, 1, 1, 1]
    cache.check()


def test_a_full_last_block_is_shared_without_a_copy():
    cache = PagedCache(MODEL, 4, block_size=3)
    extend(MODEL, cache, {"a": [1, 2, 3]})
    cache.fork("a", "b")
    assert cache.fits({"a": 1, "b": 1})
    extend(MODEL, cache, {"a": [4], "b": [5]})
    assert [cache.table(name) for name in "ab"] == [[0, 1], [0, 2]]


@pytest.mark.parametrize("prefix_caching", [False, True])
def test_a_step_that_does_not_fit_names_both_sizes_and_changes_nothing(prefix_caching):
    cache = PagedCache(MODEL, 3, block_size=4, prefix_caching=prefix_caching)
    extend(MODEL, cache, {"a": [1] * 6})
    cache.fork("a", "b")
    assert cache.fits({"a": 2}) and cache.fits({"a": 2, "b": 2}) and not cache.fits({"a": 3, "b": 2})
    before = cache.export("a"), cache.table("a"), cache.table("b")
    with pytest.raises(ValueError, match=r"needs 2 blocks of 4 tokens, 1 of 3 are free"):
        cache.prepare(["a", "c"], [torch.tensor([6]), torch.tensor([0])])
    with pytest.raises(ValueError, match="2 positions and 3 tokens"):
        cache.prepare(["a"], [torch.tensor([6, 7])], tokens=torch.tensor([1, 2, 3]))
    assert (cache.table("a"), cache.table("b")) == before[1:]
    assert all(torch.equal(part, before[0][name]) for name, part in cache.export("a").items())
    cache.check()
    assert cache.next_position("c") == 0
    with pytest.raises(ValueError, match="does not hold"):
        cache.table("c")
    close(extend(MODEL, cache, {"b": [5]})["b"][0], plain(MODEL, [1] * 6 + [5]))


def test_check_finds_every_kind_of_broken_book():
    def broken(change):
        cache = PagedCache(MODEL, 6, block_size=4, prefix_caching=True)
        extend(MODEL, cache, {"a": [1] * 6, "b": [2] * 3})
        cache.free("b")
        change(cache)
        with pytest.raises(AssertionError) as error:
            cache.check()
        return str(error.value)

    assert "block 0 has 2 references and 1 table entries" in broken(lambda c: c.pool.share([0]))
    assert "lost or counted twice" in broken(lambda c: c.pool._unused.pop())
    assert "keeps nothing" in broken(lambda c: c.pool._idle.update({c.pool._unused.pop(): None}))
    assert "6 tokens in 3 blocks" in broken(lambda c: c._rows["a"].table.extend(c.pool.take(1)))
    assert "two sequences write" in broken(lambda c: c._writers.append((c._writers[0][0], "z")))
    assert "no row" in broken(lambda c: c.positions.update(z=[]))


# -- whatever happens, the model's logits -------------------------------------------------------------------------

NAMES, ROWS = "abcd", st.lists(st.integers(0, 3), max_size=7)
OPS = st.one_of(
    st.tuples(st.just("step"), st.dictionaries(st.sampled_from(NAMES), ROWS, min_size=1)),
    st.tuples(st.just("keep"), st.sampled_from(NAMES), st.integers(0, 7)),
    st.tuples(st.just("fork"), st.sampled_from(NAMES), st.sampled_from(NAMES)),
    st.tuples(st.just("free"), st.sampled_from(NAMES)),
    st.tuples(st.just("begin"), st.sampled_from(NAMES), st.lists(st.integers(0, 1), min_size=1, max_size=12)),
    st.tuples(st.just("swap"), st.sampled_from(NAMES)),
)  # fmt: skip


class Player:
    """Plays operations on a cache and on plain lists of tokens, and compares."""

    def __init__(self, model, cache):
        self.model, self.cache, self.texts, self.last = model, cache, {}, {}
        self.counts = dict.fromkeys(("step", "keep", "fork", "free", "begin", "swap", "refused", "hit"), 0)

    def play(self, op):
        kind, *args = op
        others = {name: self.cache.export(name) for name in self.texts}
        touched = getattr(self, kind)(*args)
        if touched is None:
            return
        self.counts[kind] += 1
        for name, state in others.items():
            if name not in touched:  # siblings are bit-identical, whatever the others did
                after = self.cache.export(name)
                assert all(torch.equal(after[part], state[part]) for part in state)
        self.cache.check()
        assert {name: self.cache.next_position(name) for name in NAMES} == {
            name: len(self.texts.get(name, [])) for name in NAMES
        }

    def step(self, rows):
        room = {name: self.model.context_length - len(self.texts.get(name, [])) for name in rows}
        rows = {name: row[: room[name]] or [0] for name, row in rows.items() if room[name]}
        if not rows:
            return None
        if not self.cache.fits({name: len(row) for name, row in rows.items()}):
            with pytest.raises(ValueError, match="are free"):
                self.cache.prepare(list(rows), [torch.arange(len(row)) for row in rows.values()])
            self.counts["refused"] += 1
            return []
        logits = extend(self.model, self.cache, rows)
        for name, row in rows.items():
            self.texts[name] = self.texts.get(name, []) + row
            with torch.inference_mode():
                expected = self.model(torch.tensor([self.texts[name]]))[0, -len(row) :]
            close(logits[name], expected)
        self.last = {name: len(row) for name, row in rows.items()}
        return rows

    def keep(self, name, n):
        if n > self.last.get(name, -1):
            return None
        self.cache.keep([name], [n])
        self.texts[name] = self.texts[name][: len(self.texts[name]) - self.last[name] + n]
        self.last[name] = n
        return [name]

    def fork(self, name, new):
        if name not in self.texts or new in self.texts:
            return None
        self.cache.fork(name, new)
        self.texts[new] = list(self.texts[name])
        return [new]

    def free(self, name):
        if name not in self.texts:
            return None
        self.cache.free(name)
        del self.texts[name]
        self.last.pop(name, None)
        return [name]

    def begin(self, name, text):
        if name in self.texts or not self.cache.prefix_caching:
            return None
        matched = self.cache.match(torch.tensor(text))
        n = self.cache.begin(name, torch.tensor(text))
        assert n == min(matched, len(text) - 1)
        self.counts["hit"] += n > 0
        self.texts[name] = text[:n]
        self.step({name: text[n:]})
        return [name]

    def swap(self, name):
        if name not in self.texts:
            return None
        state = self.cache.export(name)
        self.cache.free(name)
        if self.cache.blocks_for(len(self.texts[name])) > self.cache.free_blocks:  # it had shared blocks
            with pytest.raises(ValueError, match="are free"):
                self.cache.load(name, state)
            del self.texts[name]
            self.last.pop(name, None)
            return [name]
        self.cache.load(name, state)
        self.last.pop(name, None)
        after = self.cache.export(name)
        assert all(torch.equal(after[part], state[part]) for part in state)
        return [name]


TOTAL = dict.fromkeys(("step", "keep", "fork", "free", "begin", "swap", "refused", "hit", "evicted"), 0)


@pytest.mark.parametrize("case", ["fp64", "fp32", "window"])
# the same plans each time, since the next test asks what they tried
@settings(max_examples=120, deadline=None, derandomize=True, suppress_health_check=[HealthCheck.too_slow])
@given(
    ops=st.lists(OPS, min_size=5, max_size=25),
    n_blocks=st.integers(3, 14),
    block_size=st.integers(1, 4),
    prefix_caching=st.booleans(),
    pages=st.integers(1, 3),
)
def test_any_plan_leaks_nothing_and_equals_the_model_without_a_cache(
    case, ops, n_blocks, block_size, prefix_caching, pages
):
    model = {"fp64": MODEL, "fp32": MODEL32, "window": WINDOWED}[case]
    player = Player(model, PagedCache(model, n_blocks, block_size, prefix_caching, pages))
    for op in ops:
        player.play(op)
    for name in list(player.texts):
        player.play(("free", name))
    assert player.cache.free_blocks == n_blocks
    player.cache.check()
    for kind, n in player.counts.items():
        TOTAL[kind] += n
    TOTAL["evicted"] += player.cache.pool.evicted


@pytest.mark.slow  # it counts what all cases of another test did
def test_the_plans_tried_everything():
    assert all(TOTAL.values()), TOTAL


def test_a_path_kept_after_a_fork_leaves_the_sibling_as_it_was():
    """The step's tree lies in blocks that the fork shares: closing its gaps must not reach the other sequence."""
    cache = PagedCache(MODEL, 8, block_size=4)
    extend(MODEL, cache, {"a": [1, 2, 3]})
    step(MODEL, cache, {"a": [4, 5, 6]}, {"a": [3, 3, 4]}, {"a": [-1, -1, 1]})
    cache.fork("a", "b")
    before = cache.export("b")
    cache.keep(["a"], [[1, 2]])
    cache.check()
    assert all(torch.equal(part, before[name]) for name, part in cache.export("b").items())
    close(extend(MODEL, cache, {"a": [7]})["a"][0], plain(MODEL, [1, 2, 3, 5, 6, 7]))


def test_keeping_a_path_without_room_for_its_copies_is_refused_whole():
    cache = PagedCache(MODEL, 2, block_size=4)
    extend(MODEL, cache, {"a": [1, 2, 3]})
    step(MODEL, cache, {"a": [4, 5, 6]}, {"a": [3, 3, 4]}, {"a": [-1, -1, 1]})
    cache.fork("a", "b")
    with pytest.raises(ValueError, match="may copy 2 shared blocks, 0 are free"):
        cache.keep(["a"], [[1, 2]])
    assert cache.table("a") == cache.table("b") == [0, 1]
    cache.free("b")
    cache.keep(["a"], [[1, 2]])
    close(extend(MODEL, cache, {"a": [7]})["a"][0], plain(MODEL, [1, 2, 3, 5, 6, 7]))


# -- sharing by content -------------------------------------------------------------------------------------------


def shared_pool(**options):
    return PagedCache(MODEL, options.pop("n_blocks", 12), block_size=4, prefix_caching=True, **options)


TEXT = [3, 1, 4, 1, 5, 9, 2, 6, 5, 3]


def test_a_later_prompt_begins_with_the_full_blocks_of_an_earlier_one():
    cache = shared_pool()
    extend(MODEL, cache, {"a": TEXT})
    # the last block is not full, and the full ones are final only when the next step begins
    assert cache.match(torch.tensor(TEXT)) == 0
    extend(MODEL, cache, {"a": [8]})
    assert cache.match(torch.tensor(TEXT)) == 8
    assert cache.begin("b", torch.tensor(TEXT)) == 8
    assert cache.table("b") == cache.table("a")[:2]
    close(extend(MODEL, cache, {"b": TEXT[8:]})["b"][-1], plain(MODEL, TEXT))
    cache.check()


def test_what_a_freed_sequence_leaves_serves_the_next_and_counts_as_free():
    cache = shared_pool()
    extend(MODEL, cache, {"a": TEXT})
    cache.free("a")
    assert cache.free_blocks == 12 and len(cache.pool.idle) == 2
    assert cache.begin("b", torch.tensor([*TEXT[:6], 0, 0])) == 4
    assert cache.free_blocks == 11


def test_a_fully_cached_prompt_still_reads_its_last_token_and_others_keep_theirs():
    cache = shared_pool()
    extend(MODEL, cache, {"a": TEXT[:8]})
    extend(MODEL, cache, {"a": [0]})
    before = cache.export("a")
    assert cache.match(torch.tensor(TEXT[:8])) == 8
    assert cache.begin("b", torch.tensor(TEXT[:8])) == 7
    assert cache.table("b") == cache.table("a")[:2]
    logits = extend(MODEL, cache, {"b": [TEXT[7]]})["b"]
    close(logits[0], plain(MODEL, TEXT[:8]))
    assert cache.table("b")[1] != cache.table("a")[1]  # it wrote into a copy
    assert all(torch.equal(part, before[name]) for name, part in cache.export("a").items())
    cache.check()
    assert cache.begin("one", torch.tensor([3])) == 0


def test_a_block_that_is_written_again_is_no_longer_found_under_its_old_content():
    cache = shared_pool()
    extend(MODEL, cache, {"a": TEXT[:8]})
    cache.free("a")
    assert cache.begin("b", torch.tensor(TEXT[:8])) == 7
    close(extend(MODEL, cache, {"b": [0]})["b"][0], plain(MODEL, [*TEXT[:7], 0]))  # not the prompt's last token
    assert cache.match(torch.tensor(TEXT[:8])) == 4
    cache.free("b")
    assert cache.match(torch.tensor([*TEXT[:7], 0])) == 8
    cache.check()


def test_two_identical_prompts_in_one_batch():
    cache = shared_pool()
    logits = extend(MODEL, cache, {"a": TEXT, "b": TEXT})
    close(logits["b"], logits["a"])
    extend(MODEL, cache, {"a": [1], "b": [2]})
    assert set(cache.table("a")).isdisjoint(cache.table("b"))
    assert cache.begin("c", torch.tensor(TEXT)) == 8
    for name in "abc":
        cache.free(name)
    assert cache.free_blocks == 12 and len(cache.pool.idle) == 2
    cache.check()


def test_a_hit_compares_tokens_parent_and_salt_not_only_the_hash():
    cache = shared_pool()
    cache.pool.index.hash_block = lambda parent, block: block[:8]  # knows only the first token of a block
    extend(MODEL, cache, {"a": [1, 2, 3, 4, 5, 6, 7, 8, 1, 2, 3, 4]})
    cache.free("a")
    for text in ([1, 2, 3, 9], [5, 6, 7, 8], [1, 9, 3, 4, 5, 6, 7, 8]):
        assert cache.match(torch.tensor(text)) == 0
    assert cache.match(torch.tensor([1, 2, 3, 4, 5, 6, 7, 8])) == 8
    # the third block's name was taken by the first, which has another parent
    assert cache.match(torch.tensor([1, 2, 3, 4, 5, 6, 7, 8, 1, 2, 3, 4])) == 8
    assert cache.match(torch.tensor([1, 2, 3, 4]), salt="tenant") == 0
    cache.check()


def test_what_follows_a_collision_is_not_shared():
    """Another text's block has the name already, so what comes after it would be found behind that text."""
    cache = shared_pool()
    cache.pool.index.hash_block = lambda parent, block: block[:8]
    for name, text in (("a", [1, 2, 3, 4]), ("b", [1, 9, 9, 9, 6, 7, 8, 5])):
        extend(MODEL, cache, {name: text})
        cache.free(name)
    assert cache.match(torch.tensor([1, 2, 3, 4, 6, 7, 8, 5])) == 4
    cache.check()


def test_salted_prompts_share_among_themselves_alone():
    cache = shared_pool()
    assert cache.begin("a", torch.tensor(TEXT), salt="x") == 0
    extend(MODEL, cache, {"a": TEXT})
    cache.free("a")
    assert [cache.match(torch.tensor(TEXT), salt) for salt in ("", "x", "y")] == [0, 8, 0]


def test_a_step_that_was_never_run_shares_nothing():
    cache = shared_pool()
    cache.prepare(["a"], [torch.arange(8)], tokens=torch.tensor(TEXT[:8]))
    cache.free("a")
    assert cache.match(torch.tensor(TEXT)) == 0 and not cache.pool.idle
    cache.prepare(["b"], [torch.arange(8)], tokens=torch.tensor(TEXT[:8]))
    extend(MODEL, cache, {"b": [1]})  # on top of blocks that were never written
    cache.free("b")
    assert cache.match(torch.tensor(TEXT)) == 0
    cache.check()


def test_what_the_cache_was_not_told_is_not_shared():
    cache = shared_pool()
    with torch.inference_mode():
        MODEL.run(torch.tensor(TEXT[:8]), cache.prepare(["a"], [torch.arange(8)]), cache)
    extend(MODEL, cache, {"a": TEXT[8:]})
    cache.fork("a", "b")
    state = cache.export("a")
    for name in "ab":
        cache.free(name)
    cache.load("c", state)
    extend(MODEL, cache, {"c": [1] * 6})
    cache.free("c")
    assert not cache.pool.idle and len(cache.pool.index) == 0


def test_tokens_at_other_positions_than_their_own_are_not_shared():
    cache = shared_pool()
    step(MODEL, cache, {"a": TEXT[:8]}, {"a": list(range(2, 10))})  # a text whose beginning was left out
    step(MODEL, cache, {"b": TEXT[:4]}, {"b": [0, 1, 1, 2]}, {"b": [-1, 0, 0, 1]})  # a tree that nobody cut
    for name in "ab":
        cache.free(name)
    assert cache.match(torch.tensor(TEXT[:8])) == 0 and not cache.pool.idle


def test_rejected_drafts_are_not_shared_and_a_tree_only_as_its_kept_path():
    cache = shared_pool()
    extend(MODEL, cache, {"a": TEXT[:3]})
    step(MODEL, cache, {"a": [7, 1, 5, 6, 2]}, {"a": [3, 3, 4, 4, 5]}, {"a": [-1, -1, 1, 1, 2]})
    cache.fork("a", "b")
    assert len(cache.pool.index) == 0  # any of the step's tokens may still be taken back
    cache.keep(["a"], [[1, 2]])
    extend(MODEL, cache, {"a": [9, 2]})
    cache.free("a")
    assert cache.match(torch.tensor([3, 1, 4, 7])) == 0
    assert cache.match(torch.tensor([3, 1, 4, 1, 5, 9, 2])) == 4


def test_the_block_that_was_let_go_first_is_evicted_first_and_never_one_in_use():
    cache = shared_pool(n_blocks=5)
    extend(MODEL, cache, {"a": [1] * 8})
    cache.free("a")
    extend(MODEL, cache, {"b": [2] * 8})
    cache.free("b")
    assert cache.pool.idle == [1, 0, 3, 2]  # of each text the end first
    assert cache.begin("c", torch.tensor([1] * 5)) == 4
    extend(MODEL, cache, {"c": [1], "d": [5] * 8})
    # the unused block, then the oldest idle one, then the next: never block 0, which c holds
    assert cache.match(torch.tensor([1] * 8)) == 4
    assert cache.match(torch.tensor([2] * 8)) == 4
    assert cache.pool.evicted == 2
    cache.check()
    close(extend(MODEL, cache, {"c": [7]})["c"][0], plain(MODEL, [1] * 5 + [7]))


def test_without_prefix_caching_nothing_begins():
    cache = PagedCache(MODEL, 4)
    extend(MODEL, cache, {"a": [1] * 16})
    extend(MODEL, cache, {"a": [1]})
    assert (cache.match(torch.tensor([1] * 16)), cache.begin("b", torch.tensor([1] * 17))) == (0, 0)
    assert cache.next_position("b") == 0
    cache.free("a")
    assert not cache.pool.idle


# -- attention through the table ----------------------------------------------------------------------------------


class Largest(TorchDispatchMode):
    """Sees every tensor that any operation makes, but for those that are the pool itself."""

    def __init__(self, cache):
        super().__init__()
        self.pools = {pool.untyped_storage().data_ptr() for pool in (*cache.k, *cache.v)}
        self.numel = 0

    def __torch_dispatch__(self, func, types, args=(), kwargs=None):
        out = func(*args, **(kwargs or {}))
        for part in out if isinstance(out, tuple | list) else [out]:
            if isinstance(part, torch.Tensor) and part.untyped_storage().data_ptr() not in self.pools:
                self.numel = max(self.numel, part.numel())
        return out


def long_model():
    torch.manual_seed(2)
    return GPTlite(GPTConfig(VOCAB, 512, n_layers=2, d_model=16, n_heads=4, d_head=8, n_kv_heads=2)).eval().double()


@torch.inference_mode()
def largest_in_a_step(model, cache, names):
    """Numbers in the largest tensor of one decode step's layers."""
    segments = cache.prepare(names, torch.tensor([[cache.next_position(name)] for name in names]))
    with Largest(cache) as spy:
        model.run(torch.ones(len(names), dtype=torch.int64), segments, cache)
    return spy.numel


def test_a_spy_sees_no_copy_of_a_whole_sequence():
    model, n = long_model(), 480
    whole = n * 2 * 8  # one layer's keys of one sequence

    def filled(pages):
        cache = PagedCache(model, 200, block_size=8, pages_per_split=pages)
        for i in range(0, n, 8):  # turn about, so that no sequence's blocks are neighbours
            extend(model, cache, {name: [i % VOCAB] * 8 for name in "ab"})
        assert all(b - a > 1 for a, b in pairwise(cache.table("a")))
        return cache

    split = 2 * 4 * 8 * 2 * 8  # 2 rows, 4 pages of 8 tokens, 2 heads of 8
    assert largest_in_a_step(model, filled(4), ["a", "b"]) == split
    assert split < whole / 3
    assert largest_in_a_step(model, filled(64), ["a", "b"]) >= 2 * whole  # the spy does see a gathered copy


def test_neighbouring_blocks_are_read_where_they_lie():
    model = long_model()
    cache = PagedCache(model, 70, block_size=8, pages_per_split=64)
    extend(model, cache, {"a": [1] * 480})
    (segment,) = cache.prepare(["a"], torch.tensor([[480]]))
    assert segment.splits[0].blocks == slice(0, 61)
    with torch.inference_mode(), Largest(cache) as spy:
        model.run(torch.tensor([1]), [segment], cache)
    assert spy.numel < 480 * 2 * 8


@settings(max_examples=60, deadline=None)
@given(
    lengths=st.lists(st.integers(0, 19), min_size=1, max_size=4),
    S=st.integers(1, 3),
    block_size=st.integers(1, 5),
    pages=st.integers(1, 4),
    window=st.none() | st.integers(1, 8),
    sinks=st.integers(0, 2),
    wide=st.booleans(),
    seed=st.integers(0, 99),
)
def test_split_attention_equals_attention_over_all_keys(lengths, S, block_size, pages, window, sinks, wide, seed):
    """Against `attend` over the gathered keys, in fp64; queries that see nothing give zeros in both."""
    generator = torch.Generator().manual_seed(seed)
    G, D, n_blocks = 2, 4, 40
    k = torch.randn(n_blocks + 1, block_size, G, D, generator=generator, dtype=torch.float64)
    v = torch.randn(n_blocks + 1, block_size, G, D + wide, generator=generator, dtype=torch.float64)
    order = torch.randperm(n_blocks, generator=generator).tolist()
    tables = []
    for n in lengths:
        n_pages = min(-(-n // block_size), len(order))
        tables.append([order.pop() for _ in range(n_pages)])
    counts = torch.tensor([min(n, len(table) * block_size) for n, table in zip(lengths, tables, strict=True)])
    T = max(1, *map(len, tables)) * block_size
    k_pos = torch.arange(T).expand(len(lengths), T).masked_fill(torch.arange(T) >= counts[:, None], -1)
    q_pos = counts[:, None] - 1 - torch.arange(S).flip(0)  # some before the text begins, these see nothing
    q = torch.randn(len(lengths), 4, S, D, generator=generator, dtype=torch.float64)
    segment = PagedSegment(None, q_pos, k_pos=k_pos, splits=split_pages(tables, n_blocks, block_size, pages, q.device))
    found = attend_splits(q, k, v, segment.seen(window, sinks, q.dtype), scale=0.5)
    padded = torch.tensor([table + [n_blocks] * (T // block_size - len(table)) for table in tables])
    keys, values = (pool[padded].flatten(1, 2).transpose(1, 2) for pool in (k, v))
    expected = attend(q, keys, values, visible(q_pos, k_pos, window, sinks), 0.5)
    torch.testing.assert_close(found, expected, rtol=0, atol=1e-12)  # 19 keys in fp64


def test_pages_before_every_window_are_not_read():
    model = make_model(window=5)
    cache = PagedCache(model, 30, block_size=4, pages_per_split=1)
    extend(model, cache, {"a": [1] * 40})
    (segment,) = cache.prepare(["a"], torch.tensor([[40]]))
    # positions 36 to 40 are seen, in pages 9 and 10; the first page is always read
    assert [split.begin for split, _ in segment.seen(5, 0, torch.float64)] == [0, 36, 40]


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16])
def test_half_precision_is_as_near_as_the_dense_cache(dtype):
    model = make_model(dtype=torch.float32)
    with torch.no_grad():
        for parameter in model.parameters():
            parameter.mul_(0.3)
    model = model.to(dtype)
    rows = {"a": TEXT * 2, "b": TEXT}
    paged = extend(model, PagedCache(model, 20, 4, pages_per_split=2), rows)
    dense = extend(model, StaticCache(model, 2, 48, bucket=4), rows)
    for name in rows:  # logits of size one: three units of the last place of each format
        torch.testing.assert_close(paged[name], dense[name], rtol=0, atol=3 * torch.finfo(dtype).eps)


@pytest.mark.parametrize("pages", [1, 2])
@pytest.mark.parametrize("left", [1e6, float("inf"), float("nan")])
def test_what_lies_in_unused_blocks_is_never_read(left, pages):
    """Whatever earlier requests left: a mask alone would let what is not finite through, 0 * inf is NaN."""
    cache = PagedCache(MODEL, 8, block_size=4, pages_per_split=pages)
    for store in (*cache.k, *cache.v):
        store.fill_(left)
    long = [1, 2, 3, 4, 5, 6]
    logits = step(MODEL, cache, {"a": long, "b": [5, 0]}, {"a": range(6), "b": [0, -1]})
    close(logits["a"][5], plain(MODEL, long))
    close(logits["b"][0], plain(MODEL, [5]))
    assert torch.isfinite(logits["b"]).all()
    both = extend(MODEL, cache, {"a": [7], "b": [8]})  # in one segment, where the shorter table is filled up
    close(both["a"][0], plain(MODEL, [*long, 7]))
    close(both["b"][0], plain(MODEL, [5, 8]))
    cache.load("c", cache.export("a"))
    close(extend(MODEL, cache, {"c": [9]})["c"][0], plain(MODEL, [*long, 7, 9]))


def test_a_request_that_overflows_spoils_no_other():
    cache = PagedCache(MODEL, 4, block_size=4)
    extend(MODEL, cache, {"bad": [1, 2, 3, 4, 5], "good": [6]})
    for store in (*cache.k, *cache.v):
        store[cache.table("bad")] = float("inf")
    both = extend(MODEL, cache, {"bad": [1], "good": [7]})
    assert not torch.isfinite(both["bad"]).all()
    close(both["good"][0], plain(MODEL, [6, 7]))
    cache.free("bad")
    close(extend(MODEL, cache, {"next": [3, 4]})["next"][1], plain(MODEL, [3, 4]))


def test_a_sequence_of_holes_alone_takes_no_block():
    cache = PagedCache(MODEL, 2, block_size=4)
    logits = step(MODEL, cache, {"a": [1, 2], "b": [0, 0]}, {"a": [0, 1], "b": [-1, -1]})
    assert cache.table("b") == [] and torch.isfinite(logits["b"]).all()
    close(logits["a"][1], plain(MODEL, [1, 2]))


def test_a_variant_that_mixes_in_its_own_way_is_asked_to():
    model = make_model()
    seen = []
    own = type(model.blocks[0].mha)

    class Variant(own):
        def mix(self, q, k, v, q_pos, k_pos, mask):
            seen.append(k.shape)
            return super().mix(q, k, v, q_pos, k_pos, mask)

    for block in model.blocks:
        block.mha.__class__ = Variant
    cache = PagedCache(model, 20, block_size=4, pages_per_split=1)
    close(extend(model, cache, {"a": TEXT})["a"][-1], plain(MODEL, TEXT))
    assert (1, 3, 12, 4) in seen


# -- size and moves -----------------------------------------------------------------------------------------------


def test_a_pool_of_a_size_in_bytes_or_of_a_fraction_of_free_memory(monkeypatch):
    # 2 layers, 3 heads of 4, keys and values in fp64
    assert bytes_per_token(MODEL) == 2 * 3 * (4 + 4) * 8
    cache = PagedCache.sized(MODEL, memory_bytes=100_000, block_size=8, prefix_caching=True)
    assert cache.n_blocks == 100_000 // (8 * 384) - 1 and cache.prefix_caching
    assert cache.nbytes <= 100_000 < cache.nbytes + 8 * 384
    monkeypatch.setattr(hardware, "free_bytes", lambda device: 50_000)
    assert PagedCache.sized(MODEL, fraction=0.5).n_blocks == 25_000 // (16 * 384) - 1
    with pytest.raises(ValueError, match="10000 bytes are too few"):
        PagedCache.sized(MODEL, memory_bytes=10_000)


@pytest.mark.parametrize(
    ("options", "message"),
    [
        ({"n_blocks": 0}, "n_blocks is 0"),
        ({"block_size": 0}, "block_size is 0"),
        ({"pages_per_split": 0}, "pages_per_split is 0"),
    ],
)
def test_numbers_below_one_are_refused(options, message):
    with pytest.raises(ValueError, match=message):
        PagedCache(MODEL, **{"n_blocks": 4} | options)


def test_sized_refuses_what_is_no_fraction():
    for fraction in (0, 1.1, -1):
        with pytest.raises(ValueError, match="above 0 and at most 1"):
            PagedCache.sized(MODEL, fraction=fraction)
    with pytest.raises(ValueError, match="block_size is 0"):
        PagedCache.sized(MODEL, block_size=0)


def test_a_swapped_sequence_comes_back_bit_for_bit_into_other_blocks():
    cache = PagedCache(MODEL, 6, block_size=4)
    extend(MODEL, cache, {"x": [1] * 3, "a": TEXT})
    state = cache.export("a")
    assert all(part.device.type == "cpu" and part.is_contiguous() for part in state.values())
    for name in "ax":
        cache.free(name)
    cache.load("a", state)
    assert cache.table("a") == [0, 1, 2]
    assert all(torch.equal(part, state[name]) for name, part in cache.export("a").items())
    close(extend(MODEL, cache, {"a": [7]})["a"][0], plain(MODEL, [*TEXT, 7]))
    cache.load("b", state)
    with pytest.raises(ValueError, match="'c' needs 3 blocks, 0 of 6 are free"):
        cache.load("c", state)
    cache.check()
