"""The labelled pairs of questions, and what a threshold and a check make of them."""

from __future__ import annotations

import json
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from importlib import resources

import numpy as np

from gptlite.semantic.embed import Embed

KINDS = (
    "paraphrase",
    "foreign paraphrase",
    "near-miss",
    "reworded near-miss",
    "negation",
    "number",
    "translation",
    "unrelated",
)
THRESHOLDS = tuple(round(0.5 + 0.01 * i, 2) for i in range(50))


@dataclass(frozen=True)
class Pair:
    """Two questions: `cached` was answered before, `asked` comes now.

    Args:
        kind: one of `KINDS`.
        same: whether the answer to the first may be given to the second.
        half: "choose", on which threshold and check were chosen, or "judge", on which they are judged.
    """

    cached: str
    asked: str
    kind: str
    same: bool
    half: str


@dataclass(frozen=True)
class Rates:
    """Counts at one threshold: pairs served and pairs in all, by kind; and over all kinds, right and wrong ones."""

    served: dict[str, int]
    pairs: dict[str, int]
    right: int
    wrong: int
    same: int

    @property
    def precision(self) -> float:
        """Share of the served answers that are right; 1 where none is served."""
        return self.right / (self.right + self.wrong) if self.right + self.wrong else 1.0

    @property
    def recall(self) -> float:
        """Share of the pairs with the same answer that are served."""
        return self.right / self.same if self.same else 0.0

    def share(self, *kinds: str) -> float:
        """Share of the pairs of these kinds that are served."""
        return sum(self.served[kind] for kind in kinds) / sum(self.pairs[kind] for kind in kinds)


def load_pairs(half: str | None = None) -> list[Pair]:
    """The book's labelled pairs of questions, in their order.

    Args:
        half: "choose" or "judge"; None gives both.
    Raises: ValueError on another half.
    """
    if half not in (None, "choose", "judge"):
        raise ValueError(f"half is {half!r}, it must be 'choose', 'judge' or None")
    text = (resources.files("gptlite") / "facts" / "question_pairs.json").read_text(encoding="utf-8")
    pairs = [Pair(row["a"], row["b"], row["kind"], row["same"], row["half"]) for row in json.loads(text)["pairs"]]
    return [pair for pair in pairs if half in (None, pair.half)]


def similarities(pairs: Sequence[Pair], embed: Embed) -> np.ndarray:
    """Cosine similarity of the two questions of each pair, as NumPy [n]."""
    cached, asked = (embed([getattr(pair, side) for pair in pairs]) for side in ("cached", "asked"))
    return (cached * asked).sum(1)


def rates(
    pairs: Sequence[Pair],
    similarity: Sequence[float] | np.ndarray,
    threshold: float,
    check: Callable[[str, str], str | None] | None = None,
) -> Rates:
    """What a cache that holds the first question of each pair serves to the second.

    Args:
        similarity: of each pair, [n]. threshold: from which a pair is served.
        check: as in `SemanticCache`; None serves all above the threshold.
    """
    served = dict.fromkeys(KINDS, 0)
    right = wrong = 0
    for pair, value in zip(pairs, similarity, strict=True):
        if value >= threshold and (check is None or check(pair.asked, pair.cached) is None):
            served[pair.kind] += 1
            right, wrong = right + pair.same, wrong + (not pair.same)
    n_pairs = {kind: sum(pair.kind == kind for pair in pairs) for kind in KINDS}
    return Rates(served, n_pairs, right, wrong, sum(pair.same for pair in pairs))


def choose_threshold(
    pairs: Sequence[Pair],
    similarity: Sequence[float] | np.ndarray,
    check: Callable[[str, str], str | None] | None = None,
    max_wrong: int = 0,
) -> float | None:
    """The lowest of `THRESHOLDS` at which at most `max_wrong` pairs are answered wrongly; None when there is none."""
    for threshold in THRESHOLDS:
        if rates(pairs, similarity, threshold, check).wrong <= max_wrong:
            return threshold
    return None


def auc(positive: Sequence[float] | np.ndarray, negative: Sequence[float] | np.ndarray) -> float:
    """Probability that a random positive is above a random negative, ties counting half: the area under the ROC curve.

    Raises: ValueError when one of them is empty.
    """
    if not len(positive) or not len(negative):
        raise ValueError(f"there are {len(positive)} positives and {len(negative)} negatives, both are needed")
    difference = np.asarray(positive)[:, None] - np.asarray(negative)[None]
    return float((difference > 0).mean() + 0.5 * (difference == 0).mean())
