"""The lab of the chapter on drafting without a draft model: any drafter, on the reader's own prompt and device."""

from collections.abc import Callable, Iterator
from typing import Any

import torch
from matplotlib.axes import Axes

from gptlite.arithmetic import ModelShape, kv_bytes, n_params
from gptlite.checkpoint import load, read_card
from gptlite.config import GPTConfig
from gptlite.notebook.controls import Menu, Slider, Text
from gptlite.notebook.explorers_drafting import drafter_rows
from gptlite.notebook.lab import Lab
from gptlite.progress import Progress
from gptlite.record import Recording
from gptlite.speculative.catalog import DRAFTERS
from gptlite.sweeps.drafting import REPEATING

ALL = "all of them"


class DraftingLab(Lab):
    """Tokens per round and speed-up of one drafter or of all, after a prompt of the reader's own.

    Args:
        device: that it measures on.
    """

    name = "drafting"
    title = "Drafters after a prompt"
    shrinks = "batch"
    controls = (
        Text("prompt", "Prompt", REPEATING),
        Menu("drafter", "Drafter", ALL, (ALL, *DRAFTERS)),
        Slider("n_draft", "Drafts per round (γ)", 4, 1, 8, 1),
        Slider("temperature", "Temperature", 0.0, 0.0, 2.0, 0.1),
        Menu("batch", "Batch (sequences)", 1, tuple(2**e for e in range(6))),
        Slider("n_new", "New tokens per sequence", 48, 16, 160, 16),
        Slider("repeats", "Samples per point", 1, 1, 9, 1),
    )

    def measure(self, settings: dict[str, Any], stop: Callable[[], bool], progress: Progress) -> Iterator[Recording]:
        """Measures the plain loop and then the drafters.

        Raises: ValueError when the prompt is empty, has a character that the model does not know, or is too long.
        """
        _, tokenizer = load("gptlite")
        n = len(tokenizer.encode(settings["prompt"]))
        context = GPTConfig.from_dict(read_card("gptlite")["config"]).context_length
        if not n or n + settings["n_new"] > context:
            raise ValueError(f"The prompt has {n} characters; with the new ones it must have 1 to {context}")
        params = {key: settings[key] for key in ("prompt", "n_draft", "n_new", "repeats")}
        params |= {
            "drafters": list(DRAFTERS) if settings["drafter"] == ALL else [settings["drafter"]],
            "temperatures": [settings["temperature"]],
            "batches": [settings["batch"]],
        }
        return super().measure(params, stop, progress)

    def needed_bytes(self, settings: dict[str, Any]) -> float:
        """Returns: memory of the model, the draft model, the caches of both and a pass over all drafts, in fp32."""
        total = 0.0
        for name in ("gptlite", "draft"):
            shape = ModelShape.of(GPTConfig.from_dict(read_card(name)["config"]))
            step = 16 * (6 * shape.d_ff + 4 * shape.vocab_size)
            total += n_params(shape) + settings["batch"] * (kv_bytes(shape, 256, 1) + step)
        return total * torch.float32.itemsize

    def draw(self, axes: Axes, recording: Recording) -> None:
        """Tokens per round and speed-up, a pair of bars for each drafter."""
        rows = drafter_rows([recording])
        places = list(range(len(rows)))
        axes.barh([p - 0.2 for p in places], [row["tokens"] for row in rows], 0.38, label="tokens per round")
        speeds = [row["speedup"] for row in rows]
        axes.barh([p + 0.2 for p in places], speeds, 0.38, hatch="//", label="speed-up (times)")
        axes.axvline(1, color="gray", linestyle="--")
        axes.set_yticks(places, [row["drafter"] for row in rows])
        axes.invert_yaxis()
        axes.set(xlabel="Tokens per round, speed-up (times)", ylabel="Drafter")
        axes.legend()

    def rows(self, recording: Recording) -> list[dict[str, Any]]:
        """Returns: the table: drafter, tokens per round, acceptance, the shares of a round, samples and speed-up."""
        found = {row["drafter"]: row for row in drafter_rows([recording])}
        table = []
        for point in recording.points:
            name, row = point.at["drafter"], found.get(point.at["drafter"])
            line: dict[str, Any] = {"Drafter": name, "Tokens per round": 1.0, "Acceptance": "", "Drafting (steps)": ""}
            line |= {"Rest of a round (steps)": "", "Speed-up (times)": 1.0}
            if row:
                line |= {"Tokens per round": round(row["tokens"], 2), "Drafting (steps)": round(row["overhead"], 2)}
                line |= {"Rest of a round (steps)": round(row["verify"], 2)}
                line |= {"Speed-up (times)": round(row["speedup"], 2)}
                line["Acceptance"] = "" if row["acceptance"] is None else round(row["acceptance"], 2)
            line["Samples (ms)"] = ", ".join(f"{1e3 * s:.3g}" for s in point.samples)
            table.append(line)
        return table + [{"Drafter": left["at"]["drafter"], "Samples (ms)": left["why"]} for left in recording.left_out]
