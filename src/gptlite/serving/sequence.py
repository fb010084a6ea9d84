"""What a client asks for (a request) and what the engine knows of it while it runs (a sequence)."""

from __future__ import annotations

from collections.abc import Iterable
from collections.abc import Sequence as SequenceOf
from dataclasses import dataclass, field
from typing import Protocol

import torch
from torch import Tensor

from gptlite.config import check_counts
from gptlite.sampling import SamplingParams

Key = tuple[int, int]  # of a sequence: number of its request, and which of the request's samples it is


class Tokenizer(Protocol):
    """What stop strings need: text of tokens, where the text of two tokens is that of the one and then the other."""

    def decode(self, tokens: Iterable[int], /) -> str:
        """Returns: their text."""
        ...


@dataclass(frozen=True, eq=False)
class Request:
    """One prompt and how to answer it.

    Args:
        tokens: the prompt, [n] or a list, n >= 1.
        n_new: new tokens at most.
        params: of this request's sampling, whatever others in its batch have.
        seed: of its uniform numbers: the tokens are those of `gptlite.generate` with this seed, alone or in a batch.
        stop: strings that end the answer; they are not part of it.
        salt: what else must agree for a prefix cache to share its prompt: an adapter, a tenant.
    Raises: ValueError that names what is wrong.
    """

    tokens: Tensor | list[int]
    n_new: int
    params: SamplingParams = field(default_factory=SamplingParams)
    seed: int = 0
    stop: tuple[str, ...] = ()
    salt: str = ""

    def __post_init__(self) -> None:
        if isinstance(self.tokens, str) or not isinstance(self.tokens, Tensor | SequenceOf):
            raise ValueError(f"a request's tokens are {self.tokens!r}, they must be a tensor [n] or a list of numbers")
        shape = tuple(self.tokens.shape) if isinstance(self.tokens, Tensor) else (len(self.tokens),)
        if len(shape) != 1 or not shape[0]:
            raise ValueError(f"a request's tokens have shape {shape}, it must be [n] with at least one token")
        check_counts(n_new=self.n_new)
        if not isinstance(self.stop, tuple | list) or not all(isinstance(s, str) and s for s in self.stop):
            raise ValueError(f"stop is {self.stop!r}, it must be a tuple of strings that are not empty")

    @property
    def prompt(self) -> list[int]:
        """The prompt's tokens."""
        return self.tokens.tolist() if isinstance(self.tokens, Tensor) else list(self.tokens)


class Sequence:
    """A request that runs: its tokens, how far the cache has got with them, and what its client may read.

    Args:
        request: what it answers. key: unique in its engine, and in the order of arrival. arrived: when, in seconds.
    """

    def __init__(self, request: Request, key: Key, arrived: float = 0.0) -> None:
        self.request, self.key, self.arrived = request, key, arrived
        self.tokens = request.prompt  # the prompt, then what was generated
        self.n_prompt = len(self.tokens)
        self.n_computed = 0  # of the tokens, how many the cache holds
        self.state: dict[str, Tensor] | None = None  # its keys and values while it is swapped out
        self.siblings: list[Sequence] = []  # samples of the same prompt, forked from this one once it is read
        self.reason = ""  # why it ended: "length", "stop" or "cancelled"
        self.n_released = 0  # of the generated tokens, how many are surely no part of a stop string
        self.text = ""  # of the generated tokens, kept where there are stop strings
        self.ends: list[int] = []  # where in the text each generated token ends
        self.times: list[float] = []  # when each generated token came, in seconds
        self.logits: list[Tensor] = []  # [V] of each generated token, where the engine keeps them
        self.n_preempted = 0
        self.n_cached = 0  # tokens that a prefix cache spared, over all admissions
        self._uniforms: list[float] | None = None

    @property
    def finished(self) -> bool:
        """Whether it has ended, for whatever reason."""
        return bool(self.reason)

    @property
    def n_generated(self) -> int:
        """Tokens generated so far, those of a stop string too."""
        return len(self.tokens) - self.n_prompt

    @property
    def output(self) -> list[int]:
        """The generated tokens that the client may have."""
        return self.tokens[self.n_prompt : self.n_prompt + self.n_released]

    @property
    def uniform(self) -> float:
        """The number in [0, 1) that decides the next token.

        It belongs to the token's place in the answer, so a sequence that is computed again does not draw again.
        """
        if self._uniforms is None:
            seed = self.request.seed + self.key[1]
            generator = torch.Generator().manual_seed(seed)
            self._uniforms = torch.rand(self.request.n_new, generator=generator, dtype=torch.float64).tolist()
        return self._uniforms[self.n_generated]

    def append(self, token: int, time: float, tokenizer: Tokenizer | None) -> list[int]:
        """Takes in a new token, and ends the sequence where a stop string or its length says so.

        A token whose text may begin a stop string is held back until that is settled.
        Returns: the tokens that the client may read now.
        """
        self.tokens.append(token)
        self.times.append(time)
        released = self.n_generated
        if self.n_generated == self.request.n_new:
            self.reason = "length"
        if self.request.stop:
            assert tokenizer is not None
            released = self._stop_at(tokenizer.decode([token]))
        new = self.tokens[self.n_prompt + self.n_released : self.n_prompt + released]
        self.n_released = released
        return new

    def _stop_at(self, new_text: str) -> int:
        """Looks for stop strings in the text with its new end. Returns: how many generated tokens are released."""
        stops = self.request.stop
        start = max(0, len(self.text) - max(map(len, stops)) + 1)  # a stop string that ends in the new text
        self.text += new_text
        self.ends.append(len(self.text))
        found = [(at, stop) for stop in stops if (at := self.text.find(stop, start)) >= 0]
        if found:
            self.reason = "stop"
            safe = min(at for at, _ in found)
            self.text = self.text[:safe]
        elif self.reason:
            safe = len(self.text)
        else:
            held = max(n for stop in stops for n in range(len(stop)) if self.text.endswith(stop[:n]))
            safe = len(self.text) - held
        return sum(end <= safe for end in self.ends)

    def __repr__(self) -> str:
        words = self.reason or f"{self.n_computed} of {len(self.tokens)} tokens computed"
        return f"Sequence {self.key}: {self.n_prompt} + {self.n_generated} tokens, {words}"
