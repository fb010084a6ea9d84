"""`gptlite quantize`: a trained model whose weights are stored in a few bits, with or without training."""

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


def _add_quantize(parser: Parser) -> None:
    parser.add_argument(
        "--method",
        choices=("rtn", "gptq", "awq", "qat"),
        required=True,
        help="round to nearest, GPTQ, AWQ, or quantisation-aware training, which needs --steps",
    )
    parser.add_argument("--bits", type=whole_number(2, 8), default=4, help="of a weight, 2 to 8 (default: 4)")
    parser.add_argument(
        "--group", type=whole_number(0), default=128, help="weights that share a scale; 0 takes whole rows (128)"
    )
    parser.add_argument("--symmetric", action="store_true", help="no zero point: as many codes below zero as above")
    parser.add_argument("--clip", action="store_true", help="leave out the ends of a range where that errs less")
    parser.add_argument("--steps", type=whole_number(0), default=0, help="of training, for qat (default: 0)")
    parser.add_argument("--no-teacher", action="store_true", help="learn the text, not the distribution of the model")
    _add_settings(parser, lr=0.001, save_every=20)
    _add_checkpoint(parser)
    _add_text(parser)
    parser.add_argument("--out", metavar="FILE", required=True, help="checkpoint to write, ends in .safetensors")
    _add_device(parser)


def run_quantize(args: argparse.Namespace) -> int:
    """Store a trained model's weights in 2 to 8 bits: round to nearest, GPTQ, AWQ, or training for it."""
    from gptlite.progress import Progress
    from gptlite.quantize.make import make_quantized
    from gptlite.quantize.rtn import Grid
    from gptlite.train import TrainSettings

    out = Path(args.out)
    if out.suffix != ".safetensors":
        raise ValueError(f"{out} must end in .safetensors")
    if (args.method == "qat") != (args.steps > 0):
        wrong = "needs --steps" if args.method == "qat" else "trains nothing, so it takes no --steps"
        raise ValueError(f"--method {args.method} {wrong}")
    grid = Grid(args.bits, args.group or None, args.symmetric, args.clip)
    settings = None
    if args.steps:
        settings = TrainSettings(**{field.name: getattr(args, field.name) for field in fields(TrainSettings)})
    device = choose_device(args.device)
    corpus = _corpus(args)
    if not _is_writable(out.parent):
        raise ValueError(f"cannot write into {out.parent}, choose another place with --out")
    progress = Progress(max(args.steps, 1))
    try:
        card = make_quantized(
            args.checkpoint,
            args.method,
            grid,
            corpus,
            out,
            settings,
            not args.no_teacher,
            command_of(args),
            device,
            args.precision,
            on_step=lambda step, loss: progress.update(step, f"loss {loss:.3f}"),
        )
    finally:
        progress.close()
    each = card["bytes_of_them"] / card["weights_in_codes"]
    print(
        f"{out}: {card['weights_in_codes']:,} weights in {card['bytes_of_them']:,} bytes, {each:.3f} each; "
        f"validation loss {card['validation_loss']:.4f} nats per character, {card['base_loss']:.4f} before"
    )
    return 0


def command_of(args: argparse.Namespace) -> str:
    """The command line that makes the same file: options that are not the default, files without their folders."""
    words = ["gptlite", "quantize", "--method", args.method]
    for name, value in vars(args).items():
        if name in ("run", "parser", "device", "method") or value == args.parser.get_default(name):
            continue
        words.append(f"--{name.replace('_', '-')}")
        if value is not True:
            words.append(Path(value).name if name in ("text", "out", "checkpoint") else str(value))
    return shlex.join(words)
