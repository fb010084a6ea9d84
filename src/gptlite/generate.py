"""The plain loop: prefill, then decode token by token. Every cache and every engine is compared with it."""

from __future__ import annotations

import warnings
from collections.abc import Iterator
from typing import Literal

import torch
from torch import Tensor

from gptlite.cache.contract import Cache
from gptlite.model import GPTlite
from gptlite.sampling import SamplingParams, greedy, probabilities, sample

Overflow = Literal["error", "slide", "clamp"]


@torch.inference_mode()
def prefill(model: GPTlite, tokens: Tensor, cache: Cache | None = None, chunk: int | None = None) -> Tensor:
    """Reads a prompt {cite}`pope2023scaling`.

    Args:
        tokens: [B, n], all rows of the same length.
        cache: keeps the keys and values; the rows are its sequences 0 to B - 1 and continue what it holds of them.
        chunk: tokens per forward pass at most, with a cache; None reads all at once.
    Returns: logits of the last token [B, V].
    """
    if cache is None:
        return model(tokens)[:, -1]
    for part in tokens.split(chunk or tokens.shape[1], dim=1):
        logits = _last_logits(model, part, None, cache)
    return logits


@torch.inference_mode()
def decode_step(model: GPTlite, tokens: Tensor, cache: Cache, position: int | None = None) -> Tensor:
    """Reads one new token per row on top of the cache.

    Args:
        tokens: [B], those just sampled.
        position: of the new tokens; None means the one after the cached ones.
    Returns: logits [B, V].
    """
    positions = None if position is None else torch.full((len(tokens), 1), position)
    return _last_logits(model, tokens[:, None], positions, cache)


def _last_logits(model: GPTlite, tokens: Tensor, positions: Tensor | None, cache: Cache) -> Tensor:
    """Like the plain call, but the head reads only the last token of each row: [B, S] -> [B, V]."""
    B, S = tokens.shape
    positions = model.next_positions(B, S, cache) if positions is None else positions
    model.check(tokens, positions)
    packed = tokens.flatten()  # [B * S]
    segments = cache.prepare(range(B), positions, tokens=packed)
    hidden = model.run(packed, segments, cache)  # [B * S, d]
    return model.head(hidden.unflatten(0, (B, S))[:, -1])


def stream(
    model: GPTlite,
    tokens: Tensor,
    n_new: int,
    params: SamplingParams | None = None,
    cache: Cache | None = None,
    overflow: Overflow = "error",
    seed: int = 0,
) -> Iterator[Tensor]:
    """Generates token by token; see `generate` for the arguments.

    Yields: the next tokens [B], n_new times.
    """
    _check(model, tokens, n_new, cache, overflow)
    params = params or SamplingParams()
    # a generator per row, so that a row of a batch draws what it would draw alone
    generators = [torch.Generator().manual_seed(seed + b) for b in range(len(tokens))]
    return _stream(model, tokens, n_new, params, cache, overflow, generators)


def _stream(
    model: GPTlite,
    tokens: Tensor,
    n_new: int,
    params: SamplingParams,
    cache: Cache | None,
    overflow: Overflow,
    generators: list[torch.Generator],
) -> Iterator[Tensor]:
    n, window = tokens.shape[1], model.context_length
    chunk = getattr(cache, "chunk", None)  # a ring takes so many tokens at once
    text = [tokens[:, -window:]]
    logits = prefill(model, text[0], cache, chunk)
    for step in range(n_new):
        if params.temperature == 0:
            new = greedy(logits)  # [B]
        else:
            u = torch.stack([torch.rand((), generator=g, dtype=torch.float64) for g in generators])  # [B]
            new = sample(probabilities(logits, params), u)  # [B]
        yield new
        if step == n_new - 1:
            return
        text.append(new[:, None])
        if cache is not None and n + step < window:
            logits = decode_step(model, new, cache)
        elif cache is None or overflow == "slide":
            if cache is not None:  # every cached position is off by one now: nothing can be kept
                _restart(cache, len(tokens))
            text = [torch.cat(text, dim=1)[:, -window:]]  # [B, n]
            logits = prefill(model, text[0], cache, chunk)
        else:
            _forget_oldest(cache, len(tokens), keep=window - 1)
            logits = decode_step(model, new, cache, position=window - 1)


def generate(
    model: GPTlite,
    tokens: Tensor,
    n_new: int,
    params: SamplingParams | None = None,
    cache: Cache | None = None,
    overflow: Overflow = "error",
    seed: int = 0,
) -> Tensor:
    """The plain loop; without a cache it reads the whole text again for each token, and is the oracle of the rest.

    Args:
        tokens: prompts [B, n], n >= 1, all of the same length.
        n_new: tokens to generate per row, at least 0.
        params: temperature, top-k and top-p; None means plain sampling at temperature 1.
        cache: an empty cache makes each step read only its new token; it holds the text afterwards.
        overflow: what happens past the context window: "error" refuses beforehand; "slide" reads the last n tokens
            again at positions 0 to n - 1, as the model without a cache does; "clamp" (with a cache) drops the
            oldest token and gives the new one the last position, which no longer gives the same output.
        seed: row b draws from a generator seeded with seed + b.
    Returns: prompts and new tokens [B, n + n_new].
    Raises: ValueError on a bad argument, before anything is computed.
    """
    new = list(stream(model, tokens, n_new, params, cache, overflow, seed))
    return torch.cat([tokens, *(t[:, None] for t in new)], dim=1)


def _check(model: GPTlite, tokens: Tensor, n_new: int, cache: Cache | None, overflow: str) -> None:
    if tokens.dim() != 2 or not tokens.numel():
        raise ValueError(f"tokens has shape {tuple(tokens.shape)}, it must be [B, n] with at least one token per row")
    if n_new < 0:
        raise ValueError(f"n_new is {n_new}, it must be at least 0")
    if overflow not in ("error", "slide", "clamp"):
        raise ValueError(f"overflow is {overflow!r}, it must be 'error', 'slide' or 'clamp'")
    if cache is not None and any(cache.next_position(b) for b in range(len(tokens))):
        raise ValueError("the cache already holds text, generate needs an empty one")
    # the last token is sampled and never read
    needed = tokens.shape[1] + max(n_new - 1, 0)
    passes = needed > model.context_length
    if passes and overflow == "error":
        raise ValueError(
            f"{tokens.shape[1]} tokens and {n_new} new ones pass the context window of {model.context_length}: "
            "ask for fewer, or choose overflow='slide' or 'clamp'"
        )
    if passes and overflow == "clamp" and cache is None:
        raise ValueError("overflow='clamp' drops the oldest cached token, so it needs a cache")
    held = min(needed, model.context_length)
    if cache is not None and cache.longest is not None and held > cache.longest:
        raise ValueError(f"the text needs room for {held} tokens, a sequence of the cache has {cache.longest}")
    if passes and overflow == "clamp":
        warnings.warn("overflow='clamp': past the context window the output differs from the model's", stacklevel=3)


def _restart(cache: Cache, n_rows: int) -> None:
    for row in range(n_rows):
        cache.free(row)


def _forget_oldest(cache: Cache, n_rows: int, keep: int) -> None:
    """Keeps the last tokens of each row; what they were computed from stays in them, which is why output differs."""
    for row in range(n_rows):
        state = cache.export(row)
        if len(state["k_pos"]) > keep:
            cache.free(row)
            # k_pos is [n], keys and values are [G, n, D]: tokens are axis 0 of the first and 1 of the others
            last = {name: t[-keep:] if name == "k_pos" else t[:, -keep:] for name, t in state.items()}
            cache.load(row, last)
