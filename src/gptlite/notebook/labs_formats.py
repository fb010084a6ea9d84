"""The lab of the chapter on number formats: error, bits, and time of coding, for a tensor of the reader's choice."""

from collections.abc import Callable, Iterator
from typing import Any

from matplotlib.axes import Axes

from gptlite.notebook.controls import Menu, Slider
from gptlite.notebook.lab import Lab
from gptlite.progress import Progress
from gptlite.record import Recording
from gptlite.sweeps.formats import TENSORS

QUANTITIES = ("error", "time")
GROUPS = ("own", "8", "16", "32", "64", "128", "256")


class FormatLab(Lab):
    """Every number format on one tensor: signal-to-noise ratio against bits, and nanoseconds per value.

    Args:
        device: that it measures on.
    """

    name = "formats"
    title = "Number formats on a tensor"
    shrinks = "n_values"
    _shown = QUANTITIES[0]
    controls = (
        Menu("tensor", "Tensor", "weights", TENSORS),
        Menu("group", "Values that share a scale", "own", GROUPS),
        Menu("n_values", "Values", 65_536, tuple(4**e for e in range(7, 13))),
        Menu("shown", "Drawn", QUANTITIES[0], QUANTITIES),
        Slider("repeats", "Samples per point", 3, 1, 15, 1),
    )

    def measure(self, settings: dict[str, Any], stop: Callable[[], bool], progress: Progress) -> Iterator[Recording]:
        """Measures each format, encoding and decoding."""
        self._shown = settings["shown"]
        params = {key: settings[key] for key in ("tensor", "group", "n_values", "repeats")}
        return super().measure(params, stop, progress)

    def needed_bytes(self, settings: dict[str, Any]) -> float:
        """Returns: memory of the values and of what encoding makes of them."""
        return 48.0 * settings["n_values"]

    def draw(self, axes: Axes, recording: Recording) -> None:
        """The error of each format against its bits, or the time of both directions."""
        rows = recording.data["formats"]
        if self._shown == "error":
            known = sorted((row["snr"], kind) for kind, row in rows.items() if row["snr"] is not None)
            close = [kind for _, kind in known if rows[kind]["bits"] < 6]  # their names would lie on one another
            for ratio, kind in known:
                axes.plot(rows[kind]["bits"], ratio, linestyle="")
                below = 7 * (close.index(kind) - len(close) / 2) if kind in close else 0
                axes.annotate(kind, (rows[kind]["bits"], ratio), (8, below), textcoords="offset points")
            axes.set(xlabel="Bits per value, scales included", ylabel="Signal-to-noise ratio (dB)", xlim=(3, 18))
            return
        for what in ("encode", "decode"):
            points = [point for point in recording.points if point.at["what"] == what]
            times = [1e9 * point.median / recording.params["n_values"] for point in points]
            axes.plot([point.at["format"] for point in points], times, label=what)
        axes.set(xlabel="Format", ylabel="Time per value (ns)", yscale="log")
        axes.tick_params(axis="x", rotation=30)
        axes.legend()

    def rows(self, recording: Recording) -> list[dict[str, Any]]:
        """Returns: the table of every format: bits, error, and the time of each direction."""
        times = {(point.at["format"], point.at["what"]): point.median for point in recording.points}
        n_values = recording.params["n_values"]

        def of(kind: str, what: str) -> float | str:
            seconds = times.get((kind, what))
            return "" if seconds is None else float(f"{1e9 * seconds / n_values:.3g}")

        return [
            {
                "Format": kind,
                "Bits per value": round(row["bits"], 3),
                "Signal to noise (dB)": "exact" if row["snr"] is None else round(row["snr"], 1),
                "Encode (ns per value)": of(kind, "encode"),
                "Decode (ns per value)": of(kind, "decode"),
            }
            for kind, row in recording.data["formats"].items()
        ]
