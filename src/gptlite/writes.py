"""Counts the bytes that caches write: by concatenation, all that they hold; in place, what is new."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from typing import Any

from torch import Tensor
from torch.utils._python_dispatch import TorchDispatchMode


@dataclass
class Written:
    """Bytes of floating-point values that were written; filled in while the block runs.

    Args:
        joined: by operations that make a new tensor out of old ones: cat, stack and pad.
        in_place: into a tensor that was there, at given places.
    """

    joined: int = 0
    in_place: int = 0


class _Writes(TorchDispatchMode):
    def __init__(self, written: Written) -> None:
        super().__init__()
        self.written = written

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        result = func(*args, **(kwargs or {}))
        name = func.overloadpacket.__name__
        if name in ("cat", "stack", "constant_pad_nd") and _is_float(result):
            self.written.joined += result.nbytes
        elif name == "index_put_" and _is_float(result):
            self.written.in_place += args[2].nbytes  # the values
        elif name == "copy_" and _is_float(result):
            self.written.in_place += result.nbytes
        return result


def _is_float(value: Any) -> bool:
    return isinstance(value, Tensor) and value.is_floating_point()


@contextmanager
def count_writes() -> Iterator[Written]:
    """Counts what is written inside a `with` block, for comparison with `gptlite.arithmetic_cache.written_bytes`.

    Yields: a Written that grows while the block runs.
    """
    written = Written()
    with _Writes(written):
        yield written
