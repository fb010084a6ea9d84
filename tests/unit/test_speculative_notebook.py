"""The chapter on speculative decoding: its sweeps, explorers, lab and checks say what the package's loop did."""

import pytest
from drawn import draw, marks, words

from gptlite.notebook import checks_speculative as checks
from gptlite.notebook.explorers_speculative import (
    KINDS,
    measured_speedups,
    round_player,
    speedup_chart,
    trace_cells,
    trace_words,
)
from gptlite.notebook.labs_speculative import SpeculativeLab
from gptlite.notebook.recordings import recorded
from gptlite.record import Point, Recording, run_sweep
from gptlite.speculative.theory import best_n_draft, expected_tokens, speedup
from gptlite.sweeps.speculative import FRENCH, OTHER, kinds_of_text


def timed(seconds) -> Recording:
    points = [
        Point({"kind": kind, "batch": batch, "temperature": temperature, "n_draft": n}, [time])
        for (kind, batch, temperature, n), time in seconds.items()
    ]
    return Recording("speculative-speed", {}, machine={"name": "a machine"}, points=points)


SECONDS = {
    ("plain", 1, 0.0, 0): 1.0,
    ("draft", 1, 0.0, 0): 0.2,
    ("speculative", 1, 0.0, 1): 0.8,
    ("speculative", 1, 0.0, 4): 0.5,
    ("plain", 8, 1.0, 0): 3.0,
    ("draft", 8, 1.0, 0): 0.9,
    ("speculative", 8, 1.0, 4): 4.0,
    ("speculative", 8, 0.5, 4): 4.0,  # of a setting without a plain run
}


def test_measured_speedups_are_over_the_plain_loop_of_the_same_setting():
    rows = measured_speedups(timed(SECONDS))
    assert [(row["batch"], row["n_draft"], row["speedup"]) for row in rows] == [(1, 1, 1.25), (1, 4, 2.0), (8, 4, 0.75)]
    assert [row["cost_ratio"] for row in rows] == pytest.approx([0.2, 0.2, 0.3])


@pytest.mark.parametrize("alpha", [0, 0.6, 1])
@pytest.mark.parametrize("gamma", [0, 4, 16])
def test_the_chart_says_what_the_formula_says(alpha, gamma):
    scene = draw(speedup_chart(timed(SECONDS)), alpha=alpha, gamma=gamma, c=0.16, extra=0)
    text = words(scene)
    assert f"{expected_tokens(alpha, gamma):.2f} tokens per round of γ = {gamma}" in text
    assert f"costs {1 + 0.16 * gamma:.2f} steps: {speedup(alpha, gamma, 0.16):.2f} times as fast" in text
    best = best_n_draft(alpha, 0.16, 16)
    expected = f"best: γ = {best} with {speedup(alpha, best, 0.16):.2f} times" if best else "drafting does not pay"
    assert any(line.startswith(expected) for line in text)
    assert max(map(len, text)) <= 42


def test_a_longer_pass_and_the_measured_set_move_the_chart():
    explorer = speedup_chart(timed(SECONDS))
    longer = words(draw(explorer, alpha=0.8, gamma=4, c=0.1, extra=0.1))
    assert f"costs 1.80 steps: {speedup(0.8, 4, 0.1, 1.4):.2f} times as fast" in longer
    squares = [
        len([item for item in marks(draw(explorer, measured=choice), "symbol") if item.get("shape") == "square"])
        for choice in (0, 1, 2)
    ]
    assert squares == [0, 2, 1]
    assert "batch 8, temperature 1" in repr(explorer)


TRACES = [
    {
        "temperature": 0.0,
        "first": 0,
        "rounds": [
            {"start": 1, "drafts": [1, 2, 3], "kept": 3, "next": 4, "p": [], "q": []},
            {"start": 5, "drafts": [1, 1, 1], "kept": 0, "next": 2, "p": [], "q": []},
            {"start": 6, "drafts": [], "kept": 0, "next": 5, "p": [], "q": []},
        ],
    },
    {
        "temperature": 0.7,
        "first": 5,
        "rounds": [{"start": 1, "drafts": [1, 2], "kept": 1, "next": 0, "p": [0.004, 0.25], "q": [0.4, 0.5]}],
    },
]


def trace() -> Recording:
    return Recording("speculative-trace", {}, data={"chars": "abcde\n", "prompt": "ab ", "traces": TRACES})


def test_cells_and_words_of_a_trace():
    cells = [cell for cell in trace_cells(trace()) if (cell["trace"], cell["round"]) == (1, 1)]
    assert [(cell["char"], cell["kind"]) for cell in cells] == [
        ("b", "kept"),
        ("c", "rejected"),
        ("a", "the target's own"),
    ]
    assert [cell["chances"] for cell in cells] == ["q 40 %\np < 1 %", "q 50 %\np 25 %", ""]
    second = [cell["kind"] for cell in trace_cells(trace()) if (cell["trace"], cell["round"]) == (0, 2)]
    assert second == ["rejected", "not tried", "not tried", "the target's own"] and set(second) < set(KINDS)
    rows = trace_words(trace())
    assert [row["text"] for row in rows] == ["ab␣a", "ab␣abcde", "ab␣abcdec", "ab␣⏎"]
    assert [row["so_far"] for row in rows] == [4, 5, 6, 2]


def test_the_player_draws_every_round_of_every_trace_and_stops_at_the_end():
    explorer = round_player(trace())
    assert "3 of 3 drafts stay, then a bonus token" in words(draw(explorer, trace=0, round=1))
    assert "0 of 3 drafts stay, then the target's own" in words(draw(explorer, trace=0, round=2))
    last = words(draw(explorer, trace=1, round=3))  # past the end of a shorter trace
    assert "1 of 2 drafts stay, then the target's own" in last and "2 tokens in 1 of 1 passes of the target" in last


def test_the_books_trace_is_a_text_that_grows_by_what_was_kept():
    (recording,) = recorded("speculative-trace")
    chars = recording.data["chars"]
    for one in recording.data["traces"]:
        start = 1
        for round_ in one["rounds"]:
            assert round_["start"] == start
            assert 0 <= round_["kept"] <= len(round_["drafts"])
            assert all(0 <= token < len(chars) for token in [*round_["drafts"], round_["next"], one["first"]])
            if one["temperature"]:
                assert len(round_["p"]) == len(round_["q"]) == len(round_["drafts"])
                assert all(0 <= chance <= 1 for chance in round_["p"] + round_["q"])
            start += round_["kept"] + 1
        assert start == recording.params["n_new"]
    explorer = round_player(recording)
    longest = max(len(one["rounds"]) for one in recording.data["traces"])
    for choice in range(len(recording.data["traces"])):
        for number in (1, 7, longest):
            text = [line for item in words(draw(explorer, trace=choice, round=number)) for line in item.split("\n")]
            assert text and max(map(len, text)) <= 48 and not any("undefined" in line or "NaN" in line for line in text)


def test_a_play_is_cut_into_kinds():
    play = (
        "KING:\nNow let us go,\nAnd take our leave.\n\nFOOL:\nI pray you, what is the\nhour?\n\nKING:\nNoon.\n\n"
        f"ALICE:\n{FRENCH[0]} la\n\nALICE:\nOui. {FRENCH[1]}\n"
    )
    kinds = kinds_of_text(play)

    def at(text):
        begin = play.index(text)
        return set(kinds[begin : begin + len(text)])

    assert at("KING:") == at("FOOL:") == {"names"}
    assert at("Now let us go,\nAnd take") == {"verse"} and at("I pray you, what") == {"prose"}
    assert at("Noon.") == {"one-line speeches"} and at(FRENCH[0]) == {"French"} and at("Oui.") == {"French"}
    assert len(kinds) == len(play)


def test_the_books_texts_are_written_in_the_corpus_own_characters():
    (recording,) = recorded("speculative-trace")
    for kind, text in OTHER.items():
        assert set(text) <= set(recording.data["chars"]), kind
    rows = recorded("speculative-texts")[0].data["rows"]
    assert {row["draft"] for row in rows} == {"draft", "draft-alone"}
    rates = {(row["draft"], row["temperature"], row["kind"]): row["acceptance"] for row in rows}
    assert all(0 < rate < 1 for rate in rates.values())
    for temperature in (0.0, 1.0):  # what distilling the draft is for
        alone = rates["draft-alone", temperature, "all of the play"]
        assert rates["draft", temperature, "all of the play"] > alone


def test_the_speed_sweep_measures_plain_draft_and_speculative():
    params = {"n_drafts": [2], "temperatures": [0.0, 1.0], "batches": [2], "n_new": 8, "repeats": 1, "warmup": 1}
    *_, recording = run_sweep("speculative-speed", **params)
    assert [point.at["kind"] for point in recording.points] == ["plain", "draft", "speculative"] * 2
    runs = [run for run in recording.data["runs"] if run["kind"] == "speculative"]
    assert all(run["rounds"] and run["kept"] <= run["tried"] <= 2 * run["rounds"] for run in runs)
    assert len(measured_speedups(recording)) == 2


def test_the_lab_measures_and_shows_tokens_per_round():
    lab = SpeculativeLab("cpu")
    for name, value in {"most": 2, "n_new": 16, "repeats": 1}.items():
        lab.inputs[name].value = value
    lab.run()
    assert lab.state == "done", lab.message
    rows = {row["Drafts per round"]: row for row in lab.rows(lab.recording)}
    assert list(rows) == ["target alone", "draft model alone", "γ = 1", "γ = 2"]
    assert 0 < rows["γ = 2"]["Acceptance"] <= 1 < rows["γ = 2"]["Tokens per round"] <= 3
    assert rows["target alone"]["Speed-up (times)"] == "" and rows["γ = 1"]["Speed-up (times)"] > 0
    assert "speed-up (times)" in lab._repr_html_()
    settings = {"most": 2, "batch": 1, "dtype": "float32"}
    assert lab.needed_bytes({**settings, "batch": 64}) > lab.needed_bytes(settings) > 4 * 5e6


def right_tokens(acceptance, n_draft):
    return sum(acceptance**i for i in range(n_draft + 1))


SOLUTIONS = [
    (checks.check_tokens_per_round, right_tokens, lambda a, n: (1 - a ** (n + 1)) / (1 - a)),
    (checks.check_residual, lambda p, q: (p - q).clamp(min=0) / (p - q).clamp(min=0).sum(), lambda p, q: p - q),
    (
        checks.check_best_gamma,
        lambda a, c: max(range(33), key=lambda n: right_tokens(a, n) / (n * c + 1)),
        lambda a, c: round(1 / c),
    ),
]


@pytest.mark.parametrize(("check", "good", "bad"), SOLUTIONS)
def test_the_checks_tell_right_from_wrong(check, good, bad, capsys):
    check(good)
    assert capsys.readouterr().out == "right\n"
    check(bad)
    assert capsys.readouterr().out.startswith("not yet")
