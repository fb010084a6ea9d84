"""A semantic cache on disk: one safetensors file, whole or not there, with a checksum; nothing in it is executed."""

from __future__ import annotations

import hashlib
import json
from math import isfinite
from pathlib import Path
from typing import Any

import numpy as np
from safetensors import SafetensorError, safe_open
from safetensors.numpy import save

from gptlite.checkpoint import write_atomically

FORMAT = "gptlite-semantic-1"
FIELDS = {"question": str, "answer": str, "scope": str, "born": float}


def write(path: Path, vectors: np.ndarray, rows: list[dict[str, Any]]) -> None:
    """Writes embeddings [n, d] and n entries, in the order of their last use.

    An index isn't stored: it is built from the embeddings in a moment, and then fits any version of FAISS.

    Raises: ValueError when the folder cannot be written.
    """
    text = np.frombuffer(json.dumps(rows).encode(), dtype=np.uint8)
    parts: dict[str, np.ndarray] = {"vectors": np.ascontiguousarray(vectors, dtype=np.float32), "entries": text}
    write_atomically(path, save(parts, metadata={"format": FORMAT, "sha256": _digest(parts)}))


def read(path: Path) -> tuple[np.ndarray, list[dict[str, Any]]]:
    """Reads what `write` wrote; the file is not trusted.

    Returns: embeddings [n, d], and n entries.
    Raises: ValueError when the file is missing, damaged or no store.
    """
    if not path.is_file():
        raise ValueError(f"there is no store {path}")
    try:
        with safe_open(path, framework="np") as file:
            header = file.metadata() or {}
            if header.get("format") != FORMAT:
                raise ValueError(f"its header does not say {FORMAT}")
            parts = {name: file.get_tensor(name) for name in ("vectors", "entries")}
        if _digest(parts) != header.get("sha256"):
            raise ValueError("its checksum is wrong")
        vectors, rows = parts["vectors"], json.loads(parts["entries"].tobytes())
        if vectors.ndim != 2 or vectors.dtype != np.float32 or not isinstance(rows, list) or len(rows) != len(vectors):
            raise ValueError("its embeddings and its entries do not belong together")
        for row in rows:
            if {name: type(value) for name, value in row.items()} != FIELDS:
                raise ValueError("an entry has other fields than a store's")
            if not isfinite(row["born"]):
                raise ValueError("the time of an entry is not finite")
        if len(rows) and not np.allclose(np.linalg.norm(vectors, axis=1), 1, atol=1e-3):
            raise ValueError("an embedding is not of unit length")
    except (SafetensorError, OSError, ValueError, KeyError, TypeError, AttributeError, RecursionError) as error:
        raise ValueError(f"{path} is no store of a semantic cache, or is damaged: {error}") from None
    return vectors, rows


def _digest(parts: dict[str, np.ndarray]) -> str:
    digest = hashlib.sha256()
    for name, array in sorted(parts.items()):
        digest.update(f"{name} {array.dtype} {array.shape}".encode())
        digest.update(array.tobytes())
    return digest.hexdigest()
