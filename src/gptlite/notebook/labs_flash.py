"""The lab of the chapter on FlashAttention: time and peak memory of each back end, by context."""

from collections.abc import Callable, Iterator
from typing import Any

import torch
from matplotlib.axes import Axes

from gptlite.measure import peak_memory
from gptlite.notebook.controls import Menu, Slider
from gptlite.notebook.lab import Lab
from gptlite.notebook.labs_phases import doubling, name_ticks
from gptlite.progress import Progress
from gptlite.record import DTYPES, Recording

QUANTITIES = ("time", "peak memory")


class AttentionLab(Lab):
    """Causal attention by PyTorch's back ends and by the package's own tiles, against the context.

    Args:
        device: that it measures on.
    """

    name = "attention"
    title = "Attention by back end and context"
    shrinks = "longest"
    _shown = QUANTITIES[0]
    controls = (
        Menu("longest", "Longest context (tokens)", 2048, tuple(2**e for e in range(7, 16))),
        Menu("n_heads", "Heads", 8, (1, 2, 4, 8, 16, 32)),
        Menu("d_head", "Head size", 64, (16, 32, 64, 128)),
        Menu("dtype", "Number format", "float32", DTYPES),
        Menu("shown", "Drawn", QUANTITIES[0], QUANTITIES),
        Slider("repeats", "Samples per point", 3, 1, 15, 1),
    )

    def __init__(self, device: str | torch.device = "cpu") -> None:
        super().__init__(device)
        if self.device.type == "cpu":  # torch's profiler complains unless its first use is on the main thread
            peak_memory(lambda: None, "cpu")

    def measure(self, settings: dict[str, Any], stop: Callable[[], bool], progress: Progress) -> Iterator[Recording]:
        """Measures contexts of 128 tokens, 256, 512 and so on up to the longest."""
        self._shown = settings["shown"]
        params = {key: settings[key] for key in ("n_heads", "d_head", "dtype", "repeats")}
        return super().measure({**params, "contexts": doubling(128, settings["longest"])}, stop, progress)

    def needed_bytes(self, settings: dict[str, Any]) -> float:
        """Returns: memory of the longest context but for its matrix; points that need it are left out when short."""
        width = getattr(torch, settings["dtype"]).itemsize
        return 12.0 * settings["n_heads"] * settings["longest"] * settings["d_head"] * width

    def draw(self, axes: Axes, recording: Recording) -> None:
        """The chosen quantity against the context, a line for each back end that ran."""
        for backend in dict.fromkeys(point.at["backend"] for point in recording.points):
            points = [point for point in recording.points if point.at["backend"] == backend]
            values = [
                1e3 * point.median if self._shown == "time" else (point.peak_bytes or 0) / 1e6 for point in points
            ]
            axes.plot([point.at["context"] for point in points], values, label=backend)
        axes.set(xlabel="Context (tokens)", xscale="log", yscale="log")
        axes.set_ylabel("Time (ms)" if self._shown == "time" else "Peak memory (MB)")
        name_ticks(axes, sorted({point.at["context"] for point in recording.points}))
        axes.legend()

    def rows(self, recording: Recording) -> list[dict[str, Any]]:
        """Returns: the table of every point, with the kernel that ran; then what did not run, and why."""
        kernels = recording.data["kernels"]
        measured: list[dict[str, Any]] = [
            {
                "Back end": point.at["backend"],
                "Context (tokens)": point.at["context"],
                "Kernel, or why not": kernels[point.at["backend"]],
                "Median (ms)": float(f"{1e3 * point.median:.3g}"),
                "Peak memory (MB)": float(f"{(point.peak_bytes or 0) / 1e6:.3g}"),
            }
            for point in recording.points
        ]
        return measured + [
            {
                "Back end": left["at"]["backend"],
                "Context (tokens)": left["at"].get("context", "any"),
                "Kernel, or why not": left["why"],
                "Median (ms)": "",
                "Peak memory (MB)": "",
            }
            for left in recording.left_out
        ]
