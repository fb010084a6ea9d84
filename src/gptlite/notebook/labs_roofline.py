"""The lab of the chapter on the roofline, and the box that does its arithmetic for any model."""

import html
import json
from collections.abc import Callable, Iterator
from typing import Any

import ipywidgets as widgets
import torch
from matplotlib.axes import Axes
from matplotlib.ticker import LogLocator, NullFormatter

from gptlite.arithmetic import (
    ModelShape,
    crossover_last_token,
    crossover_prefill,
    decode_costs,
    kv_bytes,
    kv_bytes_per_token,
    largest_batch,
    n_params,
    shipped_models,
    step_bound,
    total,
)
from gptlite.config import preset
from gptlite.hardware import gpu, gpus
from gptlite.notebook.controls import Control, Menu, Slider, Text, live_view
from gptlite.notebook.explorers_roofline import measured_roof, step_in_words
from gptlite.notebook.lab import LIVE, Lab
from gptlite.notebook.tables import Table
from gptlite.progress import Progress
from gptlite.record import Point, Recording, run_sweep

KINDS = {"batch": ("decode", "#0072B2", "o"), "length": ("prefill", "#D55E00", "s")}  # by what a point varies last


class RooflineLab(Lab):
    """The reader's own roof, from a matrix product and a copy, with decode steps and prefills of a model below it."""

    name = "roofline"
    title = "Roofline"
    shrinks = "batch"
    controls: tuple[Control, ...] = (
        Menu("preset", "Model (random weights)", "gpt2", ("nano", "gptlite", "gpt2", "1b", "7b")),
        Menu("dtype", "Number format", "float32", ("float32", "bfloat16", "float16")),
        Menu("batch", "Largest batch (sequences)", 16, (1, 4, 16, 64, 256)),
        Slider("context", "Context (tokens)", 256, 64, 4096, 64),
    )

    def measure(self, settings: dict[str, Any], stop: Callable[[], bool], progress: Progress) -> Iterator[Recording]:
        """The sweep `roofline`: decode steps at 1, 4, 16 ... sequences, prefills of the context and an eighth of it."""
        context = settings["context"]
        return run_sweep(
            self.name,
            stop,
            progress,
            device=str(self.device),
            dtype=settings["dtype"],
            preset=settings["preset"],
            batches=[4**e for e in range(5) if 4**e <= settings["batch"]],
            contexts=[context],
            lengths=[context // 8, context],
        )

    def needed_bytes(self, settings: dict[str, Any]) -> float:
        """Returns: bytes of the weights, twice, and of the largest cache; the sweep checks each point again."""
        shape = ModelShape.of(preset(settings["preset"], context_length=settings["context"]))
        width = getattr(torch, settings["dtype"]).itemsize
        return 2 * n_params(shape) * width + settings["batch"] * kv_bytes(shape, settings["context"], width)

    def draw(self, axes: Axes, recording: Recording) -> None:
        """Rate against work per byte, both logarithmic: the measured roof, and what each step reached."""
        peak, bandwidth = measured_roof(recording)
        ends = (0.1, 10_000.0)
        if peak and bandwidth:
            at = sorted({*ends, peak / bandwidth})
            axes.plot(
                at, [min(peak, bandwidth * x) / 1e9 for x in at],
                color="#E69F00", marker="", linestyle="-", label=f"roof, ridge point {peak / bandwidth:.1f} FLOP/B",
            )  # fmt: skip
        for kind, (phase, colour, marker) in KINDS.items():
            points = [point for point in recording.points if _kind(point) == kind]
            if points:
                axes.plot(
                    [_intensity(point) for point in points], [_rate(point) for point in points],
                    linestyle="none", color=colour, marker=marker, label=phase,
                )  # fmt: skip
            for point in points:
                words = f"{point.at[kind]}" + ("" if kind == "batch" else " tokens")
                axes.annotate(words, (_intensity(point), _rate(point)), xytext=(6, -10), textcoords="offset points")
        axes.set(xscale="log", yscale="log", xlim=ends, xlabel="Work per byte (FLOP/B)", ylabel="Rate (GFLOP/s)")
        axes.yaxis.set_major_locator(LogLocator(subs=(1, 2, 5)))
        for axis in (axes.xaxis, axes.yaxis):
            axis.set_major_formatter("{x:,g}")
            axis.set_minor_formatter(NullFormatter())
        if axes.get_legend_handles_labels()[0]:
            axes.legend(loc="lower right")

    def rows(self, recording: Recording) -> list[dict[str, Any]]:
        """Returns: for each point its work per byte, what it reached, and its share of what the roof allows."""
        peak, bandwidth = measured_roof(recording)
        rows = []
        for point in recording.points:
            work, rate, share = "", "", ""
            if point.flops and point.bytes:
                work, rate = f"{_intensity(point):.2f}", f"{_rate(point):.1f}"
                if peak and bandwidth:
                    share = f"{100 * _rate(point) * 1e9 / min(peak, bandwidth * _intensity(point)):.0f}"
            elif point.flops:
                rate = f"{_rate(point):.1f}"
            rows.append(
                {
                    "Step": step_in_words(point.at),
                    "Work per byte (FLOP/B)": work,
                    "Rate (GFLOP/s)": rate,
                    "Bandwidth (GB/s)": f"{point.bytes / point.median / 1e9:.1f}" if point.bytes else "",
                    "Of the roof (%)": share,
                    "Median (ms)": f"{point.median * 1e3:.3g}",
                    "Samples (ms)": ", ".join(f"{s * 1e3:.3g}" for s in point.samples),
                }
            )
        empty = dict.fromkeys(list(rows[0])[1:-1], "")
        return rows + [
            {"Step": step_in_words(left["at"]), **empty, "Samples (ms)": left["why"]} for left in recording.left_out
        ]


def _kind(point: Point) -> str:
    return "length" if "length" in point.at else "batch" if "batch" in point.at else ""


def _intensity(point: Point) -> float:
    return (point.flops or 0) / (point.bytes or 1)


def _rate(point: Point) -> float:
    """GFLOP/s at the median."""
    return (point.flops or 0) / point.median / 1e9


def model_rows(shape: ModelShape, card: str, n_context: int, batch: int) -> list[dict[str, Any]]:
    """The arithmetic of this chapter for one model on one GPU, in 16 bits, as rows of a table.

    Args:
        card: name in the book's table of GPUs.
        n_context: tokens of each sequence. batch: sequences of the decode step.
    """
    machine = gpu(card)
    cost = total(decode_costs(shape, batch, n_context))
    seconds, limit = step_bound(cost, machine.peak_flops, machine.bandwidth)
    fits = largest_batch(shape, n_context, machine.memory_bytes)
    values = {
        "Attention": f"{shape.kind}, {shape.n_heads} query heads to {shape.n_kv_heads} KV heads"
        if not shape.d_latent
        else f"MLA, a latent of {shape.d_latent} + {shape.d_rope} for {shape.n_heads} heads",
        "Parameters (billions)": f"{n_params(shape) / 1e9:.2f}",
        "Weights (GB)": f"{2 * n_params(shape) / 1e9:.1f}",
        "Keys and values (KiB per token)": f"{kv_bytes_per_token(shape) / 1024:.1f}",
        f"Keys and values of {n_context:,} tokens (GB)": f"{kv_bytes(shape, n_context) / 1e9:.2f}",
        f"Largest batch on {card} (sequences)": f"{fits:,}",
        f"Decode step of batch {batch}: work per byte (FLOP/B)": f"{cost.intensity:.1f}",
        f"Decode step of batch {batch}: least time (ms)": f"{1e3 * seconds:.2f}, limited by {limit}",
    }
    if not (shape.n_experts or shape.d_latent or shape.n_sliding):
        ends = f"{crossover_prefill(shape):,.0f} and {crossover_last_token(shape):,.0f}"
        values["Attention is half of a prompt's, and of its last token's work (tokens)"] = ends
    return [{"What": what, "Value": value} for what, value in values.items()]


class ModelBox:
    """A picker of shipped models and a box for the reader's own `config.json`; as a cell's last value it shows itself.

    Args:
        model, card: the choices at first, by the book's names.
    """

    def __init__(self, model: str = "Llama 3.1 8B", card: str = "H100 SXM") -> None:
        self.controls: tuple[Control, ...] = (
            Menu("model", "Model", model, tuple(shipped_models())),
            Text("config", "Or your config.json", ""),
            Menu("card", "GPU", card, tuple(gpus())),
            Slider("context", "Context (tokens)", 4096, 1024, 131_072, 1024),
            Slider("batch", "Batch (sequences)", 16, 1, 512, 1),
        )
        self.inputs = {control.name: control.widget() for control in self.controls}
        self.inputs["config"].placeholder = 'paste it here: {"hidden_size": 4096, ...}'
        self._table = widgets.HTML()
        self.box = widgets.VBox([*self.inputs.values(), self._table])
        for widget in self.inputs.values():
            widget.observe(lambda _: self._refresh(), "value")
        self._refresh()

    def table(self) -> Table:
        """Returns: the arithmetic of the model that is chosen, or pasted. Raises: ValueError on a bad config."""
        values = {name: widget.value for name, widget in self.inputs.items()}
        name, shape = values["model"], shipped_models()[values["model"]]
        if values["config"].strip():
            try:
                name, config = "your model", json.loads(values["config"])
            except (json.JSONDecodeError, RecursionError) as error:
                raise ValueError(f"this is not JSON: {error}") from None
            shape = ModelShape.of(config)
        rows = model_rows(shape, values["card"], values["context"], values["batch"])
        return Table(rows, f"{name} in 16 bits, with a tenth of the memory of {values['card']} kept free")

    def _refresh(self) -> None:
        try:
            self._table.value = self.table()._repr_html_()
        except ValueError as error:
            self._table.value = f'<p role="alert">{html.escape(str(error))}</p>'

    def __repr__(self) -> str:
        return repr(self.table())

    def _repr_mimebundle_(self, include: Any = None, exclude: Any = None) -> dict[str, Any]:
        note = f'<p class="gptlite-lab-note">{html.escape(LIVE)}</p>'
        return {
            **live_view(self.box),
            "text/html": f'<section class="gptlite-lab" aria-label="Any model">{note}{self._table.value}</section>',
            "text/plain": repr(self),
        }
