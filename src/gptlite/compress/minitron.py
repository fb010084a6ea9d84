"""The Minitron recipe: prune a trained model to a smaller shape, then let it learn from the model that it was."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import asdict, dataclass, replace
from pathlib import Path
from typing import Any

import torch
from torch import Tensor

from gptlite.checkpoint import load, load_checkpoint, read_card, save_checkpoint
from gptlite.compress.depth import choose_blocks
from gptlite.compress.importance import calibration_batches, choose, structure_scores
from gptlite.compress.learned_masks import learn_masks
from gptlite.compress.structured import Kept, prune
from gptlite.config import GPTConfig
from gptlite.data import Corpus
from gptlite.measure import validation_loss
from gptlite.model import GPTlite
from gptlite.train import TrainSettings
from gptlite.variants.uptrain import uptrain

STARTS = ("one-shot", "iterative", "random", "depth", "learned")
N_STAGES = 5  # of the iterative start: a fifth of what goes, each time
N_SEARCH = 5  # a fifth of the steps of the learned start goes to the search of its masks
N_WATCH = 20  # windows of the held-out text that a curve follows
OnStep = Callable[[int, float], None]


@dataclass(frozen=True)
class Recipe:
    """How a smaller model comes to its weights.

    Args:
        start: "one-shot" prunes heads and neurons at once; "iterative" in steps with training between them; "depth"
            prunes blocks; "learned" spends part of the steps on a search for the masks of heads and neurons; "random"
            takes the shape of "one-shot" and nothing else.
        keep: share of the heads and neurons, or of the blocks, that is left, in (0, 1).
        by: importance of heads and neurons, see `structure_scores`.
    Raises: ValueError that names the field and what is allowed.
    """

    start: str = "one-shot"
    keep: float = 0.5
    by: str = "activation"

    def __post_init__(self) -> None:
        if self.start not in STARTS:
            raise ValueError(f"start is {self.start!r}, it must be one of {', '.join(STARTS)}")
        if not 0 < self.keep < 1:
            raise ValueError(f"keep is {self.keep}, it must be a share between 0 and 1")

    @property
    def shares(self) -> list[float]:
        """The share that is left at each stage; training follows each of them."""
        n = N_STAGES if self.start == "iterative" else 1
        return [1 - (1 - self.keep) * (stage + 1) / n for stage in range(n)]


def target_shape(config: GPTConfig, keep: float) -> tuple[int, int]:
    """Heads and neurons of a block that are left of a share `keep`: whole ones, as many per KV head, at least 1."""
    per = 1 if config.n_kv_heads == config.n_heads else config.n_kv_heads  # heads that go together
    return max(1, round(keep * config.n_heads / per)) * per, max(1, round(keep * config.d_ff))


def shrink(model: GPTlite, original: GPTConfig, keep: float, tokens: Tensor, by: str = "activation") -> GPTlite:
    """A copy of the model with a share of the original's heads and neurons in each block: the most important ones.

    Args:
        model: may have been pruned before; its importance is judged as it is now.
        original: the shape that `keep` is a share of.
        tokens: the text [n] whose windows it is judged on.
    """
    heads, neurons = target_shape(original, keep)
    batches = calibration_batches(tokens.to(model.ln.weight.device), model.context_length)
    return prune(model, choose(structure_scores(model, batches, by), model, heads, neurons))


def first_student(
    teacher: GPTlite, recipe: Recipe, tokens: Tensor, settings: TrainSettings, on_step: OnStep | None = None
) -> tuple[GPTlite, int]:
    """The smaller model before its weights are trained, and the steps that went into finding it.

    Args:
        tokens: the training text [n], whose windows importance is judged on.
        settings: of the whole run; the random start takes its seed, the learned one some of its steps.
    Raises: ValueError when no block would go by depth.
    """
    if recipe.start == "depth":
        n_keep = max(1, round(recipe.keep * len(teacher.blocks)))
        if n_keep == len(teacher.blocks):
            raise ValueError(f"keep is {recipe.keep}, so all {n_keep} blocks would stay")
        windows = torch.cat(calibration_batches(tokens, teacher.context_length, 32)).flatten()
        return prune(teacher, Kept(blocks=choose_blocks(teacher, windows, n_keep))), 0
    heads, neurons = target_shape(teacher.config, recipe.keep)
    if recipe.start == "learned":
        steps, batch = settings.steps // N_SEARCH, settings.batch_size
        scores = learn_masks(
            teacher,
            tokens,
            (heads, neurons),
            steps,
            batch,
            seed=settings.seed,
            precision=settings.precision,
            on_step=on_step,
        )
        return prune(teacher, choose(scores, teacher, heads, neurons)), steps
    if recipe.start != "random":
        return shrink(teacher, teacher.config, recipe.shares[0], tokens, recipe.by), 0
    before = teacher.config
    torch.manual_seed(settings.seed)
    kv_heads = heads if before.n_kv_heads == before.n_heads else before.n_kv_heads
    config = replace(before, n_heads=heads, n_kv_heads=kv_heads, d_ff=neurons)
    return GPTlite(config).to(teacher.ln.weight.device).eval(), 0


def distil(
    teacher: GPTlite,
    recipe: Recipe,
    tokens: Tensor,
    settings: TrainSettings,
    watch: Tensor,
    on_step: OnStep | None = None,
) -> tuple[GPTlite, list[list[float]]]:
    """Prunes, and trains what is left towards the teacher's distribution, as often as the recipe says.

    Args:
        tokens: the text [n] to train on. watch: the held-out text [m] that the curve follows.
        settings: of the whole run; its steps are shared out evenly over the stages, and each stage's learning rate
            rises and falls by itself.
    Returns: the smaller model, and the curve: rows of tokens seen, loss on `watch` in nats per token, parameters.
    Raises: ValueError when there are fewer steps than stages, or too few to search for masks.
    """
    shares = recipe.shares
    if settings.steps < len(shares):
        raise ValueError(f"steps is {settings.steps}, the {len(shares)} stages need at least one each")
    if recipe.start == "learned" and settings.steps < N_SEARCH:
        raise ValueError(f"steps is {settings.steps}, the learned start needs at least {N_SEARCH}")
    curve: list[list[float]] = []
    done, student = 0, None
    for stage, share in enumerate(shares):
        if student is None:
            student, done = first_student(teacher, recipe, tokens, settings, on_step)
        else:
            student = shrink(student, teacher.config, share, tokens, recipe.by)
        until = settings.steps * (stage + 1) // len(shares)
        part = replace(settings, steps=until - done, seed=settings.seed * N_STAGES + stage)
        rows = uptrain(student, tokens, part, teacher, "all", watch, shifted(on_step, done))
        seen = done * settings.batch_size * teacher.context_length
        curve += [[seen + row[0], row[-1], student.n_params] for row in rows]
        done = until
    assert student is not None
    return student, curve


def shifted(on_step: OnStep | None, done: int) -> OnStep | None:
    """The same call-back for a stage that begins after some steps."""
    return None if on_step is None else lambda step, loss: on_step(done + step, loss)


def make_pruned(
    base: str | Path,
    recipe: Recipe,
    corpus: Corpus,
    out: str | Path,
    settings: TrainSettings,
    command: str = "",
    device: torch.device | str = "cpu",
    on_step: OnStep | None = None,
) -> dict[str, Any]:
    """Makes a smaller model out of a checkpoint and writes it, with a card that says what it cost.

    Args:
        base: the checkpoint, which is the teacher too. out: ends in .safetensors.
        command: the command line, for the card.
    Returns: the card. Its losses are in nats per token over all held-out text, of the weights as stored, in fp16.
    Raises: ValueError when the base cannot be read or pruned, or was trained on another corpus.
    """
    card = read_card(base)
    if card.get("corpus", {}).get("sha256") != corpus.sha256:
        raise ValueError(f"{base} was trained on another text than {corpus.name}: its card has another sha256")
    teacher, tokenizer = load(base, device)
    text, held_out = tokenizer.encode(corpus.train), tokenizer.encode(corpus.held_out)
    watch = held_out[: N_WATCH * teacher.context_length + 1]
    student, curve = distil(teacher, recipe, text, settings, watch, on_step)
    save_checkpoint(out, student, tokenizer)
    stored, _ = load_checkpoint(out, device)
    result = {
        "command": command,
        "base": str(base) if Path(base).suffix != ".safetensors" else Path(base).name,
        "recipe": asdict(recipe),
        "n_params": student.n_params,
        "config": student.config.to_dict(),
        "corpus": card["corpus"],
        "held_out_chars": len(corpus.held_out),
        "settings": asdict(settings),
        "tokens_seen": settings.steps * settings.batch_size * teacher.context_length,
        "share_of_original_tokens": round(
            settings.steps * settings.batch_size * teacher.context_length / card["tokens_seen"], 4
        ),
        "device": str(torch.device(device).type),
        "torch": torch.__version__,
        "losses": {"original": card["validation_loss"], "after": round(validation_loss(stored, held_out), 4)},
        "validation_loss_unit": "nats per character",
        "loss_curve": curve,
        "loss_curve_columns": ["tokens seen", f"loss of {N_WATCH} held-out windows", "parameters"],
    }
    result["validation_loss"] = result["losses"]["after"]
    save_checkpoint(out, student, tokenizer, result)
    return result
