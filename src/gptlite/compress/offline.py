"""Offline distillation: the teacher runs once, its most probable tokens are stored, and students learn from them."""

from __future__ import annotations

import hashlib
import os
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch
import torch.nn.functional as F
from safetensors import SafetensorError, safe_open
from safetensors.torch import save
from torch import Tensor

from gptlite.checkpoint import write_atomically
from gptlite.data import training_batch
from gptlite.model import GPTlite
from gptlite.train import Objective, TrainSettings, weights_sha256

FORMAT = "gptlite-teacher-1"
NAMES = ("indices", "logs", "tokens")


@dataclass(frozen=True)
class Store:
    """What a teacher said about some windows of text.

    Args:
        tokens: [n, S + 1], the windows: inputs, and the last one's target.
        logs: [n, S, k] fp16, the logarithms of the k largest probabilities, the largest first: the logits less the
            logarithm of the sum of their exponentials, so that what the other tokens have together is known too.
        indices: [n, S, k], which tokens these are.
        vocab_size: V.
        teacher: whose words these are, the hash of its weights.
    """

    tokens: Tensor
    logs: Tensor
    indices: Tensor
    vocab_size: int
    teacher: str

    @property
    def n_bytes(self) -> int:
        """Bytes of the three tensors."""
        return sum(t.numel() * t.element_size() for t in (self.tokens, self.logs, self.indices))


def training_windows(tokens: Tensor, steps: int, context: int, settings: TrainSettings) -> Tensor:
    """The windows [steps * B, S + 1] that a run with these settings reads in its first steps, in their order."""
    batches = [training_batch(tokens, step, settings.batch_size, context, settings.seed) for step in range(steps)]
    return torch.cat([torch.cat([x, y[:, -1:]], 1) for x, y in batches])


@torch.no_grad()
def ask_teacher(teacher: GPTlite, windows: Tensor, k: int, batch_size: int = 16, precision: str = "fp32") -> Store:
    """Runs the teacher once over all windows and keeps its k most probable tokens of every position.

    Args:
        windows: [n, S + 1], by `training_windows` or of the teacher's own writing.
        k: tokens to keep, 1 to V.
        batch_size: windows that the teacher reads at once; the result does not depend on it.
        precision: "fp32", or "bf16" for products in bf16, as in training with that precision.
    Raises: ValueError when k is out of range.
    """
    V, device = teacher.fc_out.out_features, teacher.fc_out.weight.device
    if not 1 <= k <= V:
        raise ValueError(f"k is {k}, it must be 1 to the vocabulary's {V}")
    teacher.eval()
    logs, indices = [], []
    for part in windows[:, :-1].split(batch_size):
        with torch.autocast(device.type, torch.bfloat16, enabled=precision == "bf16"):
            logits = teacher(part.to(device))
        top = logits.float().log_softmax(-1).topk(k, dim=-1)
        logs.append(top.values.half().cpu())
        indices.append(top.indices.to(narrow(V)).cpu())
    return Store(windows.to(narrow(V)).cpu(), torch.cat(logs), torch.cat(indices), V, weights_sha256(teacher))


def narrow(vocab_size: int) -> torch.dtype:
    """The smallest dtype that holds every token."""
    return torch.uint8 if vocab_size <= 256 else torch.int32


def stored_loss(student_logits: Tensor, logs: Tensor, indices: Tensor, tail: bool = True) -> Tensor:
    """KL(teacher || student) of what was stored: k tokens, and all others together as one more.

    Joining outcomes never raises a divergence, so it is at most `distillation_loss` at temperature 1, and equal to it
    when all tokens are stored, up to the rounding of the logarithms to fp16.

    Args:
        student_logits: [..., V].
        logs, indices: [..., k], as in `Store`.
        tail: False makes the k probabilities sum to one instead and forgets the others, which teaches the student
            that they are impossible.
    Returns: a scalar in nats per token, the mean over all tokens.
    Raises: ValueError when the shapes do not belong together.
    """
    if logs.shape != indices.shape or logs.shape[:-1] != student_logits.shape[:-1]:
        shapes = ", ".join(str(tuple(t.shape)) for t in (student_logits, logs, indices))
        raise ValueError(f"logits, logs and indices have shapes {shapes}, they must be [..., V], [..., k] and [..., k]")
    found = student_logits.float().log_softmax(-1)  # [..., V]
    indices, goal = indices.long(), logs.float()
    q = found.gather(-1, indices)  # [..., k]
    if not tail:
        goal = goal.log_softmax(-1)
    elif indices.shape[-1] < found.shape[-1]:
        rest = (1 - goal.exp().sum(-1, keepdim=True)).clamp(min=1e-7)  # rounding may leave less than nothing
        goal = torch.cat([goal, rest.log()], -1)  # [..., k + 1]
        others = found.scatter(-1, indices, float("-inf"))
        q = torch.cat([q, others.logsumexp(-1, keepdim=True)], -1)
    return F.kl_div(q, goal, reduction="none", log_target=True).sum(-1).mean()


class Offline(Objective):
    """Learn from a store, its windows in their order and from the first again: no teacher is loaded.

    Args:
        store: by `ask_teacher` or `load_store`.
        tail: as in `stored_loss`.
    """

    def __init__(self, store: Store, tail: bool = True) -> None:
        super().__init__()
        self.store, self.tail = store, tail

    def draw(self, model: GPTlite, tokens: Tensor, step: int, settings: TrainSettings) -> tuple[Tensor, ...]:
        """Inputs [B, S] of the store's next windows, and what the teacher said about them, [B, S, k] each."""
        B, n = settings.batch_size, len(self.store.tokens)
        rows = torch.arange(step * B, (step + 1) * B) % n
        return self.store.tokens[rows, :-1].long(), self.store.logs[rows], self.store.indices[rows]

    def loss(self, model: GPTlite, x: Tensor, logs: Tensor, indices: Tensor) -> Tensor:  # type: ignore[override]
        """The divergence of one batch, a scalar."""
        return stored_loss(model(x), logs, indices, self.tail)

    def describe(self) -> dict[str, Any]:
        """What tells this objective from others: the store by its hash."""
        digest = hashlib.sha256()
        for tensor in (self.store.tokens, self.store.logs, self.store.indices):
            digest.update(tensor.numpy().tobytes())
        return {"kind": "Offline", "tail": self.tail, "store": digest.hexdigest()}


def save_store(path: str | Path, store: Store) -> None:
    """Writes a store as safetensors, whole or not at all. Raises: ValueError when the folder cannot be written."""
    tensors = {name: getattr(store, name).contiguous() for name in NAMES}
    header = {"format": FORMAT, "vocab_size": str(store.vocab_size), "teacher": store.teacher}
    write_atomically(Path(path), save(tensors, metadata=header))


def load_store(path: str | Path) -> Store:
    """Reads a store; the file is not trusted: sizes are checked before tensors are read, and values after.

    Raises: ValueError when the file is missing, damaged, or does not say what a teacher can have said.
    """
    if not os.path.isfile(path):
        raise ValueError(f"there is no store {path}")
    try:
        with safe_open(path, framework="pt") as file:
            header = file.metadata() or {}
            if header.get("format") != FORMAT:
                raise ValueError(f"its header does not say {FORMAT}")
            V = int(header["vocab_size"])
            if tuple(sorted(file.keys())) != NAMES:
                raise ValueError(f"it holds {', '.join(sorted(file.keys()))}, not {', '.join(NAMES)}")
            shapes = {name: tuple(file.get_slice(name).get_shape()) for name in NAMES}
            n, length = (*shapes["tokens"], 0, 0)[:2]
            k = (0, *shapes["logs"])[-1]
            fits = n >= 1 and length >= 2 and 1 <= k <= V
            if not fits or shapes != {"tokens": (n, length), "logs": (n, length - 1, k), "indices": (n, length - 1, k)}:
                raise ValueError(f"its tensors have shapes {shapes}, for a vocabulary of {V}")
            tokens, logs, indices = (file.get_tensor(name).clone() for name in ("tokens", "logs", "indices"))
            store = Store(tokens, logs, indices, V, header["teacher"])
    except (SafetensorError, OSError, ValueError, KeyError) as error:
        raise ValueError(f"{path} is no store of a teacher, or is damaged: {error}") from None
    check_store(store, path)
    return store


def check_store(store: Store, path: str | Path) -> None:
    """Raises: ValueError unless tokens lie in the vocabulary, and each position has probabilities of distinct ones."""
    for name in ("tokens", "indices"):
        values = getattr(store, name)
        if values.dtype != narrow(store.vocab_size) or values.min() < 0 or values.max() >= store.vocab_size:
            raise ValueError(f"{path} is damaged: its {name} are not tokens of a vocabulary of {store.vocab_size}")
    ordered = store.indices.sort(-1).values
    if (ordered[..., 1:] == ordered[..., :-1]).any():
        raise ValueError(f"{path} is damaged: it names a token twice at one position")
    logs = store.logs.float()
    if store.logs.dtype != torch.float16 or not logs.isfinite().all() or (logs.exp().sum(-1) > 1.01).any():
        raise ValueError(f"{path} is damaged: its logarithms are not those of probabilities")
