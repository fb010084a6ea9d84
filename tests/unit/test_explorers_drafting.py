"""The charts of the chapter on drafting draw what the recordings say, at every value of their controls."""

import pytest
from drawn import draw, marks, words

from gptlite.notebook.explorers_drafting import cost_chart, drafter_rows, node_rows, round_words, tree_player, tree_rows
from gptlite.record import Point, Recording

TREE = {
    "before": "so far\n",
    "tokens": [0, 1, 2, 0, 1],
    "parents": [-1, -1, 1, 1, 0],
    "p": [0.1, 0.6, 0.2, 0.7, 0.3],
    "kept": [1, 3],
    "next": 2,
}
EMPTY = {"before": "text", "tokens": [], "parents": [], "p": [], "kept": [], "next": 1}


@pytest.fixture
def trace() -> Recording:
    traces = [{"drafter": "one", "rounds": [TREE, EMPTY]}, {"drafter": "two", "rounds": [EMPTY, TREE, TREE]}]
    return Recording("drafting-trace", {"temperature": 1.0}, data={"chars": "ab ", "prompt": "so", "traces": traces})


def test_leaves_lie_below_each_other_and_a_parent_at_its_first_child() -> None:
    assert tree_rows(TREE) == [0.0, 1.0, 1.0, 2.0, 0.0]
    assert tree_rows(EMPTY) == []


def test_every_node_says_what_became_of_it(trace: Recording) -> None:
    rows = [row for row in node_rows(trace) if row["trace"] == 0 and row["round"] == 1]
    assert [(row["char"], row["depth"], row["kind"]) for row in rows] == [
        ("…", 0, "the text so far"),
        ("a", 1, "tried and rejected"),
        ("b", 1, "kept"),
        ("␣", 2, "tried and rejected"),
        ("a", 2, "kept"),
        ("b", 2, "never reached"),  # its parent was rejected
    ]
    assert [row["p"] for row in rows] == ["", "10 %", "60 %", "20 %", "70 %", "30 %"]
    assert [(row["from_depth"], row["from_row"]) for row in rows[1:]] == [
        (0, 0.0),
        (0, 0.0),
        (1, 1.0),
        (1, 1.0),
        (1, 0.0),
    ]
    late = TREE | {"kept": [0], "p": TREE["p"]}
    trace.data["traces"][0]["rounds"][0] = late
    rows = [row for row in node_rows(trace) if row["trace"] == 0 and row["round"] == 1]
    assert [row["kind"] for row in rows[1:]] == [
        "kept",
        "never reached",  # its elder sibling was kept
        "never reached",
        "never reached",
        "tried and rejected",
    ]


def test_the_words_of_a_round(trace: Recording) -> None:
    said = [row["words"] for row in round_words(trace) if row["trace"] == 0]
    assert said[:2] == ["round 1 of 2, after …so␣far⏎", "5 nodes, kept: ba, then: ␣"]
    assert said[3] == "0 nodes, kept: none, then: b"
    assert all(len(words) <= 42 for words in said)


def test_every_choice_and_round_draws_its_tree(trace: Recording) -> None:
    explorer = tree_player(trace)
    for number, one in enumerate(trace.data["traces"]):
        for n in (1, 2, 3):
            scene = draw(explorer, trace=number, round=n)
            shown = one["rounds"][min(n, len(one["rounds"])) - 1]
            text = words(scene)
            assert len(marks(scene, "symbol")) >= len(shown["tokens"]) + 1
            assert any(word.startswith(f"round {min(n, len(one['rounds']))} of") for word in text)
            assert sum(word.endswith(" %") for word in text) == len(shown["tokens"])
            assert not any("NaN" in word or "undefined" in word for word in text)
    assert "one: 2 rounds, 5 nodes, 2 kept" in repr(explorer)


@pytest.fixture
def costs() -> Recording:
    """Two drafters at two temperatures: 100 tokens, a plain step of 1 ms."""
    points, runs = [], []
    for temperature in (0.0, 1.0):
        points.append(Point({"drafter": "plain", "batch": 1, "temperature": temperature}, [0.1, 0.1]))
        for name, seconds, rounds, tried in (("head", 0.05, 50, 200), ("tree", 0.2, 100, 0)):
            points.append(Point({"drafter": name, "batch": 1, "temperature": temperature}, [seconds, seconds]))
            runs.append(
                {
                    "drafter": name,
                    "batch": 1,
                    "temperature": temperature,
                    "equal": True,
                    "rounds": rounds,
                    "passes": rounds,
                }
                | {"drafted": 200, "kept": 200 - rounds, "tried": tried, "proposing": [0.0125, 0.0125]}
            )
    params = {"n_new": 100, "repeats": 2, "batches": [1]}
    return Recording("drafting", params, {"name": "a machine"}, points=points, data={"runs": runs})


def test_a_round_is_counted_in_steps_of_the_plain_loop(costs: Recording) -> None:
    head, tree = drafter_rows([costs])[:2]
    assert head["tokens"] == 4.0 and head["acceptance"] == 0.75 and head["drafted"] == 4.0
    # 25 passes in a generation: 0.5 ms of drafting in each, 1.5 ms of the rest, over a step of 1 ms
    assert head["overhead"] == pytest.approx(0.5) and head["verify"] == pytest.approx(1.5)
    assert head["speedup"] == pytest.approx(2.0) == pytest.approx(head["tokens"] / (head["overhead"] + head["verify"]))
    assert tree["acceptance"] is None and tree["tokens"] == 2.0 and tree["speedup"] == 0.5
    costs.points = costs.points[:1]  # a run that was stopped
    assert drafter_rows([costs]) == []


@pytest.mark.parametrize("temperature", [0, 1])
@pytest.mark.parametrize("drafting", [0, 1, 1.5])
@pytest.mark.parametrize("longer", [0, 1, 1.5])
def test_the_chart_of_costs_says_who_pays(costs: Recording, temperature: int, drafting: float, longer: float) -> None:
    explorer = cost_chart(costs)
    scene = draw(explorer, temperature=temperature, drafting=drafting, **{"pass": longer})
    text = words(scene)
    head, tree = drafter_rows([costs])[:2]
    cost = [1 + drafting * row["overhead"] + longer * (row["verify"] - 1) for row in (head, tree)]
    assert f"1 head: 4.00 tokens, {4 / cost[0]:.2f} times" in text
    assert f"2 tree: 2.00 tokens, {2 / cost[1]:.2f} times" in text
    assert all(len(word) <= 42 for word in text)
    colours = [item["fill"] for item in marks(scene, "symbol") if item.get("size", 0) == 380]
    assert colours == ["#009E73" if tokens > c else "#E69F00" for tokens, c in zip((4, 2), cost, strict=True)]
    if drafting == longer == 1:  # as measured
        assert [4 / cost[0], 2 / cost[1]] == pytest.approx([head["speedup"], tree["speedup"]])
    assert "temperature 1, tree: 2.00 tokens a round" in repr(explorer)
