"""A student by one recipe: which loss, from which teachers, and how what it needs is made."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any

import torch
from torch import Tensor

from gptlite.checkpoint import load, load_checkpoint, save_checkpoint
from gptlite.compress.agreement import agreement, all_logits, spread_windows
from gptlite.compress.hidden import HiddenStates, even_pairs
from gptlite.compress.mutual import Mutual
from gptlite.compress.objectives import SoftLabels, check_share
from gptlite.compress.offline import Offline, ask_teacher, load_store, save_store, training_windows
from gptlite.compress.on_policy import OnPolicy
from gptlite.compress.responses import Responses, write_responses
from gptlite.config import GPTConfig
from gptlite.data import CharTokenizer, Corpus
from gptlite.model import GPTlite
from gptlite.train import Objective, TrainSettings, train, weights_sha256

LOSSES = ("text", "soft", "logits", "hidden", "mutual", "offline", "on-policy", "responses")
N_COMPARED = 64  # held-out windows over which a student is compared with its teacher


@dataclass(frozen=True)
class Recipe:
    """What a student learns, and from what.

    Args:
        loss: one of LOSSES; "text" learns without a teacher, "mutual" from another student, all others from teachers.
        temperature, hard: as in `SoftLabels`, for soft and hidden; hard for logits too.
        squares, cosine, soft: weights of hidden, as in `HiddenStates`.
        top_k: tokens that an offline store keeps per position; tail: as in `stored_loss`.
        share, reverse: as in `OnPolicy`; begin: share of the steps before its first sample, in [0, 1].
        answers: how many the teacher writes, for responses.
    Raises: ValueError on an unknown loss or a number out of range.
    """

    loss: str = "soft"
    temperature: float = 1.0
    hard: float = 0.0
    squares: float = 1.0
    cosine: float = 0.0
    soft: float = 1.0
    top_k: int = 8
    tail: bool = True
    share: float = 0.5
    begin: float = 0.5
    reverse: bool = False
    answers: int = 512

    def __post_init__(self) -> None:
        if self.loss not in LOSSES:
            raise ValueError(f"loss is {self.loss!r}, it must be one of {', '.join(LOSSES)}")
        check_share(begin=self.begin, share=self.share, hard=self.hard)

    def changed(self) -> dict[str, Any]:
        """The loss and the fields that are not the default, by name."""
        return {name: value for name, value in asdict(self).items() if name == "loss" or value != getattr(Recipe, name)}


def make_objective(
    recipe: Recipe,
    teachers: Sequence[GPTlite],
    config: GPTConfig,
    tokens: Tensor,
    settings: TrainSettings,
    store: str | Path | None = None,
) -> Objective:
    """The objective of a recipe, with what has to be there before the first step: a peer, a store, or answers.

    Args:
        teachers: used by all losses but text and mutual; all of them by soft and logits, the first by the others.
        config: of the student, with the vocabulary of the corpus.
        tokens: the text [n].
        store: for offline, a file that is read if it is there, and else written; None keeps the store in memory.
    Raises: ValueError when a teacher is missing, a number of the recipe is out of range, or a store is not of this
        teacher and recipe.
    """
    if recipe.loss == "text":
        return Objective()
    if recipe.loss == "mutual":
        with torch.random.fork_rng(devices=[]):
            torch.manual_seed(settings.seed + 1)  # another student, not this one twice
            return Mutual(GPTlite(config))
    if not teachers:
        raise ValueError(f"0 teachers are given, loss {recipe.loss!r} needs at least 1")
    first = teachers[0]
    if recipe.loss in ("soft", "logits"):
        return SoftLabels(*teachers, temperature=recipe.temperature, hard=recipe.hard, logits=recipe.loss == "logits")
    if recipe.loss == "hidden":
        pairs = even_pairs(config.n_layers, len(first.blocks))
        weights = {"squares": recipe.squares, "cosine": recipe.cosine, "soft": recipe.soft}
        return HiddenStates(first, config.d_model, pairs, temperature=recipe.temperature, hard=recipe.hard, **weights)
    if recipe.loss == "on-policy":
        begin = round(recipe.begin * settings.steps)
        return OnPolicy(first, recipe.share, begin, reverse=recipe.reverse)
    if recipe.loss == "responses":
        return Responses(write_responses(first, tokens, recipe.answers, seed=settings.seed))
    if store is not None and Path(store).exists():
        kept = load_store(store)
        if kept.vocab_size != config.vocab_size:
            raise ValueError(f"{store} has a vocabulary of {kept.vocab_size}, the corpus has {config.vocab_size}")
        if kept.logs.shape[-1] != recipe.top_k:
            raise ValueError(
                f"{store} keeps {kept.logs.shape[-1]} tokens per position, the recipe asks for {recipe.top_k}"
            )
        if kept.teacher != weights_sha256(first):
            raise ValueError(f"{store} holds the words of another teacher")
        return Offline(kept, recipe.tail)
    windows = training_windows(tokens, settings.steps, config.context_length, settings)
    kept = ask_teacher(first, windows, recipe.top_k, settings.batch_size, settings.precision)
    if store is not None:
        save_store(store, kept)
    return Offline(kept, recipe.tail)


def make_student(
    config: GPTConfig,
    corpus: Corpus,
    settings: TrainSettings,
    out: str | Path,
    recipe: Recipe,
    teachers: dict[str, GPTlite],
    command: str = "",
    resume: bool = True,
    device: torch.device | str = "cpu",
    on_step: Callable[[int, float], None] | None = None,
    store: str | Path | None = None,
) -> dict[str, Any]:
    """Trains a student and writes it with a card that also says how far it agrees with its first teacher.

    Args:
        config: shape of the student. out: ends in .safetensors.
        teachers: by name, from `load_teachers`; the student is compared with the first.
        command, resume, on_step: as in `train`. store: as in `make_objective`.
    Returns: the card of `train`, with the recipe, the teachers and the agreement over held-out windows.
    Raises: ValueError when a number is out of range, or a file cannot be read or written.
    """
    if Path(out).suffix != ".safetensors":
        raise ValueError(f"{out} must end in .safetensors")
    tokenizer = CharTokenizer.of(corpus.train, corpus.held_out)
    loaded = list(teachers.values())
    config = GPTConfig.from_dict({**config.to_dict(), "vocab_size": tokenizer.vocab_size})
    objective = make_objective(recipe, loaded, config, tokenizer.encode(corpus.train), settings, store)
    card = train(config, corpus, settings, out, command, None, resume, device, on_step, objective)
    card["recipe"] = recipe.changed()
    card["teachers"] = list(teachers)
    student, _ = load_checkpoint(out, device)
    if loaded:
        held_out = tokenizer.encode(corpus.held_out)
        windows = spread_windows(held_out, N_COMPARED, min(config.context_length, loaded[0].context_length))
        found = agreement(all_logits(student, windows), all_logits(loaded[0], windows))
        card["agreement"] = {name: round(value, 4) for name, value in asdict(found).items()}
    save_checkpoint(out, student, tokenizer, card)
    return card


def load_teachers(names: Sequence[str], corpus: Corpus, device: torch.device | str = "cpu") -> dict[str, GPTlite]:
    """The teachers of a run.

    Args:
        names: of shipped checkpoints, or files. corpus: the text that the student will learn.
    Returns: the models by their names, files without their folders.
    Raises: ValueError when one cannot be read, or has another vocabulary than the corpus.
    """
    chars = CharTokenizer.of(corpus.train, corpus.held_out).chars
    found: dict[str, GPTlite] = {}
    for name in names:
        model, known = load(name, device)
        if known.chars != chars:
            raise ValueError(f"teacher {name} has another vocabulary than {corpus.name}: they must be the same")
        found[Path(name).name] = model
    return found


def remember(teacher: GPTlite) -> GPTlite:
    """Makes a teacher keep every answer, so that recipes that read the same batches ask it only once, in place.

    Only a plain pass without gradients is kept, in the dtype in which it was computed; nothing is ever forgotten.
    """
    plain, answers = teacher.forward, {}

    def forward(tokens: Tensor, *rest: Any, **more: Any) -> Tensor:
        """Logits [B, S, V] of tokens [B, S], from memory when they were asked for before in the same precision."""
        hooked = any(block._forward_hooks for block in teacher.blocks)
        if rest or more or hooked or torch.is_grad_enabled():
            return plain(tokens, *rest, **more)
        key = (torch.is_autocast_enabled(tokens.device.type), tuple(tokens.shape), tokens.cpu().numpy().tobytes())
        if key not in answers:
            answers[key] = plain(tokens)
        return answers[key]

    teacher.forward = forward  # type: ignore[method-assign]
    return teacher
