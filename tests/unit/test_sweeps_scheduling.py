"""The sweeps of the chapter on scheduling measure what they say, and their simulations are repeatable."""

import io
import json
from pathlib import Path

import pytest

from gptlite.notebook.recordings import FOLDERS
from gptlite.record import load_recording, record
from gptlite.serving.step_time import FittedTime
from gptlite.sweeps import fleets, scheduling

BOOK = Path(__file__).parents[2] / "book" / "recorded"
SMALL = {"preset": "nano", "running": 2, "context": 4, "prompt": 20, "budgets": [7, 12, 22], "repeats": 2}


def test_a_prompt_among_running_users_is_read_in_as_many_steps_as_the_budget_asks(tmp_path):
    made = record("chunked-prefill", tmp_path / "a.json", stream=io.StringIO(), **SMALL)
    assert load_recording(tmp_path / "a.json") == made and made.complete
    assert [point.at for point in made.points] == [
        {"what": what, "budget": budget} for budget in (7, 12, 22) for what in ("longest gap", "mean gap", "TTFT")
    ]
    assert all(len(point.samples) == 2 for point in made.points)
    for budget, steps in made.data["steps"].items():
        reading = [(decoding, read) for decoding, read, _ in steps if read]
        # 2 users decode in every step, and the prompt gets the rest
        assert [decoding for decoding, _ in reading] == [2] * len(reading)
        size = int(budget) - 2
        assert [read for _, read in reading] == [size] * (20 // size) + [20 % size] * (20 % size > 0)
        assert all(decoding == 3 for decoding, read, _ in steps[len(reading) : len(reading) + 3] if not read)
    medians = {(point.at["what"], point.at["budget"]): point.median for point in made.points}
    for budget in (7, 12, 22):
        assert medians["longest gap", budget] >= medians["mean gap", budget]
        assert medians["TTFT", budget] >= 0.5 * medians["longest gap", budget]


@pytest.mark.parametrize(
    ("wrong", "said"),
    [
        ({"budgets": [2, 9]}, "budgets has 2, it must be above the 2 running users"),
        ({"preset": "gptlite", "prompt": 300}, "the trained model sees 256"),
    ],
)
def test_a_sweep_that_cannot_run_says_why(tmp_path, wrong, said):
    with pytest.raises(ValueError, match=said):
        record("chunked-prefill", tmp_path / "a.json", stream=io.StringIO(), **{**SMALL, **wrong})


def test_steps_are_measured_and_fitted(tmp_path):
    small = {"preset": "nano", "decodes": [1, 3], "contexts": [8, 32], "chunks": [4, 16], "repeats": 2}
    made = record("step-costs", tmp_path / "b.json", stream=io.StringIO(), **small)
    assert [(p.at["decodes"], p.at["context"], p.at["chunk"]) for p in made.points] == [
        (d, n, c) for d in (0, 1, 3) for n in (8, 32) for c in (0, 4, 16) if d or c
    ]
    fit = scheduling.fitted(made)
    assert isinstance(fit, FittedTime) and min(fit.parts) >= 0
    assert fit([(7, 1)] * 3 + [(7, 16)]) > 0


def test_a_simulated_run_is_the_recorded_one():
    """The recording of the book was made by this very code: one of its runs, again."""
    recording = load_recording(BOOK / "goodput.json")
    rate = recording.params["documents"][-1]
    again = fleets.systems(recording.params, "documents", rate)
    for run in recording.data["runs"]:
        if run["workload"] == "documents" and run["rate"] == rate:
            outcomes = again[run["system"]]
            assert run["ttft"] == [round(1e3 * outcome.ttft) for outcome in outcomes]
            assert run["gap"] == [round(1e3 * outcome.longest_gap) for outcome in outcomes]
    assert {run["system"] for run in recording.data["runs"]} == set(again)


def test_a_fleet_hits_more_by_the_cache_and_is_busy_in_one_place_by_it_alone():
    time = FittedTime((0.1, 0.01, 0.02, 0.0002, 0.0))
    jobs = fleets.shared_jobs(2.5 * 4 / fleets.alone(time), 240, 16, 1.5)
    found = {name: fleets.fleet(time, jobs, 4, name) for name in fleets.policies(4)}
    assert found["cache-aware"]["hit_rate"] > 1.2 * found["taking turns"]["hit_rate"]
    assert found["cache alone"]["busiest"] > 1.3 * found["cache-aware"]["busiest"] >= 0.25
    assert found["cache-aware"]["ttft"] < found["cache alone"]["ttft"]
    assert found == {name: fleets.fleet(time, jobs, 4, name) for name in fleets.policies(4)}  # nothing is left over


def test_the_book_has_the_recordings_that_the_chapter_shows():
    folder = next(folder for folder in FOLDERS if folder.is_dir())
    for name in ("chunked-prefill", "step-costs", "goodput"):
        recording = load_recording(folder / f"{name}.json")
        assert recording.complete and recording.name == name
        assert json.dumps(recording.data)
