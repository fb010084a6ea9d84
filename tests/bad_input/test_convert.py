"""`gptlite convert`: bad input ends with one line and exit status 2, and a good one writes file and card."""

import json
from collections.abc import Callable
from pathlib import Path

import pytest
import torch

from gptlite.checkpoint import save_checkpoint
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
    model = GPTlite(GPTConfig(tokenizer.vocab_size, 16, n_layers=1, d_model=16, n_heads=4, d_head=4)).eval()
    path = tmp_path / "base.safetensors"
    named = {"name": corpus.name, "sha256": corpus.sha256, "train_chars": len(corpus.train)}
    loss = validation_loss(model, tokenizer.encode(corpus.held_out))
    save_checkpoint(path, model, tokenizer, {"corpus": named, "validation_loss": loss, "tokens_seen": 4000})
    return path, text


@pytest.mark.parametrize(
    ("words", "says"),
    [
        ([], ["--kv-heads", "--latent", "required"]),
        (["--kv-heads", "2", "--latent", "8"], ["not allowed with"]),
        (["--kv-heads", "0"], ["'0' is not a whole number of at least 1"]),
        (["--kv-heads", "3"], ["n_kv_heads is 3, it must divide the 4 KV heads"]),
        (["--latent", "17"], ["d_latent is 17, it must be 1 to 16"]),
        (["--latent", "-1"], ["'-1' is not a whole number"]),
        (["--latent", "8", "--start", "mean"], ["start is 'mean', for latent it must be one of weights, data"]),
        (["--kv-heads", "2", "--start", "median"], ["--start", "'median'"]),
        (["--kv-heads", "2", "--steps", "1.5"], ["'1.5' is not a whole number"]),
        (["--kv-heads", "2", "--steps", "2", "--lr", "nan"], ["lr is nan, it must be a positive number"]),
        (["--kv-heads", "2", "--steps", "2", "--lr", "-1"], ["lr is -1.0"]),
        (["--kv-heads", "2", "--steps", "2", "--cooldown", "0"], ["cooldown is 0.0, it must be in (0, 1]"]),
        (["--kv-heads", "2", "--parts", "head"], ["--parts", "'head'"]),
        (["--kv-heads", "2", "--device", "toaster"], ["device is 'toaster'"]),
        (["--kv-heads", "2", "--out", "x.pt"], ["must end in .safetensors"]),
    ],
)
def test_bad_input(refused: Refused, base: tuple[Path, Path], words: list[str], says: list[str]) -> None:
    path, text = base
    out = [] if "--out" in words else ["--out", path.with_name("out.safetensors")]
    line = refused("convert", *words, "--checkpoint", path, "--text", text, *out)
    for part in says:
        assert part in line
    assert not path.with_name("out.safetensors").exists()


def test_what_is_not_there_or_does_not_fit(refused: Refused, base: tuple[Path, Path], tmp_path: Path) -> None:
    path, text = base
    out = ["--out", tmp_path / "out.safetensors"]
    assert "cannot read the card" in refused(
        "convert", "--latent", 8, "--checkpoint", "none.safetensors", "--text", text, *out
    )
    other = tmp_path / "other.txt"
    other.write_text(text.read_text(encoding="utf-8").replace("rain", "snow"), encoding="utf-8")
    assert "was trained on another text than other.txt" in refused(
        "convert", "--latent", 8, "--checkpoint", path, "--text", other, *out
    )
    blocked = tmp_path / "file"
    blocked.write_text("")
    assert "cannot write into" in refused(
        "convert", "--latent", 8, "--checkpoint", path, "--text", text, "--out", blocked / "x.safetensors"
    )
    path.write_bytes(path.read_bytes()[:100])
    assert "no checkpoint of gptlite" in refused("convert", "--latent", 8, "--checkpoint", path, "--text", text, *out)


@pytest.mark.parametrize("size", [["--kv-heads", "2", "--start", "mean"], ["--latent", "8"]])
def test_a_good_command_writes_file_and_card(
    base: tuple[Path, Path], capsys: pytest.CaptureFixture[str], size: list[str]
) -> None:
    path, text = base
    out = path.with_name("out.safetensors")
    words = ["--steps", "2", "--batch-size", "2", "--optimizer", "adamw", "--no-teacher"]
    assert main(["convert", *size, *words, "--checkpoint", str(path), "--text", str(text), "--out", str(out)]) == 0
    printed, _ = capsys.readouterr()
    assert "cached values per token" in printed and "after 64 tokens" in printed
    card = json.loads(out.with_suffix(".json").read_text(encoding="utf-8"))
    assert card["command"].split() == [
        "gptlite", "convert", *size, "--steps", "2", "--no-teacher", "--batch-size", "2", "--optimizer", "adamw",
        "--checkpoint", "base.safetensors", "--text", "text.txt", "--out", "out.safetensors",
    ]  # fmt: skip
    assert main(["measure", "--loss", "--checkpoint", str(out), "--text", str(text)]) == 0
    assert main(["generate", "the ", "--tokens", "5", "--checkpoint", str(out)]) == 0
