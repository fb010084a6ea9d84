"""The labs on semantic caching look up what their boxes hold, and measure the indexes."""

import hashlib

import numpy as np
import pytest

from gptlite.notebook import labs_semantic
from gptlite.notebook.labs_semantic import LookupLab, QuestionsLab, draw_lookup, lookup_rows
from gptlite.notebook.style import new_figure


class Encoder:
    """Embeds by a table: equal texts are equal, others have nothing in common; `near` ones a cosine of 0.9."""

    def __init__(self, device="cpu"):
        pass

    def __call__(self, texts):
        rows = []
        for text in texts:
            seed = int.from_bytes(hashlib.sha256(text.lower().removesuffix(" now").encode()).digest()[:4], "big")
            row = np.zeros(48, np.float32)
            row[seed % 40] = 1.0
            if text.endswith(" now"):
                row = 0.9 * row
                row[47] = (1 - 0.81) ** 0.5
            rows.append(row)
        return np.stack(rows)


@pytest.fixture
def lab(monkeypatch):
    monkeypatch.setattr(labs_semantic, "MiniLM", Encoder)

    def make(**settings):
        one = QuestionsLab("cpu")
        for name, value in settings.items():
            one.inputs[name].value = value
        return one.run()

    return make


def test_each_question_is_looked_up_and_its_verdict_told(lab):
    one = lab(
        cached="how do I boil an egg\n\n where is Oslo ",
        asked="How do I boil an egg\nhow do I boil an egg now",
        repeats=3,
    )
    assert one.state == "done", one.message
    verdicts = [(p.at["asked"], p.at["found"], p.at["similarity"], p.at["verdict"]) for p in one.recording.points]
    assert verdicts == [
        ("How do I boil an egg", "how do I boil an egg", 1.0, "hit"),
        ("how do I boil an egg now", "how do I boil an egg", 0.9, "refused: nearly the same wording: now / nothing"),
    ]
    assert all(len(point.samples) == 3 for point in one.recording.points)
    row = one.rows(one.recording)[1]
    assert (row["similarity"], row["verdict"][:7]) == ("0.90", "refused")
    html = one._repr_html_()
    assert "Cosine similarity; filled: served (1 of 2)" in html and "Question" in html


@pytest.mark.parametrize("index", ["flat", "ivf", "hnsw", "pq"])
def test_threshold_check_and_index_count(lab, index):
    asked = "how do I boil an egg now"
    for threshold, check, verdict in ((0.89, "off", "hit"), (0.91, "off", "below the threshold")):
        one = lab(cached="how do I boil an egg", asked=asked, threshold=threshold, check=check, index=index, repeats=1)
        assert [point.at["verdict"] for point in one.recording.points] == [verdict]


@pytest.mark.parametrize(("box", "label"), [("cached", "Answered before"), ("asked", "Asked now")])
def test_an_empty_box_is_one_clear_line(lab, box, label):
    one = lab(**{box: " \n "})
    assert (one.state, one.message) == ("failed", f"{label} is empty: write a question on each line")


def test_lookups_are_measured_for_every_index_up_to_the_most_entries(monkeypatch):
    import gptlite.sweeps.semantic as sweep

    monkeypatch.setattr(sweep, "MiniLM", lambda: lambda texts: np.eye(384, dtype=np.float32)[: len(texts)])
    one = LookupLab("cpu")
    one.inputs["largest"].value, one.inputs["queries"].value, one.inputs["repeats"].value = 1000, 20, 2
    one.run()
    assert one.state == "done", one.message
    assert [point.at for point in one.recording.points] == [
        {"index": kind, "entries": 1000} for kind in ("flat", "ivf", "hnsw", "pq")
    ]
    assert all(len(point.samples) == 2 for point in one.recording.points)
    rows = lookup_rows(one.recording)
    assert (
        [row["finds the best entry (%)"] for row in rows]
        == [100.0] * 4
        == [row["finds the best entry (%)"] for row in one.rows(one.recording)]
    )
    axes = new_figure().subplots()
    draw_lookup(axes, one.recording)
    assert (axes.get_xlabel(), axes.get_ylabel()) == ("Entries", "Time of a search (ms)")
    assert [line.get_label() for line in axes.get_lines()] == ["flat", "ivf", "hnsw", "pq"]
    needed = [LookupLab("cpu").needed_bytes({"largest": n}) for n in (1000, 4000)]
    assert needed[1] == 4 * needed[0] > 1000 * 384 * 4
