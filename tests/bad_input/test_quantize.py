"""`gptlite quantize`: bad input ends with one line and exit status 2, and a good one writes file and card."""

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
        ([], ["--method", "required"]),
        (["--method", "magic"], ["--method", "'magic'"]),
        (["--method", "rtn", "--bits", "1"], ["--bits", "'1' is not a whole number"]),
        (["--method", "rtn", "--bits", "9"], ["--bits", "'9'"]),
        (["--method", "rtn", "--bits", "4.5"], ["'4.5' is not a whole number"]),
        (["--method", "gptq", "--group", "-1"], ["--group", "'-1'"]),
        (["--method", "awq", "--steps", "3"], ["--method awq trains nothing, so it takes no --steps"]),
        (["--method", "qat"], ["--method qat needs --steps"]),
        (["--method", "qat", "--steps", "2", "--lr", "nan"], ["lr is nan, it must be a positive number"]),
        (["--method", "qat", "--steps", "2", "--cooldown", "0"], ["cooldown is 0.0, it must be in (0, 1]"]),
        (["--method", "rtn", "--device", "toaster"], ["device is 'toaster'"]),
        (["--method", "rtn", "--out", "x.pt"], ["must end in .safetensors"]),
    ],
)
def test_bad_input(refused: Refused, base: tuple[Path, Path], words: list[str], says: list[str]) -> None:
    path, text = base
    out = [] if "--out" in words else ["--out", path.with_name("out.safetensors")]
    line = refused("quantize", *words, "--checkpoint", path, "--text", text, *out)
    for part in says:
        assert part in line
    assert not path.with_name("out.safetensors").exists()


def test_what_is_not_there_or_does_not_fit(refused: Refused, base: tuple[Path, Path], tmp_path: Path) -> None:
    path, text = base
    rtn, out = ["quantize", "--method", "rtn"], ["--out", tmp_path / "out.safetensors"]
    assert "cannot read the card" in refused(*rtn, "--checkpoint", "none.safetensors", "--text", text, *out)
    other = tmp_path / "other.txt"
    other.write_text(text.read_text(encoding="utf-8").replace("rain", "snow"), encoding="utf-8")
    assert "was trained on another text than other.txt" in refused(*rtn, "--checkpoint", path, "--text", other, *out)
    blocked = tmp_path / "file"
    blocked.write_text("")
    inside = ["--out", blocked / "x.safetensors"]
    assert "cannot write into" in refused(*rtn, "--checkpoint", path, "--text", text, *inside)
    path.write_bytes(path.read_bytes()[:100])
    assert "no checkpoint of gptlite" in refused(*rtn, "--checkpoint", path, "--text", text, *out)


@pytest.mark.parametrize("method", ["rtn", "gptq", "awq", "qat"])
def test_a_good_command_writes_file_and_card(
    base: tuple[Path, Path], capsys: pytest.CaptureFixture[str], method: str
) -> None:
    path, text = base
    out = path.with_name("out.safetensors")
    words = ["--bits", "3", "--group", "8"]
    words += ["--steps", "2", "--batch-size", "2", "--optimizer", "adamw"] if method == "qat" else []
    files = ["--checkpoint", str(path), "--text", str(text), "--out", str(out)]
    assert main(["quantize", "--method", method, *words, *files]) == 0
    printed, _ = capsys.readouterr()
    assert "3,072 weights in " in printed and "nats per character" in printed
    card = json.loads(out.with_suffix(".json").read_text(encoding="utf-8"))
    assert card["command"].split()[:5] == ["gptlite", "quantize", "--method", method, "--bits"]
    assert card["command"].endswith("--checkpoint base.safetensors --text text.txt --out out.safetensors")
    assert card["grid"] == {"bits": 3, "group_size": 8, "symmetric": False, "clip": False}
    assert main(["measure", "--loss", "--checkpoint", str(out), "--text", str(text)]) == 0
    assert main(["generate", "the ", "--tokens", "5", "--checkpoint", str(out)]) == 0


def test_codes_are_not_made_of_codes(refused: Refused, base: tuple[Path, Path], capsys) -> None:
    path, text = base
    out, again = path.with_name("out.safetensors"), path.with_name("again.safetensors")
    assert main(["quantize", "--method", "rtn", "--checkpoint", str(path), "--text", str(text), "--out", str(out)]) == 0
    capsys.readouterr()
    for words in (["--method", "awq"], ["--method", "qat", "--steps", "1"]):
        line = refused("quantize", *words, "--checkpoint", out, "--text", text, "--out", again)
        assert "layer blocks.0.mha.query_proj holds codes already" in line
    assert not again.exists()


def test_a_cut_file_does_not_generate(refused: Refused, base: tuple[Path, Path], capsys) -> None:
    path, text = base
    out = path.with_name("out.safetensors")
    assert main(["quantize", "--method", "rtn", "--checkpoint", str(path), "--text", str(text), "--out", str(out)]) == 0
    capsys.readouterr()
    whole = out.read_bytes()
    for cut in (0, 50, 400, len(whole) - 1):
        out.write_bytes(whole[:cut])
        line = refused("generate", "the ", "--checkpoint", out)
        assert "or is damaged" in line
