"""What all heads have in common: small modules on top of a trained model that guess what it will say next."""

from __future__ import annotations

from dataclasses import dataclass

import torch
from torch import Tensor, nn

from gptlite.cache.contract import Segment, whole_batch
from gptlite.config import GPTConfig
from gptlite.model import GPTlite
from gptlite.train import loss_of
from gptlite.variants.swap import shape_of


@dataclass
class TrunkStates:
    """What a model, the trunk, computed for a batch of windows, and what heads may read.

    Args:
        hidden: what its output layer reads [B, S, d].
        layers: what each of its blocks puts out [B, S, d].
        segments: those of the batch, for a head that has attention of its own.
    """

    hidden: Tensor
    layers: list[Tensor]
    segments: list[Segment]


def trunk_states(model: GPTlite, tokens: Tensor) -> TrunkStates:
    """Reads windows of text [B, S] with a model, and keeps what lies between its blocks."""
    B, S = tokens.shape
    positions = model.next_positions(B, S, None).to(tokens.device)  # [B, S]
    model.check(tokens, positions)
    segments = [whole_batch(positions)]
    x = model.token_embedding(tokens.flatten()) + model.position_embedding(positions.flatten())  # [B * S, d]
    layers = []
    for layer, block in enumerate(model.blocks):
        x = block(x, segments, None, layer)
        layers.append(x.unflatten(0, (B, S)))
    return TrunkStates(model.ln(layers[-1]), layers, segments)


@dataclass
class Guess:
    """The logits of one head over a batch of windows.

    Args:
        logits: [B, S - ahead, V], of positions 0 to S - ahead - 1.
        ahead: 0 guesses what the trunk says at the same position, the next token; 1 the one after it; and so on.
    """

    logits: Tensor
    ahead: int


class Heads(nn.Module):
    """Modules that guess tokens from the states of a trunk. They hold none of its weights, and work with no other.

    Args:
        sizes: what the constructor was given beside the trunk, ready for JSON.
    """

    kind = ""

    def __init__(self, **sizes: int | list[int]) -> None:
        super().__init__()
        self.sizes = sizes

    def guesses(self, model: GPTlite, states: TrunkStates, following: Tensor) -> list[Guess]:
        """What each head guesses for whole windows of text.

        Args:
            following: [B, S], the token after each one of the windows.
        """
        raise NotImplementedError

    def loss(self, model: GPTlite, states: TrunkStates, following: Tensor, teacher: Tensor | None) -> Tensor:
        """Mean over the heads of the loss per token, in nats.

        Args:
            teacher: the trunk's own logits [B, S, V], which the heads are to guess; None means the text itself.
        """
        losses = []
        for guess in self.guesses(model, states, following):
            goal = None if teacher is None else teacher[:, guess.ahead :]
            losses.append(loss_of(guess.logits, following[:, guess.ahead :], goal))
        return torch.stack(losses).mean()

    @property
    def n_params(self) -> int:
        """Number of parameters."""
        return sum(parameter.numel() for parameter in self.parameters())


def block_config(model: GPTlite) -> GPTConfig:
    """The config of one more block like the last of the model, read from its weights."""
    block = model.blocks[-1]
    shape = shape_of(block.mha).to_dict()
    d_ff = block.ffwd.net[0].out_features
    return GPTConfig.from_dict({**shape, "d_ff": d_ff})


class Combine(nn.Module):
    """One linear layer over a token's embedding and a feature side by side: d and d in, d out.

    It starts as the identity of the feature, so that an untrained head passes on what it was given.
    """

    def __init__(self, d_model: int) -> None:
        super().__init__()
        self.fc = nn.Linear(2 * d_model, d_model)
        with torch.no_grad():
            self.fc.weight[:, :d_model].normal_(std=0.02)
            self.fc.weight[:, d_model:] = torch.eye(d_model)
            self.fc.bias.zero_()

    def forward(self, embedding: Tensor, feature: Tensor) -> Tensor:
        return self.fc(torch.cat([embedding, feature], dim=-1))


def embed(model: GPTlite, tokens: Tensor, positions: Tensor) -> Tensor:
    """The trunk's embedding of tokens at positions, both of one shape [...] -> [..., d]."""
    return model.token_embedding(tokens) + model.position_embedding(positions.clamp(min=0))
