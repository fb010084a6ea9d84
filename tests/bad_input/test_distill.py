"""`gptlite distill`: bad input ends with one line and exit status 2, and a good run can be made again by its card."""

import json
from collections.abc import Callable
from pathlib import Path

import pytest
import torch
from safetensors.torch import load_file

from gptlite.checkpoint import save_checkpoint
from gptlite.cli import main
from gptlite.config import preset
from gptlite.data import CharTokenizer
from gptlite.model import GPTlite

Refused = Callable[..., str]
TEXT = "ROMEO: but soft, what light through yonder window breaks?\n" * 40


@pytest.fixture
def folder(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """A folder with a text and a teacher of its vocabulary, as the place where the command runs."""
    (tmp_path / "mine.txt").write_text(TEXT, encoding="utf-8")
    tokenizer = CharTokenizer.of(TEXT)
    torch.manual_seed(0)
    save_checkpoint(tmp_path / "t.safetensors", GPTlite(preset("nano", vocab_size=tokenizer.vocab_size)), tokenizer)
    monkeypatch.chdir(tmp_path)
    return tmp_path


WORDS = ["distill", "--preset", "nano", "--steps", "4", "--batch-size", "2", "--save-every", "2", "--text", "mine.txt"]
WORDS += ["--teacher", "t.safetensors", "--out", "s.safetensors"]


@pytest.mark.parametrize(
    ("words", "says"),
    [
        (["--steps", "0"], "'0' is not a whole number of at least 1"),
        (["--loss", "softly"], "--loss"),
        (["--temperature", "0"], "temperature is 0.0, it must be a positive number"),
        (["--temperature", "nan"], "temperature is nan"),
        (["--hard", "1.5"], "hard is 1.5, it must be in [0, 1]"),
        (["--loss", "hidden", "--cosine", "-1"], "cosine is -1.0, it must be at least 0"),
        (["--loss", "offline", "--top-k", "500"], "k is 500, it must be 1 to the vocabulary's"),
        (["--loss", "offline", "--store", "mine.txt"], "mine.txt is no store of a teacher, or is damaged"),
        (["--loss", "offline", "--store", "t.safetensors"], "its header does not say gptlite-teacher-1"),
        (["--loss", "on-policy", "--share", "2"], "share is 2.0"),
        (["--loss", "on-policy", "--begin", "-1"], "begin is -1.0"),
        (["--teacher", "nowhere"], "there is no checkpoint nowhere"),
        (["--teacher", "gptlite"], "teacher gptlite has another vocabulary than mine.txt"),
        (["--out", "s.pt"], "must end in .safetensors"),
        (["--text", "nowhere.txt"], "cannot read nowhere.txt"),
        (["--lr", "-1"], "lr is -1.0"),
        (["--device", "toaster"], "device is 'toaster'"),
    ],
)
def test_bad_input(refused: Refused, folder: Path, words: list[str], says: str) -> None:
    assert says in refused(*WORDS, *words)
    assert not (folder / "s.safetensors").exists()


LOSSES = ["text", "soft", "logits", "hidden", "mutual", "offline", "on-policy", "responses"]


@pytest.mark.parametrize("loss", LOSSES)
def test_the_command_of_the_card_gives_the_same_student(folder: Path, capsys, loss: str) -> None:
    more = {"soft": ["--temperature", "2", "--hard", "0.5"], "offline": ["--no-tail", "--top-k", "3"]}
    more |= {"responses": ["--answers", "3"], "on-policy": ["--begin", "0", "--share", "1", "--reverse"]}
    assert main([*WORDS, "--loss", loss, *more.get(loss, [])]) == 0
    assert "the teacher's most probable character is the student's at" in capsys.readouterr().out
    card = json.loads((folder / "s.json").read_text())
    assert card["recipe"]["loss"] == loss and card["teachers"] == ["t.safetensors"]
    first = load_file(folder / "s.safetensors")
    for file in folder.glob("s.*"):
        file.unlink()
    assert main(card["command"].split()[1:]) == 0
    again = load_file(folder / "s.safetensors")
    assert all(torch.equal(again[name], first[name]) for name in first)
    assert json.loads((folder / "s.json").read_text()) == card


def test_a_stopped_run_goes_on(folder: Path, monkeypatch: pytest.MonkeyPatch, capsys) -> None:
    import gptlite.progress

    assert main(WORDS) == 0
    plain = load_file(folder / "s.safetensors")
    for file in folder.glob("s.*"):
        file.unlink()
    update = gptlite.progress.Progress.update

    def stop(self: object, done: int, note: str = "") -> None:
        if done == 3:
            raise KeyboardInterrupt

    monkeypatch.setattr(gptlite.progress.Progress, "update", stop)
    assert main(WORDS) == 130
    assert "stopped; saved at step 2 of 4" in capsys.readouterr().err
    monkeypatch.setattr(gptlite.progress.Progress, "update", update)
    assert main(WORDS) == 0
    again = load_file(folder / "s.safetensors")
    assert all(torch.equal(again[name], plain[name]) for name in plain)


def test_several_teachers_and_a_store_on_disk(folder: Path) -> None:
    assert main([*WORDS, "--teacher", "t.safetensors", "--loss", "offline", "--store", "said.safetensors"]) == 0
    assert (folder / "said.safetensors").exists()
    card = json.loads((folder / "s.json").read_text())
    assert "--store said.safetensors" in card["command"]
    assert card["command"].count("--teacher") == 2
