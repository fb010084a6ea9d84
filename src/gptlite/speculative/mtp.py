"""Multi-token prediction: a chain of modules, each of which guesses one token further ahead."""

from __future__ import annotations

from collections.abc import Hashable, Sequence

import torch
from torch import Tensor, nn

from gptlite.cache.contract import Cache, Segment
from gptlite.model import Block, GPTlite, unpack
from gptlite.sampling import sample
from gptlite.speculative.drafters import Draft, Drafter, Text, next_distribution, prepare_step
from gptlite.speculative.heads import Combine, Guess, Heads, TrunkStates, block_config, embed
from gptlite.speculative.heads_cache import BlocksCache


class MTPModule(nn.Module):
    """One depth of multi-token prediction: norms, a layer that joins state and token, and a transformer block."""

    def __init__(self, model: GPTlite) -> None:
        super().__init__()
        config = block_config(model)
        self.norm_state, self.norm_token = nn.LayerNorm(config.d_model), nn.LayerNorm(config.d_model)
        self.combine = Combine(config.d_model)
        self.block = Block(config)
        self.ln = nn.LayerNorm(config.d_model)

    def forward(
        self, model: GPTlite, states: Tensor, tokens: Tensor, ahead: int, segments: list[Segment], cache: Cache | None
    ) -> Tensor:
        """States [n, d] of positions i and tokens [n] of i + ahead -> states [n, d], which say token i + ahead + 1."""
        positions = unpack([segment.positions.flatten() for segment in segments], segments)  # [n]
        token = embed(model, tokens, (positions + ahead).clamp(max=model.context_length - 1))  # [n, d]
        x = self.combine(self.norm_token(token), self.norm_state(states))
        return self.ln(self.block(x, segments, cache, 0))


class MTPHeads(Heads):
    """K modules one after the other, which share the trunk's embedding and its output layer {cite}`deepseek2024v3`.

    Module k reads what module k - 1 put out at position i (the first one: the trunk's hidden state) and token i + k,
    and guesses token i + 1 + k. The whole chain of tokens stays causal, unlike Medusa's independent heads.

    Args:
        model: the trunk, whose last block's shape the modules take.
        n_heads: K.
    """

    kind = "mtp"

    def __init__(self, model: GPTlite, n_heads: int) -> None:
        super().__init__(n_heads=n_heads)
        self.blocks = nn.ModuleList(MTPModule(model) for _ in range(n_heads))

    def guesses(self, model: GPTlite, states: TrunkStates, following: Tensor) -> list[Guess]:
        B, S = following.shape
        out, guesses = states.hidden, []
        for ahead, module in enumerate(self.blocks, 1):
            # the last windows' tokens wrap round; what they give is cut off, and no earlier position sees it
            tokens = following.roll(1 - ahead, dims=1)  # [B, S], token i + ahead
            out = module(model, out.flatten(0, 1), tokens.flatten(), ahead, states.segments, None).unflatten(0, (B, S))
            guesses.append(Guess(model.head(out[:, :-ahead]), ahead))
        return guesses


class MTPDrafter(Drafter):
    """Drafts with the modules of multi-token prediction, one pass of one module per token.

    Each module keeps a cache of its own. What a module read that depends on a draft is taken back after the round.

    Args:
        model: the target.
        heads: trained on its hidden states, or together with it.
        max_batch: texts that it drafts for at once.
    Raises: ValueError when max_batch is below 1.
    """

    wants_hidden = True

    def __init__(self, model: GPTlite, heads: MTPHeads, max_batch: int = 1) -> None:
        self.model, self.heads = model, heads
        self.caches = [BlocksCache(model, [module.block], max_batch) for module in heads.blocks]  # type: ignore[list-item]
        # per text and module, states that are true and that the module has not read for good [n, d]
        self._waiting: dict[Hashable, list[Tensor]] = {}

    @torch.inference_mode()
    def propose(self, texts: Sequence[Text], n_draft: int, hidden: Sequence[Tensor] | None = None) -> Draft:
        assert hidden is not None
        depth = [max(0, min(n_draft, text.room, len(self.caches))) for text in texts]
        greedy = all(text.params.temperature == 0 for text in texts)
        tokens: list[list[int]] = [[] for _ in texts]
        probs: list[Tensor] = []
        states = {b: hidden[b] for b in range(len(texts))}  # per text, the newest states of the module before
        for ahead, (module, cache) in enumerate(zip(self.heads.blocks, self.caches, strict=True), 1):
            rows = [b for b, n in enumerate(depth) if n >= ahead]
            if not rows:
                break
            inputs, new = [], []
            for b in rows:
                inputs.append(self._inputs(texts[b], ahead, states[b]))
                known = [*texts[b].tokens, *tokens[b]]
                new.append(known[len(known) - len(inputs[-1]) :])  # token i + ahead of each state i
            step = [texts[b] for b in rows]
            packed, segments = prepare_step(cache, step, new, inputs[0].device)
            out = module(self.model, torch.cat(inputs), packed, ahead, segments, cache)  # [n, d]
            parts = out.split([len(row) for row in new])
            logits = self.model.head(torch.stack([part[-1] for part in parts]))  # [rows, V]
            if greedy:
                drawn = logits.argmax(-1).tolist()
            else:
                q, u = next_distribution(logits, step)
                drawn = sample(q, u).tolist()
                probs.append(q.new_zeros(len(texts), q.shape[-1]).index_copy(0, torch.tensor(rows).to(q.device), q))
            states = dict(zip(rows, parts, strict=True))
            for b, token in zip(rows, drawn, strict=True):
                tokens[b].append(token)
                # of the states, the last ahead - 1 were made with a draft
                cache.trim(texts[b].key, max(0, len(texts[b].tokens) - ahead))
        return Draft(tokens, torch.stack(probs, dim=1) if probs else None)

    def _inputs(self, text: Text, ahead: int, states: Tensor) -> Tensor:
        """What a module reads in this round: what waited, and the new states of the module before it [n, d]."""
        waiting = self._waiting.setdefault(text.key, [states[:0]] * len(self.caches))
        inputs = torch.cat([waiting[ahead - 1], states])  # [n, d]
        # module k keeps positions 0 to len(tokens) - k - 1, the one before it one more: that state waits
        begin = self.caches[ahead - 1].next_position(text.key)
        own, before = (max(0, len(text.tokens) - k) - begin for k in (ahead, ahead - 1))
        waiting[ahead - 1] = inputs[own:before] if ahead > 1 else states[:0]
        return inputs

    def free(self, text: Text) -> None:
        self._waiting.pop(text.key, None)
        for cache in self.caches:
            cache.drop(text.key)
