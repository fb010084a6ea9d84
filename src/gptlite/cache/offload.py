"""Tiers below a block store: CPU memory, then a folder on disk that survives a restart {cite}`liu2025lmcache`.

What comes from a disk is not trusted: a file that is cut, changed, made by another model or no file of ours is a miss
and is reported; nothing of it is executed, and nothing larger than a block is read.
"""

from __future__ import annotations

import contextlib
import hashlib
import json
import logging
import os
import re
import stat
from abc import ABC, abstractmethod
from collections import Counter, OrderedDict
from pathlib import Path
from typing import TYPE_CHECKING

import numpy as np
import torch
from safetensors import SafetensorError
from safetensors.torch import load as parse_safetensors
from safetensors.torch import save as to_safetensors
from torch import Tensor

from gptlite.cache.block_store import Block
from gptlite.checkpoint import write_atomically

if TYPE_CHECKING:
    from gptlite.model import GPTlite

FORMAT = "gptlite-block-1"
HEADER_BYTES = 1 << 16  # more than any block's header takes
log = logging.getLogger(__name__)


class Tier(ABC):
    """A slower and larger place for the blocks that a store evicts."""

    @abstractmethod
    def put(self, block: Block) -> None:
        """Takes a block in, and may give up older ones for it."""

    @abstractmethod
    def get(self, key: bytes, parent: bytes, tokens: bytes) -> Block | None:
        """The block of this name, parent and tokens, or None. It counts as used."""

    @abstractmethod
    def __contains__(self, key: bytes) -> bool:
        """Whether a block of this name is here or below; `get` may still refuse it."""

    def flush(self) -> None:
        """Sends everything to the tiers below; by default there is none."""
        return


class MemoryTier(Tier):
    """Blocks in the memory of the CPU.

    Args:
        max_bytes: of keys and values. below: where the least recently used go when it is full.
    Raises: ValueError when max_bytes is below 0.
    """

    def __init__(self, max_bytes: int, below: Tier | None = None) -> None:
        if max_bytes < 0:
            raise ValueError(f"max_bytes is {max_bytes}, it must be at least 0")
        self.max_bytes, self.below, self.nbytes = max_bytes, below, 0
        self._blocks: OrderedDict[bytes, Block] = OrderedDict()  # the least recently used first
        self._device = torch.device("cpu")  # that the blocks came from, and go back to

    def __len__(self) -> int:
        return len(self._blocks)

    def __contains__(self, key: bytes) -> bool:
        return key in self._blocks or (self.below is not None and key in self.below)

    def put(self, block: Block) -> None:
        if block.key not in self._blocks:
            self._device = next(iter(block.state.values())).device
            state = {name: part.cpu() for name, part in block.state.items()}
            self._blocks[block.key] = Block(block.key, block.parent, block.tokens, state)
            self.nbytes += block.nbytes
        self._blocks.move_to_end(block.key)
        while self.nbytes > self.max_bytes:
            _, oldest = self._blocks.popitem(last=False)
            self.nbytes -= oldest.nbytes
            if self.below is not None:
                self.below.put(oldest)

    def get(self, key: bytes, parent: bytes, tokens: bytes) -> Block | None:
        block = self._blocks.get(key)
        if block is None:
            return None if self.below is None else self.below.get(key, parent, tokens)
        if (block.parent, block.tokens) != (parent, tokens):
            return None
        del self._blocks[key]  # it goes up to the store
        self.nbytes -= block.nbytes
        block.state = {name: part.to(self._device) for name, part in block.state.items()}
        return block

    def flush(self) -> None:
        if self.below is not None:
            for block in self._blocks.values():
                self.below.put(block)
            self.below.flush()


class DiskTier(Tier):
    """Blocks as files of one folder, one safetensors file each, with its checksum and the model's identity.

    A file is written beside its name and renamed, so that a process that dies leaves it whole or not there. One store
    at a time should write to a folder; others may lose some of its files, never get wrong ones.

    Args:
        folder: made when it isn't there.
        model: the model whose keys and values they are; another model's files are refused.
        block_size: tokens of a block.
        max_bytes: of all files; the least recently used are deleted beyond it.
    Raises: ValueError when max_bytes is below 0, or the folder can't be made or read.
    """

    def __init__(self, folder: str | Path, model: GPTlite, block_size: int, max_bytes: int = 2**30) -> None:
        if max_bytes < 0:
            raise ValueError(f"max_bytes is {max_bytes}, it must be at least 0")
        self.folder, self.max_bytes, self.identity = Path(folder), max_bytes, fingerprint(model)
        weight = model.token_embedding.weight
        self.dtype, self.device, self.block_size = weight.dtype, weight.device, block_size
        self.shapes: dict[str, tuple[int, ...]] = {}
        for layer, block in enumerate(model.blocks):
            G, Dk, Dv = block.mha.kv_shape
            self.shapes |= {f"k.{layer}": (G, block_size, Dk), f"v.{layer}": (G, block_size, Dv)}
        n_values = sum(int(np.prod(shape)) for shape in self.shapes.values())
        self.largest = n_values * self.dtype.itemsize + 8 * block_size + HEADER_BYTES  # bytes of a file at most
        self.refused: Counter[str] = Counter()  # files that could not be used, by reason
        self._sizes: OrderedDict[bytes, int] = OrderedDict()  # of the files by key, the least recently used first
        self._open()

    @property
    def nbytes(self) -> int:
        """Bytes of the files."""
        return sum(self._sizes.values())

    def __len__(self) -> int:
        return len(self._sizes)

    def __contains__(self, key: bytes) -> bool:
        return key in self._sizes

    def path(self, key: bytes) -> Path:
        """Where the block of this name is kept."""
        return self.folder / f"{key.hex()}.safetensors"

    def put(self, block: Block) -> None:
        if block.key in self._sizes:
            self._sizes.move_to_end(block.key)
            return
        content = _pack(block, self.identity)
        try:
            write_atomically(self.path(block.key), content)
        except ValueError as error:  # a full disk makes the cache smaller, it doesn't stop the model
            self._refuse("not written", str(error))
            return
        self._sizes[block.key] = len(content)
        self._trim()

    def get(self, key: bytes, parent: bytes, tokens: bytes) -> Block | None:
        if key not in self._sizes:
            return None
        path = self.path(key)
        try:
            state, header = _unpack(_read(path, self.largest))
            self._check(state, header)
        except (OSError, ValueError) as error:
            reason = error.args[0] if isinstance(error, _Foreign) else "damaged"
            self._refuse(reason, f"{path.name}: {error}")
            del self._sizes[key]
            if reason == "damaged":  # ours, and of no use any more; what is another's stays where it is
                with contextlib.suppress(OSError):
                    path.unlink()
            return None
        if (header["key"], header["parent"]) != (key.hex(), parent.hex()) or state[
            "tokens"
        ].numpy().tobytes() != tokens:
            return None  # a collision of names: another text
        self._sizes.move_to_end(key)
        with contextlib.suppress(OSError):
            os.utime(path)  # for the order after a restart
        own = {name: state[name].to(self.device) for name in self.shapes}
        return Block(key, parent, tokens, own)

    def _open(self) -> None:
        """Takes in what an earlier process has left, and clears what it did not finish."""
        found = []
        try:
            self.folder.mkdir(parents=True, exist_ok=True)
            for entry in os.scandir(self.folder):
                if re.fullmatch(r"\.[0-9a-f]{32}\.safetensors\.part", entry.name):
                    os.unlink(entry.path)
                elif re.fullmatch(r"[0-9a-f]{32}\.safetensors", entry.name) and entry.is_file(follow_symlinks=False):
                    about = entry.stat(follow_symlinks=False)
                    found.append((about.st_mtime_ns, entry.name, about.st_size))
        except OSError as error:
            raise ValueError(f"cannot use the folder {self.folder}: {error.strerror}") from None
        for _, name, size in sorted(found):
            self._sizes[bytes.fromhex(name[:32])] = size
        self._trim()

    def _trim(self) -> None:
        total = self.nbytes
        while total > self.max_bytes:
            key, size = self._sizes.popitem(last=False)
            total -= size
            with contextlib.suppress(OSError):
                self.path(key).unlink()

    def _check(self, state: dict[str, Tensor], header: dict[str, str]) -> None:
        """Raises: _Foreign when a whole file is not a block of this model and size."""
        if header.get("format") != FORMAT:
            raise _Foreign("another format", f"{header.get('format')!r} is not {FORMAT!r}")
        if header.get("model") != self.identity:
            raise _Foreign("another model", "its keys and values are those of other weights")
        expected = {name: (shape, self.dtype) for name, shape in self.shapes.items()}
        expected["tokens"] = ((self.block_size,), torch.int64)
        if {name: (tuple(part.shape), part.dtype) for name, part in state.items()} != expected:
            raise _Foreign("another shape", f"it is no block of {self.block_size} tokens of this model")

    def _refuse(self, reason: str, text: str) -> None:
        self.refused[reason] += 1
        log.warning("block not used, %s: %s", reason, text)


class _Foreign(ValueError):
    """A whole file that is not for this store; the first argument is the reason, in two words."""

    def __str__(self) -> str:
        return str(self.args[1])


def fingerprint(model: GPTlite) -> str:
    """Tells one model's keys and values from another's: a hash of names, shapes, dtypes and values of all weights.

    Returns: 64 hexadecimal digits.
    """
    digest = hashlib.sha256()
    for name, weight in sorted(model.state_dict().items()):
        digest.update(f"{name} {tuple(weight.shape)} {weight.dtype};".encode())
        digest.update(_raw(weight))
    windows = [(block.mha.window, block.mha.sinks) for block in model.blocks]  # what attention sees is no weight
    return hashlib.sha256(digest.digest() + repr(windows).encode()).hexdigest()


def _raw(tensor: Tensor) -> memoryview:
    """The bytes of a tensor [...], of any dtype."""
    return tensor.detach().cpu().contiguous().flatten().view(torch.uint8).numpy().data


def _checksum(header: dict[str, str], tensors: dict[str, Tensor]) -> str:
    """sha256 of the header without the checksum, and of name, shape, dtype and values of each tensor."""
    described = {name: value for name, value in header.items() if name != "sha256"}
    digest = hashlib.sha256(json.dumps(described, sort_keys=True).encode())
    for name, tensor in sorted(tensors.items()):
        digest.update(f"{name} {tuple(tensor.shape)} {tensor.dtype};".encode())
        digest.update(_raw(tensor))
    return digest.hexdigest()


def _pack(block: Block, identity: str) -> bytes:
    """The content of a block's file."""
    tensors = {name: part.detach().cpu().contiguous() for name, part in block.state.items()}
    tensors["tokens"] = torch.from_numpy(np.frombuffer(block.tokens, "<i8").astype(np.int64))
    header = {"format": FORMAT, "model": identity, "key": block.key.hex(), "parent": block.parent.hex()}
    return to_safetensors(tensors, header | {"sha256": _checksum(header, tensors)})


def _unpack(content: bytes) -> tuple[dict[str, Tensor], dict[str, str]]:
    """Tensors and header of a file. Raises: ValueError when it is no whole file of ours."""
    try:
        tensors = parse_safetensors(content)
        size = int.from_bytes(content[:8], "little")
        header = json.loads(content[8 : 8 + size]).get("__metadata__")
    except (SafetensorError, ValueError, RecursionError) as error:
        raise ValueError(f"no safetensors file: {error}") from None
    if not isinstance(header, dict) or header.get("sha256") != _checksum(header, tensors):
        raise ValueError("the checksum does not fit the content")
    return tensors, header


def _read(path: Path, largest: int) -> bytes:
    """A plain file's bytes. Raises: OSError; ValueError when it is no plain file, or too large for a block."""
    # a pipe or a device must not make us wait, a link not lead us elsewhere
    handle = os.open(path, os.O_RDONLY | getattr(os, "O_NONBLOCK", 0) | getattr(os, "O_NOFOLLOW", 0))
    with open(handle, "rb") as file:
        about = os.fstat(handle)
        if not stat.S_ISREG(about.st_mode) or about.st_size > largest:
            raise ValueError(f"{about.st_size:,} bytes, or no plain file; a block has at most {largest:,}")
        return file.read(largest)
