"""The names of blocks, and the stores that find keys and values by the text before them."""

import hashlib
import random
import struct

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from gptlite.cache.block_store import BlockStore
from gptlite.cache.prefix import PrefixIndex, block_keys
from gptlite.cache.radix import RadixStore

TEXT = st.lists(st.integers(0, 2), min_size=1, max_size=14)  # few tokens, so that texts share beginnings


def state_of(text):
    """Made-up keys and values that depend, like real ones, on all the text up to each token."""
    values = [hash(tuple(text[: i + 1])) % 10_007 for i in range(len(text))]
    return {"k.0": torch.tensor(values, dtype=torch.float64).reshape(1, -1, 1)}


def found(store, text, salt=""):
    """Tokens that the store has of a text, after checking that their keys are the text's own."""
    hit = store.acquire(text, salt)
    if hit.n_tokens:
        whole = torch.cat([part["k.0"] for part in hit.parts], dim=1)
        assert torch.equal(whole, state_of(text)["k.0"][:, : hit.n_tokens])
    store.release(hit)
    return hit.n_tokens


def common(a, b):
    """Tokens that two texts share from the first."""
    return next((i for i, (x, y) in enumerate(zip(a, b, strict=False)) if x != y), min(len(a), len(b)))


# -- names --------------------------------------------------------------------------------------------------------


def test_a_name_is_the_hash_of_the_tokens_and_the_name_before():
    def named(parent, *tokens):
        return hashlib.blake2b(parent + struct.pack(f"<{len(tokens)}q", *tokens), digest_size=16).digest()

    first = named(b"root:", 5, 6)
    assert block_keys([5, 6, 7, 8, 9], 2) == [first, named(first, 7, 8)]
    assert block_keys([5, 6, 7, 8], 2, salt="ann")[0] == named(b"root:ann", 5, 6)
    assert block_keys([7, 8], 2, parent=first) == block_keys([5, 6, 7, 8], 2)[1:]
    assert block_keys(torch.tensor([5, 6, 7, 8]), 2) == block_keys([5, 6, 7, 8], 2)
    assert block_keys([1], 2) == block_keys([], 2) == []
    with pytest.raises(ValueError, match="block_size is 0"):
        block_keys([1], 0)


@pytest.mark.parametrize("place", range(12))
def test_one_changed_token_renames_its_block_and_all_that_follow(place):
    text = list(range(12))
    other = [*text]
    other[place] += 100
    same = [a == b for a, b in zip(block_keys(text, 3), block_keys(other, 3), strict=True)]
    assert same == [True] * (place // 3) + [False] * (4 - place // 3)


def test_the_same_tokens_after_another_text_are_another_block():
    assert not set(block_keys([1, 2, 7, 7], 2)) & set(block_keys([3, 4, 7, 7], 2))
    assert not set(block_keys([1, 2], 2, "ann")) & set(block_keys([1, 2], 2, "bob"))


# -- the index ----------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("hash_block", [lambda parent, block: b"same", lambda parent, block: block[:1]])
@settings(deadline=None)
@given(texts=st.lists(TEXT, max_size=8), asked=TEXT)
def test_a_hash_that_collides_gives_no_wrong_block(hash_block, texts, asked):
    index = PrefixIndex(2, hash_block)
    for text in texts:
        for i, (key, parent, block) in enumerate(index.chain(text)):
            before = tuple(text[: 2 * i + 2])
            if not index.insert(key, parent, block, before) and index.find(key, parent, block) != before:
                break
    for i, payload in enumerate(index.match(asked)):
        assert payload == tuple(asked[: 2 * i + 2])


def test_the_index_compares_the_parent_too():
    index = PrefixIndex(2)
    assert index.insert(b"name", b"parent", [1, 2], "block")
    assert index.find(b"name", b"parent", [1, 2]) == "block"
    assert index.find(b"name", b"other", [1, 2]) is None
    assert index.find(b"name", b"parent", [1, 3]) is None
    assert not index.insert(b"name", b"other", [1, 2], "intruder")
    assert index.remove(b"name") == "block" and len(index) == 0
    with pytest.raises(ValueError, match="no block 6e616d65"):
        index.remove(b"name")


# -- both stores --------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("size", [1, 2, 3])
@settings(deadline=None)
@given(texts=st.lists(TEXT, max_size=8), asked=TEXT)
def test_blocks_are_found_as_far_as_whole_blocks_agree(size, texts, asked):
    store = BlockStore(1000, size)
    for text in texts:
        store.insert(text, state_of(text))
    expected = max((common(asked, text) // size * size for text in texts), default=0)
    assert found(store, asked) == store.match(asked) == expected
    blocks = {tuple(text[: i + size]) for text in texts for i in range(0, len(text) - size + 1, size)}
    assert len(store) == len(blocks)  # each text up to a block's end is kept once


@settings(deadline=None)
@given(texts=st.lists(TEXT, max_size=8), asked=TEXT)
def test_the_tree_finds_the_longest_shared_beginning_to_the_token(texts, asked):
    store = RadixStore(1000)
    for text in texts:
        store.insert(text, state_of(text))
    expected = max((common(asked, text) for text in texts), default=0)
    assert store.match(asked) == found(store, asked) == store.match(asked) == expected
    assert store.total == len({tuple(text[: i + 1]) for text in texts for i in range(len(text))})


def check_blocks(store, hits):
    held = [block for hit in hits for block in hit.held]
    blocks = store.index.payloads()
    assert len(blocks) <= store.capacity
    assert sum(block.refs for block in blocks) == sum(block in blocks for block in held)
    assert {block.key for block in blocks if not block.refs} == set(store._idle)
    keys = {block.key for block in blocks}
    for block in blocks:  # nothing is there whose parent has gone
        assert block.parent in keys or block.parent.startswith(b"root:")


def check_tree(store, hits):
    nodes = list(store.nodes())
    assert store.evictable == sum(len(node) for node in nodes if not node.locks)
    assert store.protected == sum(len(node) for node in nodes if node.locks)
    assert store.evictable + store.protected == store.total <= store.capacity
    below = {id(node): 0 for node in nodes}
    for hit in hits:
        for node in hit.held:
            while node.parent is not None:
                assert id(node) in below  # a node that is held is in the tree
                below[id(node)] += 1
                node = node.parent
    for node in nodes:
        assert node.locks == below[id(node)]
        assert len(node) and all(part.shape[1] == len(node) for part in node.state.values())
        assert all(first == child.tokens[0] and child.parent is node for first, child in node.children.items())


@pytest.mark.parametrize(
    ("make", "check"), [(lambda: BlockStore(6, 2), check_blocks), (lambda: RadixStore(12), check_tree)]
)
@settings(max_examples=200, deadline=None)
@given(
    plan=st.lists(
        st.tuples(st.sampled_from(["insert", "hold", "release"]), TEXT, st.sampled_from(["", "x"])), max_size=25
    )
)
def test_whatever_is_inserted_held_and_evicted_what_is_found_is_right(make, check, plan):
    store, hits = make(), []
    for what, text, salt in plan:
        if what == "insert":
            new = store.insert(text, state_of(text), salt)
            assert 0 <= new <= len(text)
        elif what == "hold":
            hits.append(store.acquire(text, salt))
        elif hits:
            store.release(hits.pop(len(text) % len(hits)))
        check(store, hits)
        for hit in hits:  # what is held is still there
            n = sum(part["k.0"].shape[1] for part in hit.parts)
            assert n == hit.n_tokens
        found(store, text, salt)
        check(store, hits)
    counts = store.counts
    held = len(store) * 2 if isinstance(store, BlockStore) else store.total
    assert counts["stored"] - counts["evicted"] == held
    for hit in hits:
        store.release(hit)
    check(store, [])


@pytest.mark.parametrize("store", [BlockStore(100, 2), RadixStore(100)])
def test_one_salt_does_not_see_what_another_has_left(store):
    text = [1, 2, 3, 4]
    store.insert(text, state_of(text), "ann")
    assert [store.match(text, salt) for salt in ("ann", "bob", "")] == [4, 0, 0]


@pytest.mark.parametrize("store", [BlockStore(100, 2), RadixStore(100)])
def test_what_is_stored_is_a_copy(store):
    text, state = [1, 2, 3, 4], state_of([1, 2, 3, 4])
    store.insert(text, state)
    state["k.0"].zero_()
    assert found(store, text) == 4


def test_a_part_of_a_stored_text_does_not_keep_all_of_its_memory():
    for store in (BlockStore(1, 2), RadixStore(2)):
        text = [1, 2] * 50
        store.insert(text, state_of(text))
        hit = store.acquire(text)
        assert hit.n_tokens == 2
        assert all(part["k.0"].untyped_storage().nbytes() == 2 * 8 for part in hit.parts)
    tree = RadixStore(1000)
    tree.insert(list(range(100)), state_of(list(range(100))))
    tree.insert([0, 1, 777], state_of([0, 1, 777]))  # splits
    assert sorted(node.state["k.0"].untyped_storage().nbytes() // 8 for node in tree.nodes()) == [1, 2, 98]


# -- by hand ------------------------------------------------------------------------------------------------------


def test_the_least_recently_used_block_goes_and_never_before_its_child():
    store = BlockStore(4, 2)
    a, b, c = [1, 1, 2, 2], [1, 1, 3, 3], [4, 4, 5, 5]
    for text in (a, b):
        store.insert(text, state_of(text))  # three blocks: the first is shared
    assert len(store) == 3
    found(store, a)  # now b's second block is the oldest
    store.insert(c, state_of(c))
    assert (store.match(a), store.match(b), store.match(c)) == (4, 2, 4)
    store.insert([6, 6], state_of([6, 6]))  # a's second block, not the first, which is as old
    assert (store.match(a), store.match(b), store.match(c), store.match([6, 6])) == (2, 2, 4, 2)
    assert store.counts == {"stored": 12, "evicted": 4, "asked": 4, "hit": 4}


def test_a_block_that_is_held_stays_and_what_does_not_fit_is_left_out():
    store = BlockStore(2, 2)
    store.insert([1, 1, 2, 2], state_of([1, 1, 2, 2]))
    hit = store.acquire([1, 1, 2, 2])
    assert store.insert([3, 3], state_of([3, 3])) == 0
    assert store.match([1, 1, 2, 2]) == 4
    store.release(hit)
    store.release(hit)  # a second time it holds nothing
    assert store.insert([3, 3], state_of([3, 3])) == 2
    assert (store.match([1, 1, 2, 2]), store.match([3, 3])) == (2, 2)


def test_a_split_keeps_keys_children_and_locks():
    tree = RadixStore(100)
    text = [1, 2, 3, 4, 5, 6]
    tree.insert(text, state_of(text))
    hit = tree.acquire(text)
    [node] = hit.held
    tree.insert([1, 2, 3, 9], state_of([1, 2, 3, 9]))
    assert [list(one.tokens) for one in tree._chain(node)] == [[1, 2, 3], [4, 5, 6]]
    assert node.parent.locks == node.locks == 1 and set(node.parent.children) == {4, 9}
    assert (tree.protected, tree.evictable) == (6, 1)
    other = tree.acquire([1, 2, 7])  # splits again, below nothing that moves
    assert other.n_tokens == 2 and (tree.protected, tree.evictable) == (6, 1)
    tree.release(hit)
    assert (tree.protected, tree.evictable) == (2, 5)
    tree.release(other)
    assert (tree.protected, tree.evictable, tree.total) == (0, 7, 7)
    assert found(tree, text) == 6 and found(tree, [1, 2, 3, 9]) == 4


def test_the_least_recently_used_leaf_goes_and_then_its_parent():
    tree = RadixStore(8)
    for text in ([1, 2, 3], [1, 2, 4], [5, 6, 7]):
        tree.insert(text, state_of(text))
    assert tree.total == 7
    found(tree, [1, 2, 3])
    tree.insert([8, 8], state_of([8, 8]))  # one token too many: of the leaves 3, 4 and 567 the last but one is oldest
    assert [tree.match(t) for t in ([1, 2, 3], [1, 2, 4], [5, 6, 7], [8, 8])] == [3, 2, 3, 2]
    hit = tree.acquire([5, 6, 7])
    tree.insert([9] * 5, state_of([9] * 5))  # all but 567: the leaf 3, then 12, which it leaves bare, and 88
    assert [tree.match(t) for t in ([1, 2, 3], [5, 6, 7], [8, 8], [9] * 5)] == [0, 3, 0, 5]
    assert tree.insert([4, 4, 4, 4, 4, 4, 4], state_of([4] * 7)) == 5  # what fits beside the held ones
    tree.release(hit)


def test_a_new_leaf_is_younger_than_one_that_was_used_before_it_came():
    tree = RadixStore(4)
    tree.insert([1, 1], state_of([1, 1]))
    found(tree, [1, 1])
    tree.insert([2, 2], state_of([2, 2]))
    tree.insert([3, 3], state_of([3, 3]))
    assert [tree.match(t) for t in ([1, 1], [2, 2], [3, 3])] == [0, 2, 2]


def test_a_parent_that_is_left_bare_goes_by_its_own_age():
    tree = RadixStore(6)
    for text in ([1, 2, 3], [1, 2, 4], [5, 6]):
        tree.insert(text, state_of(text))
    found(tree, [1, 2])  # younger than all leaves
    tree.insert([9, 9, 9], state_of([9, 9, 9]))
    assert [tree.match(t) for t in ([1, 2, 3], [1, 2, 4], [5, 6], [9, 9, 9])] == [2, 2, 0, 3]


def test_texts_that_differ_at_once_give_a_tree_of_leaves():
    tree, rng = RadixStore(500), random.Random(0)
    for i in range(100):
        text = [i, *(rng.randrange(5) for _ in range(9))]
        tree.insert(text, state_of(text))
        assert tree.total <= 500
    assert tree.counts["evicted"] == 500 and {len(node) for node in tree.nodes()} == {10}


@pytest.mark.parametrize("n", [0, -1, 2.5, "2", True])
@pytest.mark.parametrize("call", [BlockStore, RadixStore, PrefixIndex, lambda n: BlockStore(3, n)])
def test_a_store_holds_at_least_one(call, n):
    with pytest.raises(ValueError, match=f"is {n!r}, it must be a whole number of at least 1"):
        call(n)


@pytest.mark.parametrize("store", [BlockStore(100, 2), RadixStore(100)])
@pytest.mark.parametrize(
    "tokens", [[1.5, 2.5], torch.tensor([1.0, 2.0]), [float("nan")] * 2, torch.tensor([[1, 2]]), [2**70, 1], "12"]
)
def test_tokens_are_whole_numbers(store, tokens):
    """A cast would make 1 of 1.5, and find what another text has left."""
    store.insert([1, 2], state_of([1, 2]))
    for call in (store.match, store.acquire, lambda bad: store.insert(bad, state_of([1, 2]))):
        with pytest.raises(ValueError, match=r"whole numbers \[n\]|must be \[G"):
            call(tokens)
    assert store.match([1, 2]) == store.match(torch.tensor([1, 2], dtype=torch.int32)) == 2


@pytest.mark.parametrize("store", [BlockStore(100, 2), RadixStore(100)])
@pytest.mark.parametrize("state", [{}, state_of([1, 2]), state_of([1, 2, 3, 4, 5]), {"k.0": torch.zeros(4, 1)}])
def test_a_state_of_another_length_is_refused(store, state):
    with pytest.raises(ValueError, match=r"^the state"):
        store.insert([1, 2, 3, 4], state)
    assert store.match([1, 2, 3, 4]) == 0
