"""The sweep on distillation trains the students it names, alike but for the lesson, and says what came out."""

import json
from pathlib import Path

import pytest
import torch

from gptlite.checkpoint import save_checkpoint
from gptlite.compress.students import Recipe
from gptlite.config import preset
from gptlite.data import CharTokenizer
from gptlite.model import GPTlite
from gptlite.notebook.explorers_distill import RECIPES
from gptlite.record import all_sweeps, record
from gptlite.sweeps.distill import read_recipe, run_settings

TEXT = "ROMEO: but soft, what light through yonder window breaks?\n" * 40


@pytest.fixture
def files(tmp_path: Path) -> dict[str, str]:
    (tmp_path / "mine.txt").write_text(TEXT, encoding="utf-8")
    tokenizer = CharTokenizer.of(TEXT)
    torch.manual_seed(0)
    save_checkpoint(tmp_path / "t.safetensors", GPTlite(preset("nano", vocab_size=tokenizer.vocab_size)), tokenizer)
    return {"text": str(tmp_path / "mine.txt"), "teacher": str(tmp_path / "t.safetensors")}


def test_students_of_a_seed_differ_in_the_lesson_alone(tmp_path: Path, files: dict[str, str]) -> None:
    recipes = ["text", "soft", "offline top_k=5", "text steps=3"]
    out = tmp_path / "r.json"
    record("distillation", out, recipes=recipes, seeds=[1, 2], steps=2, batch=2, preset="nano", **files)
    said = json.loads(out.read_text())
    rows = said["data"]["students"]
    assert [(row["recipe"], row["seed"]) for row in rows] == [(r, seed) for seed in (1, 2) for r in recipes]
    assert [row["steps"] for row in rows] == [2, 2, 2, 3] * 2
    assert [row["tokens_seen"] for row in rows] == [256, 256, 256, 384] * 2
    assert all(0 <= row["same"] <= 1 and 0 <= row["overlap"] <= 1 and row["divergence"] >= 0 for row in rows)
    assert len({row["loss"] for row in rows}) > 4
    assert said["complete"] and len(said["points"]) == 8
    assert (said["params"]["text"], said["params"]["teacher"]) == ("mine.txt", "t.safetensors")
    assert str(tmp_path) not in out.read_text()
    again = tmp_path / "again.json"
    record("distillation", again, recipes=["soft"], seeds=[2], steps=2, batch=2, preset="nano", **files)
    assert json.loads(again.read_text())["data"]["students"] == [rows[5]]


def test_a_recipe_is_read_as_it_is_written() -> None:
    assert read_recipe("text") == (Recipe("text"), {})
    assert read_recipe("soft temperature=2 hard=0.5") == (Recipe("soft", temperature=2.0, hard=0.5), {})
    assert read_recipe("offline tail=no top_k=3") == (Recipe("offline", tail=False, top_k=3), {})
    assert read_recipe("soft teachers=a+b steps=9") == (Recipe("soft"), {"teachers": "a+b", "steps": "9"})


@pytest.mark.parametrize("text", ["", "softly", "soft temperature", "soft heat=2", "soft temperature=", "soft =2"])
def test_a_text_that_is_no_recipe_is_refused(text: str) -> None:
    with pytest.raises(ValueError, match=r"must be (a loss and NAME=VALUE|one of text)"):
        read_recipe(text)


def test_the_chapter_has_words_for_every_recipe_of_the_sweep() -> None:
    recipes = all_sweeps()["distillation"].defaults["recipes"]
    assert set(recipes) == set(RECIPES)
    for text in recipes:
        read_recipe(text)


def test_settings_do_not_depend_on_the_recipe() -> None:
    one = run_settings(200, 8, 3)
    assert (one.steps, one.batch_size, one.seed, one.warmup, one.precision) == (200, 8, 3, 10, "bf16")
    assert run_settings(1, 8, 3).warmup == 1
