"""The lab of the chapter on scheduling: a long prompt among running users, on the reader's device."""

from collections.abc import Callable, Iterator
from typing import Any

from matplotlib.axes import Axes

from gptlite.config import PRESETS
from gptlite.notebook.controls import Menu, Slider
from gptlite.notebook.lab import Lab
from gptlite.notebook.labs_phases import doubling, name_ticks, step_bytes
from gptlite.progress import Progress
from gptlite.record import DTYPES, Recording

CONTEXT = 32  # tokens of each running user when the prompt comes
MEASURED = {
    "longest gap": "longest gap of a running user",
    "mean gap": "TPOT of the running users",
    "TTFT": "TTFT of the prompt",
}


class ChunkedPrefillLab(Lab):
    """TPOT of the running users and TTFT of an arriving prompt, by the token budget of a step.

    Args:
        device: that it measures on.
    """

    name = "chunked-prefill"
    title = "A long prompt arrives"
    shrinks = "prompt"
    controls = (
        Menu("preset", "Model", "gptlite", tuple(PRESETS)),
        Slider("running", "Running users", 4, 1, 64, 1),
        Menu("prompt", "Arriving prompt (tokens)", 192, (96, 192, 512, 1024, 2048, 4096, 8192)),
        Slider("budget", "Smallest token budget", 16, 8, 512, 8),
        Menu("dtype", "Number format", "float32", DTYPES),
        Slider("repeats", "Samples per budget", 3, 1, 15, 1),
    )

    def measure(self, settings: dict[str, Any], stop: Callable[[], bool], progress: Progress) -> Iterator[Recording]:
        """Measures the smallest budget, twice it, and so on up to one that holds the whole prompt.

        Raises: ValueError when the budget leaves no token for the prompt, or holds all of it.
        """
        running, prompt, budget = settings["running"], settings["prompt"], settings["budget"]
        if not running < budget < running + prompt:
            raise ValueError(
                f"The token budget is {budget}, it must be above the {running} running users, who take a token each,"
                f" and below {running + prompt}, which is everything at once"
            )
        params = {key: settings[key] for key in ("preset", "running", "prompt", "dtype", "repeats")}
        return super().measure(
            {**params, "context": CONTEXT, "budgets": doubling(budget, running + prompt)}, stop, progress
        )

    def needed_bytes(self, settings: dict[str, Any]) -> float:
        """Returns: memory of a step that reads the whole prompt."""
        n_tokens = settings["prompt"] + CONTEXT
        return step_bytes(settings, settings["running"] + 1, n_tokens, settings["prompt"])

    def draw(self, axes: Axes, recording: Recording) -> None:
        """Both waits against the budget; the largest budget reads the prompt whole."""
        budgets = recording.params["budgets"]
        for what, label in MEASURED.items():
            points = [point for point in recording.points if point.at["what"] == what]
            axes.plot([point.at["budget"] for point in points], [1e3 * point.median for point in points], label=label)
        axes.set(xlabel="Token budget of a step; the last holds the whole prompt", ylabel="Time (ms)")
        axes.set(xscale="log", yscale="log")
        name_ticks(axes, budgets)
        axes.legend()

    def rows(self, recording: Recording) -> list[dict[str, Any]]:
        """Returns: a row per budget."""
        medians = {(point.at["what"], point.at["budget"]): 1e3 * point.median for point in recording.points}
        budgets = dict.fromkeys(point.at["budget"] for point in recording.points)
        measured: list[dict[str, Any]] = [
            {"Token budget": budget}
            | {
                f"{label} (ms)": float(f"{medians.get((what, budget), float('nan')):.3g}")
                for what, label in MEASURED.items()
            }
            for budget in budgets
        ]
        return measured + [
            {"Token budget": left["at"]["budget"]}
            | dict.fromkeys([f"{label} (ms)" for label in MEASURED.values()], left["why"])
            for left in recording.left_out
            if left["at"]["what"] == "TTFT"
        ]
