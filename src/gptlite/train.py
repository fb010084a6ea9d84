"""Training with resume: a stopped run goes on exactly where it was, and ends with the same weights."""

from __future__ import annotations

import contextlib
import hashlib
import json
from collections.abc import Callable
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any

import torch
import torch.nn.functional as F
from safetensors import SafetensorError, safe_open
from safetensors.torch import save
from torch import Tensor, nn

from gptlite.checkpoint import load_checkpoint, save_checkpoint, write_atomically
from gptlite.config import GPTConfig
from gptlite.data import CharTokenizer, Corpus, training_batch
from gptlite.export import fold_head_bias
from gptlite.measure import validation_loss
from gptlite.model import GPTlite


@dataclass(frozen=True)
class TrainSettings:
    """How a model is trained.

    The learning rate warms up, stays, and falls to zero over the last part {cite}`hu2024minicpm`. Since it stays, a
    run can be made longer or shorter at any time before it begins to fall, and ends as if it had been planned so.

    Args:
        steps: steps of the whole run.
        batch_size: windows of the context length per step.
        lr: learning rate of the matrices inside the blocks (of all parameters, with AdamW).
        optimizer: "muon" {cite}`jordan2024muon` for those matrices, with AdamW for the rest; or "adamw"
            {cite}`loshchilov2019adamw` for all.
        precision: "fp32", or "bf16" for the products in bf16 with fp32 weights {cite}`micikevicius2018mixed`.
        warmup: steps over which the learning rate rises.
        cooldown: share of the steps over which it falls, in (0, 1].
        weight_decay: of the matrices inside the blocks.
        seed: of the weights and of the order of the data.
        save_every: steps between two saved states.
    Raises: ValueError that names the field and what is allowed.
    """

    steps: int
    batch_size: int = 16
    lr: float = 0.01
    optimizer: str = "muon"
    precision: str = "fp32"
    warmup: int = 100
    cooldown: float = 0.4
    weight_decay: float = 0.1
    seed: int = 0
    save_every: int = 100

    def __post_init__(self) -> None:
        for name in ("steps", "batch_size", "save_every"):
            if getattr(self, name) < 1:
                raise ValueError(f"{name} is {getattr(self, name)}, it must be at least 1")
        if not 0 < self.lr < float("inf"):
            raise ValueError(f"lr is {self.lr}, it must be a positive number")
        if self.optimizer not in ("muon", "adamw"):
            raise ValueError(f"optimizer is {self.optimizer!r}, it must be 'muon' or 'adamw'")
        if self.optimizer == "muon" and not hasattr(torch.optim, "Muon"):
            raise ValueError(f"optimizer 'muon' needs torch 2.9, this is {torch.__version__}; choose 'adamw'")
        if self.precision not in ("fp32", "bf16"):
            raise ValueError(f"precision is {self.precision!r}, it must be 'fp32' or 'bf16'")
        if not 0 < self.cooldown <= 1:
            raise ValueError(f"cooldown is {self.cooldown}, it must be in (0, 1]")
        for name in ("warmup", "weight_decay"):
            if not 0 <= getattr(self, name) < float("inf"):
                raise ValueError(f"{name} is {getattr(self, name)}, it must be at least 0")

    @property
    def falls_at(self) -> int:
        """The step from which the learning rate falls."""
        return self.steps - round(self.steps * self.cooldown)

    def rate(self, step: int) -> float:
        """The factor of the learning rate at a step, in (0, 1]."""
        rise = min(1.0, (step + 1) / (self.warmup + 1))
        fall = min(1.0, (self.steps - step) / (self.steps - self.falls_at)) if step >= self.falls_at else 1.0
        return min(rise, fall)


class Objective:
    """What a step of training minimises: the loss of the text, or the divergence from a teacher's distribution.

    A technique overrides `draw` when it learns from something else than the text, `loss` when it minimises something
    else, and `describe` so that a saved state is not taken for that of another run. Both may depend on the model and
    the step alone: random numbers come from torch's global generator, which is seeded before each step.

    Args:
        teacher: learn its distribution (KL divergence per token) {cite}`hinton2015distilling`; it is put into eval
            mode. None learns the text.
    """

    along: nn.Module | None = None  # trained along with the model, and saved with its state

    def __init__(self, teacher: GPTlite | None = None) -> None:
        self.teacher = None if teacher is None else teacher.eval()

    def draw(self, model: GPTlite, tokens: Tensor, step: int, settings: TrainSettings) -> tuple[Tensor, ...]:
        """The batch of a step: what `loss` takes after the model; here inputs [B, S] and targets [B, S]."""
        return training_batch(tokens, step, settings.batch_size, model.context_length, settings.seed)

    def loss(self, model: GPTlite, x: Tensor, y: Tensor) -> Tensor:
        """The loss of one batch, a scalar with a gradient for the model and what trains along with it."""
        return loss_of(model(x), y, None if self.teacher is None else teacher_logits(self.teacher, x))

    def describe(self) -> dict[str, Any]:
        """What tells this objective from others, ready for JSON."""
        return {"teacher": None if self.teacher is None else weights_sha256(self.teacher)}


def train(
    config: GPTConfig,
    corpus: Corpus,
    settings: TrainSettings,
    out: str | Path,
    command: str = "",
    teacher: GPTlite | None = None,
    resume: bool = True,
    device: torch.device | str = "cpu",
    on_step: Callable[[int, float], None] | None = None,
    objective: Objective | None = None,
) -> dict[str, Any]:
    """Trains a model on the corpus and writes the checkpoint and its card.

    Beside the checkpoint lies, as NAME.state.safetensors, the state of every `save_every` steps, from which the next
    call goes on.

    Args:
        config: shape of the model; its vocabulary is replaced by the corpus's.
        out: where the checkpoint goes, ends in .safetensors.
        command: the command line, for the card.
        teacher: learn its distribution (KL divergence per token) instead of the text {cite}`hinton2015distilling`.
        resume: go on from the saved state, if there is one; False begins anew.
        on_step: called after each step with the number of steps done and the step's loss, in nats per token.
        objective: what is minimised instead of the text's or the teacher's loss; it brings its own teacher.
    Returns: the card: command, corpus hash, steps, device, loss curve and validation loss in nats per token.
    Raises: ValueError when the saved state is of another run, a file cannot be read or written, or both a teacher and
        an objective are given.
    """
    if objective is not None and teacher is not None:
        raise ValueError("a teacher and an objective are given: the objective brings its own teacher")
    out = Path(out)
    if out.suffix != ".safetensors":
        raise ValueError(f"{out} must end in .safetensors")
    tokenizer = CharTokenizer.of(corpus.train, corpus.held_out)
    config = GPTConfig.from_dict({**config.to_dict(), "vocab_size": tokenizer.vocab_size})
    tokens = tokenizer.encode(corpus.train)
    torch.manual_seed(settings.seed)
    model = GPTlite(config).to(device).train()
    goal = objective or Objective(teacher)
    along = None if goal.along is None else goal.along.to(device).train()
    optimizers = make_optimizers(model, settings, along)
    state_path = out.with_suffix(".state.safetensors")
    run = {"config": config.to_dict(), "corpus": corpus.sha256, "settings": asdict(settings), "teacher": None}
    if teacher is not None:
        if teacher.token_embedding.num_embeddings != config.vocab_size:
            have = teacher.token_embedding.num_embeddings
            raise ValueError(f"the teacher has a vocabulary of {have}, the corpus has {config.vocab_size} characters")
        run["teacher"] = weights_sha256(teacher)
    if objective is not None:
        run["objective"] = objective.describe()
    step = 0
    curve: list[list[float]] = []
    if resume and state_path.exists():
        step, curve = load_state(state_path, run, model, optimizers, along)
    recent: list[float] = []
    while step < settings.steps:
        # dropout too depends on the step alone, so that a resumed run is the same run
        torch.manual_seed(settings.seed * 1_000_003 + step)
        with torch.autocast(torch.device(device).type, torch.bfloat16, enabled=settings.precision == "bf16"):
            batch = goal.draw(model, tokens, step, settings)
            loss = goal.loss(model, *(part.to(device) for part in batch))
        loss.backward()
        for trained in (model, along):
            if trained is not None:
                torch.nn.utils.clip_grad_norm_(trained.parameters(), 1.0)
        for optimizer in optimizers:
            for group in optimizer.param_groups:
                group["lr"] = group["peak_lr"] * settings.rate(step)
            optimizer.step()
            optimizer.zero_grad()
        step += 1
        value = loss.item()
        recent.append(value)
        if step % settings.save_every == 0 or step == settings.steps:
            curve.append([step, round(sum(recent) / len(recent), 4)])
            recent = []
            save_state(state_path, run, model, optimizers, step, curve, along)
        if on_step:
            on_step(step, value)
    with contextlib.suppress(ValueError):  # a large vocabulary keeps its bias
        fold_head_bias(model)
    save_checkpoint(out, model, tokenizer)
    # measured on the weights as stored, in fp16, so that anyone who measures the file finds the same
    stored, _ = load_checkpoint(out, device)
    held_out = validation_loss(stored, tokenizer.encode(corpus.held_out))
    card = {
        "command": command,
        "n_params": model.n_params,
        "config": config.to_dict(),
        "corpus": {"name": corpus.name, "sha256": corpus.sha256, "train_chars": len(corpus.train)},
        "held_out_chars": len(corpus.held_out),
        "settings": asdict(settings),
        "steps": settings.steps,
        "tokens_seen": settings.steps * settings.batch_size * config.context_length,
        "device": str(torch.device(device).type),
        "torch": torch.__version__,
        "validation_loss": round(held_out, 4),
        "validation_loss_unit": "nats per character",
        "loss_curve": curve,
        "loss_curve_columns": ["step", "mean training loss since the row before, nats per character"],
    }
    save_checkpoint(out, model, tokenizer, card)
    return card


def loss_of(logits: Tensor, targets: Tensor, teacher: Tensor | None) -> Tensor:
    """Mean loss per token: cross-entropy with targets [B, S], or KL(teacher || model) where there is a teacher.

    Args:
        logits, teacher: [B, S, V].
    Returns: a scalar in nats per token, computed in fp32.
    """
    logits = logits.float().flatten(0, 1)  # [B * S, V]
    if teacher is None:
        return F.cross_entropy(logits, targets.flatten())
    goal = teacher.float().flatten(0, 1).log_softmax(-1)
    return F.kl_div(logits.log_softmax(-1), goal, reduction="batchmean", log_target=True)


@torch.no_grad()
def teacher_logits(teacher: GPTlite, x: Tensor) -> Tensor:
    """Logits [B, S, V] of the teacher for tokens x [B, S], without gradients."""
    return teacher(x)


def weights_sha256(model: GPTlite) -> str:
    """Hash of all weights, which tells two models apart."""
    digest = hashlib.sha256()
    for weight in model.state_dict().values():
        digest.update(weight.detach().float().cpu().numpy().tobytes())
    return digest.hexdigest()


def make_optimizers(
    model: GPTlite, settings: TrainSettings, along: nn.Module | None = None
) -> list[torch.optim.Optimizer]:
    """The optimizers of a run, for a model and what trains along with it; each group remembers its peak rate."""
    named = [*model.named_parameters(), *([] if along is None else along.named_parameters())]
    matrices = [p for name, p in named if p.dim() == 2 and name.startswith("blocks.")]
    others = [p for name, p in named if not (p.dim() == 2 and name.startswith("blocks."))]
    if settings.optimizer == "muon":
        optimizers: list[torch.optim.Optimizer] = [
            # updates scaled to AdamW's size, so that one learning rate fits both
            torch.optim.Muon(
                matrices, lr=settings.lr, weight_decay=settings.weight_decay, adjust_lr_fn="match_rms_adamw"
            ),
            torch.optim.AdamW(others, lr=min(settings.lr, 3e-3), betas=(0.9, 0.95), weight_decay=0.0),
        ]
    else:
        groups = [
            {"params": matrices, "weight_decay": settings.weight_decay},
            {"params": others, "weight_decay": 0.0},
        ]
        optimizers = [torch.optim.AdamW(groups, lr=settings.lr, betas=(0.9, 0.95))]
    for optimizer in optimizers:
        for group in optimizer.param_groups:
            group["peak_lr"] = group["lr"]
    return optimizers


def save_state(
    path: Path,
    run: dict[str, Any],
    model: GPTlite,
    optimizers: list[torch.optim.Optimizer],
    step: int,
    curve: list[list[float]],
    along: nn.Module | None = None,
) -> None:
    """Writes all that the rest of a run depends on, atomically, as safetensors."""
    tensors = {f"model.{name}": t.detach().cpu().contiguous() for name, t in model.state_dict().items()}
    for name, t in (along.state_dict() if along is not None else {}).items():
        tensors[f"along.{name}"] = t.detach().cpu().contiguous()
    for i, optimizer in enumerate(optimizers):
        for number, values in optimizer.state_dict()["state"].items():
            for name, value in values.items():
                tensors[f"optimizer.{i}.{number}.{name}"] = torch.as_tensor(value).detach().cpu().contiguous()
    header = {"run": json.dumps(run), "step": str(step), "curve": json.dumps(curve)}
    write_atomically(path, save(tensors, metadata=header))


def load_state(
    path: Path,
    run: dict[str, Any],
    model: GPTlite,
    optimizers: list[torch.optim.Optimizer],
    along: nn.Module | None = None,
) -> tuple[int, list[list[float]]]:
    """Puts a saved state into the model, the optimizers and what trains along with the model.

    Returns: steps done, and the loss curve so far.
    Raises: ValueError when the file is damaged or is the state of another run.
    """
    try:
        with safe_open(path, framework="pt") as file:
            header = file.metadata() or {}
            saved, step, curve = json.loads(header["run"]), int(header["step"]), json.loads(header["curve"])
            tensors = {name: file.get_tensor(name).clone() for name in file.keys()}  # noqa: SIM118 - not a dict
    except (SafetensorError, OSError, KeyError, ValueError) as error:
        raise ValueError(f"{path} is damaged ({type(error).__name__}); delete it, or begin anew") from None
    check_same_run(path, saved, run, step)
    model.load_state_dict({name[6:]: t for name, t in tensors.items() if name.startswith("model.")})
    if along is not None:
        along.load_state_dict({name[6:]: t for name, t in tensors.items() if name.startswith("along.")})
    for i, optimizer in enumerate(optimizers):
        state: dict[int, dict[str, Tensor]] = {}
        for name, tensor in tensors.items():
            if name.startswith(f"optimizer.{i}."):
                _, _, number, key = name.split(".", 3)
                state.setdefault(int(number), {})[key] = tensor
        optimizer.load_state_dict({"state": state, "param_groups": optimizer.state_dict()["param_groups"]})
    return step, curve


def check_same_run(path: Path, saved: dict[str, Any], run: dict[str, Any], step: int) -> None:
    """Raises: ValueError unless going on from `saved` at `step` gives what `run` from the start would have given."""
    old, new = saved["settings"], run["settings"]
    for name in ("config", "corpus", "teacher"):
        if saved.get(name, run[name]) != run[name]:  # states of the first version do not name the teacher
            raise ValueError(f"{path} is the state of a run with another {name}; begin anew, or write elsewhere")
    if saved.get("objective") != run.get("objective"):
        raise ValueError(f"{path} is the state of a run with another objective; begin anew, or write elsewhere")
    for name, value in new.items():
        if name != "steps" and old.get(name) != value:
            raise ValueError(f"{path} is the state of a run with {name} {old.get(name)}, not {value}; begin anew")
    if old["steps"] != new["steps"]:
        limit = min(TrainSettings(**old).falls_at, TrainSettings(**new).falls_at)
        if step > limit:
            raise ValueError(
                f"{path} has done {step} of {old['steps']} steps, {new['steps']} can only be chosen up to step {limit}"
            )
