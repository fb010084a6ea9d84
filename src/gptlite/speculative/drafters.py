"""What proposes tokens: the text it goes on from, the drafts it hands over, the contract, and a small model."""

from __future__ import annotations

from collections.abc import Hashable, Sequence
from dataclasses import dataclass, field
from typing import TYPE_CHECKING

import torch
from torch import Tensor

from gptlite.cache.contract import Cache, Segment
from gptlite.cache.dense import StaticCache
from gptlite.config import check_counts
from gptlite.sampling import SamplingParams, probabilities, sample

if TYPE_CHECKING:
    from gptlite.model import GPTlite

UNIFORMS = 64  # random numbers that a text draws at once


@dataclass(eq=False)
class Text:
    """A text that is being generated, with its own random numbers, so that who shares its batch changes nothing.

    Args:
        key: of its sequence in the caches.
        tokens: the prompt; what is generated is appended. The last one has been read by no model yet.
        n_new: tokens to generate.
        params: how each next token is chosen; drafts are drawn and verified with the same.
        seed: of its uniform numbers.
    Raises: ValueError when there is no prompt or n_new is below 1.
    """

    key: Hashable
    tokens: list[int]
    n_new: int
    params: SamplingParams = field(default_factory=SamplingParams)
    seed: int = 0

    def __post_init__(self) -> None:
        check_counts(n_new=self.n_new)
        if not self.tokens:
            raise ValueError(f"text {self.key!r} has no prompt, it needs at least one token")
        self.end = len(self.tokens) + self.n_new  # tokens when it is finished
        self._generator = torch.Generator().manual_seed(self.seed)
        self._numbers: list[float] = []

    @property
    def finished(self) -> bool:
        """Whether all its tokens are there."""
        return len(self.tokens) >= self.end

    @property
    def room(self) -> int:
        """How deep drafts may go: the token that follows them must be wanted too."""
        return self.end - len(self.tokens) - 1

    def uniforms(self, n: int) -> list[float]:
        """The next n numbers in [0, 1) of this text's own generator."""
        while len(self._numbers) < n:
            self._numbers += torch.rand(UNIFORMS, generator=self._generator, dtype=torch.float64).tolist()
        taken, self._numbers = self._numbers[:n], self._numbers[n:]
        return taken


@dataclass
class Draft:
    """What a drafter proposes for a round.

    Args:
        tokens: per text its drafts [n_b]; a text may have none.
        probs: the distribution that each draft was really drawn from [B, n, V], n the longest row, in the dtype that
            it was drawn in; for a sibling, given those before it. None: the drafter had no choice (greedy, a look-up),
            a probability of 1 on its token.
        parents: per text the index of each draft's parent, -1 for a child of the text, parents before children
            [n_b]; None when all rows are chains.
    """

    tokens: list[list[int]]
    probs: Tensor | None = None
    parents: list[list[int]] | None = None

    def depths(self, row: int) -> list[int]:
        """How far each draft of a row is from the text, from 1 on."""
        if self.parents is None:
            return list(range(1, len(self.tokens[row]) + 1))
        return [depth + 1 for depth in depths(self.parents[row])]


def depths(parents: Sequence[int]) -> list[int]:
    """How far each token of a tree is from its root, from 0 on."""
    found: list[int] = []
    for parent in parents:
        found.append(0 if parent < 0 else found[parent] + 1)
    return found


class Drafter:
    """Proposes tokens for texts. A round calls `propose`, then `keep`; `free` ends a text."""

    wants_hidden = False  # whether `propose` is to be given the target's hidden states
    vocab_size: int | None = None  # of a drafter that has a vocabulary of its own, which must be the target's

    def propose(self, texts: Sequence[Text], n_draft: int, hidden: Sequence[Tensor] | None = None) -> Draft:
        """Drafts for a batch of texts, none deeper than its `room`.

        Args:
            texts: the running ones, any of those seen before or new.
            n_draft: gamma, how deep drafts go at most.
            hidden: for a drafter that wants them, per text the target's hidden states [n, d] of the tokens that it
                has read since the last round (in the first, of the prompt), all but the text's last token.
        Returns: the drafts; those of a text are the same in any batch.
        """
        raise NotImplementedError

    def keep(self, texts: Sequence[Text], kept: Sequence[Sequence[int]]) -> None:
        """Learns which drafts of the last round stayed; the texts have already grown by them and one token more.

        Args:
            kept: per text, in the order of `propose`, indices of the drafts that stayed, one path.
        """

    def free(self, text: Text) -> None:
        """Forgets a text that has ended; nothing happens for one that was never seen."""


class DraftCache(StaticCache):
    """A static cache that also takes back several steps: a draft of n tokens takes as many."""

    def cut(self, sequence: Hashable, n_tokens: int) -> None:
        """Forgets all but the first n_tokens of a sequence, as if the others were its last step's."""
        self._real[sequence] = list(range(len(self._held(sequence)) - n_tokens))
        self.keep([sequence], [0])


class ModelDrafter(Drafter):
    """A smaller model with the target's vocabulary, one step per token {cite}`leviathan2023speculative`.

    Args:
        model: the draft model.
        max_batch: texts that it drafts for at once.
    Raises: ValueError when max_batch is below 1.
    """

    def __init__(self, model: GPTlite, max_batch: int = 1) -> None:
        check_counts(max_batch=max_batch)
        self.model, self.vocab_size = model, model.token_embedding.num_embeddings
        self.cache = DraftCache(model, max_batch, model.context_length)

    @torch.inference_mode()
    def propose(self, texts: Sequence[Text], n_draft: int, hidden: Sequence[Tensor] | None = None) -> Draft:
        # its own window may be shorter than the target's
        depth = [max(0, min(n_draft, t.room, self.model.context_length - len(t.tokens) + 1)) for t in texts]
        greedy = all(text.params.temperature == 0 for text in texts)
        tokens: list[list[int]] = [[] for _ in texts]
        probs: list[Tensor] = []
        rows = [b for b, n in enumerate(depth) if n]
        # what of each text it has not read: the last token, and after a round without a rejection one before it
        new = {b: texts[b].tokens[self.cache.next_position(texts[b].key) :] for b in rows}
        while rows:
            logits = self._read([texts[b] for b in rows], [new[b] for b in rows])  # [rows, V]
            if greedy:
                drawn = logits.argmax(-1).tolist()
            else:
                q, u = next_distribution(logits, [texts[b] for b in rows])
                drawn = sample(q, u).tolist()
                probs.append(q.new_zeros(len(texts), q.shape[-1]).index_copy(0, torch.tensor(rows).to(q.device), q))
            for b, token in zip(rows, drawn, strict=True):
                tokens[b].append(token)
                new[b] = [token]
            rows = [b for b in rows if len(tokens[b]) < depth[b]]
        return Draft(tokens, torch.stack(probs, dim=1) if probs else None)

    def _read(self, texts: Sequence[Text], new: Sequence[list[int]]) -> Tensor:
        """Reads new tokens of each text; logits [B, V] after the last one of each."""
        packed, segments = prepare_step(self.cache, texts, new, self.cache.device)
        hidden = self.model.run(packed, segments, self.cache)  # [n_new, d]
        if len(hidden) > len(new):
            last = torch.tensor([len(row) for row in new]).cumsum(0) - 1
            hidden = hidden[last.to(hidden.device)]  # [B, d]
        return self.model.head(hidden)

    def keep(self, texts: Sequence[Text], kept: Sequence[Sequence[int]]) -> None:
        for text in texts:
            # all that the text and the cache have in common: the last token is never read, nor a last draft
            if self.cache.next_position(text.key) >= len(text.tokens):
                self.cache.cut(text.key, len(text.tokens) - 1)

    def free(self, text: Text) -> None:
        if self.cache.next_position(text.key):
            self.cache.free(text.key)


def next_distribution(logits: Tensor, texts: Sequence[Text]) -> tuple[Tensor, Tensor]:
    """What the next token of each text is drawn from [B, V], and the uniform number that draws it [B]."""
    u = [text.uniforms(1)[0] if text.params.temperature else 0.0 for text in texts]
    probs = probabilities(logits, [text.params for text in texts])
    return probs, torch.tensor(u, dtype=torch.float64)


def prepare_step(
    cache: Cache,
    texts: Sequence[Text],
    new: Sequence[list[int]],
    device: torch.device,
    parents: Sequence[list[int]] | None = None,
) -> tuple[Tensor, list[Segment]]:
    """Prepares a step that reads new tokens of each text, after those that the cache holds of it.

    Args:
        new: per text its new tokens, at least one.
        device: of the model.
        parents: per text of each token its parent, -1 for a child of the cached text; None for plain runs.
    Returns: the packed tokens [n_new], and the segments.
    """
    starts = [cache.next_position(text.key) for text in texts]
    if parents is None:
        places = [list(range(start, start + len(row))) for start, row in zip(starts, new, strict=True)]
    else:
        places = [[start + depth for depth in depths(tree)] for start, tree in zip(starts, parents, strict=True)]
    equal = len({len(row) for row in new}) == 1
    positions = torch.tensor(places) if equal else [torch.tensor(row) for row in places]  # on the host
    packed = torch.tensor([token for row in new for token in row], device=device)
    return packed, cache.prepare([text.key for text in texts], positions, parents, packed)
