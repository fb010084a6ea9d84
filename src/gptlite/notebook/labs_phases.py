"""The labs of the chapter on prefill and decode: both phases on the reader's device."""

from collections.abc import Callable, Iterator, Sequence
from statistics import median
from typing import Any

import torch
from matplotlib.axes import Axes

from gptlite.arithmetic import ModelShape, kv_bytes, n_params
from gptlite.config import PRESETS, preset
from gptlite.notebook.controls import Menu, Slider
from gptlite.notebook.lab import Lab
from gptlite.progress import Progress
from gptlite.record import DTYPES, Recording

_MODEL = Menu("preset", "Model (random weights)", "gpt2", tuple(PRESETS))
_DTYPE = Menu("dtype", "Number format", "float32", DTYPES)


def doubling(first: int, last: int) -> list[int]:
    """first, 2 first, 4 first, ... up to last, which ends the list whatever it is."""
    values = [first]
    while 2 * values[-1] < last:
        values.append(2 * values[-1])
    return values if values[-1] == last else [*values, last]


def step_bytes(settings: dict[str, Any], batch: int, n_tokens: int, n_new: int) -> float:
    """Memory that a step takes at most, in bytes: weights, keys and values, activations and logits."""
    shape = ModelShape.of(preset(settings["preset"], context_length=n_tokens))
    width = getattr(torch, settings["dtype"]).itemsize
    activations = batch * (n_new * 6 * shape.d_ff + shape.vocab_size)
    return n_params(shape) * width + batch * kv_bytes(shape, n_tokens, width) + activations * width


def name_ticks(axes: Axes, values: Sequence[int]) -> None:
    """Names the measured values on a logarithmic x axis, and no others."""
    axes.set_xticks(values, [f"{value:,}" for value in values])
    axes.set_xticks([], minor=True)


class PrefillLab(Lab):
    """Time to first token by the length of the prompt.

    Args:
        device: that it measures on.
    """

    name = "prefill"
    title = "Prefill by prompt length"
    shrinks = "longest"
    controls = (
        _MODEL,
        Menu("longest", "Longest prompt (tokens)", 256, tuple(2**e for e in range(5, 14))),
        Menu("batch", "Batch (prompts)", 1, (1, 2, 4, 8)),
        _DTYPE,
        Slider("repeats", "Samples per point", 3, 1, 15, 1),
    )

    def measure(self, settings: dict[str, Any], stop: Callable[[], bool], progress: Progress) -> Iterator[Recording]:
        """Measures prompts of 16 tokens, 32, 64 and so on up to the longest."""
        lengths = doubling(16, settings["longest"])
        params = {key: value for key, value in settings.items() if key != "longest"}
        return super().measure({**params, "lengths": lengths}, stop, progress)

    def needed_bytes(self, settings: dict[str, Any]) -> float:
        """Returns: memory of the longest prompts' prefill."""
        return step_bytes(settings, settings["batch"], settings["longest"], settings["longest"])

    def draw(self, axes: Axes, recording: Recording) -> None:
        """TTFT against the prompt's length, beside a line that is proportional to it."""
        lengths = [point.at["length"] for point in recording.points]
        times = [point.median * 1e3 for point in recording.points]
        axes.plot(lengths, times, label="TTFT")
        axes.plot(
            lengths,
            [times[-1] * length / lengths[-1] for length in lengths],
            marker="",
            label="proportional to the length",
        )
        axes.set(xlabel="Prompt (tokens)", ylabel="Time to first token (ms)", xscale="log", yscale="log")
        name_ticks(axes, lengths)
        axes.legend()

    def rows(self, recording: Recording) -> list[dict[str, Any]]:
        """Returns: the table, with the rate at which the prompt's tokens are read."""
        return _rows(recording, lambda at: at["batch"] * at["length"], "Tokens read per s")


class DecodeLab(Lab):
    """Time per output token by batch size, at a short and at a long context.

    Args:
        device: that it measures on.
    """

    name = "decode"
    title = "Decode by batch and context"
    shrinks = "largest"
    controls = (
        _MODEL,
        Menu("largest", "Largest batch (sequences)", 8, tuple(2**e for e in range(9))),
        Menu("short", "Short context (tokens)", 64, (32, 64, 128, 256, 512)),
        Menu("long", "Long context (tokens)", 1024, tuple(2**e for e in range(6, 15))),
        _DTYPE,
        Slider("repeats", "Samples per point", 5, 1, 25, 1),
    )

    def measure(self, settings: dict[str, Any], stop: Callable[[], bool], progress: Progress) -> Iterator[Recording]:
        """Measures batches of 1, 2, 4 and so on up to the largest, at both contexts.

        Raises: ValueError when the long context isn't the longer one.
        """
        if settings["long"] <= settings["short"]:
            raise ValueError(f"The long context is {settings['long']}, it must be above the short one")
        return super().measure(
            {key: settings[key] for key in ("preset", "dtype", "repeats")}
            | {"batches": doubling(1, settings["largest"]), "contexts": [settings["short"], settings["long"]]},
            stop,
            progress,
        )

    def needed_bytes(self, settings: dict[str, Any]) -> float:
        """Returns: memory of a step of the largest batch at the longer context."""
        return step_bytes(settings, settings["largest"], max(settings["short"], settings["long"]), 1)

    def draw(self, axes: Axes, recording: Recording) -> None:
        """TPOT against the batch, a line for each context; and what it would be if each sequence ran alone."""
        contexts = dict.fromkeys(point.at["context"] for point in recording.points)
        for context in contexts:
            points = [point for point in recording.points if point.at["context"] == context]
            batches, times = [point.at["batch"] for point in points], [point.median * 1e3 for point in points]
            axes.plot(batches, times, label=f"context {context:,}")
            if context == min(contexts):
                apart = [times[0] * batch / batches[0] for batch in batches]
                axes.plot(batches, apart, marker="", label="one after the other")
        axes.set(xlabel="Batch (sequences)", ylabel="Time per output token (ms)")
        axes.set(xscale="log", yscale="log")
        name_ticks(axes, sorted({point.at["batch"] for point in recording.points}))
        axes.legend()

    def rows(self, recording: Recording) -> list[dict[str, Any]]:
        """Returns: the table, with the throughput of the whole batch."""
        return _rows(recording, lambda at: at["batch"], "Throughput (token/s)")


def _rows(recording: Recording, tokens: Callable[[dict[str, Any]], int], rate: str) -> list[dict[str, Any]]:
    """What was varied, every sample, their median, and tokens per second by it."""
    names = {"batch": "Batch", "length": "Prompt (tokens)", "context": "Context (tokens)"}
    measured: list[dict[str, Any]] = [
        {names[key]: value for key, value in point.at.items()}
        | {"Samples (ms)": ", ".join(map(_ms, point.samples))}
        | {"Median (ms)": float(f"{1e3 * median(point.samples):.3g}")}
        | {rate: float(f"{tokens(point.at) / point.median:.3g}")}
        for point in recording.points
    ]
    return measured + [
        {names[key]: value for key, value in left["at"].items()}
        | {"Samples (ms)": left["why"], "Median (ms)": "", rate: ""}
        for left in recording.left_out
    ]


def _ms(seconds: float) -> str:
    """Seconds in ms, with three digits at least."""
    return f"{1e3 * seconds:,.0f}" if seconds >= 1 else f"{1e3 * seconds:.3g}"
