"""The lab of the chapter on speculative decoding: tokens per round and speed-up on the reader's device."""

from collections.abc import Callable, Iterator
from typing import Any

import torch
from matplotlib.axes import Axes

from gptlite.arithmetic import ModelShape, kv_bytes, n_params
from gptlite.checkpoint import read_card
from gptlite.config import GPTConfig
from gptlite.notebook.controls import Menu, Slider
from gptlite.notebook.explorers_speculative import measured_speedups
from gptlite.notebook.lab import Lab
from gptlite.progress import Progress
from gptlite.record import DTYPES, Recording


class SpeculativeLab(Lab):
    """Speed-up and tokens per round of the shipped pair, by the number of drafts.

    Args:
        device: that it measures on.
    """

    name = "speculative-speed"
    title = "Speculative decoding by the number of drafts"
    shrinks = "batch"
    controls = (
        Slider("most", "Most drafts per round (γ)", 6, 1, 12, 1),
        Slider("temperature", "Temperature", 0.0, 0.0, 2.0, 0.1),
        Menu("batch", "Batch (sequences)", 1, tuple(2**e for e in range(8))),
        Slider("n_new", "New tokens per sequence", 96, 16, 192, 16),
        Menu("dtype", "Number format", "float32", DTYPES),
        Slider("repeats", "Samples per point", 2, 1, 9, 1),
    )

    def measure(self, settings: dict[str, Any], stop: Callable[[], bool], progress: Progress) -> Iterator[Recording]:
        """Measures the plain loop, the draft model alone, and every number of drafts up to the most."""
        params = {key: settings[key] for key in ("n_new", "dtype", "repeats")}
        params |= {
            "n_drafts": list(range(1, settings["most"] + 1)),
            "temperatures": [settings["temperature"]],
            "batches": [settings["batch"]],
        }
        return super().measure(params, stop, progress)

    def needed_bytes(self, settings: dict[str, Any]) -> float:
        """Returns: memory of both models, their caches, and a pass over all drafts."""
        width, total = getattr(torch, settings["dtype"]).itemsize, 0.0
        for name in ("gptlite", "draft"):
            shape = ModelShape.of(GPTConfig.from_dict(read_card(name)["config"]))
            step = (settings["most"] + 1) * (6 * shape.d_ff + 4 * shape.vocab_size)
            total += n_params(shape) + settings["batch"] * (kv_bytes(shape, 256, 1) + step)
        return total * width

    def draw(self, axes: Axes, recording: Recording) -> None:
        """The speed-up against the number of drafts, beside tokens per round, which no overhead lowers."""
        rows = measured_speedups(recording)
        axes.plot([row["n_draft"] for row in rows], [row["speedup"] for row in rows], label="speed-up (times)")
        runs = [run for run in recording.data["runs"] if run["kind"] == "speculative" and run["rounds"]]
        axes.plot(
            [run["n_draft"] for run in runs],
            [1 + run["kept"] / run["rounds"] for run in runs],
            label="tokens per round",
        )
        axes.axhline(1, color="gray", linestyle="--")
        axes.set(xlabel="Drafts per round (γ)", ylabel="Speed-up (times), tokens per round")
        axes.set_ylim(bottom=0)
        axes.legend()

    def rows(self, recording: Recording) -> list[dict[str, Any]]:
        """Returns: the table: drafts, acceptance, tokens per round, samples, median, speed-up."""
        speedups = {row["n_draft"]: row["speedup"] for row in measured_speedups(recording)}
        table = []
        for point, run in zip(recording.points, recording.data["runs"], strict=False):
            drafted = run["kind"] == "speculative"
            name = {"plain": "target alone", "draft": "draft model alone"}.get(run["kind"], f"γ = {run['n_draft']}")
            table.append(
                {
                    "Drafts per round": name,
                    "Acceptance": round(run["kept"] / run["tried"], 3) if run["tried"] else "",
                    "Tokens per round": round(1 + run["kept"] / run["rounds"], 2) if run["rounds"] else "",
                    "Samples (ms)": ", ".join(f"{1e3 * s:.3g}" for s in point.samples),
                    "Median (ms)": float(f"{1e3 * point.median:.3g}"),
                    "Speed-up (times)": round(speedups[run["n_draft"]], 2) if drafted else "",
                }
            )
        return table
