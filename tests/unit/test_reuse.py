"""A cache that begins from a store gives the plain model's logits, and reads only what the store does not have."""

import random

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from gptlite.cache.block_store import BlockStore
from gptlite.cache.dense import DynamicCache, StaticCache
from gptlite.cache.offload import DiskTier, MemoryTier
from gptlite.cache.radix import RadixStore
from gptlite.cache.reuse import PrefixCache, SharedPrefix
from gptlite.config import GPTConfig
from gptlite.generate import decode_step, prefill
from gptlite.model import GPTlite

VOCAB, CONTEXT = 5, 32


def make_model(seed=1):
    """fp32, logits of size one as a trained model has; widths, heads and head sizes that differ from each other."""
    torch.manual_seed(seed)
    model = GPTlite(GPTConfig(VOCAB, CONTEXT, n_layers=2, d_model=20, n_heads=6, d_head=4, n_kv_heads=3)).eval()
    for parameter in model.parameters():
        torch.nn.init.normal_(parameter, std=0.1)
    return model


MODEL = make_model()
STORES = {"blocks of 4": lambda n=100: BlockStore(n, 4), "radix tree": lambda n=100: RadixStore(4 * n)}


@pytest.fixture(params=STORES)
def store(request):
    return STORES[request.param]()


def plain(text):
    with torch.inference_mode():
        return MODEL(torch.tensor([text]))[0, -1]


def serve(cache, prompt, n_new=1, salt="", chunks=None, sequence=0):
    """One request, checked at each token: greedy tokens, and how many of its prompt were read."""
    tokens = torch.tensor(prompt)
    n_cached = cache.begin(sequence, tokens, salt)
    read = []
    hook = MODEL.token_embedding.register_forward_pre_hook(lambda module, args: read.append(args[0].numel()))
    parts = tokens[n_cached:].split(chunks or len(tokens))
    for part in parts:
        logits = prefill(MODEL, part[None], cache)
    text = list(prompt)
    for i in range(n_new):
        hook.remove()
        torch.testing.assert_close(logits[0], plain(text), rtol=0, atol=1e-5)
        text.append(int(logits.argmax()))
        if i < n_new - 1:
            logits = decode_step(MODEL, torch.tensor(text[-1:]), cache)
    cache.free(sequence)
    assert sum(read) == len(prompt) - n_cached
    return text, n_cached


PROMPT = st.lists(st.integers(0, 1), min_size=1, max_size=20)  # two tokens: beginnings are shared


@pytest.mark.parametrize("kind", STORES)
@settings(max_examples=15, deadline=None)
@given(
    plan=st.lists(
        st.tuples(PROMPT, st.integers(1, 4), st.sampled_from([None, 1, 3]), st.sampled_from(["", "x"])),
        min_size=2,
        max_size=6,
    ),
    room=st.sampled_from([2, 5, 100]),
)
def test_logits_are_those_of_the_plain_model(kind, plan, room):
    """Random prompts, chunks, answers and salts; small rooms evict, shared beginnings split."""
    cache = PrefixCache(MODEL, 1, CONTEXT, STORES[kind](room), bucket=8)
    for prompt, n_new, chunks, salt in plan:
        expected = min(cache.match(torch.tensor(prompt), salt), len(prompt) - 1)
        _, n_cached = serve(cache, prompt, n_new, salt, chunks)
        assert n_cached == expected


@settings(max_examples=8, deadline=None)
@given(prompts=st.lists(PROMPT, min_size=3, max_size=8))
def test_logits_are_those_of_the_plain_model_through_all_tiers(tmp_path_factory, prompts):
    """Two blocks in the store, about two in memory, the rest on disk."""
    block = 4 * 2 * 2 * 3 * 4 * 4  # tokens, k and v, layers, heads, sizes, bytes
    disk = DiskTier(tmp_path_factory.mktemp("blocks"), MODEL, 4)
    cache = PrefixCache(MODEL, 1, CONTEXT, BlockStore(2, 4, MemoryTier(2 * block, disk)), bucket=8)
    longest = {}
    for prompt in prompts * 2:
        known = max((len(p) for p in longest if prompt[: len(p)] == list(p)), default=0)
        text, n_cached = serve(cache, prompt)
        assert n_cached == min(known, len(prompt) - 1)  # nothing that was ever read is read again
        longest |= dict.fromkeys(tuple(text[:n]) for n in range(4, len(text), 4))
    assert not disk.refused


# -- counted by hand ----------------------------------------------------------------------------------------------

SYSTEM = [3, 1, 4, 1, 0, 2, 2, 3, 3, 1]  # 10 tokens


def test_tokens_read_by_hand():
    """Of prompts with 10 shared tokens and 3 own ones; blocks of 4 share 8 of the 10, the tree all."""
    for store, cached in ((BlockStore(100, 4), [0, 8, 8, 12, 12]), (RadixStore(100), [0, 10, 10, 12, 13])):
        cache = PrefixCache(MODEL, 1, CONTEXT, store)
        prompts = [
            SYSTEM + [0, 0, 0],
            SYSTEM + [1, 1, 1],
            SYSTEM + [2, 2, 2],
            SYSTEM + [0, 0, 0],
            SYSTEM + [1, 1, 1, 4],
        ]
        assert [serve(cache, prompt)[1] for prompt in prompts] == cached


@pytest.mark.parametrize(("n", "cached"), [(8, [0, 7]), (9, [0, 8]), (4, [0, 3]), (3, [0, 0]), (1, [0, 0])])
def test_a_fully_cached_prompt_reads_its_last_token_again(n, cached):
    cache = PrefixCache(MODEL, 1, CONTEXT, BlockStore(100, 4))
    assert [serve(cache, SYSTEM[:n])[1] for _ in range(2)] == cached


def test_the_next_turn_of_a_chat_finds_the_answer_too():
    """10 tokens of prompt and 6 of answer, of which the last is never read: 15 are left behind."""
    for store, cached in ((BlockStore(100, 4), 12), (RadixStore(100), 15)):
        cache = PrefixCache(MODEL, 1, CONTEXT, store)
        text, _ = serve(cache, SYSTEM, n_new=6)
        assert len(text) == 16
        assert serve(cache, [*text, 0, 1])[1] == cached


def test_two_requests_at_a_time_leave_what_they_read(store):
    cache = PrefixCache(MODEL, 2, CONTEXT, store)
    rows = torch.tensor([SYSTEM + [0], SYSTEM + [1]])
    assert [cache.begin(row, rows[row]) for row in range(2)] == [0, 0]
    logits = prefill(MODEL, rows, cache)
    for row in range(2):
        torch.testing.assert_close(logits[row], plain(rows[row].tolist()), rtol=0, atol=1e-5)
        cache.free(row)
    shared = 8 if isinstance(store, BlockStore) else 10
    assert cache.match(torch.tensor([*SYSTEM, 4])) == shared
    assert store.counts["stored"] == (8 if isinstance(store, BlockStore) else 12)


def test_the_same_prompt_twice_in_a_batch_is_kept_once(store):
    cache = PrefixCache(MODEL, 2, CONTEXT, store)
    rows = torch.tensor([[*SYSTEM, 0]] * 2)
    for expected in (0, 8 if isinstance(store, BlockStore) else 10):  # nothing, then what the first two have left
        assert [cache.begin(row, rows[row]) for row in range(2)] == [expected] * 2
        logits = prefill(MODEL, rows[:, expected:], cache)
        for row in range(2):
            torch.testing.assert_close(logits[row], plain([*SYSTEM, 0]), rtol=0, atol=1e-5)
            cache.free(row)
    assert store.counts["stored"] == (8 if isinstance(store, BlockStore) else 11)
    assert store.counts["asked"] == 44


def test_a_running_sequence_can_share_what_is_final(store):
    cache = PrefixCache(MODEL, 2, CONTEXT, store)
    prefill(MODEL, torch.tensor([SYSTEM]), cache)
    assert cache.share(0) == 0  # the last step can still be taken back
    decode_step(MODEL, torch.tensor([4]), cache)
    n = 8 if isinstance(store, BlockStore) else 10
    assert cache.share(0) == n and cache.share(0) == 0
    assert cache.begin(1, torch.tensor([*SYSTEM, 2])) == n
    with pytest.raises(ValueError, match="does not hold sequence 9"):
        cache.share(9)


def test_what_a_sequence_began_with_is_not_evicted_while_it_runs():
    store = BlockStore(3, 4)
    cache = PrefixCache(MODEL, 2, CONTEXT, store)
    serve(cache, SYSTEM)
    assert cache.begin("slow", torch.tensor([*SYSTEM, 2])) == 8
    serve(cache, [0] * 12)  # three blocks, and room for one
    assert cache.match(torch.tensor(SYSTEM)) == 8 and cache.match(torch.tensor([0] * 12)) == 4
    cache.free("slow")
    serve(cache, [1] * 12)
    assert cache.match(torch.tensor(SYSTEM)) == 0


# -- what does not reach the store --------------------------------------------------------------------------------


def step(cache, sequence, tokens, positions, parents=None):
    packed = torch.tensor(tokens)
    segments = cache.prepare([sequence], [torch.tensor(positions)], parents and [parents], packed)
    with torch.inference_mode():
        MODEL.run(packed, segments, cache)


def test_rejected_drafts_never_reach_the_store(store):
    cache = PrefixCache(MODEL, 1, CONTEXT, store)
    step(cache, "a", [3, 1, 4, 1], [0, 1, 2, 3])
    step(cache, "a", [2, 2, 2], [4, 5, 6])  # three drafts in a row, one is kept
    cache.keep(["a"], [1])
    step(cache, "a", [0, 3, 1], [5, 5, 6], [-1, -1, 1])  # a tree: of two siblings the second, and its child
    cache.keep(["a"], [[1, 2]])
    step(cache, "a", [4, 4], [7, 8])  # both rejected
    cache.keep(["a"], [0])
    step(cache, "a", [0], [7])
    cache.free("a")
    text = [3, 1, 4, 1, 2, 3, 1, 0]
    assert cache.match(torch.tensor([*text, 4, 4])) == 8
    for wrong in ([3, 1, 4, 1, 2, 2], [3, 1, 4, 1, 2, 0], [3, 1, 4, 1, 2, 3, 1, 4]):
        assert cache.match(torch.tensor(wrong)) < len(wrong)
    assert store.counts["stored"] == 8
    assert serve(cache, [*text, 1])[1] == 8  # and what is there is right


def test_tokens_that_nobody_told_are_not_shared(store):
    cache = PrefixCache(MODEL, 2, CONTEXT, store)
    step(cache, "a", [3, 1, 4, 1], [0, 1, 2, 3])
    segments = cache.prepare(["a"], torch.tensor([[4]]))
    with torch.inference_mode():
        MODEL.run(torch.tensor([2]), segments, cache)
    step(cache, "a", [2, 2, 2], [5, 6, 7])
    cache.keep(["a"], [2])
    state = cache.export("a")
    cache.free("a")
    assert cache.match(torch.tensor([3, 1, 4, 1, 2, 2, 2])) == 4
    before = store.counts["stored"]
    cache.load("moved", state)
    cache.free("moved")
    assert store.counts["stored"] == before


def test_holes_and_other_rows_do_not_shift_what_is_remembered(store):
    cache = PrefixCache(MODEL, 3, CONTEXT, store)
    tokens = torch.tensor([9, 3, 1, 9, 4, 1, 2, 2, 2, 2, 0, 0, 0, 0]) % VOCAB
    rows = [[-1, 0, 1, -1, 2, 3], [0, 1, 2, 3], [0, 1, 2, 3]]
    segments = cache.prepare(["a", "b", "c"], [torch.tensor(row) for row in rows], tokens=tokens)
    with torch.inference_mode():
        MODEL.run(tokens, segments, cache)
    for name in "abc":
        cache.free(name)
    for text in ([3, 1, 4, 1], [2, 2, 2, 2], [0, 0, 0, 0]):
        assert serve(cache, [*text, 1])[1] == 4


def test_positions_that_do_not_count_from_zero_are_not_shared(store):
    cache = PrefixCache(MODEL, 1, CONTEXT, store)
    step(cache, "a", [3, 1, 4, 1], [1, 2, 3, 4])
    cache.free("a")
    step(cache, "b", [3, 1, 4, 1, 0, 0], [0, 1, 2, 3, 9, 10])
    cache.free("b")
    assert store.counts["stored"] == 4 and serve(cache, [3, 1, 4, 1, 0])[1] == 4


def test_salts_keep_tenants_apart(store):
    cache = PrefixCache(MODEL, 2, CONTEXT, store)
    serve(cache, SYSTEM, salt="ann")
    assert [serve(cache, SYSTEM, salt=salt)[1] > 0 for salt in ("bob", "", "ann")] == [False, False, True]
    cache.begin("x", torch.tensor(SYSTEM), "carl")
    step(cache, "x", SYSTEM[cache.next_position("x") :], list(range(cache.next_position("x"), 10)))
    cache.fork("x", "y")
    cache.free("x")
    cache.free("y")
    assert cache.match(torch.tensor(SYSTEM), "carl") >= 8


def test_begin_refuses_a_held_sequence_and_begins_nothing_without_room(store):
    cache = PrefixCache(MODEL, 1, 12, store)
    serve(cache, SYSTEM)
    assert cache.begin("long", torch.tensor(SYSTEM + [0] * 9)) == 0 and cache.next_position("long") == 0
    assert cache.begin("a", torch.tensor(SYSTEM)) > 0
    with pytest.raises(ValueError, match="already holds"):
        cache.begin("a", torch.tensor(SYSTEM))
    assert cache.begin("b", torch.tensor(SYSTEM)) == 0 and cache.next_position("b") == 0


# -- one prefix ---------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("make", [DynamicCache, lambda model: StaticCache(model, 3, CONTEXT)])
def test_a_shared_prefix_is_computed_once(make):
    read = []
    hook = MODEL.token_embedding.register_forward_pre_hook(lambda module, args: read.append(args[0].numel()))
    shared, cache, rng = SharedPrefix(MODEL, torch.tensor(SYSTEM)), make(MODEL), random.Random(0)
    prompts = [SYSTEM + [rng.randrange(VOCAB) for _ in range(3)] for _ in range(3)]
    assert [shared.begin(cache, row, torch.tensor(prompt)) for row, prompt in enumerate(prompts)] == [10] * 3
    logits = prefill(MODEL, torch.tensor(prompts)[:, 10:], cache)
    hook.remove()
    assert read == [10, 9]
    for row, prompt in enumerate(prompts):
        torch.testing.assert_close(logits[row], plain(prompt), rtol=0, atol=1e-5)


def test_a_shared_prefix_refuses_another_text():
    shared, cache = SharedPrefix(MODEL, torch.tensor(SYSTEM)), DynamicCache(MODEL)
    for prompt in (SYSTEM, SYSTEM[:5], [0, *SYSTEM]):
        with pytest.raises(ValueError, match="the 10 tokens of the prefix"):
            shared.begin(cache, "a", torch.tensor(prompt))
    with pytest.raises(ValueError, match="at least one token"):
        SharedPrefix(MODEL, torch.tensor([], dtype=torch.int64))
