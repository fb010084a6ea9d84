"""The lab of the chapter on batching: throughput against latency on the reader's device."""

from collections.abc import Callable, Iterator
from typing import Any

from matplotlib.axes import Axes

from gptlite.arithmetic import ModelShape, kv_bytes, n_params
from gptlite.config import preset
from gptlite.notebook.controls import Menu, Slider
from gptlite.notebook.explorers_batching import AT_ONCE, rate_in_words
from gptlite.notebook.lab import Lab
from gptlite.notebook.labs_phases import doubling
from gptlite.progress import Progress
from gptlite.record import Recording
from gptlite.sweeps.batching import ANSWERS, PROMPTS


class ServingLab(Lab):
    """Serves mixed requests as they come, once for each largest batch.

    Args:
        device: that it measures on.
    """

    name = "batching"
    title = "Throughput against latency, by the largest batch"
    shrinks = "largest"
    controls = (
        Menu("model", "Model", "gptlite", ("gptlite", "gpt2", "1b")),
        Menu("largest", "Largest batch", 16, tuple(2**e for e in range(9))),
        Slider("rate", f"Arrivals per s ({AT_ONCE:g}: all at once)", 1000.0, 1.0, AT_ONCE, 1.0),
        Slider("requests", "Requests", 24, 8, 256, 8),
    )

    def measure(self, settings: dict[str, Any], stop: Callable[[], bool], progress: Progress) -> Iterator[Recording]:
        """Measures batches of 1, 2, 4 and so on at most, up to the largest."""
        batches = doubling(1, settings["largest"])
        params = {"model": settings["model"], "requests": settings["requests"], "rates": [float(settings["rate"])]}
        return super().measure({**params, "batches": batches}, stop, progress)

    def needed_bytes(self, settings: dict[str, Any]) -> float:
        """Returns: memory of the weights and of the largest batch's keys and values."""
        shape = ModelShape.of(preset(settings["model"]))
        n_tokens = max(PROMPTS) + max(ANSWERS)
        activations = settings["largest"] * max(PROMPTS) * 6 * shape.d_ff + settings["largest"] * shape.vocab_size
        return 4 * (n_params(shape) + activations) + settings["largest"] * kv_bytes(shape, n_tokens, 4)

    def draw(self, axes: Axes, recording: Recording) -> None:
        """Throughput against the TPOT that half of the requests have at most, a point for each largest batch."""
        served = recording.data["served"]
        tpot, rate = [1e3 * one["tpot_p50"] for one in served], [one["throughput"] for one in served]
        axes.plot(tpot, rate, label=f"{recording.params['model']}, {rate_in_words(recording.params['rates'][0])}")
        for one, x, y in zip(served, tpot, rate, strict=True):
            axes.annotate(str(one["batch"]), (x, y), textcoords="offset points", xytext=(6, -10))
        axes.set(xlabel="Median TPOT (ms)", ylabel="Throughput (token/s)", ylim=(0, None))
        axes.legend()

    def rows(self, recording: Recording) -> list[dict[str, Any]]:
        """Returns: the table, with the percentiles of both latencies, the use of the seats, and the step's overhead."""
        rows: list[dict[str, Any]] = [
            {"At most at once": one["batch"], "Steps": one["steps"], "Throughput (token/s)": _digits(one["throughput"])}
            | {f"TTFT, {q} (ms)": _digits(1e3 * one[f"ttft_p{q[:2]}"]) for q in ("50th percentile", "90th percentile")}
            | {f"TPOT, {q} (ms)": _digits(1e3 * one[f"tpot_p{q[:2]}"]) for q in ("50th percentile", "90th percentile")}
            | {
                "Seats in use (%)": round(100 * one["utilisation"]),
                "Outside the model (%)": round(100 * one["overhead"]),
            }
            for one in recording.data["served"]
        ]
        return rows + [{"At most at once": left["at"]["batch"], "Steps": left["why"]} for left in recording.left_out]


def _digits(value: float) -> float:
    """Three digits."""
    return float(f"{value:.3g}")
