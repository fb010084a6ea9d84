"""Prompt lookup: the text itself as the draft, found where it last said the same."""

from __future__ import annotations

from collections.abc import Sequence

from torch import Tensor

from gptlite.config import check_counts
from gptlite.speculative.drafters import Draft, Drafter, Text


class LookupDrafter(Drafter):
    """Proposes what followed the last time that the text ended in the same n tokens {cite}`saxena2023lookup`.

    It has no weights, no cache and no distribution: a look-up that finds nothing proposes nothing, and the round is
    a plain decode step.

    Args:
        longest: n to begin with; a longer match is rarer, and more often right.
        shortest: n to stop at.
    Raises: ValueError when they are no whole numbers of at least 1, or the longest is below the shortest.
    """

    def __init__(self, longest: int = 12, shortest: int = 5) -> None:
        check_counts(longest=longest, shortest=shortest)
        if longest < shortest:
            raise ValueError(f"longest is {longest}, it must be at least shortest, which is {shortest}")
        self.longest, self.shortest = longest, shortest

    def propose(self, texts: Sequence[Text], n_draft: int, hidden: Sequence[Tensor] | None = None) -> Draft:
        found = []
        for text in texts:
            begin = last_match(text.tokens, self.longest, self.shortest)
            depth = max(0, min(n_draft, text.room))
            found.append([] if begin is None else text.tokens[begin : begin + depth])
        return Draft(found)


def last_match(tokens: Sequence[int], longest: int, shortest: int) -> int | None:
    """Where the text goes on after the last earlier place that ends like the text itself.

    Args:
        tokens: the text [n].
        longest, shortest: lengths of the ending that are tried, from the first to the second.
    Returns: the index of the token after the match; None when no ending occurs twice.
    """
    # one character per token, so that the search is the string search of Python itself
    text = "".join(map(chr, tokens))
    for n in range(min(longest, len(text) - 1), shortest - 1, -1):
        begin = text.rfind(text[-n:], 0, len(text) - 1)  # ends before the last token: not the ending itself
        if begin >= 0:
            return begin + n
    return None
