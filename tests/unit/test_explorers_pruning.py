"""The charts of the chapter on pruning draw what the recordings say, at every end of their sliders."""

import math

import pytest
from drawn import draw, marks, words

from gptlite.notebook.explorers_pruning import CRITERIA, PARTS, STARTS, recovery, removed_parts, runs
from gptlite.notebook.recordings import recorded
from gptlite.record import Point, Recording

CHOSEN = ["activation", "random"]
SHARES = [25, 50, 75]


def structures() -> Recording:
    """A model of 3 blocks of 4 heads and 100 neurons, in which head h of block b is worth 10 * b + h + 1, or less."""
    heads = {
        "activation": [[10.0 * b + h + 1 for h in range(4)] for b in range(3)],
        "random": [[4.0 - h for h in range(4)] for _ in range(3)],
    }
    losses = []
    for i, criterion in enumerate(CHOSEN):
        for gone in SHARES:
            row = {"criterion": criterion, "gone": gone, "heads": 4 - gone // 25, "neurons": 100 - gone}
            for j, part in enumerate(PARTS):
                row |= {f"loss_{part}": 2 + i + gone / 100 + j / 1000, f"n_params_{part}": 5000 - 10 * gone - j}
            losses.append(row)
    whole = {"heads": 4, "neurons": 100, "n_params": 6000}
    data = {"heads": heads, "neurons": {}, "losses": losses, "original": 1.5, "whole": whole}
    return Recording("prune-structures", {"shares": SHARES}, data=data)


def curve(last: float, n: int = 4) -> list[list[float]]:
    return [[1000 * i, last + 0.1 * (n - i), 77] for i in range(n + 1)]


def minitron() -> Recording:
    finals = {("one-shot", 1): 1.5, ("one-shot", 2): 1.6, ("random", 1): 1.9}
    data = [
        {
            "recipe": {"start": start},
            "settings": {"lr": 0.002, "seed": seed, "steps": 4},
            "n_params": 77,
            "tokens_seen": 4000,
            "losses": {"original": 1.4, "after": loss + 0.001},
            "loss_curve": curve(loss),
        }
        for (start, seed), loss in finals.items()
    ]
    points = [Point({"start": start, "lr": 0.002, "seed": seed}, [9.0]) for start, seed in finals]
    return Recording("minitron", {}, points=points, data={"runs": data})


@pytest.mark.parametrize(("crit", "gone", "part"), [(0, 0, 0), (0, 50, 0), (1, 25, 1), (1, 75, 2), (1, 50, 0)])
def test_the_least_important_heads_of_each_block_are_removed(crit: int, gone: int, part: int) -> None:
    scene = draw(removed_parts(structures()), crit=crit, gone=gone, part=part)
    n_heads = 4 if part == 2 else 4 - gone // 25
    n_neurons = 100 if part == 1 else 100 - gone
    shown = words(scene)
    assert any(f"{n_heads} of 4 heads and {n_neurons} of 100 neurons" in text for text in shown), shown
    loss, params = (1.5, 6000) if gone == 0 else (2 + crit + gone / 100, 5000 - 10 * gone - part)
    assert any(f"{params:,} parameters are left" in text for text in shown), shown
    assert any(f"loss {loss:.2f} untrained, whole 1.50" in text for text in shown), shown
    cells = marks(scene, "rect", "layer_0")
    assert len(cells) == 12
    fills = [cell["fill"] for cell in cells]
    removed = [fill for fill in fills if fill.upper() == "#D55E00"]
    assert len(removed) == 3 * (4 - n_heads)
    assert sum(text == "×" for text in shown) == len(removed)
    first = [cell["fill"].upper() == "#D55E00" for cell in cells[:4]]  # heads of block 1, from the left
    gone_heads = range(4 - n_heads) if crit == 0 else range(n_heads, 4)
    assert [h for h, is_gone in enumerate(first) if is_gone] == list(gone_heads)


def test_bars_of_neurons_are_as_long_as_their_share() -> None:
    for gone in (0, 25, 75):
        scene = draw(removed_parts(structures()), gone=gone)
        kept, rest = (sum(bar["width"] for bar in marks(scene, "rect", f"layer_{i}")) for i in (2, 3))
        assert kept / (kept + rest) == pytest.approx(1 - gone / 100, abs=0.01)


def test_losses_stand_at_the_chosen_number_of_tokens() -> None:
    for seen in (1, 2, 4):
        scene = draw(recovery([minitron()]), seen=seen)
        shown = words(scene)
        one, other = 1.55 + 0.1 * (4 - seen), 1.9 + 0.1 * (4 - seen)
        assert any(f"{STARTS['one-shot']}: {one:.3f}, mean of 2" in text for text in shown), shown
        assert any(text == f"{STARTS['random']}: {other:.3f}" for text in shown), shown


def test_a_menu_shows_one_kind_alone_and_nothing_is_drawn_above_the_top() -> None:
    assert len(marks(draw(recovery([minitron()])), "line", "")) >= 1
    scene = draw(recovery([minitron()]), only=2)
    assert not any(STARTS["one-shot"] + ":" in text for text in words(scene))
    for roof in (1.6, 4.5):
        for item in marks(draw(recovery([minitron()]), roof=roof), "line", "layer_0"):
            assert math.isfinite(item["y"])
            assert item["y"] >= -1


@pytest.mark.parametrize("make", [lambda: removed_parts(structures()), lambda: recovery([minitron()])])
def test_every_end_of_every_control_draws_finite_text(make) -> None:
    explorer = make()
    for control in explorer.controls:
        bind = control["bind"]
        for value in (bind["min"], bind["max"]) if bind["input"] == "range" else bind["options"]:
            shown = words(draw(explorer, **{control["name"]: value}))
            assert shown
            assert not any(bad in text for text in shown for bad in ("NaN", "undefined", "null", "Infinity")), shown
            assert max(map(len, shown)) <= 44, shown


def test_facts_and_runs_repeat_the_recording() -> None:
    assert f"50 % of both gone by {CRITERIA['activation']}: loss 2.50" in repr(removed_parts(structures()))
    assert "half at once: loss 1.55 over all held-out text, mean of 2" in repr(recovery([minitron()]))
    assert [run["after"] for run in runs([minitron()])] == pytest.approx([1.501, 1.601, 1.901])


def test_every_start_of_the_recording_is_drawn_before_a_control_is_moved() -> None:
    explorer = recovery(recorded("minitron"))
    roof = next(control["value"] for control in explorer.controls if control["name"] == "roof")
    assert max(run["curve"][-1][1] for run in runs(recorded("minitron"))) < roof


def test_the_two_legends_of_a_start_are_one_and_the_axis_needs_no_data() -> None:
    encoding = recovery([minitron()]).chart.to_dict()["layer"][0]["encoding"]
    assert encoding["color"]["legend"] == encoding["strokeDash"]["legend"]  # else a browser complains
    assert encoding["y"]["scale"]["domain"] == [1.4, {"expr": "roof"}]
