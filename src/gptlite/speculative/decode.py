"""The round of speculative decoding, for a batch, over any cache: draft, verify in one pass, keep, go on."""

from __future__ import annotations

from collections.abc import Hashable, Iterator, Sequence
from dataclasses import dataclass, field

import torch
from torch import Tensor
from torch.nn.utils.rnn import pad_sequence

from gptlite.cache.contract import Cache
from gptlite.cache.dense import StaticCache
from gptlite.model import GPTlite
from gptlite.sampling import SamplingParams, probabilities, sample
from gptlite.speculative.drafters import Draft, Drafter, Text, next_distribution, prepare_step
from gptlite.speculative.verify import verify, verify_greedy


@dataclass
class Verdict:
    """What a round did to one text.

    Args:
        key: of the text.
        drafts: the drafted tokens [n].
        parents: of each, where they are a tree; None for a chain.
        kept: indices of those that stayed, one path.
        next_token: the token that follows them, the target's own.
        p: the target's distribution after the text and after each draft [n + 1, V]; None at temperature 0.
        q: the distribution that each draft was drawn from [n, V]; None when the drafter had no choice.
    """

    key: Hashable
    drafts: list[int]
    parents: list[int] | None
    kept: list[int]
    next_token: int
    p: Tensor | None = field(default=None, repr=False)
    q: Tensor | None = field(default=None, repr=False)

    @property
    def emitted(self) -> list[int]:
        """The tokens by which the text grew."""
        return [*(self.drafts[i] for i in self.kept), self.next_token]


class Speculator:
    """Runs rounds of draft and verify {cite}`leviathan2023speculative,chen2023speculative` for a batch of texts.

    The tokens are distributed as the target's own, and at temperature 0 they are the target's own, over every cache
    that loses nothing. Each text's are the same alone and in a batch, as long as the cache has room for all drafts.

    Args:
        model: the target.
        drafter: proposes.
        cache: of the target, without the texts.
        n_draft: gamma, drafts per round, in a tree its depth; 0 decodes token by token.
    Raises: ValueError when n_draft is no whole number of at least 0, or the drafter has another vocabulary.
    """

    def __init__(self, model: GPTlite, drafter: Drafter, cache: Cache, n_draft: int = 4) -> None:
        if isinstance(n_draft, bool) or not isinstance(n_draft, int) or n_draft < 0:
            raise ValueError(f"n_draft is {n_draft!r}, it must be a whole number of at least 0")
        vocab_size = model.token_embedding.num_embeddings
        if drafter.vocab_size not in (None, vocab_size):
            raise ValueError(
                f"the drafter has a vocabulary of {drafter.vocab_size} tokens, the target one of {vocab_size}"
            )
        self.model, self.drafter, self.cache, self.n_draft = model, drafter, cache, n_draft
        self._hidden: dict[Hashable, Tensor] = {}  # of what each text read last, for a drafter that wants it

    @torch.inference_mode()
    def begin(self, texts: Sequence[Text]) -> None:
        """Reads the prompts, and draws the first token of each.

        Raises: ValueError when a text does not fit the model or the cache, has a token that the model does not know,
            or is in the cache already.
        """
        for text in texts:
            if self.cache.next_position(text.key):
                raise ValueError(f"the cache already holds text {text.key!r}, a text begins in an empty one")
            needed = text.end - 1  # the last token is drawn and never read
            for what, limit in (("the context window", self.model.context_length), ("the cache", self.cache.longest)):
                if limit is not None and needed > limit:
                    raise ValueError(
                        f"text {text.key!r} of {len(text.tokens)} tokens and {text.n_new} new ones needs {needed}, "
                        f"{what} holds {limit} at most"
                    )
            self.model.check(torch.tensor(text.tokens), torch.arange(len(text.tokens)))
        hidden = self._run(texts, [text.tokens for text in texts])  # [n_new, d]
        sizes = [len(text.tokens) for text in texts]
        last = torch.tensor(sizes).cumsum(0) - 1  # [B], each text's last token in the packed step
        probs, u = next_distribution(self.model.head(hidden[last.to(hidden.device)]), texts)
        self._remember(texts, hidden, [range(size) for size in sizes], sizes)
        for text, token in zip(texts, sample(probs, u).tolist(), strict=True):
            text.tokens.append(token)

    @torch.inference_mode()
    def step(self, texts: Sequence[Text]) -> list[Verdict]:
        """One round: each text grows by one token to n_draft + 1.

        Args:
            texts: begun before, and not finished.
        Returns: what happened to each.
        Raises: ValueError when a drafter goes deeper than a text has room.
        """
        n_draft = min(self.n_draft, max(text.room for text in texts))
        hidden = [self._hidden.pop(text.key) for text in texts] if self.drafter.wants_hidden else None
        draft = self.drafter.propose(texts, n_draft, hidden) if n_draft else Draft([[] for _ in texts])
        for b, text in enumerate(texts):
            if draft.tokens[b] and max(draft.depths(b)) > text.room:
                raise ValueError(
                    f"text {text.key!r} has drafts {max(draft.depths(b))} deep, it has room for {text.room}"
                )
        self._shorten(texts, draft)
        # the target reads each text's last token and its drafts in one pass
        new = [[text.tokens[-1], *row] for text, row in zip(texts, draft.tokens, strict=True)]
        trees = draft.parents and [[-1, *(parent + 1 for parent in tree)] for tree in draft.parents]
        read = self._run(texts, new, trees)  # [n_new, d]
        verdicts = self._judge(texts, draft, self.model.head(read))
        kept = [[0, *(i + 1 for i in verdict.kept)] for verdict in verdicts]  # of the tokens read
        self.cache.keep([text.key for text in texts], kept if trees else [len(path) for path in kept])
        self._remember(texts, read, kept, [len(row) for row in new])
        for text, verdict in zip(texts, verdicts, strict=True):
            text.tokens += verdict.emitted
        if n_draft:
            self.drafter.keep(texts, [verdict.kept for verdict in verdicts])
        return verdicts

    def free(self, text: Text) -> None:
        """Forgets a text in both caches."""
        self.cache.free(text.key)
        self.drafter.free(text)
        self._hidden.pop(text.key, None)

    def _shorten(self, texts: Sequence[Text], draft: Draft) -> None:
        """Drops last drafts until the cache has room for the others: a tree takes more than the text that stays."""
        while not self.cache.fits({text.key: len(row) + 1 for text, row in zip(texts, draft.tokens, strict=True)}):
            longest = max(range(len(texts)), key=lambda b: len(draft.tokens[b]))
            if not draft.tokens[longest]:
                return  # `prepare` says what is missing
            # the last one is nobody's parent, and nothing before it was drawn with regard to it
            draft.tokens[longest].pop()
            if draft.parents is not None:
                draft.parents[longest].pop()

    def _run(self, texts: Sequence[Text], new: Sequence[list[int]], trees: Sequence[list[int]] | None = None) -> Tensor:
        """Reads new tokens of each text. Returns: their hidden states, packed [n_new, d]."""
        packed, segments = prepare_step(self.cache, texts, new, self.model.token_embedding.weight.device, trees)
        return self.model.run(packed, segments, self.cache)

    def _remember(
        self, texts: Sequence[Text], hidden: Tensor, kept: Sequence[Sequence[int]], sizes: Sequence[int]
    ) -> None:
        """Keeps the hidden states of the tokens that stayed, for a drafter that wants them."""
        if self.drafter.wants_hidden:
            for text, states, rows in zip(texts, hidden.split(list(sizes)), kept, strict=True):
                self._hidden[text.key] = states[list(rows)]

    def _judge(self, texts: Sequence[Text], draft: Draft, logits: Tensor) -> list[Verdict]:
        """Verifies the drafts of each text by the target's logits, packed [n_new, V]."""
        trees: Sequence[list[int] | None] = draft.parents or [None] * len(texts)
        sizes = [len(row) + 1 for row in draft.tokens]
        verdicts = []
        if all(text.params.temperature == 0 for text in texts):
            highest, best = logits.max(-1)
            if not bool(highest.isfinite().all()):
                raise ValueError("a row of logits holds NaN or an infinite value")
            rest = best.tolist()
            for text, drafts, tree, size in zip(texts, draft.tokens, trees, sizes, strict=True):
                path, token = verify_greedy(rest[:size], drafts, tree)
                verdicts.append(Verdict(text.key, drafts, tree, path, token))
                rest = rest[size:]
            return verdicts
        params = [text.params for text, size in zip(texts, sizes, strict=True) for _ in range(size)]
        p = pad_sequence(probabilities(logits, params).split(sizes), batch_first=True)  # [B, n + 1, V]
        n = p.shape[1] - 1
        u = torch.zeros(len(texts), n + 1, dtype=torch.float64)
        for b, (text, size) in enumerate(zip(texts, sizes, strict=True)):
            if text.params.temperature:
                *of_drafts, u[b, -1] = text.uniforms(size)
                u[b, : size - 1] = torch.tensor(of_drafts, dtype=torch.float64)
        tokens = torch.tensor([row + [-1] * (n - len(row)) for row in draft.tokens], device=p.device)  # [B, n]
        parents = None
        if draft.parents is not None:
            parents = torch.tensor([tree + [-1] * (n - len(tree)) for tree in draft.parents], device=p.device)
        q = None if draft.probs is None else draft.probs[:, :n]
        stays, following = verify(p, q, tokens, u, parents)
        for b, (text, token) in enumerate(zip(texts, following.tolist(), strict=True)):
            path, size = stays[b].nonzero()[:, 0].tolist(), sizes[b]
            of_text = None if q is None else q[b, : size - 1]
            verdicts.append(Verdict(text.key, draft.tokens[b], trees[b], path, token, p[b, :size], of_text))
        return verdicts


def rounds(speculator: Speculator, texts: Sequence[Text]) -> Iterator[list[Verdict]]:
    """Begins texts and runs rounds until each has its tokens; one that has them leaves the batch.

    Both caches forget all texts at the end, also when a round fails or nobody asks for the next one.

    Yields: the verdicts of each round.
    """
    speculator.begin(texts)
    running = list(texts)
    try:
        while True:
            for text in running:
                if text.finished:
                    speculator.free(text)
            running = [text for text in running if not text.finished]
            if not running:
                return
            yield speculator.step(running)
    finally:
        for text in running:
            speculator.free(text)


def speculate(
    model: GPTlite,
    tokens: Tensor,
    n_new: int,
    drafter: Drafter,
    n_draft: int = 4,
    params: SamplingParams | None = None,
    cache: Cache | None = None,
    seed: int = 0,
    trace: list[list[Verdict]] | None = None,
) -> Tensor:
    """Generates as `gptlite.generate` does, with several tokens per pass of the target.

    Args:
        tokens: prompts [B, n], n >= 1.
        n_new: tokens to generate per row, at least 0.
        drafter: proposes; it goes on being of use afterwards.
        n_draft: gamma, drafts per round, in a tree its depth; 0 decodes token by token, and then the tokens are those
            of `gptlite.generate` at any temperature.
        params: temperature, top-k and top-p, for both models alike; None means plain sampling at temperature 1.
        cache: an empty one; None makes a static cache of the right size. The texts are freed at the end.
        seed: row b draws from a generator seeded with seed + b.
        trace: takes in the verdicts of each round.
    Returns: prompts and new tokens [B, n + n_new].
    Raises: ValueError on a bad argument.
    """
    if tokens.dim() != 2 or not tokens.numel():
        raise ValueError(f"tokens has shape {tuple(tokens.shape)}, it must be [B, n] with at least one token per row")
    if n_new < 0:
        raise ValueError(f"n_new is {n_new}, it must be at least 0")
    if n_new == 0:
        return tokens
    B, n = tokens.shape
    cache = cache or StaticCache(model, B, n + n_new)
    params = params or SamplingParams()
    texts = [Text(b, row, n_new, params, seed + b) for b, row in enumerate(tokens.tolist())]
    for verdicts in rounds(Speculator(model, drafter, cache, n_draft), texts):
        if trace is not None:
            trace.append(verdicts)
    return torch.tensor([text.tokens for text in texts], device=tokens.device)
