"""The exact-match cache: the same request gets the same answer, and nothing else does."""

from __future__ import annotations

import hashlib
import json
import threading
import time
from collections.abc import Callable
from dataclasses import asdict

import torch

from gptlite.model import GPTlite
from gptlite.sampling import SamplingParams
from gptlite.semantic.entries import BoundedEntries


def fingerprint(model: GPTlite) -> str:
    """Identity of a model: 16 hex digits that change with any of its weights or sizes."""
    digest = hashlib.sha256(json.dumps(model.config.to_dict(), sort_keys=True).encode())
    for name, weight in sorted(model.state_dict().items()):
        digest.update(f"{name} {weight.dtype} {tuple(weight.shape)}".encode())
        digest.update(weight.detach().cpu().contiguous().view(-1).view(torch.uint8).numpy().tobytes())
    return digest.hexdigest()[:16]


def request_key(
    prompt: str,
    model: str,
    params: SamplingParams,
    seed: int | None = None,
    scope: str = "",
    n_new: int | None = None,
) -> str:
    """Identity of a request: SHA-256 of everything that its answer may depend on.

    JSON keeps the parts apart, so that no two requests are written the same way.

    Args:
        n_new: the most new tokens that the answer may have; None when that is the same for all requests.
    """
    parts = [prompt, model, asdict(params), seed, scope, n_new]
    return hashlib.sha256(json.dumps(parts, sort_keys=True).encode()).hexdigest()


class ExactCache:
    """Answers by the whole request; safe for threads.

    A request at temperature 0, or with a seed of its own, has one answer, and that is cached. Without a seed it has
    many, and to cache one of them is a choice: every later asker gets the first one's draw.

    Args:
        model: identity of the model, such as its `fingerprint`.
        cache_sampled: keep answers that were drawn at a temperature above 0 without a seed.
        max_entries, expires_after, clock: as in `BoundedEntries`.
    """

    def __init__(
        self,
        model: str,
        cache_sampled: bool = False,
        max_entries: int = 10_000,
        expires_after: float | None = None,
        clock: Callable[[], float] = time.time,
    ) -> None:
        self.model, self.cache_sampled = model, cache_sampled
        self.hits = self.misses = 0
        self._entries: BoundedEntries[str, str] = BoundedEntries(max_entries, expires_after, clock)
        self._lock = threading.Lock()

    def __len__(self) -> int:
        with self._lock:
            self._entries.expire()
            return len(self._entries)

    def ask(
        self,
        prompt: str,
        params: SamplingParams,
        generate: Callable[[str], str],
        seed: int | None = None,
        scope: str = "",
        n_new: int | None = None,
    ) -> str:
        """The answer from the cache, else from `generate(prompt)`, which then is cached.

        Args:
            params, seed, n_new: what `generate` samples with, and at most how many tokens; they are part of the key.
            scope: user or tenant; an answer is given to its own scope only.
        """
        repeatable = params.temperature == 0 or seed is not None
        if not (repeatable or self.cache_sampled):
            return generate(prompt)
        key = request_key(prompt, self.model, params, seed if params.temperature else None, scope, n_new)
        with self._lock:
            self._entries.expire()
            answer = self._entries.get(key)
            self.hits, self.misses = self.hits + (answer is not None), self.misses + (answer is None)
        if answer is None:
            answer = generate(prompt)  # without the lock: others go on meanwhile
            with self._lock:
                self._entries.put(key, answer)
        return answer
