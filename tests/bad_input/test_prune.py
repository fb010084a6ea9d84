"""`gptlite prune`: bad input ends with one line and exit status 2, and a good one writes file and card."""

import json
from collections.abc import Callable
from pathlib import Path

import pytest
import torch

from gptlite.checkpoint import load, save_checkpoint
from gptlite.cli import main
from gptlite.config import GPTConfig
from gptlite.data import CharTokenizer, load_corpus
from gptlite.measure import validation_loss
from gptlite.model import GPTlite

Refused = Callable[..., str]


@pytest.fixture
def base(tmp_path: Path) -> tuple[Path, Path]:
    """A small checkpoint with its card, and the text that it says it was trained on."""
    text = tmp_path / "text.txt"
    text.write_text("the rain in spain stays mainly in the plain. " * 30, encoding="utf-8")
    corpus = load_corpus(text)
    tokenizer = CharTokenizer.of(corpus.train, corpus.held_out)
    torch.manual_seed(0)
    model = GPTlite(GPTConfig(tokenizer.vocab_size, 16, n_layers=2, d_model=16, n_heads=4, d_head=4)).eval()
    path = tmp_path / "base.safetensors"
    named = {"name": corpus.name, "sha256": corpus.sha256, "train_chars": len(corpus.train)}
    save_checkpoint(path, model, tokenizer, {"corpus": named, "validation_loss": 3.1, "tokens_seen": 4000})
    return path, text


@pytest.mark.parametrize(
    ("words", "says"),
    [
        (["--start", "luck"], ["--start", "'luck'"]),
        (["--keep", "0"], ["keep is 0.0, it must be a share between 0 and 1"]),
        (["--keep", "1.5"], ["keep is 1.5"]),
        (["--keep", "nan"], ["keep is nan"]),
        (["--by", "taste"], ["--by", "'taste'"]),
        (["--steps", "0"], ["'0' is not a whole number of at least 1"]),
        (["--start", "iterative", "--steps", "3"], ["steps is 3, the 5 stages need at least one each"]),
        (["--start", "learned", "--steps", "4"], ["steps is 4, the learned start needs at least 5"]),
        (["--lr", "-1"], ["lr is -1.0"]),
        (["--seed", "-1"], ["'-1' is not a whole number"]),
        (["--device", "toaster"], ["device is 'toaster'"]),
        (["--out", "x.pt"], ["must end in .safetensors"]),
    ],
)
def test_bad_input(refused: Refused, base: tuple[Path, Path], words: list[str], says: list[str]) -> None:
    path, text = base
    out = [] if "--out" in words else ["--out", path.with_name("out.safetensors")]
    line = refused("prune", *words, "--checkpoint", path, "--text", text, *out)
    for part in says:
        assert part in line
    assert not path.with_name("out.safetensors").exists()


def test_another_text_or_another_vocabulary_is_refused(
    refused: Refused, base: tuple[Path, Path], tmp_path: Path
) -> None:
    path, _ = base
    other = tmp_path / "other.txt"
    other.write_text("something else entirely, " * 40, encoding="utf-8")
    line = refused("prune", "--checkpoint", path, "--text", other, "--out", tmp_path / "out.safetensors")
    assert "was trained on another text than other.txt" in line
    assert "cannot read the card" in refused(
        "prune", "--checkpoint", tmp_path / "none.safetensors", "--text", other, "--out", tmp_path / "out.safetensors"
    )


def test_a_good_one_writes_file_and_card(base: tuple[Path, Path], capsys: pytest.CaptureFixture[str]) -> None:
    path, text = base
    out = path.with_name("small.safetensors")
    words = ["prune", "--steps", "3", "--save-every", "1", "--checkpoint", path, "--text", text, "--out", out]
    assert main([str(word) for word in words]) == 0
    card = json.loads(out.with_suffix(".json").read_text(encoding="utf-8"))
    model, tokenizer = load(out)
    assert (model.config.n_heads, model.config.d_ff, model.n_params) == (2, 32, card["n_params"])
    loss = validation_loss(model, tokenizer.encode(load_corpus(text).held_out))
    assert card["losses"]["after"] == pytest.approx(loss, abs=1e-4)
    assert card["command"] == (
        "gptlite prune --steps 3 --save-every 1 --checkpoint base.safetensors --text text.txt --out small.safetensors"
    )
    assert f"{model.n_params:,} parameters" in capsys.readouterr().out
