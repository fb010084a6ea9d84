"""`gptlite heads`: small modules on a trained model that guess its next tokens, one command per kind."""

from __future__ import annotations

import argparse
import shlex
from dataclasses import fields
from pathlib import Path
from typing import Any

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

ABOUT = {
    "medusa": "independent heads, each for one token further ahead",
    "eagle": "one block that guesses the next hidden state",
    "mtp": "a chain of blocks, each for one token further ahead",
    "exit": "ways out after some of the first layers",
}


def _add_heads(parser: Parser) -> None:
    kinds = parser.add_subparsers(metavar="KIND", required=True, dest="kind")
    for kind, about in ABOUT.items():
        each = kinds.add_parser(kind, help=about, description=f"Train {about}.", allow_abbrev=False)
        each.set_defaults(parser=each)
        if kind in ("medusa", "mtp"):
            n = 4 if kind == "medusa" else 2
            each.add_argument("--n-heads", type=whole_number(1, 64), default=n, help=f"tokens ahead (default: {n})")
        if kind == "exit":
            each.add_argument(
                "--layers", type=whole_number(1), nargs="+", default=[2, 3], help="after which layers (default: 2 3)"
            )
        each.add_argument("--steps", type=whole_number(1), required=True, help="steps of the run")
        _add_settings(each, lr=0.003, save_every=50)
        _add_checkpoint(each)
        _add_text(each)
        each.add_argument("--out", metavar="FILE", required=True, help="file to write, ends in .safetensors")
        _add_device(each)


def run_heads(args: argparse.Namespace) -> int:
    """Train heads that guess a model's next tokens."""
    from gptlite.progress import Progress
    from gptlite.speculative.heads_stored import make_heads
    from gptlite.train import TrainSettings

    settings = TrainSettings(**{field.name: getattr(args, field.name) for field in fields(TrainSettings)})
    sizes = {name: getattr(args, name) for name in ("n_heads", "layers") if hasattr(args, name)}
    out = Path(args.out)
    if out.suffix != ".safetensors":
        raise ValueError(f"{out} must end in .safetensors")
    device = choose_device(args.device)
    corpus = _corpus(args)
    if not _is_writable(out.parent):
        raise ValueError(f"cannot write into {out.parent}, choose another place with --out")
    progress = Progress(args.steps)
    try:
        card = make_heads(
            args.checkpoint,
            args.kind,
            sizes,
            corpus,
            out,
            settings,
            command_of(args),
            device,
            on_step=lambda step, loss: progress.update(step, f"loss {loss:.3f}"),
        )
    finally:
        progress.close()
    print(_in_words(out, card))
    return 0


def _in_words(out: Path, card: dict[str, Any]) -> str:
    heads = ", ".join(f"{head['top']:.1%}" for head in card["agreement"])
    return f"{out}: {card['n_params']:,} parameters, same most probable token as the model: {heads}"


def command_of(args: argparse.Namespace) -> str:
    """The command line that makes the same file: options that are not the default, files without their folders."""
    words = ["gptlite", "heads", args.kind]
    for name, value in vars(args).items():
        if name in ("run", "parser", "kind", "device") or value == args.parser.get_default(name):
            continue
        words.append(f"--{name.replace('_', '-')}")
        if isinstance(value, list):
            words += map(str, value)
        else:
            words.append(Path(value).name if name in ("text", "out", "checkpoint") else str(value))
    return shlex.join(words)
