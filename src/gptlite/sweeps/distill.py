"""Students of one shape by different recipes, at equal steps: their loss, and how far they agree with the teacher."""

from __future__ import annotations

import time
from collections.abc import Iterator
from dataclasses import fields
from functools import partial
from pathlib import Path
from tempfile import TemporaryDirectory
from typing import Any

from gptlite.compress.students import Recipe, load_teachers, make_student, remember
from gptlite.config import preset
from gptlite.data import Corpus, load_corpus
from gptlite.model import GPTlite
from gptlite.record import Point, Recording, Step, sweep
from gptlite.train import TrainSettings

OF_THE_RUN = ("teachers", "steps")  # what a recipe's text may name beside the fields of `Recipe`


def read_recipe(text: str) -> tuple[Recipe, dict[str, str]]:
    """The recipe of a text such as "soft temperature=2 hard=0.5", and what it changes of the run.

    Raises: ValueError when it is no such text.
    """
    loss, *words = text.split() or [""]
    pairs = [word.partition("=") for word in words]
    kinds = {field.name: type(field.default) for field in fields(Recipe)}
    given: dict[str, Any] = {}
    run: dict[str, str] = {}
    for name, _, value in pairs:
        if name in OF_THE_RUN and value:
            run[name] = value
        elif name in kinds and value:
            given[name] = value == "yes" if kinds[name] is bool else kinds[name](value)  # type: ignore[misc]
        else:
            allowed = ", ".join((*kinds, *OF_THE_RUN))
            raise ValueError(f"recipe is {text!r}, it must be a loss and NAME=VALUE with names of {allowed}")
    return Recipe(loss, **given), run


@sweep(
    "distillation",
    "validation loss and agreement of students by recipe at equal steps; minutes on one core",
    preset="draft",
    teacher="gptlite",
    recipes=[
        "text",
        "soft",
        "soft hard=0.5",
        "offline",
        "soft temperature=2",
        "logits",
        "hidden",
        "hidden squares=0 cosine=1",
        "hidden squares=0 cosine=1 hard=1",
        "offline tail=no",
        "mutual",
        "on-policy",
        "responses",
        "soft teachers=gptlite+gptlite-gqa2+gptlite-mla128",
        "text steps=900",
        "offline steps=900",
    ],
    seeds=[1],
    steps=200,
    batch=8,
    text="",
)
def _distillation(recording: Recording) -> Iterator[Step]:
    params = recording.params
    shape = preset(params["preset"])
    chosen = [(text, *read_recipe(text)) for text in params["recipes"]]
    source = Path(params["text"]) if params["text"] else "shakespeare"
    teacher = params["teacher"]
    params["text"], params["teacher"] = Path(params["text"]).name, Path(teacher).name  # no path of a machine is kept
    rows = recording.data.setdefault("students", [])
    corpora: list[Corpus] = []
    known: dict[tuple[str, int], GPTlite] = {}  # teachers, with what they said about the batches of a seed

    def run(text: str, recipe: Recipe, changes: dict[str, str], seed: int) -> Point:
        if not corpora:
            corpora.append(load_corpus(source))
        steps = int(changes.get("steps", params["steps"]))
        settings = run_settings(steps, params["batch"], seed)
        begin = time.perf_counter()
        teachers = {}
        for name in changes.get("teachers", teacher).split("+"):
            if (name, seed) not in known:
                for old in [key for key in known if key[1] != seed]:
                    del known[old]
                known[name, seed] = remember(load_teachers([name], corpora[0], params["device"])[Path(name).name])
            teachers[Path(name).name] = known[name, seed]
        with TemporaryDirectory() as scratch:
            out = Path(scratch) / "student.safetensors"
            card = make_student(shape, corpora[0], settings, out, recipe, teachers, device=params["device"])
        row = {"recipe": text, "seed": seed, "steps": steps, "tokens_seen": card["tokens_seen"]}
        rows.append({**row, "loss": card["validation_loss"], **card["agreement"]})
        return Point({"recipe": text, "seed": seed}, [time.perf_counter() - begin])

    for seed in params["seeds"]:
        for text, recipe, changes in chosen:
            yield {"recipe": text, "seed": seed}, 1e9, partial(run, text, recipe, changes, seed)


def run_settings(steps: int, batch: int, seed: int) -> TrainSettings:
    """The settings that all students of a comparison share."""
    warmup = max(1, steps // 20)
    return TrainSettings(steps, batch, 0.01, "muon", "bf16", warmup, 0.4, 0.1, seed, save_every=steps)
