"""The lab of the chapter on quantised keys and values: time of a decode step and bytes of the cache by recipe."""

from collections.abc import Callable, Iterator
from typing import Any

import torch
from matplotlib.axes import Axes

from gptlite.arithmetic import ModelShape, kv_bytes, n_params
from gptlite.config import PRESETS, preset
from gptlite.notebook.controls import Menu, Slider
from gptlite.notebook.lab import Lab
from gptlite.progress import Progress
from gptlite.quantize.kv import RECIPES
from gptlite.record import DTYPES, Recording

NAMES = {"plain": "not rounded", "int8": "int8", "fp8": "fp8", "kivi4": "KIVI, 4 bits", "kivi2": "KIVI, 2 bits"}


class KVQuantLab(Lab):
    """Time per output token and bytes of the cache by recipe, at several contexts.

    Args:
        device: that it measures on.
    """

    name = "kv-quant"
    title = "Decode by bits of the cache"
    shrinks = "batch"
    controls = (
        Menu("preset", "Model (random weights)", "gpt2", tuple(PRESETS)),
        Menu("context", "Longest context (tokens)", 512, tuple(2**e for e in range(6, 15))),
        Slider("residual", "KIVI's residual (tokens)", 64, 32, 256, 32),
        Menu("batch", "Batch (sequences)", 1, tuple(2**e for e in range(6))),
        Menu("dtype", "Number format", "float32", DTYPES),
        Slider("repeats", "Samples per point", 3, 1, 15, 1),
    )

    def measure(self, settings: dict[str, Any], stop: Callable[[], bool], progress: Progress) -> Iterator[Recording]:
        """Measures every recipe at a quarter of the longest context and at all of it."""
        params = {key: settings[key] for key in ("preset", "dtype", "repeats", "batch", "residual")}
        params |= {"contexts": [max(16, settings["context"] // 4), settings["context"]]}
        return super().measure(params, stop, progress)

    def needed_bytes(self, settings: dict[str, Any]) -> float:
        """Returns: memory of a step whose cache is not rounded, and of the one that it is filled from."""
        config = preset(settings["preset"], context_length=settings["context"])
        shape = ModelShape.of(config)
        step = settings["batch"] * (2 * kv_bytes(shape, settings["context"], 1) + 8 * config.d_ff + config.vocab_size)
        return (n_params(shape) + step) * getattr(torch, settings["dtype"]).itemsize

    def draw(self, axes: Axes, recording: Recording) -> None:
        """TPOT against the bytes of the cache, a line per recipe from the short context to the long one."""
        for recipe in RECIPES:
            points = [point for point in recording.points if point.at["recipe"] == recipe]
            megabytes = [point.at["cache_bytes"] / 1e6 for point in points]
            axes.plot(megabytes, [1e3 * point.median for point in points], label=NAMES[recipe])
        axes.set(xlabel="Cache of the batch (MB)", ylabel="Time per output token (ms)")
        axes.set_ylim(bottom=0)
        axes.legend()

    def rows(self, recording: Recording) -> list[dict[str, Any]]:
        """Returns: the table: recipe, context, bytes, samples, median, and both against what is not rounded."""
        plain = {point.at["context"]: point for point in recording.points if point.at["recipe"] == "plain"}
        table = []
        for point in recording.points:
            at = point.at
            row: dict[str, Any] = {
                "Cache": NAMES[at["recipe"]],
                "Context (tokens)": at["context"],
                "Cache of the batch (MB)": float(f"{at['cache_bytes'] / 1e6:.3g}"),
                "Samples (ms)": ", ".join(f"{1e3 * s:.3g}" for s in point.samples),
                "Median (ms)": float(f"{1e3 * point.median:.3g}"),
            }
            other = plain.get(at["context"])
            row["Bytes, times less"] = float(f"{other.at['cache_bytes'] / at['cache_bytes']:.3g}") if other else ""
            row["Times as fast"] = float(f"{other.median / point.median:.3g}") if other else ""
            table.append(row)
        for left in recording.left_out:
            row = dict.fromkeys(table[0], "") if table else {"Cache": "", "Context (tokens)": "", "Samples (ms)": ""}
            at = left["at"]
            row |= {"Cache": NAMES[at["recipe"]], "Context (tokens)": at["context"], "Samples (ms)": left["why"]}
            table.append(row)
        return table
