"""The lab of the chapter on PagedAttention: a step's time by the size of a block, and how many requests then fit."""

from collections.abc import Callable, Iterator
from typing import Any

from matplotlib.axes import Axes

from gptlite import hardware
from gptlite.arithmetic import ModelShape, kv_bytes_per_token, n_params
from gptlite.config import PRESETS, preset
from gptlite.notebook.controls import Menu, Slider
from gptlite.notebook.lab import Lab
from gptlite.notebook.labs_phases import name_ticks, step_bytes
from gptlite.progress import Progress
from gptlite.record import DTYPES, Recording
from gptlite.serving.waste import block_waste
from gptlite.sweeps.paged import CONTIGUOUS

SIZES = (1, 4, 16, 64, 256)


class PagedLab(Lab):
    """Time of a decode step by the size of a block beside a contiguous cache, and the requests that fit the memory.

    Args:
        device: that it measures on.
    """

    name = "paged"
    title = "Decode by block size"
    shrinks = "context"
    controls = (
        Menu("preset", "Model (random weights)", "gptlite", tuple(PRESETS)),
        Slider("batch", "Batch (sequences)", 4, 1, 32, 1),
        Menu("context", "Longest sequence (tokens)", 512, tuple(2**e for e in range(6, 14))),
        Slider("mean", "Mean length (% of the longest)", 25, 5, 100, 5),
        Menu("dtype", "Number format", "float32", DTYPES),
        Slider("repeats", "Samples per point", 5, 1, 25, 1),
    )

    def measure(self, settings: dict[str, Any], stop: Callable[[], bool], progress: Progress) -> Iterator[Recording]:
        """Measures steps that end at the longest sequence, with every size of a block and with a contiguous cache."""
        params = {key: value for key, value in settings.items() if key != "mean"}
        sizes = [size for size in SIZES if size <= settings["context"]]
        for recording in super().measure({**params, "block_sizes": sizes}, stop, progress):
            recording.data["fit"] = self.fitting(settings, sizes)
            yield recording

    def fitting(self, settings: dict[str, Any], sizes: list[int]) -> dict[str, int]:
        """Returns: by cache, how many sequences of the mean length fit the memory that is free beside the weights."""
        shape = ModelShape.of(preset(settings["preset"], context_length=settings["context"]))
        width = {"float64": 8, "float32": 4}.get(settings["dtype"], 2)
        room = hardware.free_bytes(self.device) - n_params(shape) * width
        tokens = max(0.0, room) / kv_bytes_per_token(shape, width)
        mean = settings["context"] * settings["mean"] / 100
        fit = {CONTIGUOUS: int(tokens / settings["context"])}
        return fit | {f"blocks of {size}": int(tokens / (mean + block_waste(size))) for size in sizes}

    def needed_bytes(self, settings: dict[str, Any]) -> float:
        """Returns: memory of a step of the whole batch, with a block more for each sequence."""
        largest = min(max(SIZES), settings["context"])
        return step_bytes(settings, settings["batch"], settings["context"] + largest, 1)

    def draw(self, axes: Axes, recording: Recording) -> None:
        """Time of a step against the size of a block, and the contiguous cache's as a level line."""
        points = {point.at["cache"]: 1e3 * point.median for point in recording.points}
        blocks = {int(name.split()[-1]): ms for name, ms in points.items() if name != CONTIGUOUS}
        axes.plot(list(blocks), list(blocks.values()), label="in blocks")
        if CONTIGUOUS in points:
            axes.axhline(points[CONTIGUOUS], linestyle="--", color="gray", label=CONTIGUOUS)
        axes.set(xlabel="Tokens of a block", ylabel="Time of a decode step (ms)", xscale="log")
        axes.set_ylim(bottom=0)
        name_ticks(axes, list(blocks) or [1])
        axes.legend()

    def rows(self, recording: Recording) -> list[dict[str, Any]]:
        """Returns: the table: time, its ratio to the contiguous cache, and the sequences that fit."""
        fit = recording.data.get("fit", {})
        base = next((point.median for point in recording.points if point.at["cache"] == CONTIGUOUS), None)
        return [
            {
                "Cache": point.at["cache"],
                "Samples (ms)": ", ".join(f"{1e3 * s:.3g}" for s in point.samples),
                "Median (ms)": float(f"{1e3 * point.median:.3g}"),
                "Over contiguous (times)": round(point.median / base, 2) if base else "",
                "Sequences that fit": fit.get(point.at["cache"], ""),
            }
            for point in recording.points
        ] + [
            {"Cache": left["at"]["cache"], "Samples (ms)": left["why"], "Median (ms)": ""}
            | {"Over contiguous (times)": "", "Sequences that fit": fit.get(left["at"]["cache"], "")}
            for left in recording.left_out
        ]
