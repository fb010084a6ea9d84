"""`gptlite heads` and the files that it writes: bad input ends with one line, and no file is trusted."""

import json
from collections.abc import Callable
from pathlib import Path

import pytest
import torch
from safetensors import safe_open
from safetensors.torch import load_file, save_file

from gptlite.checkpoint import load_checkpoint, save_checkpoint
from gptlite.cli import main
from gptlite.config import GPTConfig
from gptlite.data import CharTokenizer, load_corpus
from gptlite.model import GPTlite
from gptlite.speculative.heads_stored import KINDS, SHIPPED_HEADS, heads_path, load_heads, save_heads

Refused = Callable[..., str]
SIZES = {"medusa": {"n_heads": 2}, "eagle": {}, "mtp": {"n_heads": 2}, "exit": {"layers": [1]}}


@pytest.fixture
def base(tmp_path: Path) -> tuple[Path, Path]:
    """A small checkpoint with its card, and the text that it says it was trained on."""
    text = tmp_path / "text.txt"
    text.write_text("the rain in spain stays mainly in the plain. " * 30, encoding="utf-8")
    corpus = load_corpus(text)
    tokenizer = CharTokenizer.of(corpus.train, corpus.held_out)
    torch.manual_seed(0)
    config = GPTConfig(tokenizer.vocab_size, 16, n_layers=2, d_model=20, n_heads=4, d_head=4, n_kv_heads=2)
    path = tmp_path / "base.safetensors"
    named = {"name": corpus.name, "sha256": corpus.sha256, "train_chars": len(corpus.train)}
    save_checkpoint(path, GPTlite(config).eval(), tokenizer, {"corpus": named, "validation_loss": 3.0})
    return path, text


@pytest.mark.parametrize("kind", KINDS)
def test_one_command_per_kind_writes_heads_and_a_card(base: tuple[Path, Path], kind: str, capsys) -> None:
    path, text = base
    out = path.with_name(f"{kind}.safetensors")
    extra = ["--layers", "1"] if kind == "exit" else []
    words = ["heads", kind, "--steps", "3", "--batch-size", "2", "--optimizer", "adamw", "--precision", "bf16", *extra]
    assert main([*words, "--checkpoint", str(path), "--text", str(text), "--out", str(out), "--device", "cpu"]) == 0
    assert f"{out}: " in capsys.readouterr().out
    card = json.loads(out.with_suffix(".json").read_text())
    assert card["command"].startswith(f"gptlite heads {kind} ") and "--out " + out.name in card["command"]
    assert str(path.parent) not in json.dumps(card)  # no path of a machine
    assert card["kind"] == kind and card["base"] == path.name and card["settings"]["steps"] == 3
    assert card["tokens_seen"] == 3 * 2 * 16 and card["corpus"]["sha256"] == load_corpus(text).sha256
    model, _ = load_checkpoint(path)
    heads = load_heads(out, model, path)
    assert heads.kind == kind and heads.sizes == card["sizes"] and heads.n_params == card["n_params"]
    assert all(0 <= row["top"] <= 1 and 0 <= row["overlap"] <= 1 for row in card["agreement"])
    with safe_open(out, framework="pt") as file:
        assert {str(file.get_tensor(name).dtype) for name in file.keys()} == {"torch.float16"}  # noqa: SIM118


@pytest.mark.parametrize(
    ("words", "says"),
    [
        ([], ["KIND", "required"]),
        (["lookahead"], ["KIND", "'lookahead'"]),
        (["medusa"], ["--steps", "required"]),
        (["medusa", "--steps", "0"], ["'0' is not a whole number of at least 1"]),
        (["medusa", "--steps", "2", "--n-heads", "0"], ["'0' is not a whole number from 1 to 64"]),
        (["eagle", "--steps", "2", "--n-heads", "2"], ["--n-heads"]),
        (["exit", "--steps", "2", "--layers", "2"], ["layers is [2], each must be 1 to 1, and come once"]),
        (["exit", "--steps", "2", "--layers", "1", "1"], ["layers is [1, 1]"]),
        (["mtp", "--steps", "2", "--lr", "nan"], ["lr is nan, it must be a positive number"]),
        (["mtp", "--steps", "2", "--out", "x.pt"], ["must end in .safetensors"]),
        (["mtp", "--steps", "2", "--device", "toaster"], ["device is 'toaster'"]),
    ],
)
def test_bad_input(refused: Refused, base: tuple[Path, Path], words: list[str], says: list[str]) -> None:
    path, text = base
    out = [] if "--out" in words or len(words) < 2 else ["--out", path.with_name("out.safetensors")]
    rest = ["--checkpoint", path, "--text", text, *out] if len(words) > 1 else []
    line = refused("heads", *words, *rest)
    for part in says:
        assert part in line


def test_another_corpus_is_refused(refused: Refused, base: tuple[Path, Path]) -> None:
    path, text = base
    text.write_text("something else entirely, and long enough for a window or two of it. " * 9, encoding="utf-8")
    out = path.with_name("out.safetensors")
    line = refused("heads", "medusa", "--steps", "1", "--checkpoint", path, "--text", text, "--out", out)
    assert "its card has another sha256" in line and not out.exists()


# -- files ----------------------------------------------------------------------------------------------------------


@pytest.fixture
def stored(base: tuple[Path, Path]) -> tuple[Path, Path, GPTlite]:
    """Heads of each kind beside their base: the folder's base, and the trunk."""
    path, _ = base
    model, _ = load_checkpoint(path)
    for kind, sizes in SIZES.items():
        save_heads(path.with_name(f"{kind}.safetensors"), KINDS[kind](model, **sizes), path)  # type: ignore[arg-type]
    return path, path.with_name("medusa.safetensors"), model


def rewrite(file: Path, header: dict[str, str] | None = None, **weights: torch.Tensor | None) -> None:
    """Changes entries of a file's header and some of its tensors; None takes a tensor away."""
    with safe_open(file, framework="pt") as opened:
        old = dict(opened.metadata())
    tensors = {k: v.clone() for k, v in load_file(file).items()}
    for name, value in weights.items():
        tensors.pop(name, None)
        if value is not None:
            tensors[name] = value
    save_file(tensors, file, {**old, **(header or {})})


@pytest.mark.parametrize("kind", KINDS)
def test_heads_come_back_as_they_were_stored(stored: tuple[Path, Path, GPTlite], kind: str) -> None:
    path, _, model = stored
    file = path.with_name(f"{kind}.safetensors")
    heads = load_heads(file, model, path)
    assert not heads.training
    for name, weight in load_file(file).items():
        assert torch.equal(heads.state_dict()[name].half(), weight)


@pytest.mark.parametrize("size", [0, 7, 8, 100, 1000, -1])
def test_a_truncated_file_is_refused(stored: tuple[Path, Path, GPTlite], size: int) -> None:
    path, file, model = stored
    whole = file.read_bytes()
    file.write_bytes(whole[:size])
    with pytest.raises(ValueError, match=r"medusa\.safetensors holds no heads for this trunk, or is damaged"):
        load_heads(file, model, path)


@pytest.mark.parametrize(
    ("header", "weights", "says"),
    [
        ({"format": "gptlite-1"}, {}, "the header does not say gptlite-heads-1"),
        ({"kind": "magic"}, {}, "their kind is 'magic', it must be one of medusa, eagle, mtp, exit"),
        ({"kind": "eagle"}, {}, ""),  # whose constructor takes no sizes
        ({"sizes": '{"n_heads": 3}'}, {}, "weight blocks.2.bias is missing or unknown"),
        ({"sizes": '{"n_heads": 1000000}'}, {}, "the header's n_heads is 1000000, the file cannot hold that"),
        ({"sizes": '{"n_heads": 0}'}, {}, "the file cannot hold that"),
        ({"sizes": '{"n_heads": true}'}, {}, "the file cannot hold that"),
        ({"sizes": '{"n_heads": "2"}'}, {}, "the file cannot hold that"),
        ({"sizes": '{"what": 2}'}, {}, ""),
        ({"sizes": "[1"}, {}, ""),
        ({"base_sha256": "0" * 64}, {}, "they were trained on base.safetensors, which is not this"),
        ({}, {"blocks.0.weight": torch.zeros(20, 21)}, r"weight blocks.0.weight has shape \(20, 21\)"),
        ({}, {"blocks.0.weight": None}, "weight blocks.0.weight is missing or unknown"),
        ({}, {"more": torch.zeros(1)}, "weight more is missing or unknown"),
        (
            {},
            {"blocks.1.bias": torch.full((20,), float("nan"))},
            "weight blocks.1.bias holds values that are not finite",
        ),
    ],
)
def test_a_file_that_does_not_fit_is_refused(stored, header, weights, says) -> None:
    path, file, model = stored
    rewrite(file, header, **weights)
    with pytest.raises(ValueError, match=f"holds no heads for this trunk, or is damaged: .*{says}"):
        load_heads(file, model, path)


def test_heads_of_another_trunk_are_refused(stored: tuple[Path, Path, GPTlite]) -> None:
    path, file, _ = stored
    torch.manual_seed(1)
    other = GPTlite(GPTConfig(7, 16, n_layers=2, d_model=24, n_heads=4, d_head=4))
    with pytest.raises(ValueError, match="for this trunk it must be"):
        load_heads(file, other, path)
    with pytest.raises(ValueError, match="there are no heads nowhere"):
        load_heads("nowhere.safetensors", other, path)
    with pytest.raises(ValueError, match="there is no checkpoint"):
        save_heads(file, KINDS["medusa"](other, n_heads=1), "nowhere.safetensors")
    with pytest.raises(ValueError, match=r"must end in \.safetensors"):
        save_heads("x.bin", KINDS["medusa"](other, n_heads=1), path)


def test_a_foreign_file_is_refused(stored: tuple[Path, Path, GPTlite]) -> None:
    path, file, model = stored
    with pytest.raises(ValueError, match="the header does not say gptlite-heads-1"):
        load_heads(path, model, path)
    file.write_bytes(b"PK\x03\x04 not safetensors" * 50)
    with pytest.raises(ValueError, match="or is damaged"):
        load_heads(file, model, path)


@pytest.mark.parametrize("name", SHIPPED_HEADS)
def test_the_shipped_heads_load_and_their_cards_say_how_they_were_made(name: str) -> None:
    import gptlite

    model, _ = gptlite.load("gptlite")
    heads = load_heads(name, model)
    card = json.loads(heads_path(name).with_suffix(".json").read_text())
    assert card["kind"] == heads.kind == name.removeprefix("gptlite-") and card["n_params"] == heads.n_params
    assert card["command"] == card["command"].strip() and card["command"].startswith(f"gptlite heads {heads.kind} ")
    assert (
        card["corpus"]["sha256"]
        == json.loads(heads_path(name).with_name("gptlite.json").read_text())["corpus"]["sha256"]
    )
    assert heads_path(name).stat().st_size < 4e6
