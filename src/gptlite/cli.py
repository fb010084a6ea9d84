"""The `gptlite` command: train, convert, distill, prune, quantize, heads, generate, measure, record,
export, data.

Whatever is wrong with the input ends with one line on the standard error stream and exit status 2.
"""

from __future__ import annotations

import argparse
import os
import shlex
import sys
import warnings
from collections.abc import Callable, Sequence
from dataclasses import fields
from pathlib import Path
from typing import Any, NoReturn

from gptlite import __version__

TRAINABLE = ("nano", "gptlite", "draft")
MAX_SEED = 2**32 - 1


class Parser(argparse.ArgumentParser):
    """A parser whose errors are exceptions, so that they end like every other bad input."""

    def error(self, message: str) -> NoReturn:
        raise ValueError(f"{message} (see {self.prog} --help)")


def main(argv: Sequence[str] | None = None) -> int:
    """Runs the command.

    Args:
        argv: the arguments after `gptlite`; None means those of the process.
    Returns: the exit status: 0, 1 when a check found a difference, 2 for bad input, 130 when interrupted, 141 when
        the reader of the output went away.
    """
    try:
        args = make_parser().parse_args(argv)
        with warnings.catch_warnings():
            warnings.showwarning = _show_warning
            status = args.run(args)
        sys.stdout.flush()
        return status
    except KeyboardInterrupt:
        _complain("stopped")
        return 130
    except BrokenPipeError:
        os.dup2(os.open(os.devnull, os.O_WRONLY), sys.stdout.fileno())  # else Python flushes into the pipe at exit
        return 141
    except (ValueError, OSError, MemoryError) as error:
        _complain(str(error) or "out of memory")
        return 2
    except RuntimeError as error:
        if "memory" not in str(error):  # torch has no class of its own for a CPU that runs out of it
            raise
        _complain(f"not enough memory: {error}")
        return 2


def make_parser() -> Parser:
    """The command line with its subcommands."""
    from gptlite.cli_compress import _add_prune, run_prune
    from gptlite.cli_convert import _add_convert, run_convert  # which is built from the pieces of this module
    from gptlite.cli_distill import _add_distill, run_distill
    from gptlite.cli_heads import _add_heads, run_heads
    from gptlite.cli_quantize import _add_quantize, run_quantize

    parser = Parser(prog="gptlite", description="Train, run and measure a small GPT.", allow_abbrev=False)
    parser.add_argument("--version", action="version", version=f"gptlite {__version__}")
    commands = parser.add_subparsers(metavar="COMMAND", required=True)
    for run, add in (
        (run_train, _add_train),
        (run_convert, _add_convert),
        (run_distill, _add_distill),
        (run_prune, _add_prune),
        (run_quantize, _add_quantize),
        (run_heads, _add_heads),
        (run_generate, _add_generate),
        (run_measure, _add_measure),
        (run_record, _add_record),
        (run_export, _add_export),
        (run_data, _add_data),
    ):
        name, about = run.__name__.removeprefix("run_"), (run.__doc__ or "").splitlines()[0]
        command = commands.add_parser(name, help=about, description=about, allow_abbrev=False)
        command.set_defaults(run=run, parser=command)
        add(command)
    return parser


# -- train --------------------------------------------------------------------------------------------------------


def _add_train(parser: Parser) -> None:
    parser.add_argument("--preset", choices=TRAINABLE, default="gptlite", help="shape of the model (default: gptlite)")
    parser.add_argument("--steps", type=whole(1), required=True, help="steps of the whole run")
    _add_text(parser)
    parser.add_argument(
        "--teacher", metavar="NAME", help="learn this model's distribution: a name or a checkpoint file"
    )
    parser.add_argument("--batch-size", type=whole(1, 65_536), default=16, help="windows per step (default: 16)")
    parser.add_argument("--lr", type=float, default=0.01, help="peak learning rate (default: 0.01)")
    parser.add_argument("--optimizer", choices=("muon", "adamw"), default="muon", help="(default: muon)")
    parser.add_argument("--precision", choices=("fp32", "bf16"), default="fp32", help="of the products (default: fp32)")
    parser.add_argument("--warmup", type=whole(0), default=100, help="steps over which the rate rises (default: 100)")
    parser.add_argument("--cooldown", type=float, default=0.4, help="share of the steps over which it falls (0.4)")
    parser.add_argument("--weight-decay", type=float, default=0.1, help="of the blocks' matrices (default: 0.1)")
    _add_seed(parser)
    parser.add_argument("--save-every", type=whole(1), default=100, help="steps between two saved states (100)")
    parser.add_argument("--out", metavar="FILE", help="checkpoint to write (default: PRESET.safetensors)")
    parser.add_argument("--restart", action="store_true", help="begin anew, whatever is saved")
    _add_device(parser)


def run_train(args: argparse.Namespace) -> int:
    """Train a model; a stopped run goes on where it was."""
    from gptlite.checkpoint import load
    from gptlite.config import preset
    from gptlite.data import CharTokenizer
    from gptlite.progress import Progress
    from gptlite.train import TrainSettings, train

    settings = TrainSettings(**{field.name: getattr(args, field.name) for field in fields(TrainSettings)})
    out = Path(args.out or f"{args.preset}.safetensors")
    device = choose_device(args.device)
    corpus = _corpus(args)
    teacher = None
    if args.teacher:
        teacher, known = load(args.teacher, device)
        if known.chars != CharTokenizer.of(corpus.train, corpus.held_out).chars:
            raise ValueError(f"teacher {args.teacher} has another vocabulary than {corpus.name}: they must be the same")
    if not _is_writable(out.parent):
        raise ValueError(f"cannot write into {out.parent}, choose another place with --out")
    state = out.with_suffix(".state.safetensors")
    progress = Progress(settings.steps, 0 if args.restart else saved_step(state))
    try:
        card = train(
            preset(args.preset),
            corpus,
            settings,
            out,
            command_of(args),
            teacher,
            not args.restart,
            device,
            lambda step, loss: progress.update(step, f"loss {loss:.3f}"),
        )
    except KeyboardInterrupt:
        progress.close()
        step = saved_step(state)
        again = "the same command without --restart" if args.restart else "the same command"
        _complain(
            f"stopped; saved at step {step} of {settings.steps}, {again} goes on from there"
            if step
            else f"stopped before step {settings.save_every}, where the first state is saved"
        )
        return 130
    progress.close()
    print(f"{out}: validation loss {card['validation_loss']:.4f} nats per character after {card['steps']} steps")
    return 0


def command_of(args: argparse.Namespace) -> str:
    """The command line that makes the same checkpoint: options that are not the default, files without their folders.

    `--device` and `--restart` are left out: the card names the device, and where a run began changes nothing.
    """
    words = ["gptlite", "train", "--preset", args.preset]
    for name, value in vars(args).items():
        if name in ("run", "parser", "preset", "device", "restart") or value == args.parser.get_default(name):
            continue
        shown = Path(value).name if name in ("text", "out", "teacher") else str(value)
        if name == "out" and shown == f"{args.preset}.safetensors":
            continue
        words += [f"--{name.replace('_', '-')}", shown]
    return shlex.join(words)


def saved_step(state: Path) -> int:
    """Steps done by the run whose state lies there; 0 when there is none, or none that can be read."""
    from safetensors import SafetensorError, safe_open

    try:
        with safe_open(state, framework="pt") as file:
            return int((file.metadata() or {})["step"])
    except (SafetensorError, OSError, KeyError, ValueError):
        return 0


# -- generate -----------------------------------------------------------------------------------------------------


def _add_generate(parser: Parser) -> None:
    parser.add_argument("prompt", nargs="?", metavar="PROMPT", help='text to go on from, such as "ROMEO:"')
    parser.add_argument("--tokens", type=whole(0), default=300, help="characters to generate (default: 300)")
    parser.add_argument("--temperature", type=float, default=0.8, help="0 takes the most probable one (default: 0.8)")
    parser.add_argument("--top-k", type=whole(1), help="sample from the k most probable ones (default: all)")
    parser.add_argument("--top-p", type=float, default=1.0, help="sample from those that make up p, in (0, 1]")
    _add_seed(parser)
    _add_checkpoint(parser)
    _add_device(parser)
    parser.add_argument(
        "--overflow",
        choices=("slide", "clamp", "error"),
        default="slide",
        help="past the context window: read the last characters again, drop the oldest, or refuse (default: slide)",
    )


def run_generate(args: argparse.Namespace) -> int:
    """Write text, character by character."""
    from gptlite.cache.dense import StaticCache
    from gptlite.checkpoint import load
    from gptlite.generate import stream
    from gptlite.sampling import SamplingParams

    if not args.prompt:
        what = "the prompt is empty" if args.prompt == "" else "a prompt is missing"
        raise ValueError(f'{what}: give the text to go on from, for example: gptlite generate "ROMEO:"')
    params = SamplingParams(args.temperature, args.top_k, args.top_p)
    model, tokenizer = load(args.checkpoint, choose_device(args.device))
    tokens = tokenizer.encode(args.prompt)[None].to(model.fc_out.weight.device)  # [1, n]
    cache = StaticCache(model, 1, min(model.context_length, tokens.shape[1] + max(args.tokens, 1)))
    # refuses what it must before anything is written
    new = stream(model, tokens, args.tokens, params, cache, args.overflow, args.seed)
    _write(args.prompt)
    for token in new:
        _write(tokenizer.decode(token))
    _write("\n")
    return 0


def _write(text: str) -> None:
    encoding = sys.stdout.encoding or "utf-8"
    sys.stdout.write(text.encode(encoding, "replace").decode(encoding))  # a terminal may lack a character
    sys.stdout.flush()


# -- measure ------------------------------------------------------------------------------------------------------


def _add_measure(parser: Parser) -> None:
    _add_checkpoint(parser)
    parser.add_argument("--loss", action="store_true", help="compute the validation loss again, instead of timing")
    parser.add_argument("--text", metavar="FILE", help="with --loss: the text that the checkpoint was trained on")
    parser.add_argument("--batch", type=whole(1, 4096), default=1, help="sequences at once (default: 1)")
    parser.add_argument("--prompt-tokens", type=whole(1), default=64, help="tokens of each prompt (default: 64)")
    parser.add_argument("--tokens", type=whole(2), default=128, help="tokens to generate per sequence (default: 128)")
    _add_device(parser)


def run_measure(args: argparse.Namespace) -> int:
    """Measure a model on this machine: time to first token, time per token, throughput; or its loss."""
    import torch

    from gptlite.cache.dense import StaticCache
    from gptlite.checkpoint import load
    from gptlite.hardware import device_name
    from gptlite.measure import time_generation

    device = choose_device(args.device)
    model, tokenizer = load(args.checkpoint, device)
    if args.loss:
        return _measure_loss(args, model, tokenizer)
    n_tokens = args.prompt_tokens + args.tokens
    if n_tokens > model.context_length:
        raise ValueError(
            f"--prompt-tokens {args.prompt_tokens} and --tokens {args.tokens} pass the context window of "
            f"{model.context_length}: together they must fit"
        )
    generator = torch.Generator().manual_seed(0)
    tokens = torch.randint(tokenizer.vocab_size, (args.batch, args.prompt_tokens), generator=generator).to(device)
    timing = time_generation(model, tokens, args.tokens, lambda: StaticCache(model, args.batch, n_tokens))
    print(f"device                {device_name(device)}")
    print(f"model                 {args.checkpoint}, {model.n_params:,} parameters")
    print(f"sequences             {args.batch}, of {args.prompt_tokens} tokens each and {args.tokens} generated")
    print(f"time to first token   {timing.ttft * 1e3:.2f} ms")
    print(f"time per output token {timing.tpot * 1e3:.2f} ms (median)")
    print(f"throughput            {timing.throughput:,.0f} tokens/s")
    return 0


def _measure_loss(args: argparse.Namespace, model: Any, tokenizer: Any) -> int:
    """Prints the loss over all held-out text beside the card's. Returns: 1 when they differ in the third decimal."""
    from gptlite.checkpoint import read_card
    from gptlite.data import load_corpus
    from gptlite.measure import validation_loss

    card = read_card(args.checkpoint)
    try:
        name, sha256, claimed = card["corpus"]["name"], card["corpus"]["sha256"], float(card["validation_loss"])
    except (KeyError, TypeError, ValueError):
        raise ValueError(f"the card of {args.checkpoint} does not name its corpus and validation loss") from None
    if not args.text and name not in ("shakespeare", "tinyshakespeare"):
        raise ValueError(f"{args.checkpoint} was trained on {name}: give that file with --text")
    corpus = load_corpus(Path(args.text) if args.text else name)
    if corpus.sha256 != sha256:
        raise ValueError(f"the text has sha256 {corpus.sha256}, {args.checkpoint} was trained on {sha256}")
    loss = validation_loss(model, tokenizer.encode(corpus.held_out))
    print(f"held-out text   {corpus.name}, {len(corpus.held_out):,} characters")
    print(f"validation loss {loss:.4f} nats per character")
    print(f"the card says   {claimed:.4f}")
    return 0 if abs(loss - claimed) < 5e-4 else 1


# -- record, export, data -----------------------------------------------------------------------------------------


def _add_record(parser: Parser) -> None:
    parser.add_argument("sweep", nargs="?", metavar="SWEEP", help="what to measure; without it, the sweeps are listed")
    parser.add_argument("--out", metavar="FILE", help="JSON file to write (default: SWEEP.json)")
    parser.add_argument("--dtype", help="of the weights, such as bfloat16 (default: float32)")
    parser.add_argument(
        "--set", action="append", default=[], metavar="NAME=VALUE", help="change a parameter, such as batches=1,8,64"
    )
    _add_device(parser)


def run_record(args: argparse.Namespace) -> int:
    """Measure a sweep on this machine and write it as JSON."""
    from gptlite.record import all_sweeps, record

    sweeps = all_sweeps()

    if args.sweep is None:
        for name, sweep in sweeps.items():
            print(f"{name:<16} {sweep.about}; {', '.join(f'{key}={_shown(v)}' for key, v in sweep.defaults.items())}")
        return 0
    if args.sweep not in sweeps:
        raise ValueError(f"no sweep {args.sweep!r}, there are {', '.join(sweeps)}")
    params: dict[str, Any] = {"device": choose_device(args.device)}
    if args.dtype:
        params["dtype"] = args.dtype
    for setting in args.set:
        name, _, text = setting.partition("=")
        defaults = sweeps[args.sweep].defaults
        if name not in defaults or not text:
            raise ValueError(f"--set is {setting!r}, it must be NAME=VALUE with a name of {', '.join(defaults)}")
        params[name] = _like(defaults[name], text, name)
    out = Path(args.out or f"{args.sweep}.json")
    recording = record(args.sweep, out, **params)
    print(f"{out}: {len(recording.points)} points measured, {len(recording.left_out)} left out")
    return 0 if recording.complete else 130


def _like(default: Any, text: str, name: str) -> Any:
    """The text as a value of the default's type; a list is separated by commas."""
    if isinstance(default, list):
        return [_like(default[0], part, name) for part in text.split(",")]
    try:
        return type(default)(text)
    except ValueError:
        raise ValueError(
            f"{name} is {text!r}, it must be {'a whole number' if type(default) is int else 'a number'}"
        ) from None


def _shown(value: Any) -> str:
    return ",".join(map(repr, value)) if isinstance(value, list) else str(value)


def _add_export(parser: Parser) -> None:
    parser.add_argument("--to", choices=("hf",), required=True, help="hf: an OPT folder of Hugging Face transformers")
    parser.add_argument("--out", metavar="FOLDER", required=True, help="folder to write")
    _add_checkpoint(parser)


def run_export(args: argparse.Namespace) -> int:
    """Write the model for other software: transformers, vLLM and what reads their folders."""
    from gptlite.checkpoint import load
    from gptlite.export import export_hf

    model, tokenizer = load(args.checkpoint)
    export_hf(model, tokenizer, args.out)
    print(f"{args.out}: an OPT model of {model.n_params:,} parameters and its tokenizer")
    return 0


def _add_data(parser: Parser) -> None:
    _add_text(parser)
    parser.add_argument("--folder", help="where downloads are kept (default: GPTLITE_CACHE, or the user's cache)")


def run_data(args: argparse.Namespace) -> int:
    """Take the corpus, check it, and say what it holds."""
    from gptlite.data import CharTokenizer

    corpus = _corpus(args)
    n_chars = CharTokenizer.of(corpus.train, corpus.held_out).vocab_size
    print(f"corpus     {corpus.name}")
    print(f"train      {len(corpus.train):,} characters")
    print(f"held out   {len(corpus.held_out):,} characters")
    print(f"vocabulary {n_chars} characters")
    print(f"sha256     {corpus.sha256}")
    return 0


# -- what the subcommands share -----------------------------------------------------------------------------------


def whole(least: int, most: int | None = None) -> Callable[[str], int]:
    """An argument's type: a whole number from `least` to `most`."""
    allowed = f"a whole number of at least {least}" if most is None else f"a whole number from {least} to {most}"

    def parse(text: str) -> int:
        try:
            value = int(text)
        except ValueError:
            value = least - 1
        if value < least or (most is not None and value > most):
            raise argparse.ArgumentTypeError(f"{text[:30]!r} is not {allowed}")
        return value

    return parse


def choose_device(name: str) -> str:
    """The device of that name; "auto" is the first of cuda, mps and cpu that this machine has.

    Raises: ValueError when the machine has no such device.
    """
    import torch

    there = [f"cuda:{i}" for i in range(torch.cuda.device_count())]
    there = (["cuda"] if there else []) + there + (["mps"] if torch.backends.mps.is_available() else []) + ["cpu"]
    if name == "auto":
        return there[0]
    if name not in there:
        raise ValueError(f"device is {name!r}, this machine has auto, {', '.join(there)}")
    return name


def _add_text(parser: Parser) -> None:
    group = parser.add_mutually_exclusive_group()
    group.add_argument("--source", choices=("shakespeare", "tinyshakespeare"), help="corpus (default: shakespeare)")
    group.add_argument("--text", metavar="FILE", help="any UTF-8 text of your own instead; its last tenth is held out")


def _add_seed(parser: Parser) -> None:
    parser.add_argument("--seed", type=whole(0, MAX_SEED), default=0, help="of all random numbers (default: 0)")


def _add_checkpoint(parser: Parser) -> None:
    parser.add_argument(
        "--checkpoint",
        default="gptlite",
        metavar="NAME",
        help="gptlite, draft, gptlite-gqa2, gptlite-mla128, gptlite-qat2, or a .safetensors file",
    )


def _add_settings(
    parser: Parser, lr: float, save_every: int, batch_size: int = 16, optimizer: str = "muon", warmup: int = 10
) -> None:
    """The options of a short run that begins with a trained model, by the fields of `TrainSettings`."""
    count = whole(1, 65_536)
    parser.add_argument("--batch-size", type=count, default=batch_size, help=f"windows per step ({batch_size})")
    parser.add_argument("--lr", type=float, default=lr, help=f"peak learning rate ({lr})")
    parser.add_argument("--optimizer", choices=("muon", "adamw"), default=optimizer, help=f"({optimizer})")
    parser.add_argument("--precision", choices=("fp32", "bf16"), default="fp32", help="of the products (fp32)")
    parser.add_argument("--warmup", type=whole(0), default=warmup, help=f"steps over which the rate rises ({warmup})")
    parser.add_argument("--cooldown", type=float, default=1.0, help="share of the steps over which it falls (1)")
    parser.add_argument("--weight-decay", type=float, default=0.0, help="of the blocks' matrices (0)")
    parser.add_argument(
        "--save-every", type=whole(1), default=save_every, help=f"steps between points of the curve ({save_every})"
    )
    parser.add_argument("--seed", type=whole(0, MAX_SEED), default=1, help="of new weights and of the batches (1)")


def _add_device(parser: Parser) -> None:
    parser.add_argument("--device", default="auto", help="auto, cpu, cuda, cuda:1, mps (default: auto)")


def _is_writable(folder: Path) -> bool:
    """Whether a file can be written there, now and not after hours of work; makes the folder."""
    try:
        folder.mkdir(parents=True, exist_ok=True)
    except OSError:
        return False
    return os.access(folder, os.W_OK)


def _corpus(args: argparse.Namespace) -> Any:
    from gptlite.data import load_corpus

    # a Path is always a file, even one that is called shakespeare
    source = args.source or "shakespeare" if args.text is None else Path(args.text)
    return load_corpus(source, getattr(args, "folder", None))


def _complain(message: str) -> None:
    """One line on the standard error stream, whatever the message holds."""
    printable = "".join(char if char.isprintable() else " " for char in message)
    print(f"gptlite: {' '.join(printable.split())}", file=sys.stderr)


def _show_warning(message: Warning | str, *_: Any, **__: Any) -> None:
    _complain(f"warning: {message}")
