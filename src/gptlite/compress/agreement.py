"""How alike two models are, token by token, over a text that neither was trained on."""

from __future__ import annotations

from dataclasses import dataclass

import torch
import torch.nn.functional as F
from torch import Tensor

from gptlite.model import GPTlite


@dataclass(frozen=True)
class Agreement:
    """A student beside its teacher, means over all tokens.

    Args:
        same: share of positions at which both find the same token most probable, in [0, 1].
        divergence: KL(teacher || student), in nats.
        overlap: sum over the vocabulary of the smaller probability, in [0, 1]; the share of drafted tokens that
            speculative decoding would keep.
    """

    same: float
    divergence: float
    overlap: float


@torch.no_grad()
def all_logits(model: GPTlite, windows: Tensor, batch_size: int = 16) -> Tensor:
    """Logits [n, S, V] of windows of text [n, S], in fp32 on the CPU; the model is put into eval mode."""
    device = model.fc_out.weight.device
    model.eval()
    return torch.cat([model(part.to(device)).float().cpu() for part in windows.split(batch_size)])


def agreement(student_logits: Tensor, teacher_logits: Tensor) -> Agreement:
    """Compares what two models say about the same tokens.

    Args:
        student_logits, teacher_logits: [..., V], by `all_logits`.
    Raises: ValueError when the shapes differ or hold no token.
    """
    if student_logits.shape != teacher_logits.shape:
        have = f"{tuple(student_logits.shape)} and {tuple(teacher_logits.shape)}"
        raise ValueError(f"logits of shapes {have} cannot be compared")
    if student_logits.numel() == 0:
        raise ValueError(f"logits of shape {tuple(student_logits.shape)} hold no token to compare")
    q, p = (logits.double().log_softmax(-1).flatten(0, -2) for logits in (student_logits, teacher_logits))  # [n, V]
    return Agreement(
        same=(q.argmax(-1) == p.argmax(-1)).double().mean().item(),
        divergence=F.kl_div(q, p, reduction="batchmean", log_target=True).item(),
        overlap=torch.minimum(q.exp(), p.exp()).sum(-1).mean().item(),
    )


def spread_windows(tokens: Tensor, n: int, context: int) -> Tensor:
    """n windows [n, S] of S = `context` tokens, evenly spread over a text [m].

    Raises: ValueError when the text is shorter than a window.
    """
    if len(tokens) < context:
        raise ValueError(f"the text has {len(tokens)} tokens, a window needs {context}")
    starts = torch.linspace(0, len(tokens) - context, n).long()
    return tokens[starts[:, None] + torch.arange(context)]
