"""Vector indexes over FAISS, chosen by name; every one of them can forget, also where FAISS cannot."""

from __future__ import annotations

from importlib.util import find_spec
from typing import Any

import numpy as np

from gptlite.config import check_counts

KINDS = ("flat", "ivf", "hnsw", "pq")
TRAIN_AT = 1024  # vectors from which ivf and pq are trained; below that they search everything, as flat does
CODE_BYTES = 48  # of pq: a vector in 48 parts, each the number of one of 256 codes
EF_SEARCH = 64  # of hnsw: places that a walk keeps in view
GROWTH = 4  # times as many vectors, or as few: built again, so that the cells fit what is there


class VectorIndex:
    """The most similar of many unit vectors, by key {cite}`douze2024faiss`.

    The vectors themselves are kept beside the index. So each similarity that comes out is exact, whatever the index
    rounds away; an index that cannot delete, as HNSW, is built again when half of it is dead; and one that must be
    trained, as IVF and PQ, waits until there is something to train on.

    Args:
        kind: "flat" compares with all; "ivf" with the cells nearest to the query {cite}`jegou2011pq`; "hnsw" walks a
            graph of neighbours {cite}`malkov2020hnsw`; "pq" compares with all in 48 bytes each {cite}`jegou2011pq`.
        dim: d, numbers in a vector.
        train_at: vectors from which ivf and pq are trained.
        n_probe: cells that ivf visits.
    Raises: ValueError on an unknown kind or a size that isn't positive; ImportError that names the extra when FAISS
        is missing.
    """

    def __init__(self, kind: str, dim: int, train_at: int = TRAIN_AT, n_probe: int = 8) -> None:
        if kind not in KINDS:
            raise ValueError(f"index is {kind!r}, it must be one of {', '.join(KINDS)}")
        check_counts(dim=dim, train_at=train_at, n_probe=n_probe)
        if kind == "pq" and dim % CODE_BYTES:
            raise ValueError(f"dim is {dim}, it must be a multiple of {CODE_BYTES} for pq")
        if train_at < 256:
            raise ValueError(f"train_at is {train_at}, it must be at least 256, the codes that pq learns")
        if find_spec("faiss") is None:
            raise ImportError('gptlite.semantic.index needs faiss: pip install "gptlite[semantic]"')
        self.kind, self.dim, self.train_at, self.n_probe = kind, dim, train_at, n_probe
        self.builds = 0  # how often it was built from the vectors
        self._vectors: dict[int, np.ndarray] = {}
        self._keys: list[int] = []  # of hnsw: the key at each place, whether it lives or not
        self._places: dict[int, int] = {}  # of hnsw: the place of each key that lives
        self._dead: set[int] = set()  # of hnsw: the other places
        self._passed_over: Any = None  # of hnsw: the dead ones in FAISS's own form, made when a search needs it
        self._n_built = 0
        self._index: Any = None
        self._build()

    def __len__(self) -> int:
        return len(self._vectors)

    @property
    def trained(self) -> bool:
        """Whether the index of its kind is in use, rather than the search of everything before training."""
        return self.kind in ("flat", "hnsw") or self._n_built >= self.train_at

    def add(self, key: int, vector: np.ndarray) -> None:
        """Adds the vector [d] under a key that isn't there yet, a whole number from 0 to 2^63 - 1.

        Raises: ValueError when it is there, or the key or the vector is none.
        """
        vector = self._checked(vector)
        if not isinstance(key, int) or not 0 <= key < 2**63:
            raise ValueError(f"key is {key!r}, it must be a whole number from 0 to 2^63 - 1")
        if key in self._vectors:
            raise ValueError(f"key {key} is in the index already")
        self._vectors[key] = vector
        if self._wants_training():
            self._build()
        elif self.kind == "hnsw":
            self._places[key] = len(self._keys)
            self._keys.append(key)
            self._index.add(vector[None])
        else:
            self._index.add_with_ids(vector[None], np.array([key], dtype=np.int64))

    def remove(self, key: int) -> None:
        """Forgets a key. Raises: ValueError when it isn't there."""
        if key not in self._vectors:
            raise ValueError(f"key {key} is not in the index")
        del self._vectors[key]
        if self.kind == "hnsw":
            self._dead.add(self._places.pop(key))  # it stays as a signpost
            self._passed_over = None
            if len(self._dead) > len(self._vectors):
                self._build()
        elif self.kind != "flat" and self.trained and GROWTH * len(self._vectors) < self._n_built:
            self._build()  # cells that are nearly empty
        else:
            self._index.remove_ids(np.array([key], dtype=np.int64))

    def search(self, vector: np.ndarray, n: int) -> list[tuple[int, float]]:
        """The n most similar keys and their exact similarities, the best first; fewer when there are fewer.

        Args:
            vector: unit length [d].
        Raises: ValueError when it is of another shape or not finite.
        """
        query = self._checked(vector)[None]
        n = min(n, len(self._vectors))
        if n < 1:
            return []
        if self.kind == "hnsw":
            _, places = self._index.search(query, n, params=self._living())
            found = [self._keys[place] for place in places[0] if place >= 0]
        else:
            wanted = max(8 * n, 64) if self.kind == "pq" else n  # the order of pq is rough
            _, keys = self._index.search(query, min(wanted, self._index.ntotal))
            found = [int(key) for key in keys[0] if key >= 0]
        exact = [(key, float(self._vectors[key] @ query[0])) for key in found]
        return sorted(exact, key=lambda pair: -pair[1])[:n]

    def _living(self) -> Any:
        """How hnsw is searched: the walk goes over dead places too, and collects the others."""
        import faiss

        parameters: Any = faiss.SearchParametersHNSW  # type: ignore[attr-defined]
        if not self._dead:
            return parameters(efSearch=EF_SEARCH)
        if self._passed_over is None:
            self._passed_over = faiss.IDSelectorBatch(np.array(sorted(self._dead), dtype=np.int64))
        return parameters(efSearch=EF_SEARCH, sel=faiss.IDSelectorNot(self._passed_over))  # FAISS holds no reference

    def _checked(self, vector: np.ndarray) -> np.ndarray:
        vector = np.ascontiguousarray(vector, dtype=np.float32)
        if vector.shape != (self.dim,):
            raise ValueError(f"vector has shape {vector.shape}, it must be ({self.dim},)")
        if not np.isfinite(vector).all():
            raise ValueError("vector holds a number that is not finite")
        return vector

    def _wants_training(self) -> bool:
        if self.kind in ("flat", "hnsw") or len(self._vectors) < self.train_at:
            return False
        return not self.trained or len(self._vectors) >= GROWTH * self._n_built

    def _build(self) -> None:
        """Makes the index anew from the vectors."""
        import faiss

        keys = np.array(list(self._vectors), dtype=np.int64)
        vectors = np.stack(list(self._vectors.values())) if len(keys) else np.empty((0, self.dim), np.float32)
        self._n_built, self.builds = len(keys), self.builds + 1
        if self.kind == "hnsw":
            self._index = faiss.IndexHNSWFlat(self.dim, 32, faiss.METRIC_INNER_PRODUCT)
            self._index.hnsw.efConstruction = 64
            self._keys, self._dead, self._passed_over = keys.tolist(), set(), None
            self._places = {key: place for place, key in enumerate(self._keys)}
            if len(keys):
                self._index.add(vectors)
            return
        if self.trained and self.kind == "ivf":
            n_cells = max(1, int(len(keys) ** 0.5))
            self._index = faiss.IndexIVFFlat(faiss.IndexFlatIP(self.dim), self.dim, n_cells, faiss.METRIC_INNER_PRODUCT)
            self._index.nprobe = self.n_probe
            self._index.cp.min_points_per_centroid = 1  # few points to a cell are no news: it prints a line about it
            self._index.train(vectors)
        elif self.trained and self.kind == "pq":
            quantizer = faiss.IndexPQ(self.dim, CODE_BYTES, 8, faiss.METRIC_INNER_PRODUCT)
            quantizer.pq.cp.min_points_per_centroid = 1
            quantizer.train(vectors)
            self._index = faiss.IndexIDMap2(quantizer)
        else:
            self._index = faiss.IndexIDMap2(faiss.IndexFlatIP(self.dim))
        if len(keys):
            self._index.add_with_ids(vectors, keys)
