"""The labs of the chapter on semantic caching: your own questions, and lookups among many entries."""

import textwrap
import time
from collections.abc import Callable, Iterator
from typing import Any

from matplotlib.axes import Axes

from gptlite.notebook.controls import Menu, Slider, Text
from gptlite.notebook.lab import Lab, new_recording
from gptlite.notebook.labs_phases import doubling, name_ticks
from gptlite.notebook.style import OKABE_ITO
from gptlite.progress import Progress
from gptlite.record import Point, Recording
from gptlite.semantic.cache import THRESHOLD, SemanticCache
from gptlite.semantic.check import objection
from gptlite.semantic.embed import MiniLM
from gptlite.semantic.index import KINDS

CACHED = """How do I reset my password?
How do I delete a file in Python?
What is the capital of Australia?
How do I cook rice for 4 people?"""
ASKED = """What do I do when I forgot my password?
What is the way to remove a file with Python?
How do I delete a folder in Python?
Which city is Australia's capital?
How do I cook rice for 6 people?
What is the meaning of life?"""


class QuestionsLab(Lab):
    """Which of your own questions hit, how similar they are, and how long a lookup takes.

    Args:
        device: that the embeddings are computed on.
    """

    name = "semantic-questions"
    title = "Your own questions"
    controls = (
        Text("cached", "Answered before (one a line)", CACHED),
        Text("asked", "Asked now (one a line)", ASKED),
        Slider("threshold", "Threshold", THRESHOLD, 0.5, 0.99, 0.01),
        Menu("check", "Cross-check", "on", ("on", "off")),
        Menu("index", "Index", "flat", KINDS),
        Slider("repeats", "Samples per question", 5, 1, 25, 1),
    )
    embed: MiniLM | None = None

    def measure(self, settings: dict[str, Any], stop: Callable[[], bool], progress: Progress) -> Iterator[Recording]:
        """Looks each question up, several times.

        Raises: ValueError when one of the two boxes is empty.
        """
        cached, asked = (
            [line.strip() for line in settings[name].splitlines() if line.strip()] for name in ("cached", "asked")
        )
        for name, lines in (("Answered before", cached), ("Asked now", asked)):
            if not lines:
                raise ValueError(f"{name} is empty: write a question on each line")
        if self.embed is None:
            self.embed = MiniLM(device=self.device)
        cache = SemanticCache(
            self.embed,
            settings["threshold"],
            objection if settings["check"] == "on" else None,
            settings["index"],
            max_entries=len(cached),
        )
        recording = new_recording(self.name, settings, self.device)
        progress.total = len(cached) + len(asked)
        for i, question in enumerate(cached):
            if stop():
                return
            cache.put(question, "")
            progress.update(i + 1, "storing")
        for i, question in enumerate(asked):
            if stop():
                return
            samples = []
            for _ in range(settings["repeats"]):
                begin = time.perf_counter()
                found = cache.lookup(question)
                samples.append(time.perf_counter() - begin)
            why = "hit" if found.hit else f"refused: {found.objection}" if found.objection else "below the threshold"
            at = {
                "asked": question,
                "found": found.question,
                "similarity": round(found.similarity or 0, 4),
                "verdict": why,
            }
            recording.points.append(Point(at, samples))
            progress.update(len(cached) + i + 1, "looking up")
            yield recording

    def draw(self, axes: Axes, recording: Recording) -> None:
        """A bar for each question: similarity with the nearest cached one, filled when its answer was served."""
        points = recording.points
        for i, point in enumerate(points):
            hit = point.at["verdict"] == "hit"
            axes.barh(i, point.at["similarity"], color=OKABE_ITO[0] if hit else "none", edgecolor=OKABE_ITO[0])
        axes.axvline(recording.params["threshold"], linestyle="--", color=OKABE_ITO[1])
        names = [textwrap.shorten(point.at["asked"], 42, placeholder="…") for point in points]
        axes.set_yticks(range(len(points)), names)
        axes.invert_yaxis()
        axes.grid(visible=False, axis="y")
        hits = sum(point.at["verdict"] == "hit" for point in points)
        axes.set(xlabel=f"Cosine similarity; filled: served ({hits} of {len(points)})", xlim=(0, 1))
        axes.set_ylabel("Question")

    def rows(self, recording: Recording) -> list[dict[str, Any]]:
        """Returns: the table: question, nearest cached one, similarity, verdict and time."""
        return [
            {
                "asked": point.at["asked"],
                "nearest answered": point.at["found"],
                "similarity": f"{point.at['similarity']:.2f}",
                "verdict": point.at["verdict"],
                "lookup, median (ms)": float(f"{1e3 * point.median:.3g}"),
            }
            for point in recording.points
        ]


class LookupLab(Lab):
    """Time of a lookup, and how often it finds the most similar entry, by index and number of entries.

    Args:
        device: named in the title; FAISS runs on the CPU.
    """

    name = "semantic-lookup"
    title = "Lookup by index and number of entries"
    shrinks = "largest"
    controls = (
        Menu("largest", "Most entries", 4000, tuple(1000 * 4**e for e in range(5))),
        Slider("queries", "Lookups per sample", 100, 20, 1000, 20),
        Slider("repeats", "Samples per point", 3, 1, 15, 1),
    )

    def measure(self, settings: dict[str, Any], stop: Callable[[], bool], progress: Progress) -> Iterator[Recording]:
        """Measures 1,000 entries, 2,000 and so on up to the most, with each index."""
        entries = doubling(1000, settings["largest"])
        return super().measure({"entries": entries, **{k: settings[k] for k in ("queries", "repeats")}}, stop, progress)

    def needed_bytes(self, settings: dict[str, Any]) -> float:
        """Returns: memory of the most entries, their vectors twice and what makes them."""
        return 4.0 * settings["largest"] * 384 * 4

    def draw(self, axes: Axes, recording: Recording) -> None:
        """Time of a lookup against the number of entries, a line for each index."""
        draw_lookup(axes, recording)

    def rows(self, recording: Recording) -> list[dict[str, Any]]:
        """Returns: the table, with the share of lookups that find the most similar entry."""
        return lookup_rows(recording)


def draw_lookup(axes: Axes, recording: Recording) -> None:
    """Time of a lookup against the number of entries, a line for each index."""
    for kind in dict.fromkeys(point.at["index"] for point in recording.points):
        points = [point for point in recording.points if point.at["index"] == kind]
        axes.plot([point.at["entries"] for point in points], [1e3 * point.median for point in points], label=kind)
    axes.set(xlabel="Entries", ylabel="Time of a search (ms)", xscale="log", yscale="log")
    name_ticks(axes, sorted({point.at["entries"] for point in recording.points}))
    axes.legend()


def lookup_rows(recording: Recording) -> list[dict[str, Any]]:
    """Rows for a table of the sweep `semantic-lookup`: times, and the share of lookups that find the best entry."""
    recall = {(row["index"], row["entries"]): row["recall"] for row in recording.data["recall"]}
    return [
        {
            "index": point.at["index"],
            "entries": point.at["entries"],
            "search, median (ms)": float(f"{1e3 * point.median:.3g}"),
            "slowest sample (ms)": float(f"{1e3 * max(point.samples):.3g}"),
            "finds the best entry (%)": round(100 * recall[point.at["index"], point.at["entries"]], 1),
        }
        for point in recording.points
    ]
