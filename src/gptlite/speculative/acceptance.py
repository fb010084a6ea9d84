"""How often a draft model would be accepted along a given text: no sampling, so no noise."""

from __future__ import annotations

import torch
from torch import Tensor

from gptlite.model import GPTlite
from gptlite.sampling import SamplingParams, probabilities
from gptlite.speculative.theory import overlap


@torch.inference_mode()
def logits_along(model: GPTlite, tokens: Tensor, context: int | None = None) -> Tensor:
    """What a model expects in the place of each token of a text but the first.

    The text is read in windows that overlap by half, so that a token has at least half a context before it wherever
    the text has.

    Args:
        tokens: the text [n]. context: tokens of a window at most; None means the model's.
    Returns: logits [n - 1, V].
    Raises: ValueError when the text has fewer than 2 tokens, or the context is not 2 to the model's.
    """
    context = model.context_length if context is None else context
    if tokens.dim() != 1 or len(tokens) < 2:
        raise ValueError(f"tokens has shape {tuple(tokens.shape)}, it must be [n] with at least 2 tokens")
    if not 2 <= context <= model.context_length:
        raise ValueError(f"context is {context}, it must be 2 to the model's {model.context_length} tokens")
    n, done, found = len(tokens) - 1, 0, []
    while done < n:
        begin = max(0, done - context // 2)
        window = tokens[begin : min(begin + context, n)]  # each of them predicts the one after it
        found.append(model(window[None])[0, done - begin :])
        done = begin + len(window)
    return torch.cat(found)


def acceptance_along(target: Tensor, draft: Tensor, params: SamplingParams) -> Tensor:
    """For each place of a text, the chance that a draft in it is accepted.

    It is the overlap of both models' distributions; at temperature 0 it is 1 where both prefer the same token, else 0.

    Args:
        target, draft: logits of both models along the same text [n - 1, V], as `logits_along` gives them.
        params: of the sampling, for both.
    Returns: probabilities [n - 1].
    """
    return overlap(probabilities(target, params), probabilities(draft, params))
