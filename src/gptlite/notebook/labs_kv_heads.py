"""The lab of the chapter on fewer KV heads: the time of a decode step by what a token adds to the cache."""

from collections.abc import Callable, Iterator
from typing import Any

import torch
from matplotlib.axes import Axes

from gptlite.arithmetic import kv_bytes, n_params
from gptlite.config import PRESETS, preset
from gptlite.notebook.controls import Menu, Slider
from gptlite.notebook.lab import Lab
from gptlite.progress import Progress
from gptlite.record import DTYPES, Recording
from gptlite.sweeps.kv_heads import sized_shape

FAMILIES = {"grouped": "KV heads", "latent": "latent, absorbed"}


def divisors(n: int) -> list[int]:
    """The divisors of n, the largest first."""
    return [d for d in range(n, 0, -1) if n % d == 0]


class KVHeadsLab(Lab):
    """Time per output token by the number of KV heads, and by the size of a latent.

    Args:
        device: that it measures on.
    """

    name = "kv-heads"
    title = "Decode by KV heads"
    shrinks = "batch"
    controls = (
        Menu("preset", "Model (random weights)", "gpt2", tuple(PRESETS)),
        Slider("kv_heads", "Fewest KV heads (G)", 1, 1, 32, 1),
        Menu("latent", "Latent beside them (r)", 256, (32, 64, 128, 256, 384, 512, 1024)),
        Menu("batch", "Batch (sequences)", 8, tuple(2**e for e in range(9))),
        Menu("context", "Context (tokens)", 1024, tuple(2**e for e in range(6, 15))),
        Menu("dtype", "Number format", "float32", DTYPES),
        Slider("repeats", "Samples per point", 3, 1, 15, 1),
    )

    def measure(self, settings: dict[str, Any], stop: Callable[[], bool], progress: Progress) -> Iterator[Recording]:
        """Measures every number of KV heads that divides the heads, from all down to the fewest, and the latent.

        Raises: ValueError when the model has fewer heads than the fewest KV heads that are asked for.
        """
        heads = preset(settings["preset"]).n_heads
        if settings["kv_heads"] > heads:
            raise ValueError(f"The fewest KV heads are {settings['kv_heads']}, the model has {heads} heads")
        params = {key: settings[key] for key in ("preset", "dtype", "repeats")}
        params |= {
            "kv_heads": [G for G in divisors(heads) if settings["kv_heads"] <= G],
            "latents": [settings["latent"]],
            "batches": [settings["batch"]],
            "contexts": [settings["context"]],
        }
        return super().measure(params, stop, progress)

    def needed_bytes(self, settings: dict[str, Any]) -> float:
        """Returns: memory of a step with as many KV heads as heads."""
        config = preset(settings["preset"], context_length=settings["context"])
        shape = sized_shape(config, "grouped", config.n_heads)
        step = settings["batch"] * (kv_bytes(shape, settings["context"], 1) + 8 * config.d_ff + config.vocab_size)
        return (n_params(shape) + step) * getattr(torch, settings["dtype"]).itemsize

    def draw(self, axes: Axes, recording: Recording) -> None:
        """TPOT against the bytes that a token adds to the cache, and the line of the bytes alone."""
        for kind, name in FAMILIES.items():
            points = [point for point in recording.points if point.at["attention"] == kind]
            kib = [point.at["cache_bytes"] / 1024 for point in points]
            axes.plot(kib, [1e3 * point.median for point in points], label=name)
            for point, x in zip(points, kib, strict=True):
                letter = "G" if kind == "grouped" else "r"
                text = f"{letter} = {point.at['size']}"
                axes.annotate(text, (x, 1e3 * point.median), (0, 7), textcoords="offset points", ha="center")
        first = recording.points[0]
        per_byte = 1e3 * first.median / (first.bytes or 1)
        line = sorted((point.at["cache_bytes"] / 1024, per_byte * (point.bytes or 0)) for point in recording.points)
        axes.plot([x for x, _ in line], [y for _, y in line], marker="", label="proportional to all bytes read")
        axes.set(xlabel="Cache (KiB per token)", ylabel="Time per output token (ms)")
        axes.set_ylim(bottom=0)
        axes.legend()

    def rows(self, recording: Recording) -> list[dict[str, Any]]:
        """Returns: the table: attention, bytes per token, cache of the batch, samples, median, and times the first."""
        table = []
        for point in recording.points:
            at = point.at
            table.append(
                {
                    "Attention": f"{'G' if at['attention'] == 'grouped' else 'r'} = {at['size']}",
                    "Cache (KiB per token)": at["cache_bytes"] / 1024,
                    "Cache of the batch (GB)": float(f"{at['cache_bytes'] * at['batch'] * at['context'] / 1e9:.3g}"),
                    "Samples (ms)": ", ".join(f"{1e3 * s:.3g}" for s in point.samples),
                    "Median (ms)": float(f"{1e3 * point.median:.3g}"),
                    "Times as fast as the first": float(f"{recording.points[0].median / point.median:.3g}"),
                }
            )
        for left in recording.left_out:
            at = left["at"]
            row = dict.fromkeys(table[0], "") if table else {"Attention": "", "Samples (ms)": ""}
            name = f"{'G' if at['attention'] == 'grouped' else 'r'} = {at['size']}"
            table.append({**row, "Attention": name, "Samples (ms)": left["why"]})
        return table
