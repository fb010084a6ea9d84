"""What pruned models lose, and what they win back, by where their weights come from."""

from __future__ import annotations

import json
import time
from collections.abc import Iterator
from dataclasses import asdict
from functools import partial
from pathlib import Path
from tempfile import TemporaryDirectory
from typing import Any

from gptlite.checkpoint import load
from gptlite.compress.depth import block_costs, block_influence
from gptlite.compress.importance import calibration_batches, choose, structure_scores
from gptlite.compress.masks import PATTERN
from gptlite.compress.minitron import Recipe, make_pruned, target_shape
from gptlite.compress.sparsify import sparsify
from gptlite.compress.structured import prune
from gptlite.data import Corpus, load_corpus
from gptlite.measure import validation_loss
from gptlite.model import GPTlite
from gptlite.record import Point, Recording, Step, sweep
from gptlite.train import TrainSettings


def read_curve(text: str) -> tuple[str, float]:
    """Start and learning rate of a text such as "one-shot 0.003". Raises: ValueError when it is none."""
    words = text.split()
    try:
        start, rate = words
        return start, float(rate)
    except ValueError:
        raise ValueError(f"curve is {text!r}, it must be like 'one-shot 0.003'") from None


@sweep(
    "minitron",
    "validation loss of a model cut to half, by where its weights come from, while it learns from the whole one",
    model="gptlite",
    curves=["one-shot 0.002", "iterative 0.002", "random 0.002", "depth 0.002", "learned 0.002"],
    seeds=[1, 2, 3],
    steps=1000,
    batch=2,
    folder="",
)
def _minitron(recording: Recording) -> Iterator[Step]:
    params = recording.params
    chosen = [(*read_curve(curve), seed) for curve in params["curves"] for seed in params["seeds"]]
    folder = params["folder"]
    params["folder"] = Path(folder).name  # a recording keeps no path of a machine
    rows = recording.data.setdefault("runs", [])
    corpora: list[Corpus] = []

    def run(start: str, lr: float, seed: int) -> Point:
        recipe, batch = Recipe(start), params["batch"]
        every = max(1, params["steps"] // 20)
        settings = TrainSettings(params["steps"], batch, lr, "adamw", "bf16", 20, 1.0, 0.0, seed, every)
        name = f"{start}-{lr:g}-{seed}"
        with TemporaryDirectory() as scratch:
            out = Path(folder or scratch) / f"{name}.safetensors"
            begin = time.perf_counter()
            card = finished(out, recipe, settings)  # a run that was stopped is begun anew, the others are kept
            if card is None:
                if not corpora:
                    corpora.append(load_corpus())
                card = make_pruned(
                    params["model"], recipe, corpora[0], out, settings, command_of(start, settings), params["device"]
                )
                card["seconds"] = round(time.perf_counter() - begin, 1)
                out.with_suffix(".json").write_text(json.dumps(card, indent=1) + "\n", encoding="utf-8")
        keep = ("command", "recipe", "settings", "n_params", "tokens_seen", "losses", "loss_curve")
        rows.append({key: card[key] for key in keep})
        return Point({"start": start, "lr": lr, "seed": seed}, [card["seconds"]])

    for start, lr, seed in chosen:
        yield {"start": start, "lr": lr, "seed": seed}, 1e9, partial(run, start, lr, seed)


def finished(out: Path, recipe: Recipe, settings: TrainSettings) -> dict[str, Any] | None:
    """The card of a run that lies there from before, when it is the same run; else None."""
    try:
        card = json.loads(out.with_suffix(".json").read_text(encoding="utf-8"))
        same = card["recipe"] == asdict(recipe) and card["settings"] == asdict(settings)
        return card if same and card["seconds"] > 0 and out.is_file() else None
    except (OSError, ValueError, KeyError, TypeError):
        return None


def command_of(start: str, settings: TrainSettings) -> str:
    """The command line that makes the same model."""
    return (
        f"gptlite prune --start {start} --steps {settings.steps} --batch-size {settings.batch_size} "
        f"--lr {settings.lr:g} --precision {settings.precision} --seed {settings.seed} "
        f"--save-every {settings.save_every} --out {start}.safetensors"
    )


# -- losses without any training ----------------------------------------------------------------------------------


class _Judged:
    """The trained model, what importance is judged on, and the held-out windows that losses are measured on."""

    def __init__(self, name: str, n_windows: int, n_watch: int, device: str) -> None:
        self.model, tokenizer = load(name, device)
        corpus = load_corpus()
        text = tokenizer.encode(corpus.train).to(device)
        self.batches = calibration_batches(text, self.model.context_length, n_windows)
        self.watch = tokenizer.encode(corpus.held_out)[: n_watch * self.model.context_length + 1]

    def loss(self, model: GPTlite) -> float:
        """In nats per token, to four decimals."""
        return round(validation_loss(model, self.watch), 4)


@sweep(
    "prune-weights",
    "loss of the trained model with zeros in its weights, by method and share of zeros; nothing is trained",
    model="gptlite",
    methods=["magnitude", "taylor", "wanda", "sparsegpt"],
    sparsities=[25, 50, 60, 70, 80],
    calibration=16,
    windows=60,
)
def _prune_weights(recording: Recording) -> Iterator[Step]:
    params = recording.params
    made: list[_Judged] = []
    rows = recording.data.setdefault("losses", [])

    def run(method: str, zeros: int, pattern: tuple[int, int] | None) -> Point:
        if not made:
            made.append(_Judged(params["model"], params["calibration"], params["windows"], params["device"]))
            recording.data["original"] = made[0].loss(made[0].model)
        begin = time.perf_counter()
        sparse = sparsify(made[0].model, made[0].batches, zeros / 100, method, pattern)
        seconds = time.perf_counter() - begin
        name = "scattered" if pattern is None else f"{pattern[0]}:{pattern[1]}"
        rows.append({"method": method, "zeros": zeros, "pattern": name, "loss": made[0].loss(sparse)})
        return Point({"method": method, "zeros": zeros, "pattern": name}, [seconds])

    for method in params["methods"]:
        for zeros in params["sparsities"]:
            yield {"method": method, "zeros": zeros}, 1e9, partial(run, method, zeros, None)
        yield {"method": method, "pattern": "2:4"}, 1e9, partial(run, method, 50, PATTERN)


@sweep(
    "prune-structures",
    "importance of heads, neurons and blocks of the trained model, and its loss without the least important ones",
    model="gptlite",
    criteria=["activation", "taylor", "magnitude", "random"],
    shares=[10, 20, 30, 40, 50, 60, 70, 80],
    calibration=64,
    windows=24,
)
def _prune_structures(recording: Recording) -> Iterator[Step]:
    params = recording.params
    made: list[_Judged] = []
    data = recording.data
    data |= {"losses": [], "heads": {}, "neurons": {}}

    def judged() -> _Judged:
        if not made:
            made.append(_Judged(params["model"], params["calibration"], params["windows"], params["device"]))
            model = made[0].model
            data["original"] = made[0].loss(model)
            config = model.config
            data["whole"] = {"heads": config.n_heads, "neurons": config.d_ff, "n_params": model.n_params}
        return made[0]

    def by_blocks() -> Point:
        begin = time.perf_counter()
        at = judged()
        data["influence"] = [round(float(x), 4) for x in block_influence(at.model, at.batches)]
        data["without_block"] = [round(loss, 4) for loss in block_costs(at.model, at.watch)]
        return Point({"what": "blocks"}, [time.perf_counter() - begin])

    def by_structures(criterion: str) -> Point:
        begin = time.perf_counter()
        at = judged()
        scores = structure_scores(at.model, at.batches, criterion)
        data["heads"][criterion] = [[float(f"{x:.4g}") for x in block.tolist()] for block in scores.heads]
        # of the neurons, a sorted sample is enough to draw from
        data["neurons"][criterion] = [
            [float(f"{x:.4g}") for x in block.sort().values[:: max(1, len(block) // 64)].tolist()]
            for block in scores.neurons
        ]
        for gone in params["shares"]:
            heads, neurons = target_shape(at.model.config, 1 - gone / 100)
            row: dict[str, Any] = {"criterion": criterion, "gone": gone, "heads": heads, "neurons": neurons}
            for what, sizes in {"heads": (heads, 0), "neurons": (0, neurons), "both": (heads, neurons)}.items():
                small = prune(at.model, choose(scores, at.model, *sizes))
                row |= {f"loss_{what}": at.loss(small), f"n_params_{what}": small.n_params}
            data["losses"].append(row)
        return Point({"what": criterion}, [time.perf_counter() - begin])

    yield {"what": "blocks"}, 1e9, by_blocks
    for criterion in params["criteria"]:
        yield {"what": criterion}, 1e9, partial(by_structures, criterion)
