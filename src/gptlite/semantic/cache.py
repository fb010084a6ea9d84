"""The semantic cache: a question that was answered before in other words gets the stored answer."""

from __future__ import annotations

import threading
import time
from collections.abc import Callable
from dataclasses import dataclass, replace
from pathlib import Path

import numpy as np

from gptlite.config import check_counts
from gptlite.semantic import store
from gptlite.semantic.embed import Embed
from gptlite.semantic.entries import BoundedEntries
from gptlite.semantic.index import KINDS, VectorIndex

THRESHOLD = 0.86  # chosen on one half of the labelled pairs; see `gptlite.semantic.evaluate`
Check = Callable[[str, str], str | None]  # asked, cached -> why the answer doesn't fit, or None


@dataclass(frozen=True)
class Entry:
    """A stored answer: question, answer, scope, and the question's embedding [d]."""

    question: str
    answer: str
    scope: str
    vector: np.ndarray


@dataclass(frozen=True)
class Lookup:
    """What a question found.

    Args:
        answer: the stored answer on a hit; None on a miss, until `ask` fills in what was generated.
        hit: whether the answer comes from the cache.
        similarity: cosine with the most similar question of the scope; None when the scope is empty.
        question: that most similar question, or on a hit the one whose answer it is.
        objection: why the check refused the most similar one of those above the threshold.
    """

    answer: str | None = None
    hit: bool = False
    similarity: float | None = None
    question: str | None = None
    objection: str | None = None


class SemanticCache:
    """Answers by the meaning of the question {cite}`bang2023gptcache`; safe for threads.

    Each scope has an index of its own, so that an answer cannot cross from one user or tenant to another.

    Args:
        embed: n texts -> [n, d], rows of unit length, such as `MiniLM`.
        threshold: least cosine similarity of a hit.
        check: called with the asked and the cached question, says why the answer must not be served; None checks
            nothing. `gptlite.semantic.check.objection` is one.
        index: flat, ivf, hnsw or pq.
        candidates: how many of the most similar questions are considered.
        max_entries: over all scopes; beyond it the least recently used entry leaves.
        expires_after: seconds for which an answer counts; None means for ever.
        clock: time in seconds, which also is what is stored; a test passes its own.
    Raises: ValueError that names the argument and what is allowed.
    """

    def __init__(
        self,
        embed: Embed,
        threshold: float = THRESHOLD,
        check: Check | None = None,
        index: str = "flat",
        candidates: int = 4,
        max_entries: int = 10_000,
        expires_after: float | None = None,
        clock: Callable[[], float] = time.time,
    ) -> None:
        if not 0 < threshold <= 1:
            raise ValueError(f"threshold is {threshold!r}, it must be in (0, 1]")
        if index not in KINDS:
            raise ValueError(f"index is {index!r}, it must be one of {', '.join(KINDS)}")
        check_counts(candidates=candidates)
        self.embed, self.threshold, self.check, self.index, self.candidates = embed, threshold, check, index, candidates
        self.hits = self.misses = self.refused = 0
        self._entries: BoundedEntries[int, Entry] = BoundedEntries(max_entries, expires_after, clock)
        self._ids: dict[tuple[str, str], int] = {}  # by scope and question
        self._indexes: dict[str, VectorIndex] = {}  # by scope
        self._next_id, self._dim = 0, 0  # numbers in an embedding, known from the first one on
        self._lock, self._saving = threading.RLock(), threading.Lock()

    def __len__(self) -> int:
        with self._lock:
            self._drop(self._entries.expire())
            return len(self._entries)

    def entries(self) -> list[Entry]:
        """All entries, the least recently used first."""
        with self._lock:
            self._drop(self._entries.expire())
            return [entry for _, _, entry in self._entries.items()]

    def ask(self, question: str, generate: Callable[[str], str], scope: str = "") -> Lookup:
        """The stored answer on a hit, else that of `generate(question)`, which then is stored.

        Two who ask the same at the same time may both generate; the later answer stays.
        """
        vector = self._vector(question, scope)
        found = self._lookup(question, vector, scope)
        if found.hit:
            return found
        answer = generate(question)  # without the lock: others go on meanwhile
        self._store(Entry(question, answer, scope, vector))
        return replace(found, answer=answer)

    def lookup(self, question: str, scope: str = "") -> Lookup:
        """What a question finds, without generating or storing anything."""
        return self._lookup(question, self._vector(question, scope), scope)

    def put(self, question: str, answer: str, scope: str = "") -> None:
        """Stores an answer; the same question of the same scope loses its old one."""
        self._store(Entry(question, answer, scope, self._vector(question, scope)))

    def forget(self, question: str, scope: str = "") -> bool:
        """Removes the answer to exactly this question. Returns: whether there was one."""
        with self._lock:
            key = self._ids.get((scope, question))
            entry = None if key is None else self._entries.pop(key)
            if key is None or entry is None:
                return False
            self._drop([(key, entry)])
            return True

    def _lookup(self, question: str, vector: np.ndarray, scope: str) -> Lookup:
        with self._lock:
            self._drop(self._entries.expire())
            index = self._indexes.get(scope)
            near = index.search(vector, self.candidates) if index else []
            candidates = [(key, similarity, self._entries.peek(key)) for key, similarity in near]
        objection = None
        for key, similarity, entry in candidates:
            if similarity < self.threshold:
                break
            reason = self.check(question, entry.question) if self.check else None  # without the lock: it may be slow
            objection = objection or reason
            if reason is None:
                with self._lock:
                    if self._entries.get(key) is entry:  # still there, and now it was used
                        self.hits += 1
                        return Lookup(entry.answer, True, similarity, entry.question)
        with self._lock:
            self.misses += 1
            self.refused += objection is not None
        if not candidates:
            return Lookup()
        _, similarity, entry = candidates[0]
        return Lookup(None, False, similarity, entry.question, objection)

    def _store(self, entry: Entry, born: float | None = None) -> None:
        if not isinstance(entry.answer, str):
            raise ValueError(f"the answer is {entry.answer!r}, it must be a text")
        with self._lock:
            # made first: an index that cannot be made is refused while nothing has changed
            index = self._indexes.get(entry.scope) or VectorIndex(self.index, len(entry.vector))
            self.forget(entry.question, entry.scope)
            key, self._next_id = self._next_id, self._next_id + 1
            self._drop(self._entries.put(key, entry, born))
            if key in self._entries:
                self._ids[entry.scope, entry.question] = key
                self._indexes.setdefault(entry.scope, index).add(key, entry.vector)

    def _drop(self, gone: list[tuple[int, Entry]]) -> None:
        """Removes from the indexes what has left the entries."""
        for key, entry in gone:
            del self._ids[entry.scope, entry.question]
            index = self._indexes[entry.scope]
            index.remove(key)
            if not len(index):
                del self._indexes[entry.scope]

    def _vector(self, question: str, scope: str = "") -> np.ndarray:
        for name, text in (("question", question), ("scope", scope)):
            if not isinstance(text, str):
                raise ValueError(f"the {name} is {text!r}, it must be a text")
        if not question.strip():
            raise ValueError("the question is empty")
        vectors = np.asarray(self.embed([question]), dtype=np.float32)
        if vectors.ndim != 2 or len(vectors) != 1:
            raise ValueError(f"embed gave shape {vectors.shape} for one text, it must be (1, d)")
        if not abs(float(np.linalg.norm(vectors[0])) - 1) < 1e-3:  # not a number is refused too
            raise ValueError(f"embed gave a vector of length {np.linalg.norm(vectors[0]):.4g}, it must be 1")
        self._dim = self._dim or vectors.shape[1]
        if vectors.shape[1] != self._dim:
            raise ValueError(f"embed gave {vectors.shape[1]} numbers, before it gave {self._dim}")
        return vectors[0]

    # -- on disk --------------------------------------------------------------------------------------------------

    def save(self, path: str | Path) -> None:
        """Writes all entries as one file; whoever looks finds the old file or the new one, never a part.

        Raises: ValueError when the folder cannot be written.
        """
        with self._saving:  # one at a time
            with self._lock:
                self._drop(self._entries.expire())
                held = [(born, entry) for _, born, entry in self._entries.items()]
            vectors = np.stack([entry.vector for _, entry in held]) if held else np.empty((0, 0), np.float32)
            rows = [
                {"question": entry.question, "answer": entry.answer, "scope": entry.scope, "born": float(born)}
                for born, entry in held
            ]
            store.write(Path(path), vectors, rows)

    def load(self, path: str | Path) -> int:
        """Adds the entries of a file to what is there; what is too old by now stays out. The index is built anew.

        A question that is there already gets the file's answer.

        Returns: how many entries came in. Raises: ValueError when the file is missing, damaged or foreign, or its
            embeddings are of another encoder; then nothing has changed.
        """
        vectors, rows = store.read(Path(path))
        if rows:  # the same encoder gives the same embedding
            own = self._vector(rows[0]["question"])
            if vectors.shape[1] != len(own):
                raise ValueError(f"{path} holds embeddings of {vectors.shape[1]} numbers, this cache makes {len(own)}")
            if vectors[0] @ own < 0.99:
                raise ValueError(f"{path} holds embeddings of another encoder")
        with self._lock:
            first = self._next_id
            for vector, row in zip(vectors, rows, strict=True):  # the least recently used first, as they were
                if not self._entries.is_old(row["born"]):  # or else it would drive out one that lives
                    self._store(Entry(row["question"], row["answer"], row["scope"], vector), row["born"])
            self._drop(self._entries.expire())
            return sum(key >= first for key, _, _ in self._entries.items())
