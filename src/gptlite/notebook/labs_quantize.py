"""The lab of the chapter on quantised weights: the time of one linear layer by format, batch and width."""

from collections.abc import Callable, Iterator
from typing import Any

from matplotlib.axes import Axes

from gptlite.notebook.controls import Menu
from gptlite.notebook.lab import Lab
from gptlite.progress import Progress
from gptlite.record import Recording
from gptlite.sweeps.quantize import FORMATS

ON_CPU: tuple[str, ...] = ("float32", "bfloat16", "int8 weights", "int8 both", "int4", "int4 plain")
ELSEWHERE: tuple[str, ...] = ("float32", "bfloat16", "int8 both", "int4 plain")  # the other kernels are for the CPU


class QuantizedLinearLab(Lab):
    """Time of a square linear layer by the batch, a line for each format of its weights.

    Args:
        device: that it measures on.
    """

    name = "quantized-linear"
    title = "A linear layer by format"
    shrinks = "width"
    controls = (
        Menu("width", "Width (inputs and outputs)", 2048, (512, 1024, 2048, 4096, 8192)),
        Menu("largest", "Largest batch (tokens)", 64, (1, 4, 16, 64, 256)),
        Menu("compare", "Formats", "all", ("all", "plain ways left out")),
        Menu("repeats", "Samples per point", 5, (3, 5, 9, 15)),
    )

    def measure(self, settings: dict[str, Any], stop: Callable[[], bool], progress: Progress) -> Iterator[Recording]:
        """Measures every format at batches 1, 4, 16, ... up to the largest."""
        formats = ON_CPU if self.device.type == "cpu" else ELSEWHERE
        if settings["compare"] != "all":
            formats = tuple(name for name in formats if not name.endswith("plain"))
        params = {
            "formats": list(formats),
            "widths": [settings["width"]],
            "batches": [4**e for e in range(5) if 4**e <= settings["largest"]],
            "repeats": settings["repeats"],
        }
        return super().measure(params, stop, progress)

    def needed_bytes(self, settings: dict[str, Any]) -> float:
        """Returns: memory of the fp32 layer, its codes, and the making of both."""
        return 24 * settings["width"] ** 2 + 64 * settings["largest"] * settings["width"]

    def draw(self, axes: Axes, recording: Recording) -> None:
        """Time by batch on logarithmic axes, a line for each format."""
        for format, name in FORMATS.items():
            points = [point for point in recording.points if point.at["format"] == format]
            if points:
                axes.plot([p.at["batch"] for p in points], [1e3 * p.median for p in points], label=name)
        batches = sorted({point.at["batch"] for point in recording.points})
        axes.set(xlabel="Batch (tokens)", ylabel="Time of the layer (ms)", xscale="log", yscale="log")
        axes.set_xticks(batches, [str(batch) for batch in batches])
        axes.minorticks_off()
        axes.legend()

    def rows(self, recording: Recording) -> list[dict[str, Any]]:
        """Returns: the table: format, batch, bytes of the weight, samples, median, and times as fast as fp32."""
        whole = {p.at["batch"]: p.median for p in recording.points if p.at["format"] == "float32"}
        table = []
        for point in recording.points:
            batch = point.at["batch"]
            table.append(
                {
                    "Format": FORMATS[point.at["format"]],
                    "Batch": batch,
                    "Weight (MB)": float(f"{(point.bytes or 0) / 1e6:.3g}"),
                    "Samples (ms)": ", ".join(f"{1e3 * s:.3g}" for s in point.samples),
                    "Median (ms)": float(f"{1e3 * point.median:.3g}"),
                    "Times as fast as fp32": float(f"{whole[batch] / point.median:.3g}") if batch in whole else "",
                }
            )
        for left in recording.left_out:
            row = dict.fromkeys(table[0], "") if table else {"Format": "", "Batch": "", "Samples (ms)": ""}
            name, batch = FORMATS[left["at"]["format"]], left["at"]["batch"]
            table.append({**row, "Format": name, "Batch": batch, "Samples (ms)": left["why"]})
        return table
