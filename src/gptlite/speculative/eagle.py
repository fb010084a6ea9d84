"""An EAGLE-style drafter: one block guesses the next hidden state, and the trunk's own head says the token."""

from __future__ import annotations

from collections.abc import Sequence

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from gptlite.cache.contract import Cache, Segment
from gptlite.config import check_counts
from gptlite.model import Block, GPTlite, unpack
from gptlite.sampling import sample
from gptlite.speculative.drafters import Draft, Drafter, Text, next_distribution, prepare_step
from gptlite.speculative.heads import Combine, Guess, Heads, TrunkStates, block_config, embed
from gptlite.speculative.heads_cache import BlocksCache
from gptlite.speculative.tree import Tree
from gptlite.train import loss_of

NOISE = 0.1  # half width of the noise on the features in training, which stands for the errors of a guessed one
MAX_DEPTH = 16  # of a tree
TOKEN_WEIGHT = 0.1  # weight of the token's loss beside the feature's


class EagleHeads(Heads):
    """A layer that joins feature and token, and one transformer block {cite}`li2024eagle`.

    From the feature of token i (what the trunk's output layer reads) and token i + 1 it guesses the feature of token
    i + 1; the trunk's output layer turns that into a guess of token i + 2. Given its own guess as the next feature,
    it goes on from there.

    Args:
        model: the trunk, whose last block's shape it takes.
    """

    kind = "eagle"

    def __init__(self, model: GPTlite) -> None:
        super().__init__()
        config = block_config(model)
        self.combine = Combine(config.d_model)
        self.blocks = nn.ModuleList([Block(config)])

    def forward(
        self, model: GPTlite, features: Tensor, tokens: Tensor, segments: list[Segment], cache: Cache | None
    ) -> Tensor:
        """Features [n, d] of tokens, and the tokens [n] after them -> guessed features of those [n, d].

        Args:
            segments: of the step, with the positions of the features' tokens.
        """
        positions = unpack([segment.positions.flatten() for segment in segments], segments)  # [n]
        # near the end of the window the token may have no position of its own any more
        after = (positions + 1).clamp(max=model.context_length - 1)
        x = self.combine(embed(model, tokens, after), features)  # [n, d]
        return self.blocks[0](x, segments, cache, 0)

    def guesses(self, model: GPTlite, states: TrunkStates, following: Tensor) -> list[Guess]:
        return [Guess(model.head(self._features(model, states, following)[:, :-1]), 1)]

    def _features(self, model: GPTlite, states: TrunkStates, following: Tensor) -> Tensor:
        B, S = following.shape
        features = states.hidden
        if self.training:
            features = features + (2 * torch.rand_like(features) - 1) * NOISE
        out = self(model, features.flatten(0, 1), following.flatten(), states.segments, None)  # [B * S, d]
        return out.unflatten(0, (B, S))

    def loss(self, model: GPTlite, states: TrunkStates, following: Tensor, teacher: Tensor | None) -> Tensor:
        """The distance of the features (smooth L1) and a tenth of the loss of the tokens, both per token.

        Args:
            teacher: the trunk's own logits [B, S, V]; None means the text itself.
        """
        guessed = self._features(model, states, following)[:, :-1]  # [B, S - 1, d]
        feature_loss = F.smooth_l1_loss(guessed.float(), states.hidden[:, 1:].float())
        goal = None if teacher is None else teacher[:, 1:]
        token_loss = loss_of(model.head(guessed), following[:, 1:], goal)
        return feature_loss + TOKEN_WEIGHT * token_loss


class EagleDrafter(Drafter):
    """Drafts with an EAGLE-style head: from the target's own features as far as they go, then from its guesses.

    A chain samples token by token. A tree is grown level by level {cite}`li2024eagle2`: the most probable nodes of a
    level are read, each gets its most probable children, and at the end the most probable nodes of all stay. It draws
    nothing, so each node is a draft of probability 1, which `verify` tries one after the other.

    Args:
        model: the target.
        heads: trained on its features.
        max_batch: texts that it drafts for at once.
        n_nodes: nodes of the tree; 0 drafts a chain.
        width: nodes of a level that are read, and children that each of them gets.
    Raises: ValueError when a number is too small or no whole number.
    """

    wants_hidden = True

    def __init__(self, model: GPTlite, heads: EagleHeads, max_batch: int = 1, n_nodes: int = 0, width: int = 3) -> None:
        check_counts(width=width)
        if n_nodes:
            check_counts(n_nodes=n_nodes)
        self.model, self.heads, self.n_nodes, self.width = model, heads, n_nodes, width
        self.cache = BlocksCache(model, heads.blocks, max_batch, width * MAX_DEPTH)  # type: ignore[arg-type]

    @torch.inference_mode()
    def propose(self, texts: Sequence[Text], n_draft: int, hidden: Sequence[Tensor] | None = None) -> Draft:
        assert hidden is not None
        deepest = min(n_draft, MAX_DEPTH) if self.n_nodes else n_draft
        depth = [max(0, min(deepest, text.room)) for text in texts]
        rows = [b for b, n in enumerate(depth) if n]
        drafting = [texts[b] for b in rows]
        # the features of what the target has read, each with the token after it
        known = [text.tokens[-len(hidden[b]) :] for b, text in zip(rows, drafting, strict=True)]
        out = self._read(drafting, known, torch.cat([hidden[b] for b in rows]))  # [n, d]
        last = torch.tensor([len(row) for row in known]).cumsum(0) - 1  # [rows]
        feature = out[last.to(out.device)]  # [rows, d], a guess of the last token's feature
        if self.n_nodes:
            trees = [Tree() for _ in texts]
            grown = self._grow(drafting, [depth[b] for b in rows], feature)
            for b, tree in zip(rows, grown, strict=True):
                trees[b] = tree.best(self.n_nodes)
            draft = Draft([tree.tokens for tree in trees], parents=[tree.parents for tree in trees])
        else:
            draft = self._chain(texts, rows, depth, feature)
        for text in drafting:  # what it read of its own guesses goes; the target's features will take its place
            self.cache.trim(text.key, len(text.tokens) - 1)
        return draft

    def _read(
        self, texts: Sequence[Text], new: Sequence[list[int]], features: Tensor, parents: list[list[int]] | None = None
    ) -> Tensor:
        """One pass of the head: features [n, d], packed as the tokens after them are."""
        packed, segments = prepare_step(self.cache, texts, new, features.device, parents)
        return self.heads(self.model, features, packed, segments, self.cache)

    def _chain(self, texts: Sequence[Text], rows: list[int], depth: list[int], feature: Tensor) -> Draft:
        greedy = all(text.params.temperature == 0 for text in texts)
        tokens: list[list[int]] = [[] for _ in texts]
        probs: list[Tensor] = []
        while rows:
            logits = self.model.head(feature)  # [rows, V]
            if greedy:
                drawn = logits.argmax(-1).tolist()
            else:
                q, u = next_distribution(logits, [texts[b] for b in rows])
                drawn = sample(q, u).tolist()
                probs.append(q.new_zeros(len(texts), q.shape[-1]).index_copy(0, torch.tensor(rows).to(q.device), q))
            for b, token in zip(rows, drawn, strict=True):
                tokens[b].append(token)
            on = [i for i, b in enumerate(rows) if len(tokens[b]) < depth[b]]
            rows = [rows[i] for i in on]
            if rows:
                feature = self._read([texts[b] for b in rows], [[tokens[b][-1]] for b in rows], feature[on])
        return Draft(tokens, torch.stack(probs, dim=1) if probs else None)

    def _grow(self, texts: Sequence[Text], depth: list[int], feature: Tensor) -> list[Tree]:
        """Candidates of each text's tree, before the best are taken; feature [B, d] is the root's."""
        trees = [Tree() for _ in texts]
        # per text, the nodes that are read: index in the tree, and the feature before each
        read: list[list[int]] = [[] for _ in texts]
        before: list[list[Tensor]] = [[] for _ in texts]
        tips = [[(-1, feature[b])] for b in range(len(texts))]  # nodes that get children, and their features
        for level in range(max(depth)):
            rows = [b for b, n in enumerate(depth) if n > level]
            for b in rows:
                fresh: list[tuple[int, Tensor]] = []
                best = self.model.head(torch.stack([f for _, f in tips[b]])).softmax(-1).topk(self.width)
                for (node, f), ps, xs in zip(tips[b], best.values.tolist(), best.indices.tolist(), strict=True):
                    above = 1.0 if node < 0 else trees[b].values[node]
                    fresh += [(trees[b].add(x, node, above * p), f) for p, x in zip(ps, xs, strict=True)]
                fresh.sort(key=lambda node: (-trees[b].values[node[0]], node[0]))
                tips[b] = fresh[: self.width]
            rows = [b for b in rows if depth[b] > level + 1]
            if not rows:
                break
            for b in rows:
                read[b] += [node for node, _ in tips[b]]
                before[b] += [f for _, f in tips[b]]
            # the cache takes a tree in one step, so the levels above are read again
            tokens = [[trees[b].tokens[node] for node in read[b]] for b in rows]
            place = [{-1: -1} | {node: i for i, node in enumerate(read[b])} for b in rows]
            parents = [[at[trees[b].parents[node]] for node in read[b]] for b, at in zip(rows, place, strict=True)]
            step = [texts[b] for b in rows]
            out = self._read(step, tokens, torch.cat([torch.stack(before[b]) for b in rows]), parents)
            self.cache.keep([text.key for text in step], [0] * len(step))
            for b, states in zip(rows, out.split([len(read[b]) for b in rows]), strict=True):
                n = len(tips[b])
                tips[b] = list(zip(read[b][-n:], states[-n:], strict=True))
        return trees

    def free(self, text: Text) -> None:
        self.cache.drop(text.key)
