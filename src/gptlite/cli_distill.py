"""`gptlite distill`: a student trained by one of the recipes of distillation, with a card that names it."""

from __future__ import annotations

import argparse
import shlex
from dataclasses import fields
from pathlib import Path

from gptlite.cli import (
    MAX_SEED,
    TRAINABLE,
    Parser,
    _add_device,
    _add_text,
    _complain,
    _corpus,
    _is_writable,
    choose_device,
    saved_step,
)
from gptlite.cli import whole as whole_number


def _add_distill(parser: Parser) -> None:
    parser.add_argument("--preset", choices=TRAINABLE, default="draft", help="shape of the student (default: draft)")
    parser.add_argument(
        "--teacher", action="append", metavar="NAME", help="a name or a file; more than one make an ensemble (gptlite)"
    )
    parser.add_argument(
        "--loss",
        choices=("text", "soft", "logits", "hidden", "mutual", "offline", "on-policy", "responses"),
        default="soft",
        help="what the student learns (default: soft, the teacher's distribution)",
    )
    parser.add_argument("--temperature", type=float, default=1.0, help="softens both distributions (default: 1)")
    parser.add_argument("--hard", type=float, default=0.0, help="weight of the text beside the teacher (default: 0)")
    parser.add_argument("--squares", type=float, default=1.0, help="hidden: weight of squared differences (default: 1)")
    parser.add_argument("--cosine", type=float, default=0.0, help="hidden: weight of the directions (default: 0)")
    parser.add_argument("--soft", type=float, default=1.0, help="hidden: weight of the labels (default: 1)")
    parser.add_argument("--top-k", type=whole_number(1), default=8, help="offline: tokens kept per position (8)")
    parser.add_argument("--no-tail", dest="tail", action="store_false", help="offline: forget all other tokens")
    parser.add_argument("--store", metavar="FILE", help="offline: the teacher's words, read if there, else written")
    parser.add_argument("--share", type=float, default=0.5, help="on-policy: share of steps on own samples (0.5)")
    parser.add_argument("--begin", type=float, default=0.5, help="on-policy: share of the run before the first (0.5)")
    parser.add_argument("--reverse", action="store_true", help="on-policy: KL(student || teacher) on own samples")
    parser.add_argument("--answers", type=whole_number(1), default=512, help="responses: texts to write (default: 512)")
    parser.add_argument("--steps", type=whole_number(1), required=True, help="steps of the whole run")
    _add_text(parser)
    parser.add_argument("--batch-size", type=whole_number(1, 65_536), default=16, help="windows per step (default: 16)")
    parser.add_argument("--lr", type=float, default=0.01, help="peak learning rate (default: 0.01)")
    parser.add_argument("--optimizer", choices=("muon", "adamw"), default="muon", help="(default: muon)")
    parser.add_argument("--precision", choices=("fp32", "bf16"), default="fp32", help="of the products (default: fp32)")
    parser.add_argument("--warmup", type=whole_number(0), default=100, help="steps over which the rate rises (100)")
    parser.add_argument("--cooldown", type=float, default=0.4, help="share of the steps over which it falls (0.4)")
    parser.add_argument("--weight-decay", type=float, default=0.1, help="of the blocks' matrices (default: 0.1)")
    parser.add_argument("--seed", type=whole_number(0, MAX_SEED), default=0, help="of all random numbers (default: 0)")
    parser.add_argument("--save-every", type=whole_number(1), default=100, help="steps between two saved states (100)")
    parser.add_argument("--out", metavar="FILE", required=True, help="checkpoint to write, ends in .safetensors")
    parser.add_argument("--restart", action="store_true", help="begin anew, whatever is saved")
    _add_device(parser)


def run_distill(args: argparse.Namespace) -> int:
    """Train a student from a teacher; a stopped run goes on where it was."""
    from gptlite.compress.students import Recipe, load_teachers, make_student
    from gptlite.config import preset
    from gptlite.progress import Progress
    from gptlite.train import TrainSettings

    recipe = Recipe(**{field.name: getattr(args, field.name) for field in fields(Recipe)})
    settings = TrainSettings(**{field.name: getattr(args, field.name) for field in fields(TrainSettings)})
    out = Path(args.out)
    if out.suffix != ".safetensors":
        raise ValueError(f"{out} must end in .safetensors")
    device = choose_device(args.device)
    corpus = _corpus(args)
    teachers = load_teachers(args.teacher or ["gptlite"], corpus, device)
    if not _is_writable(out.parent):
        raise ValueError(f"cannot write into {out.parent}, choose another place with --out")
    state = out.with_suffix(".state.safetensors")
    progress = Progress(settings.steps, 0 if args.restart else saved_step(state))
    try:
        card = make_student(
            preset(args.preset),
            corpus,
            settings,
            out,
            recipe,
            teachers,
            command_of(args),
            not args.restart,
            device,
            lambda step, loss: progress.update(step, f"loss {loss:.3f}"),
            args.store,
        )
    except KeyboardInterrupt:
        progress.close()
        step = saved_step(state)
        _complain(f"stopped; saved at step {step} of {settings.steps}" if step else "stopped; no state is saved yet")
        return 130
    progress.close()
    found = card["agreement"]
    print(
        f"{out}: validation loss {card['validation_loss']:.4f} nats per character after {card['steps']} steps; "
        f"the teacher's most probable character is the student's at {found['same']:.1%} of the positions"
    )
    return 0


def command_of(args: argparse.Namespace) -> str:
    """The command line that makes the same file: options that are not the default, files without their folders."""
    words = ["gptlite", "distill"]
    for name, value in vars(args).items():
        if name in ("run", "parser", "device", "restart") or value == args.parser.get_default(name):
            continue
        if name == "tail":
            words.append("--no-tail")
            continue
        for one in value if isinstance(value, list) else [value]:
            words.append(f"--{name.replace('_', '-')}")
            if one is not True:
                words.append(Path(one).name if name in ("text", "out", "teacher", "store") else str(one))
    return shlex.join(words)
