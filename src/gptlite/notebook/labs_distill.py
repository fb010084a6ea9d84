"""The lab of the chapter on distillation: two students of one shape, with a teacher and without, step for step."""

import time
from collections.abc import Callable, Iterator
from typing import Any

import torch
from matplotlib.axes import Axes

from gptlite.checkpoint import load
from gptlite.compress.students import Recipe, make_objective
from gptlite.config import preset
from gptlite.data import load_corpus
from gptlite.model import GPTlite
from gptlite.notebook.controls import Menu, Slider
from gptlite.notebook.lab import Lab, new_recording
from gptlite.progress import Progress
from gptlite.record import Point, Recording
from gptlite.train import TrainSettings
from gptlite.variants.uptrain import uptrain

WATCHED = 24  # held-out windows that the curves follow
CHOICES = ("soft", "logits", "hidden", "mutual", "offline")


class _Stopped(Exception):
    """Stop was pressed within a run."""


class DistillLab(Lab):
    """A student that learns the text beside one that learns from the teacher: same weights, same batches, same steps.

    Args:
        device: that it trains on.
    """

    name = "distillation-lab"
    title = "Two students, with and without a teacher"
    shrinks = "batch"
    controls = (
        Menu("preset", "Student", "draft", ("nano", "draft")),
        Menu("loss", "What the second one learns", "soft", CHOICES),
        Slider("temperature", "Temperature (soft, hidden)", 1, 1, 16, 1),
        Slider("hard", "Weight of the text (%)", 0, 0, 100, 10),
        Menu("steps", "Steps of each", 40, (10, 20, 40, 80, 160, 320)),
        Menu("batch", "Batch (windows)", 8, (1, 2, 4, 8, 16, 32)),
        Slider("seed", "Seed", 0, 0, 9, 1),
    )

    def measure(self, settings: dict[str, Any], stop: Callable[[], bool], progress: Progress) -> Iterator[Recording]:
        """Trains the student on the text, then again from the teacher; Stop ends it after the step that is running."""
        teacher, tokenizer = load("gptlite", self.device)
        corpus = load_corpus()
        tokens, held_out = tokenizer.encode(corpus.train), tokenizer.encode(corpus.held_out)
        config = preset(settings["preset"], vocab_size=tokenizer.vocab_size)
        steps, curve_step = settings["steps"], max(1, settings["steps"] // 8)
        run = TrainSettings(
            steps, settings["batch"], 3e-3, "adamw", "fp32", steps // 10, 0.5, 0.1, settings["seed"], curve_step
        )
        recording = new_recording(self.name, dict(settings), self.device)
        curves = recording.data.setdefault("curves", {})
        progress.total = 2 * steps
        chosen = Recipe(settings["loss"], temperature=float(settings["temperature"]), hard=settings["hard"] / 100)
        for i, (name, recipe) in enumerate((("text", Recipe("text")), (settings["loss"], chosen))):

            def on_step(step: int, loss: float, i: int = i, name: str = name) -> None:
                progress.update(i * steps + step, f"{name}, step {step}, loss {loss:.3f}")
                if stop():
                    raise _Stopped

            objective = make_objective(recipe, [teacher], config, tokens, run)
            torch.manual_seed(settings["seed"])  # the same first weights
            student = GPTlite(config).to(self.device)
            watch = held_out[: WATCHED * config.context_length + 1]
            begin = time.perf_counter()
            try:
                curve = uptrain(student, tokens, run, None, "all", watch, on_step, objective)
            except _Stopped:
                return
            curves[name] = [[row[0], row[-1]] for row in curve]
            recording.points.append(Point({"learns": name, "steps": steps}, [time.perf_counter() - begin]))
            recording.complete = i == 1
            yield recording

    def needed_bytes(self, settings: dict[str, Any]) -> float:
        """Returns: memory of a step: the student's activations, gradients and optimizer, and the teacher's pass."""
        tokens = settings["batch"] * preset(settings["preset"]).context_length
        return 200e6 + tokens * 4 * 256 * 30

    def draw(self, axes: Axes, recording: Recording) -> None:
        """Held-out loss against the tokens that a student has seen."""
        for name, curve in recording.data["curves"].items():
            label = "learns the text" if name == "text" else f"learns from the teacher ({name})"
            axes.plot([tokens for tokens, _ in curve], [loss for _, loss in curve], label=label)
        axes.set(xlabel="Tokens seen by the student", ylabel="Held-out loss (nats per character)")
        axes.legend()

    def rows(self, recording: Recording) -> list[dict[str, Any]]:
        """Returns: the table: what each student learned, its last loss, and its seconds."""
        return [
            {
                "Student learns": point.at["learns"],
                "Steps": point.at["steps"],
                "Held-out loss (nats per character)": round(recording.data["curves"][point.at["learns"]][-1][1], 3),
                "Time (s)": float(f"{point.median:.3g}"),
            }
            for point in recording.points
        ]
