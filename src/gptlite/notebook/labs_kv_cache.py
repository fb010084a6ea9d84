"""The lab of the chapter on the KV cache: the time of a token by its position, with no cache and with two kinds."""

from collections.abc import Callable, Iterator
from typing import Any

from matplotlib.axes import Axes

from gptlite.arithmetic import ModelShape, kv_bytes
from gptlite.config import PRESETS, preset
from gptlite.notebook.controls import Menu, Slider
from gptlite.notebook.explorers_kv_cache import NAMES
from gptlite.notebook.lab import Lab
from gptlite.notebook.labs_phases import doubling, name_ticks, step_bytes
from gptlite.progress import Progress
from gptlite.record import DTYPES, Recording

SHORTEST = 32  # tokens, the first position that is measured


class CacheLab(Lab):
    """Time of the next token by its position, without a cache, with a dynamic and with a static one.

    Args:
        device: that it measures on.
    """

    name = "kv-cache"
    title = "Time per token by position"
    shrinks = "longest"
    controls = (
        Menu("preset", "Model (random weights)", "gpt2", tuple(PRESETS)),
        Menu("longest", "Last position (tokens)", 256, tuple(2**e for e in range(5, 14))),
        Slider("batch", "Batch (sequences)", 1, 1, 32, 1),
        Menu("dtype", "Number format", "float32", DTYPES),
        Slider("repeats", "Samples per point", 3, 1, 15, 1),
    )

    def measure(self, settings: dict[str, Any], stop: Callable[[], bool], progress: Progress) -> Iterator[Recording]:
        """Measures positions 32, 64, 128 and so on up to the last one."""
        positions = doubling(SHORTEST, settings["longest"])
        params = {key: value for key, value in settings.items() if key != "longest"}
        return super().measure({**params, "positions": positions}, stop, progress)

    def needed_bytes(self, settings: dict[str, Any]) -> float:
        """Returns: memory of reading the whole batch again at the last position, beside two caches of it."""
        batch, longest = settings["batch"], settings["longest"]
        caches = 2 * batch * kv_bytes(ModelShape.of(preset(settings["preset"])), longest, 4)
        return step_bytes(settings, batch, longest, longest) + caches

    def draw(self, axes: Axes, recording: Recording) -> None:
        """Time against position, a line for each way, and a line that is proportional to the position."""
        for kind, name in NAMES.items():
            points = [point for point in recording.points if point.at["cache"] == kind]
            positions, times = [point.at["position"] for point in points], [point.median * 1e3 for point in points]
            axes.plot(positions, times, label=name)
            if kind == "none" and points:
                line = [times[-1] * n / positions[-1] for n in positions]
                axes.plot(positions, line, marker="", label="proportional to the position")
        axes.set(xlabel="Position of the token", ylabel="Time of the token (ms)", xscale="log", yscale="log")
        name_ticks(axes, sorted({point.at["position"] for point in recording.points}))
        axes.legend()

    def rows(self, recording: Recording) -> list[dict[str, Any]]:
        """Returns: the table: a row for each position, and how many times as long it takes without a cache."""
        at = {(point.at["position"], point.at["cache"]): point for point in recording.points}
        why = {(left["at"]["position"], left["at"]["cache"]): left["why"] for left in recording.left_out}
        table = []
        for position in dict.fromkeys(n for n, _ in (*at, *why)):
            row: dict[str, Any] = {"Position": position}
            for kind, name in NAMES.items():
                point = at.get((position, kind))
                samples = ", ".join(f"{1e3 * s:.3g}" for s in point.samples) if point else why.get((position, kind), "")
                row[f"{name}: samples (ms)"] = samples
                row[f"{name}: median (ms)"] = float(f"{1e3 * point.median:.3g}") if point else ""
            none, static = at.get((position, "none")), at.get((position, "static"))
            ratio = float(f"{none.median / static.median:.3g}") if none and static else ""
            table.append({**row, "no cache over static (times)": ratio})
        return table
