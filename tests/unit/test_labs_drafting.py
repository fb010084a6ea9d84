"""The lab and the sweeps of the chapter on drafting: what they measure is what their inputs ask for."""

import pytest
import torch

from gptlite.checkpoint import load
from gptlite.data import load_corpus
from gptlite.notebook.labs_drafting import ALL, DraftingLab
from gptlite.record import run_sweep
from gptlite.speculative.catalog import DRAFTERS, KEPT, TREES, make_drafter
from gptlite.speculative.decode import Verdict
from gptlite.speculative.self_draft import choose_blocks
from gptlite.sweeps.drafting import PROMPTS, prompts_of, round_of


def lab(**settings) -> DraftingLab:
    one = DraftingLab("cpu")
    for name, value in {"drafter": "look-up", "n_new": 16, **settings}.items():
        one.inputs[name].value = value
    return one


def test_it_measures_one_drafter_after_the_readers_prompt() -> None:
    one = lab(prompt="ROMEO:\nO, O, O, O, O, O").run()
    assert one.state == "done", one.message
    assert [point.at["drafter"] for point in one.recording.points] == ["plain", "look-up"]
    plain, row = one.rows(one.recording)
    assert plain["Tokens per round"] == plain["Speed-up (times)"] == 1.0
    [run] = one.recording.data["runs"]
    assert run["equal"] and row["Tokens per round"] == round((run["kept"] + run["rounds"]) / run["rounds"], 2)
    html = one._repr_html_()
    assert "speed-up (times)" in html and "tokens per round" in html


@pytest.mark.parametrize(("prompt", "words"), [("", "has 0 characters"), ("a" * 250, "has 250 characters"), ("Ω", "Ω")])
def test_a_prompt_of_no_use_is_refused_in_words(prompt: str, words: str) -> None:
    one = lab(prompt=prompt).run()
    assert one.state == "failed" and words in one.message


def test_it_runs_all_drafters_and_needs_more_memory_for_larger_batches() -> None:
    settings = lab(drafter=ALL, n_new=16).settings
    assert DraftingLab("cpu").needed_bytes(settings | {"batch": 32}) > DraftingLab("cpu").needed_bytes(settings) > 2e7
    assert set(TREES) < set(DRAFTERS)
    model, _ = load("gptlite")
    with pytest.raises(ValueError, match="there is no drafter 'oracle', there are draft model, look-up"):
        make_drafter("oracle", model)


def test_the_sweep_counts_what_the_rounds_did() -> None:
    names = ["Medusa, tree", "exit after 2"]
    *_, recording = run_sweep(
        "drafting", drafters=names, temperatures=[0.0, 1.0], batches=[2], n_new=12, repeats=2, warmup=1
    )
    assert recording.complete and len(recording.points) == 6
    for run in recording.data["runs"]:
        assert run["kept"] + run["rounds"] == 2 * 2 * 11  # the first token of each text comes of its prompt
        assert run["passes"] <= run["rounds"] and len(run["proposing"]) == 2 and run["equal"]
        assert (run["tried"] == 0) == (run["drafter"] in TREES)
        assert run["tried"] >= run["kept"] or run["drafter"] in TREES


def test_the_trace_is_the_loops_own() -> None:
    *_, recording = run_sweep("drafting-trace", n_new=10)
    chars = recording.data["chars"]
    for trace in recording.data["traces"]:
        text = trace["rounds"][0]["before"]
        for one in trace["rounds"]:
            assert text.endswith(one["before"]) or one["before"].endswith(text)
            assert len(one["tokens"]) == len(one["parents"]) == len(one["p"]) and all(0 <= p <= 1 for p in one["p"])
            path = [-1, *one["kept"]]
            assert all(one["parents"][node] == above for above, node in zip(path, one["kept"], strict=False))
            text = one["before"] + "".join(chars[one["tokens"][node]] for node in one["kept"]) + chars[one["next"]]
        assert sum(len(one["kept"]) + 1 for one in trace["rounds"]) == 9


def test_a_chain_is_recorded_as_a_tree_of_one_path() -> None:
    recorded = round_of(Verdict("a", [3, 4], None, [0], 7))
    assert recorded == {"tokens": [3, 4], "parents": [-1, 0], "p": [1.0, 1.0], "kept": [0], "next": 7}


def test_training_together_and_afterwards_are_compared_on_equal_steps() -> None:
    *_, recording = run_sweep("drafting-together", preset="nano", steps=2, batch=2, n_held_out=640)
    assert [row["trained"] for row in recording.data["rows"]] == ["together", "afterwards"]
    for row in recording.data["rows"]:
        assert 2 < row["trunk_loss"] < 5 and [guess["ahead"] for guess in row["agreement"]] == [1, 2]


def test_the_kept_blocks_of_the_catalog_are_those_that_the_search_finds() -> None:
    model, tokenizer = load("gptlite")
    windows = tokenizer.encode(load_corpus().held_out[: 8 * 192]).view(8, 192)
    assert tuple(choose_blocks(model, windows, 3)) == KEPT


def test_prompts_are_the_books_four_in_turn() -> None:
    _, tokenizer = load("gptlite")
    five = prompts_of(tokenizer, 5)
    assert torch.equal(five[4], five[0]) and torch.equal(five[:1], prompts_of(tokenizer, 1))
    assert all(PROMPTS[b].startswith(tokenizer.decode(five[b].tolist())) for b in range(4))
