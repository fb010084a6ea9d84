"""Several answers to one prompt that share it in the cache: parallel sampling, and beam search by fork and free."""

from __future__ import annotations

from collections.abc import Callable, Hashable
from dataclasses import dataclass

import torch
from torch import Tensor

from gptlite.cache.contract import Cache
from gptlite.model import GPTlite
from gptlite.sampling import SamplingParams, probabilities, sample

Watch = Callable[[], None] | None  # called after every step, to look at the cache


@dataclass(frozen=True)
class Beam:
    """One answer of a beam search.

    Args:
        tokens: its new tokens. score: sum of their log-probabilities, in nats.
        ended: whether the last of them is the end token.
    """

    tokens: tuple[int, ...]
    score: float
    ended: bool = False


@torch.inference_mode()
def parallel_sampling(
    model: GPTlite,
    prompt: Tensor,
    n_samples: int,
    n_new: int,
    cache: Cache,
    params: SamplingParams | None = None,
    seed: int = 0,
    watch: Watch = None,
) -> Tensor:
    """Samples several answers to one prompt, which is read once and forked {cite}`kwon2023pagedattention`.

    Args:
        prompt: [n], at least one token.
        cache: holds nothing under the keys ("sample", 0), ("sample", 1) and so on, before and after.
        seed: sample j draws from a generator seeded with seed + j, as row j of `generate` does.
    Returns: the new tokens [n_samples, n_new].
    Raises: ValueError on a prompt that isn't [n], a number below 1, or a cache without room.
    """
    _check(prompt, n_samples=n_samples, n_new=n_new)
    params = params or SamplingParams()
    keys: list[Hashable] = [("sample", j) for j in range(n_samples)]
    generators = [torch.Generator().manual_seed(seed + j) for j in range(n_samples)]
    held, new = keys[:1], []
    try:
        logits = _read(model, cache, held, prompt[None]).expand(n_samples, -1)  # [n_samples, V]
        for key in keys[1:]:
            cache.fork(keys[0], key)
            held = [*held, key]
        for step in range(n_new):
            if watch:
                watch()
            u = torch.stack([torch.rand((), generator=g, dtype=torch.float64) for g in generators])  # [n_samples]
            new.append(sample(probabilities(logits, params), u))
            if step < n_new - 1:
                logits = _read(model, cache, keys, new[-1][:, None])
    finally:
        _free(cache, held)
    return torch.stack(new, dim=1)


@torch.inference_mode()
def beam_search(
    model: GPTlite,
    prompt: Tensor,
    n_beams: int,
    n_new: int,
    cache: Cache,
    end: int | None = None,
    watch: Watch = None,
) -> list[Beam]:
    """Keeps the most probable partial answers at each step {cite}`lowerre1976harpy`, which share their beginnings.

    A beam that lives on in several ways is forked for all but the first of them, one that has no child is freed: a
    paged cache then copies a block only where two beams part within it.

    Args:
        prompt: [n], at least one token.
        n_beams: partial answers kept. n_new: new tokens of an answer at most.
        cache: holds nothing under keys ("beam", i) before and after.
        end: the token that ends an answer; None where there is none.
    Returns: the best n_beams answers, or as many as there are, the most probable first; scores are not divided by
        length, so a short answer has an advantage.
    Raises: ValueError on a prompt that isn't [n], a number below 1, or a cache without room.
    """
    _check(prompt, n_beams=n_beams, n_new=n_new)
    keys: list[Hashable] = [("beam", 0)]
    beams, done, names = [Beam((), 0.0)], list[Beam](), 1
    try:
        logits = _read(model, cache, keys, prompt[None])  # [1, V]
        for step in range(n_new):
            if watch:
                watch()
            wide = torch.promote_types(logits.dtype, torch.float32)
            scores = torch.tensor([[beam.score] for beam in beams], dtype=wide, device=logits.device)  # [B, 1]
            totals = scores + logits.to(wide).log_softmax(-1)  # [B, V]
            # each beam has at most one candidate that ends, so among so many there are n_beams that live on
            best = totals.flatten().topk(min(2 * n_beams, totals.numel()))
            children: list[tuple[int, Beam]] = []
            for score, place in zip(best.values.tolist(), best.indices.tolist(), strict=True):
                parent, token = divmod(place, totals.shape[1])
                child = Beam((*beams[parent].tokens, token), score, token == end)
                if child.ended:
                    done.append(child)
                elif len(children) < n_beams:
                    children.append((parent, child))
            done = sorted(done, key=lambda beam: -beam.score)[:n_beams]
            beams = [child for _, child in children]
            # a score only falls, so nothing that lives on can come in
            settled = len(done) == n_beams and (not beams or done[-1].score >= beams[0].score)
            if settled or not beams or step == n_new - 1:
                break
            keys, names = _inherit(cache, keys, [parent for parent, _ in children], names)
            new = torch.tensor([[beam.tokens[-1]] for beam in beams], device=prompt.device)  # [B, 1]
            logits = _read(model, cache, keys, new)
    finally:
        _free(cache, keys)
    return sorted([*done, *beams], key=lambda beam: -beam.score)[:n_beams]


def _inherit(cache: Cache, keys: list[Hashable], parents: list[int], names: int) -> tuple[list[Hashable], int]:
    """The cache's sequences of the next beams: the first child of a beam goes on in its own, the others in copies."""
    for i, key in enumerate(keys):
        if i not in parents:
            cache.free(key)
    heirs, taken = list[Hashable](), set[int]()
    for parent in parents:
        if parent in taken:
            cache.fork(keys[parent], ("beam", names))
            heirs.append(("beam", names))
            names += 1
        else:
            heirs.append(keys[parent])
            taken.add(parent)
    return heirs, names


def _read(model: GPTlite, cache: Cache, keys: list[Hashable], tokens: Tensor) -> Tensor:
    """Reads tokens [B, S] at the ends of sequences. Returns: logits of each row's last token [B, V]."""
    B, S = tokens.shape
    positions = torch.tensor([[cache.next_position(key) + i for i in range(S)] for key in keys])
    model.check(tokens, positions)
    packed = tokens.flatten()  # [B * S]
    hidden = model.run(packed, cache.prepare(keys, positions, tokens=packed), cache)
    return model.head(hidden.unflatten(0, (B, S))[:, -1])


def _free(cache: Cache, keys: list[Hashable]) -> None:
    for key in keys:
        if cache.next_position(key):
            cache.free(key)


def _check(prompt: Tensor, **numbers: int) -> None:
    if prompt.dim() != 1 or not len(prompt):
        raise ValueError(f"prompt has shape {tuple(prompt.shape)}, it must be [n] with at least one token")
    for name, value in numbers.items():
        if value < 1:
            raise ValueError(f"{name} is {value}, it must be at least 1")
