"""Prefix caching by blocks: a chain of hashes names each block by all the text up to its end.

A key or a value depends on its token and on every token before it, so what can be reused is a prefix, and only where
all of its tokens are the same. `block_keys` and `PrefixIndex` find it; a `PrefixStore` keeps the keys and values.
"""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections import Counter
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass, field
from hashlib import blake2b
from typing import Any, Generic, TypeVar

import numpy as np
from torch import Tensor

from gptlite.config import check_counts

KEY_BYTES = 16  # of a block's key
State = dict[str, Tensor]  # "k.LAYER" [G, n, Dk] and "v.LAYER" [G, n, Dv], as `Cache.export` gives them, without k_pos
Payload = TypeVar("Payload")


# -- the names of blocks ------------------------------------------------------------------------------------------


def token_array(tokens: Sequence[int] | Tensor) -> np.ndarray:
    """Tokens [n] as int64 on the host. Raises: ValueError when they are not whole numbers [n]."""
    values = np.asarray(tokens.tolist() if isinstance(tokens, Tensor) else tokens)
    if values.ndim != 1 or (values.size and values.dtype.kind not in "iu"):
        # a cast would cut 1.5 to 1, and find the keys of another text
        raise ValueError(f"tokens are {values.dtype} {values.shape}, they must be whole numbers [n]")
    return values.astype(np.int64)


def token_bytes(tokens: Sequence[int] | Tensor) -> bytes:
    """Tokens [n] as 8 bytes each, the same on every machine: what is hashed, and what is compared on a hit."""
    return token_array(tokens).astype("<i8").tobytes()


def block_key(parent: bytes, block: bytes) -> bytes:
    """The name of a block: a hash of its tokens and of its parent's name, and so of all the text up to its end."""
    return blake2b(parent + block, digest_size=KEY_BYTES).digest()


def root_key(salt: str = "") -> bytes:
    """What stands for the parent of a text's first block: the salt itself, so that comparing it compares the salt."""
    return b"root:" + salt.encode()


def block_chain(
    tokens: Sequence[int] | Tensor,
    block_size: int,
    salt: str = "",
    parent: bytes = b"",
    hash_block: Callable[[bytes, bytes], bytes] = block_key,
) -> Iterator[tuple[bytes, bytes, bytes]]:
    """The full blocks of a text, one after the other; see `block_keys`.

    Args:
        tokens: [n]. hash_block: gives a block its name.
    Yields: (key, parent, tokens as bytes) of each.
    """
    raw, width = token_bytes(tokens), 8 * block_size
    parent = parent or root_key(salt)
    for begin in range(0, len(raw) - width + 1, width):
        block = raw[begin : begin + width]
        key = hash_block(parent, block)
        yield key, parent, block
        parent = key


def block_keys(tokens: Sequence[int] | Tensor, block_size: int, salt: str = "", parent: bytes = b"") -> list[bytes]:
    """The names of the full blocks of a text; a rest that fills no block has none.

    Args:
        tokens: [n].
        block_size: tokens of a block.
        salt: what else must agree for two texts to share: an adapter, a tenant.
        parent: the name of the block before these tokens; empty where the text begins.
    Returns: n // block_size names.
    Raises: ValueError when the block size is not a whole number of at least 1.
    """
    check_counts(block_size=block_size)
    return [key for key, _, _ in block_chain(tokens, block_size, salt, parent)]


class PrefixIndex(Generic[Payload]):
    """Finds blocks by name, and compares parent and tokens on each hit: a hash may collide, and keys are then wrong.

    Args:
        block_size: tokens of a block.
        hash_block: gives a block its name; a weak one serves the test of collisions.
    Raises: ValueError when the block size is not a whole number of at least 1.
    """

    def __init__(self, block_size: int, hash_block: Callable[[bytes, bytes], bytes] = block_key) -> None:
        check_counts(block_size=block_size)
        self.block_size, self.hash_block = block_size, hash_block
        self._entries: dict[bytes, tuple[bytes, bytes, Payload]] = {}  # key -> parent, tokens as bytes, payload

    def __len__(self) -> int:
        return len(self._entries)

    def __contains__(self, key: bytes) -> bool:
        return key in self._entries

    def chain(self, tokens: Sequence[int] | Tensor, salt: str = "") -> Iterator[tuple[bytes, bytes, bytes]]:
        """The full blocks of a text [n], as (key, parent, tokens as bytes)."""
        return block_chain(tokens, self.block_size, salt, hash_block=self.hash_block)

    def find(self, key: bytes, parent: bytes, tokens: Sequence[int] | Tensor | bytes) -> Payload | None:
        """The payload of a block [n] that has this name, this parent and these tokens; None where there is none."""
        entry = self._entries.get(key)
        if entry is None or entry[0] != parent:
            return None
        return entry[2] if entry[1] == (tokens if isinstance(tokens, bytes) else token_bytes(tokens)) else None

    def match(self, tokens: Sequence[int] | Tensor, salt: str = "") -> list[Payload]:
        """The payloads of the longest chain of blocks that a text [n] begins with."""
        found: list[Payload] = []
        for block in self.chain(tokens, salt):
            payload = self.find(*block)
            if payload is None:
                break
            found.append(payload)
        return found

    def insert(self, key: bytes, parent: bytes, tokens: Sequence[int] | Tensor | bytes, payload: Payload) -> bool:
        """Enters a block [n] after its parent.

        Returns: whether it is entered. False when the name is taken, by this block or, a collision, by another one;
            then what would follow it must not be entered either, since its parent would be mistaken for that other.
        """
        if key in self._entries:
            return False
        self._entries[key] = (parent, tokens if isinstance(tokens, bytes) else token_bytes(tokens), payload)
        return True

    def remove(self, key: bytes) -> Payload:
        """Forgets a block; those that follow it should have gone before. Raises: ValueError when it isn't there."""
        if key not in self._entries:
            raise ValueError(f"no block {key.hex()} in the index")
        return self._entries.pop(key)[2]

    def payloads(self) -> list[Payload]:
        """All payloads, in the order in which they were entered."""
        return [payload for _, _, payload in self._entries.values()]


# -- stores -------------------------------------------------------------------------------------------------------


@dataclass
class Hit:
    """What a store has of a text.

    Args:
        n_tokens: how many of its tokens, from the first.
        parts: their keys and values, one part after the other.
        held: what the store protects until `release`.
    """

    n_tokens: int = 0
    parts: list[State] = field(default_factory=list)
    held: list[Any] = field(default_factory=list)


class PrefixStore(ABC):
    """Keys and values of texts that were read before, found by their tokens."""

    def __init__(self) -> None:
        self.counts: Counter[str] = Counter()  # in tokens: asked, hit, stored, evicted

    @abstractmethod
    def match(self, tokens: Sequence[int] | Tensor, salt: str = "") -> int:
        """How many of these tokens [n], from the first, are held; changes nothing."""

    @abstractmethod
    def acquire(self, tokens: Sequence[int] | Tensor, salt: str = "") -> Hit:
        """The longest prefix of these tokens [n] that is held; it is not evicted before `release`."""

    @abstractmethod
    def release(self, hit: Hit) -> None:
        """Gives back what `acquire` protected; once."""

    @abstractmethod
    def insert(self, tokens: Sequence[int] | Tensor, state: State, salt: str = "") -> int:
        """Keeps a text [n], as far as there is room; what it takes is copied.

        Args:
            state: its keys and values, for all n tokens.
        Returns: tokens that were not held before.
        Raises: ValueError when the state is not one of n tokens.
        """


def check_state(state: State, n_tokens: int) -> None:
    """Raises: ValueError when a state has no keys, or not those of n tokens; they would be found for another text."""
    if not state:
        raise ValueError(f"the state of {n_tokens} tokens is empty, it must have their keys and values")
    for name, part in state.items():
        if part.dim() != 3 or part.shape[1] != n_tokens:
            raise ValueError(f"the state's {name} has shape {tuple(part.shape)}, it must be [G, {n_tokens}, D]")
