"""The lab of the chapter on pruning: the time of pruned shapes, and of zeros that change no shape."""

from collections.abc import Callable, Iterator
from typing import Any

import torch
from matplotlib.axes import Axes

from gptlite.arithmetic import ModelShape, kv_bytes, n_params
from gptlite.config import PRESETS, preset
from gptlite.notebook.controls import Menu, Slider
from gptlite.notebook.lab import Lab
from gptlite.progress import Progress
from gptlite.record import DTYPES, Recording
from gptlite.sweeps.pruning_times import CUTS

SHORT = {
    "whole": "whole",
    "half the heads and neurons": "heads and\nneurons",
    "half the blocks": "blocks",
    "half the channels": "channels",
    "zeros, scattered": "zeros,\nscattered",
    "zeros, 2:4": "zeros,\n2:4",
}


class PruningLab(Lab):
    """Time of a decode step and of a prefill, for the whole model and for what is left when half of something goes.

    Args:
        device: that it measures on.
    """

    name = "prune-times"
    title = "What half of a model costs"
    shrinks = "context"
    controls = (
        Menu("preset", "Model (random weights)", "gpt2", tuple(PRESETS)),
        Menu("batch", "Batch (sequences)", 1, tuple(2**e for e in range(8))),
        Menu("context", "Context (tokens)", 256, tuple(2**e for e in range(6, 14))),
        Menu("prompt", "Prompt of the prefill (tokens)", 128, tuple(2**e for e in range(4, 13))),
        Menu("dtype", "Number format", "float32", DTYPES),
        Slider("repeats", "Samples per point", 3, 1, 15, 1),
    )

    def measure(self, settings: dict[str, Any], stop: Callable[[], bool], progress: Progress) -> Iterator[Recording]:
        """Measures every cut, decode and prefill."""
        return super().measure({**settings, "cuts": list(CUTS)}, stop, progress)

    def needed_bytes(self, settings: dict[str, Any]) -> float:
        """Returns: memory of the whole model beside the one that is cut from it, and of its cache."""
        longest = max(settings["context"], settings["prompt"])
        shape = ModelShape.of(preset(settings["preset"], context_length=longest))
        values = 2 * n_params(shape) + settings["batch"] * (kv_bytes(shape, longest, 1) + shape.vocab_size)
        return values * getattr(torch, settings["dtype"]).itemsize

    def draw(self, axes: Axes, recording: Recording) -> None:
        """Time over that of the whole model, decode and prefill side by side, and a mark at the share of parameters."""
        cuts = [cut for cut in CUTS if any(point.at["cut"] == cut for point in recording.points)]
        whole = {p.at["phase"]: p for p in recording.points if p.at["cut"] == cuts[0]}
        for i, phase in enumerate(("decode", "prefill")):
            points = [p for p in recording.points if p.at["phase"] == phase and phase in whole]
            places = [cuts.index(p.at["cut"]) + 0.36 * (i - 0.5) for p in points]
            axes.bar(places, [p.median / whole[phase].median for p in points], width=0.34, label=phase)
        shares = {p.at["cut"]: p.at["n_params"] / recording.points[0].at["n_params"] for p in recording.points}
        axes.scatter(range(len(cuts)), [shares[cut] for cut in cuts], marker="D", zorder=3, label="parameters")
        axes.axhline(1, linewidth=1)
        axes.set_xticks(range(len(cuts)), [SHORT[cut] for cut in cuts])
        axes.set(ylabel="Share of the whole model's", xlabel="Half of these is gone")
        axes.legend()

    def rows(self, recording: Recording) -> list[dict[str, Any]]:
        """Returns: the table: cut, phase, parameters, samples, median, and times as fast as the whole model."""
        first = {p.at["phase"]: p.median for p in reversed(recording.points) if p.at["cut"] == "whole"}
        table = []
        for point in recording.points:
            at = point.at
            table.append(
                {
                    "Pruned": at["cut"],
                    "Phase": at["phase"],
                    "Parameters": f"{at['n_params']:,}",
                    "Samples (ms)": ", ".join(f"{1e3 * s:.3g}" for s in point.samples),
                    "Median (ms)": float(f"{1e3 * point.median:.3g}"),
                    "Times as fast": float(f"{first.get(at['phase'], point.median) / point.median:.3g}"),
                }
            )
        for left in recording.left_out:
            row = dict.fromkeys(table[0], "") if table else {}
            table.append(
                {**row, "Pruned": left["at"]["cut"], "Phase": left["at"]["phase"], "Samples (ms)": left["why"]}
            )
        return table
