"""A second look before a hit is served: what an embedding is blind to can often be read off the words."""

from __future__ import annotations

import re
from collections import Counter
from collections.abc import Iterable
from difflib import SequenceMatcher

OVERLAP = 0.65  # chosen on one half of the labelled pairs, with the threshold; see `gptlite.semantic.evaluate`

_NEGATIONS = frozenset(["no", "not", "never", "without", "none", "nothing", "nobody", "nor", "non"])
_NAMES = "zero one two three four five six seven eight nine ten eleven twelve"
_NUMBERS = {word: str(value) for value, word in enumerate(re.findall(r"\w+", _NAMES))}
# words that may differ between two questions of nearly the same wording: they do not say what is asked for
_HARMLESS = frozenset(
    re.findall(r"\w+", "a an the my your our me i you we please can could do does did is are would will should to of")
)


def words(text: str) -> list[str]:
    """The words of a text in lower case, numbers in figures and without separators; n't counts as a word, not."""
    text = text.lower().replace("’", "'")
    text = re.sub(r"\b(can|won|shan)'t\b|\bcannot\b", r"\1 not", text)
    text = re.sub(r"n't\b", " not", text).replace("%", " percent ")
    text = re.sub(r"(?<=\d),(?=\d{3}\b)", "", text)
    found = re.findall(r"\d+(?:\.\d+)?|[^\W\d_]+", text)
    return [_NUMBERS.get(word, word) for word in found]


def objection(asked: str, cached: str, overlap: float = OVERLAP) -> str | None:
    """Why the answer to `cached` should not be given to `asked`; None when nothing speaks against it.

    Three rules. The numbers must be the same. Both negate, or neither does. And where the wording is nearly the same,
    only words that ask for nothing may differ: in a shared frame, the word that differs is the question. A synonym in
    a shared frame is refused too, which costs a call of the model; a wrong answer costs more.

    Args:
        overlap: share of the words, in their order, from which the wording counts as nearly the same; in (0, 1].
    """
    a, b = words(asked), words(cached)
    numbers = [Counter(word for word in side if word[0].isdigit()) for side in (a, b)]
    if numbers[0] != numbers[1]:
        return f"numbers: {_list(numbers[0] - numbers[1])} / {_list(numbers[1] - numbers[0])}"
    negated = [next((word for word in side if word in _NEGATIONS), None) for side in (a, b)]
    if (negated[0] is None) != (negated[1] is None):
        return f"negation: {negated[0] or negated[1]} in one of them"
    matcher = SequenceMatcher(None, a, b, autojunk=False)
    if matcher.ratio() < overlap:
        return None  # another wording: here the embedding's judgement stands
    changes = [(a[i:j], b[k:m]) for tag, i, j, k, m in matcher.get_opcodes() if tag != "equal"]
    for ours, theirs in changes:
        odd = [[word for word in side if word not in _HARMLESS] for side in (ours, theirs)]
        if odd[0] or odd[1]:
            return f"nearly the same wording: {_list(odd[0])} / {_list(odd[1])}"
    return None


def _list(found: Iterable[str]) -> str:
    return " ".join(found) or "nothing"
