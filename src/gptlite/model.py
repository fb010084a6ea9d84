"""GPTlite: a small GPT whose step is a packed list of tokens, so that every engine runs the same model."""

from collections.abc import Sequence

import torch
from torch import Tensor, nn

from gptlite.attention import attend
from gptlite.cache.contract import Cache, Segment, whole_batch
from gptlite.config import GPTConfig


class MultiHeadAttention(nn.Module):
    """Causal self-attention with H query heads over G KV heads (MHA: G = H, GQA {cite}`ainslie2023gqa`, MQA: G = 1).

    A variant overrides `mix`, and `kv_shape` when what it caches has another shape.
    """

    def __init__(self, config: GPTConfig) -> None:
        super().__init__()
        self.d_head = config.d_head
        self.scale = config.d_head**-0.5
        self.window: int | None = None
        self.sinks = 0
        self.query_proj = nn.Linear(config.d_model, config.n_heads * config.d_head)
        self.key_proj = nn.Linear(config.d_model, config.n_kv_heads * config.d_head)
        self.value_proj = nn.Linear(config.d_model, config.n_kv_heads * config.d_head)
        self.out_proj = nn.Linear(config.n_heads * config.d_head, config.d_model)
        self.dropout = nn.Dropout(config.dropout)

    @property
    def kv_shape(self) -> tuple[int, int, int]:
        """(G, Dk, Dv): what one token of this layer adds to a cache, read from the weights, so that pruning shows."""
        n_kv_heads = self.key_proj.out_features // self.d_head
        return n_kv_heads, self.d_head, self.value_proj.out_features // n_kv_heads

    def project(self, x: Tensor) -> tuple[Tensor, Tensor, Tensor | None]:
        """Queries [n, H, D], keys [n, G, D] and values [n, G, Dv] of the packed tokens x [n, d].

        A variant gives None for the values when its keys are latents that hold both.
        """
        n = len(x)
        q = self.query_proj(x).view(n, -1, self.d_head)  # [n, H, D]
        k = self.key_proj(x).view(n, -1, self.d_head)  # [n, G, D]
        v = self.value_proj(x).view(n, k.shape[1], -1)  # [n, G, Dv]
        return q, k, v

    def mask(self, segment: Segment, k_pos: Tensor) -> Tensor | None:
        """The mask [B, 1 or G, S, T] that `mix` gets, None where nothing is masked.

        A variant that masks by tile never makes the whole of it.
        """
        if self.window is None and segment.sees_all:
            return None
        return segment.visible(k_pos, self.window, self.sinks)

    def mix(self, q: Tensor, k: Tensor, v: Tensor, q_pos: Tensor, k_pos: Tensor, mask: Tensor | None) -> Tensor:
        """Attention of one segment: q [B, H, S, D], k [B, G, T, D], v [B, G, T, Dv] -> [B, H, S, Dv].

        Args:
            q_pos, k_pos: positions [B, S] and [B, T], for a variant that skips what cannot be seen.
            mask: bool [B, 1 or G, S, T], which keys each query sees, from `Segment.visible`; None: it sees all.
        """
        return attend(q, k, v, mask, self.scale)

    def forward(self, x: Tensor, segments: list[Segment], cache: Cache | None, layer: int) -> Tensor:
        """x [n, d] -> [n, d]: linear layers over all packed tokens, attention per segment {cite}`yu2022orca`."""
        q, k, v = self.project(x)
        mixed = []
        for segment in segments:
            qs, ks = (segment.take(part).transpose(1, 2) for part in (q, k))  # [B, heads, S, D]
            vs = None if v is None else segment.take(v).transpose(1, 2)  # [B, G, S, Dv]
            if cache is None:
                mask = self.mask(segment, segment.positions)  # [B, 1, S, S]
                out = self.mix(qs, ks, vs, segment.positions, segment.positions, mask)  # type: ignore[arg-type]
            else:
                out = cache.attend(layer, qs, ks, vs, segment, self)
            mixed.append(out.transpose(1, 2).reshape(segment.positions.numel(), -1))  # [B * S, H * Dv]
        out = self.out_proj(unpack(mixed, segments))
        return self.dropout(out) if self.training else out


def unpack(parts: list[Tensor], segments: list[Segment]) -> Tensor:
    """Puts the rows of each segment back where they lie in the packed step: parts [B * S, ...] -> [n, ...]."""
    if len(parts) == 1 and segments[0].rows is None:
        return parts[0]
    out = parts[0].new_empty(sum(part.shape[0] for part in parts), *parts[0].shape[1:])
    for part, segment in zip(parts, segments, strict=True):
        out[segment.rows] = part
    return out


class FeedForward(nn.Module):
    """Two linear layers with a ReLU between: x [..., d] -> [..., d]."""

    def __init__(self, config: GPTConfig) -> None:
        super().__init__()
        self.net = nn.Sequential(
            nn.Linear(config.d_model, config.d_ff),
            nn.ReLU(),
            nn.Linear(config.d_ff, config.d_model),
        )
        self.dropout = nn.Dropout(config.dropout)

    def forward(self, x: Tensor) -> Tensor:
        out = self.net(x)
        return self.dropout(out) if self.training else out


class Block(nn.Module):
    """One transformer block with the norm first {cite}`radford2019gpt2`: x + attention, then x + feed-forward."""

    def __init__(self, config: GPTConfig) -> None:
        super().__init__()
        self.ln1 = nn.LayerNorm(config.d_model)
        self.mha = MultiHeadAttention(config)
        self.ln2 = nn.LayerNorm(config.d_model)
        self.ffwd = FeedForward(config)

    def forward(self, x: Tensor, segments: list[Segment], cache: Cache | None, layer: int) -> Tensor:
        x = x + self.mha(self.ln1(x), segments, cache, layer)  # [n, d]
        return x + self.ffwd(self.ln2(x))  # [n, d]


class GPTlite(nn.Module):
    """A decoder-only transformer with learned positions and an untied head {cite}`radford2019gpt2`.

    Parameters bear the names of the original GPTlite, so its checkpoints load.
    """

    blocks: Sequence[Block]  # an nn.ModuleList, which would forget what it holds

    def __init__(self, config: GPTConfig) -> None:
        super().__init__()
        self.config = config
        self.token_embedding = nn.Embedding(config.vocab_size, config.d_model)
        self.position_embedding = nn.Embedding(config.context_length, config.d_model)
        self.blocks = nn.ModuleList(Block(config) for _ in range(config.n_layers))  # type: ignore[assignment]
        self.ln = nn.LayerNorm(config.d_model)
        self.fc_out = nn.Linear(config.d_model, config.vocab_size)
        self.dropout = nn.Dropout(config.dropout)
        self.apply(self._init)
        for name, parameter in self.named_parameters():
            # each block adds twice to the residual stream: keep its variance independent of depth
            if name.endswith(("mha.out_proj.weight", "ffwd.net.2.weight")):
                nn.init.normal_(parameter, std=0.02 / (2 * config.n_layers) ** 0.5)

    @staticmethod
    def _init(module: nn.Module) -> None:
        if isinstance(module, nn.Linear | nn.Embedding):
            nn.init.normal_(module.weight, std=0.02)
        if isinstance(module, nn.Linear):
            nn.init.zeros_(module.bias)

    @property
    def context_length(self) -> int:
        """n, the positions that the model has embeddings for, in tokens."""
        return self.position_embedding.num_embeddings

    @property
    def n_params(self) -> int:
        """N, the number of parameters."""
        return sum(parameter.numel() for parameter in self.parameters())

    def forward(self, tokens: Tensor, positions: Tensor | None = None, cache: Cache | None = None) -> Tensor:
        """The plain call: logits of every token of a batch.

        Args:
            tokens: [B, S], integers in [0, V).
            positions: [B, S]; -1 is a hole (padding). None counts from 0, or with a cache from where row b of the
                batch, the cache's sequence b, stopped.
            cache: keeps the keys and values of these tokens, and attends to those it holds; None attends to tokens.
        Returns: logits [B, S, V]; those of a hole mean nothing.
        Raises: ValueError on tokens that are not [B, S] or outside the vocabulary, and past the context window.
        """
        if tokens.dim() != 2 or not tokens.numel():
            raise ValueError(f"tokens has shape {tuple(tokens.shape)}, it must be [B, S] with at least one token")
        B, S = tokens.shape
        if positions is None:
            positions = self.next_positions(B, S, cache)
        if positions.shape != tokens.shape:
            raise ValueError(f"positions has shape {tuple(positions.shape)}, tokens {tuple(tokens.shape)}")
        self.check(tokens, positions)
        packed = tokens.flatten()  # [B * S]
        if cache is None:
            segments = [whole_batch(positions.to(tokens.device))]
        else:
            segments = cache.prepare(range(B), positions, tokens=packed)
        return self.head(self.run(packed, segments, cache)).unflatten(0, (B, S))

    @staticmethod
    def next_positions(n_rows: int, n_new: int, cache: Cache | None) -> Tensor:
        """Positions [B, S] of the next S tokens of a cache's sequences 0 to B - 1; from 0 without a cache."""
        starts = torch.tensor([[0 if cache is None else cache.next_position(b)] for b in range(n_rows)])  # [B, 1]
        return starts if n_new == 1 else starts + torch.arange(n_new)

    def check(self, tokens: Tensor, positions: Tensor) -> None:
        """Checks tokens and positions, each [B, S] or packed [n].

        Raises: ValueError when a token is outside the vocabulary or a position outside the context window.
        """
        V, n = self.token_embedding.num_embeddings, self.context_length
        low, high = (int(end) for end in tokens.aminmax())
        if low < 0 or high >= V:
            raise ValueError(f"token {low if low < 0 else high} is outside the vocabulary of {V}")
        low, high = (int(end) for end in positions.aminmax())
        if low < -1 or high >= n:
            raise ValueError(f"position {low if low < -1 else high} is outside the context window of {n} tokens")

    def run(self, tokens: Tensor, segments: list[Segment], cache: Cache | None = None) -> Tensor:
        """One step over packed tokens: the body of the model, free of Python state, so that it compiles.

        Args:
            tokens: [n_new], those of all rows one after another.
            segments: what `cache.prepare` returned for them.
            cache: the one that prepared the segments, or None.
        Returns: hidden states [n_new, d], normalised, ready for `head`.
        """
        positions = unpack([segment.positions.flatten() for segment in segments], segments)  # [n_new]
        x = self.token_embedding(tokens) + self.position_embedding(positions.clamp(min=0))  # [n_new, d]
        x = self.dropout(x) if self.training else x
        for layer, block in enumerate(self.blocks):
            x = block(x, segments, cache, layer)
        return self.ln(x)

    def head(self, hidden: Tensor) -> Tensor:
        """hidden [..., d] -> logits [..., V]; an engine calls it on the rows that sample."""
        return self.fc_out(hidden)
