"""The labs of the chapters."""

import html
import time
from collections.abc import Callable, Iterator
from statistics import median
from typing import Any

from matplotlib.axes import Axes

from gptlite.data import CharTokenizer
from gptlite.generate import stream
from gptlite.model import GPTlite
from gptlite.notebook.controls import Slider, Text
from gptlite.notebook.lab import Lab, new_recording
from gptlite.progress import Progress
from gptlite.record import Point, Recording
from gptlite.sampling import SamplingParams


class GenerationLab(Lab):
    """Text from a model, character by character, with the time that each one takes.

    Args:
        model: in eval mode, on the device that the lab measures.
        tokenizer: its characters.
    """

    name = "generation"
    title = "Time per character"

    def __init__(self, model: GPTlite, tokenizer: CharTokenizer) -> None:
        self.model, self.tokenizer = model, tokenizer
        self.prompt, self.text = "", ""
        V = tokenizer.vocab_size
        self.controls = (
            Text("prompt", "Prompt", "ROMEO:\n"),
            Slider("temperature", "Temperature", 0.8, 0.0, 2.0, 0.05),
            Slider("top_k", "Top-k (characters)", V, 1, V, 1),
            Slider("top_p", "Top-p", 1.0, 0.01, 1.0, 0.01),
            Slider("n_new", "Length (characters)", 200, 1, 1000, 1),
            Slider("seed", "Seed", 0, 0, 100, 1),
        )
        super().__init__(next(model.parameters()).device)

    def measure(self, settings: dict[str, Any], stop: Callable[[], bool], progress: Progress) -> Iterator[Recording]:
        """Generates with the plain loop, which reads the whole text again for each character.

        Raises: ValueError when the prompt is empty or has a character that the model does not know.
        """
        self.prompt, self.text = settings["prompt"], ""
        if not self.prompt:
            raise ValueError("The prompt is empty: type at least one character")
        tokens = self.tokenizer.encode(self.prompt)[None].to(self.device)  # [1, n]
        params = SamplingParams(settings["temperature"], settings["top_k"], settings["top_p"])
        n_new = progress.total = settings["n_new"]
        recording = new_recording(self.name, settings, self.device)
        start = time.perf_counter()
        for i, new in enumerate(stream(self.model, tokens, n_new, params, overflow="slide", seed=settings["seed"])):
            self.text += self.tokenizer.decode(new)  # reads the token, and so waits for the device
            recording.points.append(Point({"context": tokens.shape[1] + i}, [time.perf_counter() - start]))
            recording.complete = i + 1 == n_new
            progress.update(i + 1, f"{self._rate(recording):.0f} characters/s")
            yield recording
            start = time.perf_counter()  # what the lab draws in between is not the model's time

    def extra(self) -> str:
        """Returns: the prompt, in bold, and the text after it."""
        if not self.text:
            return ""
        text = f"<strong>{html.escape(self.prompt)}</strong>{html.escape(self.text)}"
        look = "white-space: pre-wrap; max-height: 20em; overflow: auto"
        return f'<pre class="gptlite-text" style="{look}" tabindex="0">{text}</pre>'

    def draw(self, axes: Axes, recording: Recording) -> None:
        """The time of each character against the text before it."""
        axes.plot(
            [point.at["context"] for point in recording.points],
            [point.median * 1e3 for point in recording.points],
            linestyle="none",
            markersize=3,
        )
        axes.set(xlabel="Text before it (characters)", ylabel="Time (ms)")
        axes.set_ylim(bottom=0)

    def rows(self, recording: Recording) -> list[dict[str, Any]]:
        """Returns: one row of the whole run."""
        times = [point.median * 1e3 for point in recording.points]
        return [
            {
                "Characters": len(times),
                "Characters/s": round(self._rate(recording), 1),
                "Fastest (ms)": round(min(times), 3),
                "Median (ms)": round(median(times), 3),
                "Slowest (ms)": round(max(times), 3),
                "Device": self._machine(),
            }
        ]

    @staticmethod
    def _rate(recording: Recording) -> float:
        return len(recording.points) / sum(point.median for point in recording.points)
