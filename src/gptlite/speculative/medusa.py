"""Medusa: heads that guess the tokens after the next one, each from the same hidden state."""

from __future__ import annotations

from collections.abc import Sequence

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from gptlite.config import check_counts
from gptlite.model import GPTlite
from gptlite.sampling import sample
from gptlite.speculative.drafters import Draft, Drafter, Text, next_distribution
from gptlite.speculative.heads import Guess, Heads, TrunkStates
from gptlite.speculative.tree import Tree, product_tree


class MedusaHeads(Heads):
    """K heads of one residual layer and an output layer each {cite}`cai2024medusa`.

    Head k reads the hidden state of token i, from which the model itself says token i + 1, and guesses token
    i + 1 + k. It does not see what the heads before it guessed.

    Args:
        model: the trunk; an output layer starts as a copy of the trunk's, a residual layer as zero.
        n_heads: K.
    """

    kind = "medusa"

    def __init__(self, model: GPTlite, n_heads: int) -> None:
        super().__init__(n_heads=n_heads)
        V, d = model.fc_out.weight.shape
        self.blocks = nn.ModuleList(nn.Linear(d, d) for _ in range(n_heads))
        self.outs = nn.ModuleList(nn.Linear(d, V) for _ in range(n_heads))
        for block, out in zip(self.blocks, self.outs, strict=True):
            for parameter in block.parameters():
                nn.init.zeros_(parameter)
            if not (out.weight.is_meta or model.fc_out.weight.is_meta):
                out.load_state_dict(model.fc_out.state_dict())

    def forward(self, hidden: Tensor) -> Tensor:
        """hidden [..., d] -> logits of all heads [..., K, V]."""
        logits = [
            out(hidden + F.silu(block(hidden)))  # [..., V]
            for block, out in zip(self.blocks, self.outs, strict=True)
        ]
        return torch.stack(logits, dim=-2)

    def guesses(self, model: GPTlite, states: TrunkStates, following: Tensor) -> list[Guess]:
        logits = self(states.hidden)  # [B, S, K, V]
        return [Guess(logits[:, :-ahead, ahead - 1], ahead) for ahead in range(1, logits.shape[2] + 1)]


class MedusaDrafter(Drafter):
    """Drafts from the hidden state that the target has left: one pass of the heads, no cache.

    A chain samples each head's token from its own distribution. A tree takes the most probable combinations of the
    heads' tokens without drawing, so that each is a draft of probability 1, which `verify` tries one after the other.

    Args:
        heads: trained on the target's hidden states.
        n_nodes: nodes of the tree; 0 drafts a chain.
    Raises: ValueError when n_nodes is no whole number of at least 0.
    """

    wants_hidden = True

    def __init__(self, heads: MedusaHeads, n_nodes: int = 0) -> None:
        if n_nodes:
            check_counts(n_nodes=n_nodes)
        self.heads, self.n_nodes = heads, n_nodes

    @torch.inference_mode()
    def propose(self, texts: Sequence[Text], n_draft: int, hidden: Sequence[Tensor] | None = None) -> Draft:
        assert hidden is not None
        logits = self.heads(torch.stack([states[-1] for states in hidden]))  # [B, K, V]
        depth = [max(0, min(n_draft, text.room, logits.shape[1])) for text in texts]
        if self.n_nodes:
            probs = logits.softmax(-1).cpu()
            trees = [
                product_tree(probs[b, :n], self.n_nodes) if n else Tree()  # [n, V]
                for b, n in enumerate(depth)
            ]
            return Draft([tree.tokens for tree in trees], parents=[tree.parents for tree in trees])
        if all(text.params.temperature == 0 for text in texts):
            best = logits.argmax(-1).tolist()  # [B, K]
            return Draft([row[:n] for row, n in zip(best, depth, strict=True)])
        tokens: list[list[int]] = [[] for _ in texts]
        q = logits.new_zeros(len(texts), max(depth), logits.shape[-1])  # [B, n, V]
        q = q.to(torch.promote_types(q.dtype, torch.float32))
        for k in range(max(depth)):
            rows = [b for b, n in enumerate(depth) if n > k]
            drawn_from, u = next_distribution(logits[rows, k], [texts[b] for b in rows])
            q[rows, k] = drawn_from
            for b, token in zip(rows, sample(drawn_from, u).tolist(), strict=True):
                tokens[b].append(token)
        return Draft(tokens, q if q.shape[1] else None)
