"""A bounded dictionary with an age limit: what both caches of answers keep their entries in."""

from __future__ import annotations

import time
from bisect import insort
from collections import OrderedDict, deque
from collections.abc import Callable, Hashable, Iterator
from typing import Generic, TypeVar

from gptlite.config import check_counts

Key = TypeVar("Key", bound=Hashable)
Value = TypeVar("Value")


class BoundedEntries(Generic[Key, Value]):
    """Entries that leave when they are too old, or when there are too many and they were not used for longest.

    Every operation takes constant time on average. It isn't safe for threads by itself: its owner holds a lock.

    Args:
        max_entries: how many are kept.
        expires_after: seconds for which an entry counts; None means for ever.
        clock: gives the time in seconds; a test passes its own.
    Raises: ValueError when a limit isn't positive.
    """

    def __init__(
        self, max_entries: int = 10_000, expires_after: float | None = None, clock: Callable[[], float] = time.time
    ) -> None:
        check_counts(max_entries=max_entries)
        if expires_after is not None and not expires_after > 0:
            raise ValueError(f"expires_after is {expires_after!r}, it must be None or a positive number of seconds")
        self.max_entries, self.expires_after, self.clock = max_entries, expires_after, clock
        self._held: OrderedDict[Key, tuple[float, Value]] = OrderedDict()  # the least recently used comes first
        self._born: deque[tuple[float, Key]] = deque()  # the oldest comes first, since all live for as long

    def __len__(self) -> int:
        return len(self._held)

    def __contains__(self, key: Key) -> bool:
        return key in self._held

    def items(self) -> Iterator[tuple[Key, float, Value]]:
        """Key, time of birth and value of each entry, the least recently used first."""
        for key, (born, value) in self._held.items():
            yield key, born, value

    def get(self, key: Key) -> Value | None:
        """The value, which counts as a use; None when there is none, or it is too old."""
        if key not in self._held or self.is_old(self._held[key][0]):
            return None
        self._held.move_to_end(key)
        return self._held[key][1]

    def peek(self, key: Key) -> Value:
        """The value of a key that is there; this counts as no use."""
        return self._held[key][1]

    def put(self, key: Key, value: Value, born: float | None = None) -> list[tuple[Key, Value]]:
        """Adds or replaces an entry.

        Args:
            born: time in seconds; None means now.
        Returns: what had to leave: old entries first, then the least recently used.
        """
        gone = self.expire()
        born = self.clock() if born is None else born
        self._held[key] = (born, value)
        self._held.move_to_end(key)
        if self._born and born < self._born[-1][0]:  # one that was born elsewhere
            insort(self._born, (born, key), key=lambda pair: pair[0])
        else:
            self._born.append((born, key))
        while len(self._held) > self.max_entries:
            least, (_, lost) = self._held.popitem(last=False)
            gone.append((least, lost))
        if len(self._born) > 2 * len(self._held) + 16:  # the births of entries that left otherwise
            self._born = deque(sorted(((born, key) for key, (born, _) in self._held.items()), key=lambda pair: pair[0]))
        return gone

    def pop(self, key: Key) -> Value | None:
        """Removes an entry. Returns: its value, or None when there is none."""
        return self._held.pop(key, (0.0, None))[1]

    def expire(self) -> list[tuple[Key, Value]]:
        """Removes what is too old. Returns: it."""
        gone = []
        while self._born and self.is_old(self._born[0][0]):
            born, key = self._born.popleft()
            if key in self._held and self._held[key][0] == born:  # not replaced by a younger one
                gone.append((key, self._held.pop(key)[1]))
        return gone

    def is_old(self, born: float) -> bool:
        """Whether what was born then (in seconds) counts no more."""
        return self.expires_after is not None and self.clock() - born >= self.expires_after
