"""The charts of the chapter on semantic caching draw what the pairs, the recording and arithmetic say."""

import re

import pytest
from drawn import draw, marks, words

from gptlite.arithmetic import ModelShape, decode_costs, prefill_costs, step_bound, total
from gptlite.config import preset
from gptlite.hardware import gpu
from gptlite.notebook.explorers_semantic import (
    pairs_by_kind,
    precision_recall,
    rates_table,
    recorded_pairs,
    when_it_pays,
)
from gptlite.notebook.recordings import recorded
from gptlite.record import Recording
from gptlite.semantic.evaluate import KINDS, load_pairs

RECORDING = recorded("semantic-pairs")[0]


def counted(half, threshold, check):
    """Right and wrong answers and served by kind, counted here from the recording's rows."""
    served, right, wrong = dict.fromkeys(KINDS, 0), 0, 0
    for pair, row in zip(load_pairs(), RECORDING.data["pairs"], strict=True):
        if pair.half == half and row["similarity"] >= threshold and not (check and row["objection"]):
            served[pair.kind] += 1
            right, wrong = right + pair.same, wrong + (not pair.same)
    return served, right, wrong


@pytest.mark.parametrize("half", ["judge", "choose"])
@pytest.mark.parametrize(("threshold", "check"), [(0.5, 0), (0.7, 1), (0.86, 0), (0.86, 1), (0.99, 0)])
def test_the_strip_counts_what_is_served(half, threshold, check):
    scene = draw(pairs_by_kind(RECORDING), threshold=threshold, check=check, half=("judge", "choose").index(half))
    served, _, _ = counted(half, threshold, check)
    n_pairs = {kind: sum(pair.half == half and pair.kind == kind for pair in load_pairs()) for kind in KINDS}
    assert sorted(words(scene)) == sorted(f"{served[kind]} of {n_pairs[kind]}" for kind in KINDS)
    assert len(marks(scene, "symbol", "layer_1")) == 132
    # x is linear from -0.1 to 1.3
    [rule] = [item["x"] for item in marks(scene, "rule", "layer_0")]
    assert rule == pytest.approx(1000 * (threshold + 0.1) / 1.4, abs=0.5)


@pytest.mark.parametrize("half", ["judge", "choose"])
@pytest.mark.parametrize("threshold", [0.5, 0.7, 0.86, 0.9, 0.99])
def test_the_curves_say_how_many_are_right_and_wrong(half, threshold):
    scene = draw(precision_recall(RECORDING), threshold=threshold, half=("judge", "choose").index(half))
    for check in (0, 1):
        _, right, wrong = counted(half, threshold, check)
        assert f"check {('off', 'on')[check]}: right {right} of 44, wrong {wrong}" in words(scene)
    places = sorted(item["x"] for item in marks(scene, "symbol", "layer_1"))
    expected = sorted(1000 * counted(half, threshold, check)[1] / 44 for check in (0, 1))
    assert places == pytest.approx(expected, abs=0.5)


@pytest.mark.parametrize("threshold", [0.7, 0.86])
def test_the_table_is_counted_too(threshold):
    rows = rates_table(RECORDING, "choose", (threshold,))
    for row, check in zip(rows, (0, 1), strict=True):
        served, _, _ = counted("choose", threshold, check)
        assert {kind: int(row[kind].split("/")[0]) for kind in KINDS} == served


def model_time(name, n_prompt, n_new, card="H100 SXM"):
    """Seconds, step by step."""
    shape, machine = ModelShape.of(preset(name)), gpu(card)
    costs = [prefill_costs(shape, 1, n_prompt)] + [decode_costs(shape, 1, n_prompt + i) for i in range(1, n_new)]
    return sum(step_bound(total(cost), machine.peak_flops, machine.bandwidth)[0] for cost in costs)


@pytest.mark.parametrize(
    ("model", "answer", "lookup", "rate"), [(1, 256, 10, 30), (0, 1, 5, 100), (1, 1024, 200, 0), (0, 77, 3, 55)]
)
def test_the_mean_time_is_lookup_and_misses(model, answer, lookup, rate):
    scene = draw(when_it_pays(), model=model, answer=answer, lookup=lookup, rate=rate)
    generate = 1e3 * model_time(("1b", "7b")[model], 32, answer)
    first, second = words(scene)
    found = [float(x.replace(",", "")) for x in re.findall(r"[\d,.]+(?= ms)", first)]
    assert found == pytest.approx([lookup + (1 - rate / 100) * generate, generate], rel=6e-3)
    if lookup > generate:
        assert "never pays" in second
    else:
        assert float(re.search(r"([\d.]+) %", second)[1]) == pytest.approx(100 * lookup / generate, rel=6e-2)


def test_recorded_pairs_are_the_packages():
    pairs, similarity, check = recorded_pairs(RECORDING)
    assert pairs == load_pairs() and len(similarity) == 264
    assert check(pairs[0].asked, pairs[0].cached) == RECORDING.data["pairs"][0]["objection"]


@pytest.mark.parametrize("make", [pairs_by_kind, precision_recall])
def test_the_facts_are_those_of_the_chart(make):
    text = repr(make(RECORDING))
    served, right, wrong = counted("judge", 0.86, 1)
    if make is pairs_by_kind:
        assert f"the judging half at 0.86, check on: paraphrase {served['paraphrase']} of 36" in text
    else:
        assert f"the judging half at 0.86, check on: {right} of 44 same questions served, and {wrong} wrong" in text


def test_the_book_has_its_recordings():
    for name in ("semantic-pairs", "semantic-lookup"):
        for recording in recorded(name):
            assert isinstance(recording, Recording) and recording.complete and not recording.left_out
    lookup = recorded("semantic-lookup")[0]
    recall = {(row["index"], row["entries"]): row["recall"] for row in lookup.data["recall"]}
    assert set(recall) == {(point.at["index"], point.at["entries"]) for point in lookup.points}
    assert all(value == 1 for (index, _), value in recall.items() if index == "flat") and min(recall.values()) > 0.6
