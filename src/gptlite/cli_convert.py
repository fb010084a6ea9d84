"""`gptlite convert`: a trained model with fewer KV heads or a latent, and a short run in which it settles."""

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


def _add_convert(parser: Parser) -> None:
    size = parser.add_mutually_exclusive_group(required=True)
    size.add_argument("--kv-heads", type=whole_number(1), metavar="G", help="KV heads that are left, a divisor")
    size.add_argument("--latent", type=whole_number(1), metavar="R", help="size of the latent instead (MLA)")
    parser.add_argument(
        "--start",
        choices=("mean", "first", "random", "weights", "data"),
        default="data",
        help="new weights: heads pooled (mean, first, random), or a factorisation of the weights, alone or for the "
        "data that they see (default: data)",
    )
    parser.add_argument("--steps", type=whole_number(0), default=0, help="of uptraining (default: 0, none)")
    parser.add_argument("--parts", choices=("all", "attention"), default="all", help="weights that move (default: all)")
    parser.add_argument("--no-teacher", action="store_true", help="learn the text, not the distribution of the model")
    _add_settings(parser, lr=0.003, save_every=20)
    _add_checkpoint(parser)
    _add_text(parser)
    parser.add_argument("--out", metavar="FILE", required=True, help="checkpoint to write, ends in .safetensors")
    _add_device(parser)


def run_convert(args: argparse.Namespace) -> int:
    """Convert a trained model to fewer KV heads or to a latent, and uptrain it."""
    from gptlite.progress import Progress
    from gptlite.train import TrainSettings
    from gptlite.variants.convert import Conversion, make_variant

    kind, sized = ("latent", args.latent) if args.latent else ("grouped", args.kv_heads)
    conversion = Conversion(kind, sized, args.start)
    settings = None
    if args.steps:
        settings = TrainSettings(**{field.name: getattr(args, field.name) for field in fields(TrainSettings)})
    out = Path(args.out)
    if out.suffix != ".safetensors":
        raise ValueError(f"{out} must end in .safetensors")
    device = choose_device(args.device)
    corpus = _corpus(args)
    if not _is_writable(out.parent):
        raise ValueError(f"cannot write into {out.parent}, choose another place with --out")
    progress = Progress(max(args.steps, 1))
    try:
        card = make_variant(
            args.checkpoint,
            conversion,
            corpus,
            out,
            settings,
            not args.no_teacher,
            args.parts,
            command_of(args),
            device,
            args.precision,
            on_step=lambda step, loss: progress.update(step, f"loss {loss:.3f}"),
        )
    finally:
        progress.close()
    print(_in_words(out, card))
    return 0


def _in_words(out: Path, card: dict[str, Any]) -> str:
    losses = card["losses"]
    text = (
        f"{out}: {card['cache_values_per_token']:,} cached values per token, loss {losses['original']:.4f} before the "
        f"conversion, {losses['converted']:.4f} after it"
    )
    if not card["settings"]:
        return text
    back = "" if card["recovered"] is None else f", {card['recovered']:.1%} of what was lost is back"
    return f"{text}, {losses['after']:.4f} after {card['tokens_seen']:,} tokens{back}"


def command_of(args: argparse.Namespace) -> str:
    """The command line that makes the same file: options that are not the default, files without their folders."""
    words = ["gptlite", "convert"]
    for name, value in vars(args).items():
        if name in ("run", "parser", "device") or value == args.parser.get_default(name):
            continue
        words.append(f"--{name.replace('_', '-')}")
        if value is not True:
            words.append(Path(value).name if name in ("text", "out", "checkpoint") else str(value))
    return shlex.join(words)
