"""The lab of the chapter on prefix caching: time to first token by shared prefix, on the reader's device."""

from collections.abc import Callable, Iterator
from typing import Any

from matplotlib.axes import Axes

from gptlite.config import PRESETS
from gptlite.notebook.controls import Menu, Slider
from gptlite.notebook.lab import Lab
from gptlite.notebook.labs_phases import step_bytes
from gptlite.progress import Progress
from gptlite.record import DTYPES, Recording

BLOCK = 16  # tokens


class PrefixLab(Lab):
    """Time to first token of one prompt length, by how much of it the store has.

    Args:
        device: that it measures on.
    """

    name = "prefix"
    title = "Time to first token by shared prefix"
    shrinks = "length"
    controls = (
        Menu("preset", "Model (random weights)", "gpt2", tuple(PRESETS)),
        Menu("length", "Prompt (tokens)", 256, tuple(2**e for e in range(6, 14))),
        Menu("dtype", "Number format", "float32", DTYPES),
        Slider("repeats", "Samples per point", 3, 1, 15, 1),
    )

    def measure(self, settings: dict[str, Any], stop: Callable[[], bool], progress: Progress) -> Iterator[Recording]:
        """Measures a miss, then prompts of which a half, three quarters, seven eighths and so on are in the store."""
        length = settings["length"]
        new = [length]
        while new[-1] > BLOCK:
            new.append(new[-1] // 2)
        return super().measure({**settings, "new": new, "block_size": BLOCK}, stop, progress)

    def needed_bytes(self, settings: dict[str, Any]) -> float:
        """Returns: memory of reading the prompt, with its keys and values in the cache and four times in the store."""
        length = settings["length"]
        return (
            step_bytes(settings, 1, length, length) + step_bytes(settings, 4, length, 1) - step_bytes(settings, 0, 1, 1)
        )

    def draw(self, axes: Axes, recording: Recording) -> None:
        """TTFT against the shared part, beside a line that is proportional to the tokens left to read."""
        shared = [point.at["shared"] for point in recording.points]
        times = [point.median * 1e3 for point in recording.points]
        length = recording.params["length"]
        axes.plot(shared, times, label="TTFT")
        proportional = [times[0] * (length - n) / (length - shared[0]) for n in shared]
        axes.plot(shared, proportional, marker="", label="proportional to the tokens read")
        axes.set(xlabel="Shared prefix (tokens)", ylabel="Time to first token (ms)")
        axes.set_ylim(bottom=0)
        axes.legend()

    def rows(self, recording: Recording) -> list[dict[str, Any]]:
        """Returns: the table, with how many times shorter than a miss each hit is."""
        length = recording.params["length"]
        measured: list[dict[str, Any]] = [
            {
                "Shared (tokens)": point.at["shared"],
                "Read (tokens)": length - point.at["shared"],
                "Samples (ms)": ", ".join(f"{1e3 * s:.3g}" for s in point.samples),
                "Median (ms)": float(f"{1e3 * point.median:.3g}"),
                "Times shorter": float(f"{recording.points[0].median / point.median:.3g}"),
            }
            for point in recording.points
        ]
        return measured + [
            {"Shared (tokens)": left["at"]["shared"], "Read (tokens)": length - left["at"]["shared"]}
            | {"Samples (ms)": left["why"], "Median (ms)": "", "Times shorter": ""}
            for left in recording.left_out
        ]
