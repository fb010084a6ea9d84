"""Time to first token by shared prefix, and what a store holds while a small chat goes on."""

from __future__ import annotations

from collections.abc import Iterator
from functools import partial
from typing import Any

import torch

from gptlite.arithmetic import step_costs, total
from gptlite.cache.block_store import Block, BlockStore
from gptlite.cache.prefix import PrefixStore
from gptlite.cache.radix import RadixStore
from gptlite.cache.reuse import PrefixCache
from gptlite.checkpoint import load
from gptlite.config import preset
from gptlite.generate import decode_step, prefill
from gptlite.measure import time_call
from gptlite.model import GPTlite
from gptlite.record import Point, Recording, Step, SweepModel, sweep


@sweep(
    "prefix",
    "seconds to the first token, by how much of the prompt the store has",
    preset="gpt2",
    length=512,
    new=[512, 384, 256, 128, 64, 16],
    block_size=16,
    repeats=5,
    warmup=1,
)
def _prefix(recording: Recording) -> Iterator[Step]:
    params = recording.params
    length, size = params["length"], params["block_size"]
    if wrong := [n for n in params["new"] if (length - n) % size or n > length]:
        raise ValueError(f"new has {wrong[0]}, it must leave whole blocks of {size} tokens of the {length}")
    models = SweepModel(recording, preset(params["preset"], context_length=length))

    def measure(shared: int) -> Point:
        model, device = models.get(), models.device
        generator = torch.Generator().manual_seed(shared)
        vocabulary = model.fc_out.out_features
        store = BlockStore(4 * length // size, size)
        cache = PrefixCache(model, 1, length, store, bucket=1)
        prefix = torch.randint(vocabulary, (shared,), generator=generator)
        if shared:
            store.insert(prefix, made_up(model, shared))
        samples = []
        for i in range(params["warmup"] + params["repeats"]):
            # a question of its own each time, so that only the prefix is found
            question = torch.randint(vocabulary, (length - shared,), generator=generator)
            prompt = torch.cat([prefix, question]).to(device)
            timing = time_call(partial(first_token, model, cache, prompt, shared), device, warmup=0, repeats=1)
            cache.free(0)
            if i >= params["warmup"]:
                samples += timing.wall
        width = models.width
        cost = total(step_costs(models.shape, 1, length - shared, shared, width, width))
        return Point({"length": length, "shared": shared}, samples, cost.flops, cost.bytes)

    for new in params["new"]:  # tokens of the prompt that the store does not have
        at = {"length": length, "shared": length - new}
        yield at, models.needed(1, 5 * length, length), partial(measure, length - new)


def first_token(model: GPTlite, cache: PrefixCache, prompt: torch.Tensor, expected: int | None = None) -> int:
    """Reads a prompt [n] as sequence 0, from what the cache's store has of it.

    Args:
        expected: cached tokens that there must be, so that no other path is timed; None takes what comes.
    Returns: the greedy next token.
    Raises: ValueError when another number is cached.
    """
    n_cached = cache.begin(0, prompt)
    if expected is not None and n_cached != expected:
        raise ValueError(f"{n_cached} tokens were cached, {expected} should be")
    return int(prefill(model, prompt[None, n_cached:], cache).argmax())


def made_up(model: GPTlite, n: int) -> dict[str, torch.Tensor]:
    """The state of n tokens that no text has, in [G, n, D]; the time of a step doesn't depend on it."""
    weight = model.token_embedding.weight
    state = {}
    for layer, block in enumerate(model.blocks):
        G, Dk, Dv = block.mha.kv_shape
        for part, width in (("k", Dk), ("v", Dv)):
            state[f"{part}.{layer}"] = torch.randn(G, n, width, device=weight.device, dtype=weight.dtype)
    return state


# -- a chat -------------------------------------------------------------------------------------------------------

SYSTEM = "A HERALD answers all who come.\n\n"
TURNS = (
    ("ANN", "Who is the king?"),
    ("BEN", "Where is the queen?"),
    ("ANN", "And his son?"),
    ("ANN", "Is he come?"),
    ("CAT", "What news, my lord?"),
    ("BEN", "Is she well?"),
    ("ANN", "Farewell."),
)


@sweep(
    "prefix-trace",
    "what both stores hold while three people chat with the trained model; no times",
    model="gptlite",
    block_size=16,
    capacity=256,
    n_new=12,
)
def _prefix_trace(recording: Recording) -> Iterator[Step]:
    params = recording.params
    model, tokenizer = load(params["model"], params["device"], getattr(torch, params["dtype"]))
    size = params["block_size"]
    stores: dict[str, PrefixStore] = {
        "chain of blocks": BlockStore(params["capacity"] // size, size),
        "radix tree": RadixStore(params["capacity"]),
    }
    for name, store in stores.items():
        cache = PrefixCache(model, 1, model.context_length, store)
        texts: dict[str, list[int]] = {}
        frames = []
        for who, line in TURNS:
            text = texts.get(who) or tokenizer.encode(SYSTEM).tolist()
            text = [*text, *tokenizer.encode(f"{who}:\n{line}\n\nHERALD:\n").tolist()]
            texts[who] = text
            before = held_runs(store)
            evicted = store.counts["evicted"]
            n_cached = cache.begin(0, torch.tensor(text, device=params["device"]))
            frames.append({"who": who, "line": line, "event": "begin", "prompt": len(text), "cached": n_cached})
            frames[-1] |= {"runs": _described(store, before, texts, n_cached, who), "evicted": 0}
            text = answer(model, cache, text, params["n_new"])
            texts[who] = [*text, *tokenizer.encode("\n\n").tolist()]
            before = held_runs(store)
            cache.free(0)
            frames.append({"who": who, "line": line, "event": "end", "prompt": len(text), "cached": n_cached})
            evicted = store.counts["evicted"] - evicted
            frames[-1] |= {"runs": _described(store, before, texts, 0, who), "evicted": evicted}
        recording.data[name] = frames
        recording.data["texts"] = {who: tokenizer.decode(torch.tensor(text)) for who, text in texts.items()}
    return iter(())


def answer(model: GPTlite, cache: PrefixCache, text: list[int], n_new: int) -> list[int]:
    """Goes on greedily from what sequence 0 of the cache has begun with. Returns: the text and n_new tokens more."""
    device = model.token_embedding.weight.device
    text = list(text)
    n_cached = cache.next_position(0)
    logits = prefill(model, torch.tensor([text[n_cached:]], device=device), cache)
    for i in range(n_new):
        text.append(int(logits.argmax()))
        if i < n_new - 1:
            logits = decode_step(model, torch.tensor(text[-1:], device=device), cache)
    return text


def held_runs(store: PrefixStore) -> list[tuple[tuple[int, ...], int]]:
    """What a store holds, as runs of tokens: (all the text up to the run's end, where the run begins)."""
    if isinstance(store, RadixStore):
        runs = []
        for node in store.nodes():
            chain = store._chain(node)
            text = tuple(int(token) for one in chain for token in one.tokens)
            runs.append((text, len(text) - len(node)))
        return sorted(runs)
    assert isinstance(store, BlockStore)
    by_key: dict[bytes, Block] = {block.key: block for block in store.index.payloads()}

    def text_of(block: Block) -> tuple[int, ...]:
        above = by_key.get(block.parent)
        own = tuple(int.from_bytes(block.tokens[i : i + 8], "little") for i in range(0, len(block.tokens), 8))
        return (text_of(above) if above else ()) + own

    return sorted((text_of(block), len(text_of(block)) - store.block_size) for block in by_key.values())


def _described(
    store: PrefixStore, before: list[tuple[tuple[int, ...], int]], texts: dict[str, list[int]], n_hit: int, who: str
) -> list[dict[str, Any]]:
    """Each run as a bar of a drawing: the row of the first talk that has it, its ends, and its state."""
    held, runs = held_runs(store), []
    known = {text[:i] for text, begin in before for i in range(begin + 1, len(text) + 1)}
    rows = list(dict.fromkeys(name for name, _ in TURNS))

    def row(text: tuple[int, ...]) -> int:
        owners = [i for i, name in enumerate(rows) if tuple(texts.get(name, ())[: len(text)]) == text]
        return owners[0] if owners else -1

    for text, begin in held:
        mine = tuple(texts[who][: len(text)]) == text
        state = "found" if mine and begin < n_hit else "kept" if text in known else "new"
        runs.append({"row": row(text), "begin": begin, "end": len(text), "state": state})
    still = {text[:i] for text, begin in held for i in range(begin + 1, len(text) + 1)}
    gone = [(text, begin) for text, begin in before if text not in still]
    runs += [{"row": row(text), "begin": begin, "end": len(text), "state": "evicted"} for text, begin in gone]
    return runs
