"""The labelled pairs of questions by similarity and check, and the time of a lookup by index and number of entries."""

from __future__ import annotations

import time
from collections.abc import Iterator
from functools import partial

import numpy as np

from gptlite.checkpoint import load
from gptlite.record import Point, Recording, Step, sweep
from gptlite.semantic.check import objection
from gptlite.semantic.embed import MiniLM, language_model_embed
from gptlite.semantic.evaluate import load_pairs, similarities
from gptlite.semantic.index import KINDS, VectorIndex

SPREAD = 1.0  # length of the noise on a unit vector: a made-up question has a cosine of about 0.71 with its centre


@sweep("semantic-pairs", "similarity and check of each labelled pair of questions; no times", model="gptlite")
def _pairs(recording: Recording) -> Iterator[Step]:
    pairs = load_pairs()
    of_minilm = similarities(pairs, MiniLM(device=recording.params["device"]))
    of_model = similarities(pairs, language_model_embed(*load(recording.params["model"], recording.params["device"])))
    recording.data["pairs"] = [
        {"cached": pair.cached, "asked": pair.asked, "objection": objection(pair.asked, pair.cached)}
        | {"similarity": round(float(ours), 4), "hidden_states": round(float(theirs), 4)}
        for pair, ours, theirs in zip(pairs, of_minilm, of_model, strict=True)
    ]
    return iter(())


@sweep(
    "semantic-lookup",
    "seconds per lookup, by index and number of entries, and how often the most similar entry is found",
    kinds=list(KINDS),
    entries=[1000, 4000, 16_000, 64_000],
    queries=200,
    repeats=5,
)
def _lookup(recording: Recording) -> Iterator[Step]:
    params = recording.params
    for kind in params["kinds"]:
        if kind not in KINDS:
            raise ValueError(f"kinds has {kind!r}, it must be of {', '.join(KINDS)}")
    questions = [text for pair in load_pairs() for text in (pair.cached, pair.asked)]
    centres: list[np.ndarray] = []
    recording.data["recall"] = []

    def measure(kind: str, n: int) -> Point:
        if not centres:
            centres.append(MiniLM()(questions))
        vectors, queries = made_up(centres[0], n, 0), made_up(centres[0], params["queries"], 1)
        index = VectorIndex(kind, vectors.shape[1])
        for key, vector in enumerate(vectors):
            index.add(key, vector)
        found, samples = [], []
        for repeat in range(params["repeats"] + 1):  # the first warms up
            begin = time.perf_counter()
            found = [index.search(query, 1)[0][0] for query in queries]
            if repeat:
                samples.append((time.perf_counter() - begin) / len(queries))
        recall = float(np.mean(found == (queries @ vectors.T).argmax(1)))
        recording.data["recall"].append({"index": kind, "entries": n, "recall": recall})
        return Point({"index": kind, "entries": n}, samples)

    for n in params["entries"]:
        for kind in params["kinds"]:
            yield {"index": kind, "entries": n}, 4 * n * 384 * 4.0, partial(measure, kind, n)


def made_up(centres: np.ndarray, n: int, seed: int) -> np.ndarray:
    """Embeddings [n, d] of made-up questions: each near one of the real ones.

    Args:
        centres: embeddings of real questions [m, d].
    """
    random = np.random.default_rng(seed)
    noise = random.standard_normal((n, centres.shape[1])).astype(np.float32) * (SPREAD / centres.shape[1] ** 0.5)
    rows = centres[random.integers(len(centres), size=n)] + noise
    return rows / np.linalg.norm(rows, axis=1, keepdims=True)
