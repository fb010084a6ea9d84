"""What the export writes, what it refuses and why; that transformers computes the same is shown by the oracles."""

import json
import os
import re
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors.torch import load_file
from torch import nn

import gptlite
from gptlite.checkpoint import SHIPPED
from gptlite.config import GPTConfig
from gptlite.data import CharTokenizer
from gptlite.export import FILES, export_hf, fold_head_bias, folded_bias, opt_weights
from gptlite.model import GPTlite, MultiHeadAttention

CHARS = "\n :EMORabcdé"
TOKENIZER = CharTokenizer(CHARS)


def make(**changes: Any) -> GPTlite:
    torch.manual_seed(0)
    sizes = {"context_length": 8, "n_layers": 2, "d_model": 16, "n_heads": 4, "d_head": 4, "d_ff": 20}
    model = GPTlite(GPTConfig(**{"vocab_size": len(CHARS), **sizes, **changes})).eval()
    nn.init.normal_(model.fc_out.bias)
    return model


def test_the_files(tmp_path: Path) -> None:
    model = make()
    export_hf(model, TOKENIZER, tmp_path / "opt")
    assert {path.name for path in (tmp_path / "opt").iterdir()} == FILES
    assert os.listdir(tmp_path) == ["opt"], "nothing else is left behind"
    config = json.loads((tmp_path / "opt" / "config.json").read_text())
    assert config["architectures"] == ["OPTForCausalLM"] and config["num_attention_heads"] == 4
    assert config["tie_word_embeddings"] is False and config["do_layer_norm_before"] is True
    stored = load_file(tmp_path / "opt" / "model.safetensors")
    positions = stored["model.decoder.embed_positions.weight"]
    assert torch.equal(positions[2:], model.position_embedding.weight) and not positions[:2].any()
    # OPT has two more rows of positions, and no bias of the head
    assert sum(t.numel() for t in stored.values()) == model.n_params + 2 * 16 - len(CHARS)
    vocabulary = json.loads((tmp_path / "opt" / "tokenizer.json").read_text())["model"]["vocab"]
    assert vocabulary == {char: i for i, char in enumerate(CHARS)}


@pytest.mark.parametrize("dtype", [torch.float16, torch.bfloat16, torch.float64])
def test_stored_in_fp32_from_any_dtype(dtype: torch.dtype) -> None:
    assert {t.dtype for t in opt_weights(make().to(dtype)).values()} == {torch.float32}


def test_the_model_is_left_as_it_was(tmp_path: Path) -> None:
    model = make()
    before = {name: t.clone() for name, t in model.state_dict().items()}
    export_hf(model, TOKENIZER, tmp_path / "opt")
    assert all(torch.equal(t, before[name]) for name, t in model.state_dict().items())


def test_folded_bias_gives_the_same_logits() -> None:
    model = make().double()
    hidden = torch.randn(5, 16, dtype=torch.float64)  # before the norm's bias
    with_bias = (hidden + model.ln.bias) @ model.fc_out.weight.T + model.fc_out.bias
    folded = (hidden + folded_bias(model).double()) @ model.fc_out.weight.T
    torch.testing.assert_close(folded, with_bias, atol=1e-6, rtol=0)


def test_a_bias_that_cannot_be_folded() -> None:
    with pytest.raises(
        ValueError, match=r"a vocabulary \(here 16\) smaller than d_model \(here 12\), or a bias of zero"
    ):
        folded_bias(make(vocab_size=16, d_model=12, n_heads=3))
    twice = make()
    twice.fc_out.weight.data[3] = twice.fc_out.weight.data[4]  # equal rows, unequal biases: V < d does not save it
    with pytest.raises(ValueError, match="leaves an error of"):
        folded_bias(twice)
    zero = make(vocab_size=16, d_model=12, n_heads=3)
    nn.init.zeros_(zero.fc_out.bias)
    assert torch.equal(folded_bias(zero), zero.ln.bias)


def test_a_bias_that_moves_leaves_the_logits() -> None:
    model = make().double()
    tokens = torch.randint(len(CHARS), (2, 8))
    expected = model(tokens)
    fold_head_bias(model)
    assert not model.fc_out.bias.any()
    # the bias is stored in fp32
    torch.testing.assert_close(model(tokens), expected, atol=1e-6, rtol=0)


def test_a_bias_that_cannot_move_stays() -> None:
    model = make(vocab_size=16, d_model=12, n_heads=3)
    before = {name: t.clone() for name, t in model.state_dict().items()}
    with pytest.raises(ValueError, match="or a bias of zero"):
        fold_head_bias(model)
    assert all(torch.equal(t, before[name]) for name, t in model.state_dict().items())


@pytest.mark.parametrize("name", SHIPPED)
def test_a_shipped_model_is_an_opt_as_it_is(name: str) -> None:
    model, _ = gptlite.load(name)
    assert not model.fc_out.bias.any() and torch.equal(folded_bias(model), model.ln.bias)


class Latent(MultiHeadAttention):
    """Stands for a variant of attention."""


class Quantised(nn.Linear):
    """Stands for a layer that is no plain Linear."""


def changed(change: Callable[[GPTlite], Any]) -> GPTlite:
    model = make()
    change(model)
    return model


def swap(model: GPTlite, name: str, module: nn.Module) -> None:
    parent, _, child = name.rpartition(".")
    setattr(model.get_submodule(parent), child, module)


@pytest.mark.parametrize(
    ("model", "why"),
    [
        (make(n_kv_heads=2), "layer 0 .* 2 KV heads serve 4 query heads"),
        (make(d_head=8), "layer 0 .* 4 heads of 8 are not d_model, which is 16"),
        (make(n_heads=2), "layer 0 .* 2 heads of 4 are not d_model, which is 16"),
        (changed(lambda m: setattr(m.blocks[1].mha, "window", 4)), "layer 1 .* window of 4"),
        (
            changed(lambda m: setattr(m.blocks[0].mha, "scale", 1.0)),
            r"scales its scores by 1.0, OPT by 1 / sqrt\(d_head\)",
        ),
        (changed(lambda m: swap(m, "blocks.1.ffwd.net.1", nn.GELU())), "layer 1 .* activation is GELU"),
        (changed(lambda m: swap(m, "blocks.0.mha", Latent(m.config))), "its attention is Latent"),
        (
            changed(lambda m: swap(m, "blocks.1.ffwd.net.0", Quantised(16, 20))),
            "it has a Quantised where OPT has a plain",
        ),
        (
            changed(lambda m: swap(m, "blocks.1.ffwd", make(d_ff=8).blocks[1].ffwd)),
            r"all alike, .* \[\(4, 8\), \(4, 20\)\]",
        ),
        (make(vocab_size=9), "the tokenizer has 12 characters, the model a vocabulary of 9"),
    ],
)
def test_refused_with_the_reason(model: GPTlite, why: str, tmp_path: Path) -> None:
    with pytest.raises(ValueError, match=why) as caught:
        export_hf(model, TOKENIZER, tmp_path / "opt")
    assert "\n" not in str(caught.value)
    assert not (tmp_path / "opt").exists()


def test_its_own_folder_is_replaced(tmp_path: Path) -> None:
    folder = tmp_path / "opt"
    folder.mkdir()
    export_hf(make(), TOKENIZER, folder)  # into an empty one
    export_hf(make(n_layers=1), TOKENIZER, folder)
    assert json.loads((folder / "config.json").read_text())["num_hidden_layers"] == 1
    assert os.listdir(tmp_path) == ["opt"]


@pytest.mark.parametrize(
    "files",
    [
        {"thesis.tex": "years of work"},
        {"config.json": "{}"},
        {"config.json": "[]"},
        {"config.json": "not json"},
        {"config.json": '{"exported_by": "gptlite"}', "thesis.tex": "years of work"},
        {"model.safetensors": ""},
    ],
)
def test_another_folder_is_left_alone(tmp_path: Path, files: dict[str, str]) -> None:
    for name, content in files.items():
        (tmp_path / name).write_text(content)
    with pytest.raises(ValueError, match=f"{re.escape(str(tmp_path))} exists and is no folder that an export wrote"):
        export_hf(make(), TOKENIZER, tmp_path)
    assert {path.name: path.read_text() for path in tmp_path.iterdir()} == files


def test_a_file_in_the_way(tmp_path: Path) -> None:
    (tmp_path / "opt").write_text("mine")
    with pytest.raises(ValueError, match="exists and is no folder that an export wrote"):
        export_hf(make(), TOKENIZER, tmp_path / "opt")
    with pytest.raises(ValueError, match=r"cannot write .*deeper: "):
        export_hf(make(), TOKENIZER, tmp_path / "opt" / "deeper")
    assert (tmp_path / "opt").read_text() == "mine"


def test_a_failure_half_way_leaves_the_old_folder(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    folder = tmp_path / "opt"
    export_hf(make(), TOKENIZER, folder)
    before = {path.name: path.read_bytes() for path in folder.iterdir()}

    def full(*_: Any, **__: Any) -> None:
        raise OSError(28, "No space left on device")

    monkeypatch.setattr(Path, "write_text", full)
    with pytest.raises(ValueError, match=r"cannot write .*: No space left on device"):
        export_hf(make(n_layers=1), TOKENIZER, folder)
    assert {path.name: path.read_bytes() for path in folder.iterdir()} == before
    assert os.listdir(tmp_path) == ["opt"]
