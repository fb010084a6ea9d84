"""`gptlite prune`: a trained model cut to a smaller shape, and a run in which it learns from what it was."""

from __future__ import annotations

import argparse
import shlex
from dataclasses import fields
from pathlib import Path

from gptlite.cli import (
    Parser,
    _add_checkpoint,
    _add_device,
    _add_settings,
    _add_text,
    _corpus,
    _is_writable,
    choose_device,
)
from gptlite.cli import whole as whole_number


def _add_prune(parser: Parser) -> None:
    parser.add_argument(
        "--start",
        choices=("one-shot", "iterative", "random", "depth", "learned"),
        default="one-shot",
        help="heads and neurons at once, or in steps with training between them; random weights of the same shape; "
        "blocks instead; or masks that are learned (default: one-shot)",
    )
    parser.add_argument("--keep", type=float, default=0.5, help="share that is left, between 0 and 1 (default: 0.5)")
    parser.add_argument(
        "--by",
        choices=("activation", "magnitude", "taylor", "random"),
        default="activation",
        help="importance of heads and neurons, for one-shot and iterative (default: activation)",
    )
    parser.add_argument("--steps", type=whole_number(1), default=1000, help="of training (default: 1000)")
    _add_settings(parser, lr=0.002, batch_size=2, optimizer="adamw", warmup=20, save_every=50)
    _add_checkpoint(parser)
    _add_text(parser)
    parser.add_argument("--out", metavar="FILE", required=True, help="checkpoint to write, ends in .safetensors")
    _add_device(parser)


def run_prune(args: argparse.Namespace) -> int:
    """Cut a trained model to a smaller shape, and let it learn from the whole one."""
    from gptlite.compress.minitron import Recipe, make_pruned
    from gptlite.progress import Progress
    from gptlite.train import TrainSettings

    recipe = Recipe(args.start, args.keep, args.by)
    settings = TrainSettings(**{field.name: getattr(args, field.name) for field in fields(TrainSettings)})
    out = Path(args.out)
    if out.suffix != ".safetensors":
        raise ValueError(f"{out} must end in .safetensors")
    device = choose_device(args.device)
    corpus = _corpus(args)
    if not _is_writable(out.parent):
        raise ValueError(f"cannot write into {out.parent}, choose another place with --out")
    progress = Progress(args.steps)
    try:
        card = make_pruned(
            args.checkpoint,
            recipe,
            corpus,
            out,
            settings,
            command_of(args),
            device,
            on_step=lambda step, loss: progress.update(step, f"loss {loss:.3f}"),
        )
    finally:
        progress.close()
    losses = card["losses"]
    print(
        f"{out}: {card['n_params']:,} parameters, loss {losses['after']:.4f} after {card['tokens_seen']:,} tokens, "
        f"{losses['original']:.4f} before it was cut"
    )
    return 0


def command_of(args: argparse.Namespace) -> str:
    """The command line that makes the same file: options that are not the default, files without their folders."""
    words = ["gptlite", "prune"]
    for name, value in vars(args).items():
        if name in ("run", "parser", "device") or value == args.parser.get_default(name):
            continue
        shown = Path(value).name if name in ("text", "out", "checkpoint") else str(value)
        words += [f"--{name.replace('_', '-')}", shown]
    return shlex.join(words)
