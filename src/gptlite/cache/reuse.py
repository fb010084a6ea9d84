"""A dense cache that begins its sequences from what earlier ones have left behind."""

from __future__ import annotations

from collections.abc import Hashable, Sequence
from typing import TYPE_CHECKING

import torch
from torch import Tensor

from gptlite.cache.contract import Cache, Parents, Positions, Segment
from gptlite.cache.dense import DynamicCache, StaticCache
from gptlite.cache.prefix import Hit, PrefixStore
from gptlite.generate import prefill

if TYPE_CHECKING:
    from gptlite.model import GPTlite


class SharedPrefix:
    """The keys and values of one prefix that many requests begin with, computed once: a system prompt, a document.

    Args:
        model: the model that reads it.
        tokens: the prefix [n].
    Raises: ValueError when it has no token.
    """

    def __init__(self, model: GPTlite, tokens: Tensor) -> None:
        if tokens.dim() != 1 or not len(tokens):
            raise ValueError(f"tokens has shape {tuple(tokens.shape)}, it must be [n] with at least one token")
        cache = DynamicCache(model)
        prefill(model, tokens[None], cache)
        self.tokens, self.state = tokens, cache.export(0)

    def begin(self, cache: Cache, sequence: Hashable, tokens: Tensor) -> int:
        """Begins a sequence of any cache with the prefix.

        Args:
            tokens: the sequence's prompt [n], the prefix and at least one token more.
        Returns: how many of the tokens are cached.
        Raises: ValueError when the prompt doesn't begin with the prefix, or the cache can't take it.
        """
        n = len(self.tokens)
        if len(tokens) <= n or not torch.equal(tokens[:n], self.tokens):
            raise ValueError(f"the prompt must be the {n} tokens of the prefix and at least one more")
        cache.load(sequence, self.state)
        return n


class PrefixCache(StaticCache):
    """A static cache beside a store: `begin` copies what the store has of a prompt, `free` hands over what was read.

    A sequence's own line stays its own, so a hit costs a copy of its keys and values and no attention ever sees
    another's memory. Only tokens that nobody can take back reach the store: those of a sequence that has ended, or
    those that `share` finds below the last step. A step that was prepared and never run must be taken back by
    `keep(sequences, 0)` before `free`.

    Args:
        model: the model whose keys and values it keeps.
        n_sequences, max_tokens, bucket: as in `StaticCache`.
        store: a `BlockStore` or a `RadixStore`; several caches of one model may share it.
    """

    def __init__(self, model: GPTlite, n_sequences: int, max_tokens: int, store: PrefixStore, bucket: int = 1) -> None:
        super().__init__(model, n_sequences, max_tokens, bucket)
        self.store = store
        self._texts: dict[Hashable, list[int]] = {}  # the tokens that are known of each sequence, from its first
        self._salts: dict[Hashable, str] = {}
        self._hits: dict[Hashable, Hit] = {}

    def match(self, tokens: Tensor, salt: str = "") -> int:
        return self.store.match(tokens, salt)

    def begin(self, sequence: Hashable, tokens: Tensor, salt: str = "") -> int:
        self._absent(sequence)
        self._salts[sequence] = salt  # for what the sequence will leave behind, whether it finds something or not
        if not self.fits({sequence: len(tokens) - 1}) or len(tokens) < 2:
            return 0
        hit = self.store.acquire(tokens, salt)
        n = min(hit.n_tokens, len(tokens) - 1)  # the last token must be read to give logits
        if n == 0:
            self.store.release(hit)
            return 0
        self._lines |= self._take_lines([sequence])
        line = self._lines[sequence]
        for name, lines in (("k", self.k), ("v", self.v)):
            for layer, stored in enumerate(lines):
                # joined first: one write for each part of the hit would take several times as long
                stored[line, :, :n] = torch.cat([part[f"{name}.{layer}"] for part in hit.parts], dim=1)[:, :n]
        self.k_pos[line, :n] = torch.arange(n, device=self.device)
        self._slots[sequence], self.positions[sequence] = list(range(n)), list(range(n))
        self._texts[sequence], self._hits[sequence] = tokens[:n].tolist(), hit
        return n

    def prepare(
        self, sequences: Sequence[Hashable], positions: Positions, parents: Parents = None, tokens: Tensor | None = None
    ) -> list[Segment]:
        before = {key: len(self.positions.get(key, ())) for key in sequences}
        segments = super().prepare(sequences, positions, parents, tokens)
        if tokens is not None:
            told, begin = tokens.tolist(), 0
            for key, row in zip(sequences, positions, strict=True):
                text = self._texts.setdefault(key, [])
                if len(text) == before[key]:  # else there is a token before these that nobody told
                    text += [told[begin + i] for i in self._real[key]]
                begin += len(row)
        return segments

    def keep(self, sequences: Sequence[Hashable], kept: Sequence[int | Sequence[int]]) -> None:
        steps = {key: list(self._real[key]) for key in sequences if key in self._real}
        begins = {key: len(self.positions[key]) - len(real) for key, real in steps.items()}
        super().keep(sequences, kept)
        for key, real in steps.items():
            text, place = self._texts.get(key, []), {i: begins[key] + j for j, i in enumerate(real)}
            if len(text) > begins[key]:  # else the step's tokens were not told
                self._texts[key] = text[: begins[key]] + [text[place[i]] for i in self._real[key]]

    def share(self, sequence: Hashable) -> int:
        """Hands to the store what is final of a sequence that goes on: the tokens before its last step.

        Returns: tokens that the store did not have.
        Raises: ValueError when the cache doesn't hold the sequence.
        """
        return self._hand_over(sequence, len(self._held(sequence)) - len(self._real.get(sequence, ())))

    def _hand_over(self, sequence: Hashable, n: int) -> int:
        """Hands the first n tokens to the store, or as many as are known and stand at their own positions."""
        text, positions = self._texts.get(sequence, [])[:n], self.positions[sequence]
        n = next((i for i, p in enumerate(positions[: len(text)]) if i != p), len(text))
        if not n:
            return 0
        line = self._lines[sequence]  # its slots are 0, 1, 2, ..., since a static line is filled in order
        state = {
            f"{name}.{layer}": lines[line, :, :n]
            for name, store in (("k", self.k), ("v", self.v))
            for layer, lines in enumerate(store)
        }
        return self.store.insert(text[:n], state, self._salts.get(sequence, ""))

    def free(self, sequence: Hashable) -> None:
        self._hand_over(sequence, len(self._held(sequence)))
        super().free(sequence)
        if sequence in self._hits:
            self.store.release(self._hits.pop(sequence))
        self._texts.pop(sequence, None)
        self._salts.pop(sequence, None)

    def fork(self, sequence: Hashable, new: Hashable) -> None:
        super().fork(sequence, new)
        self._texts[new] = list(self._texts.get(sequence, ()))
        self._salts[new] = self._salts.get(sequence, "")

    def load(self, sequence: Hashable, state: dict[str, Tensor]) -> None:
        super().load(sequence, state)
        self._salts.pop(sequence, None)  # its tokens are not known, so it leaves nothing behind
