"""Quantised files: few bytes, the same bits when they come back, and nothing believed that they say."""

import json
from pathlib import Path

import pytest
import torch
from safetensors import safe_open
from safetensors.torch import load_file, save_file

import gptlite
from gptlite.checkpoint import QUANTIZED, checkpoint_path, read_card
from gptlite.config import GPTConfig, preset
from gptlite.data import CharTokenizer
from gptlite.layers import linear_layers
from gptlite.measure import validation_loss
from gptlite.model import GPTlite
from gptlite.quantize.coded import CodedLinear
from gptlite.quantize.make import calibration_windows, make_quantized, quantize_model
from gptlite.quantize.rtn import Grid, round_to_nearest
from gptlite.quantize.stored import FORMAT, load_quantized, model_bytes, save_quantized, weight_bytes
from gptlite.record import random_model
from gptlite.variants.mla import to_latent

CHARS = "\n :EMORabcdef"
CONFIG = GPTConfig(len(CHARS), 16, n_layers=2, d_model=20, n_heads=6, d_head=4, n_kv_heads=3)


def small(grid: Grid | None = None) -> GPTlite:
    torch.manual_seed(0)
    model = GPTlite(CONFIG).half().float().eval()  # so that 16 bits lose nothing of what is not in codes
    return round_to_nearest(model, grid or Grid(3, 7))


@pytest.fixture
def stored(tmp_path: Path) -> Path:
    path = tmp_path / "small.safetensors"
    save_quantized(path, small(), CharTokenizer(CHARS), {"validation_loss": 2.0})
    return path


@pytest.mark.parametrize("grid", [Grid(4, 8), Grid(3, 7), Grid(2, None, symmetric=True), Grid(8, None, symmetric=True)])
def test_a_model_comes_back_bit_for_bit(tmp_path: Path, grid: Grid) -> None:
    model, path = small(grid), tmp_path / "m.safetensors"
    save_quantized(path, model, CharTokenizer(CHARS))
    back, tokenizer = gptlite.load(path)
    assert tokenizer.chars == CHARS and not back.training
    old, new = model.state_dict(), back.state_dict()
    assert old.keys() == new.keys()
    assert all(torch.equal(old[name], new[name]) and old[name].dtype == new[name].dtype for name in old)
    tokens = torch.randint(len(CHARS), (2, 16))
    assert torch.equal(back(tokens), model(tokens))
    assert gptlite.load(path, dtype=torch.float64)[0](tokens).dtype == torch.float64


def test_int4_at_the_size_of_gpt2_takes_at_most_06_bytes_a_weight(tmp_path: Path) -> None:
    model = random_model(preset("gpt2", n_layers=2, vocab_size=64, context_length=64))
    round_to_nearest(model, Grid(4, 32))  # the smallest groups of the chapter: scales and zero points weigh most
    n_bytes, n_weights = weight_bytes(model)
    assert n_weights == 2 * 12 * 768**2 and n_bytes / n_weights <= 0.60
    held = sum(
        part.untyped_storage().nbytes()
        for layer in linear_layers(model).values()
        for part in (layer.packed, layer.scale, layer.zero)
    )
    assert held == n_bytes  # nothing larger is kept alive behind a view
    path = tmp_path / "gpt2.safetensors"
    save_quantized(path, model, CharTokenizer("".join(map(chr, range(32, 96)))))
    rest = 2 * model.n_params
    assert (path.stat().st_size - rest) / n_weights <= 0.60
    back, _ = load_quantized(path)
    names = [name for name in model.state_dict() if name.endswith((".packed", ".scale", ".zero"))]
    assert len(names) == 2 * 6 * 3
    assert all(torch.equal(model.state_dict()[name], back.state_dict()[name]) for name in names)
    assert model_bytes(model) == n_bytes + rest


def test_the_head_may_be_in_codes_too(tmp_path: Path) -> None:
    model = round_to_nearest(GPTlite(CONFIG).eval(), Grid(4, 8), head=True)
    save_quantized(tmp_path / "m.safetensors", model, CharTokenizer(CHARS))
    back, _ = load_quantized(tmp_path / "m.safetensors")
    assert isinstance(back.fc_out, CodedLinear) and torch.equal(back.fc_out.packed, model.fc_out.packed)


def test_what_cannot_be_stored_is_refused(tmp_path: Path) -> None:
    tokenizer = CharTokenizer(CHARS)
    with pytest.raises(ValueError, match=r"must end in \.safetensors"):
        save_quantized(tmp_path / "m.pt", small(), tokenizer)
    with pytest.raises(ValueError, match="no layer of the model holds codes"):
        save_quantized(tmp_path / "m.safetensors", GPTlite(CONFIG), tokenizer)
    latent = to_latent(GPTlite(CONFIG).eval(), 8)
    latent.blocks[0].ffwd.net[0] = CodedLinear(Grid(4).codes(latent.blocks[0].ffwd.net[0].weight))
    with pytest.raises(ValueError, match="the model is not of its config's shape"):
        save_quantized(tmp_path / "m.safetensors", latent, tokenizer)
    assert not list(tmp_path.iterdir())


# -- files that are not what they say -----------------------------------------------------------------------------


def rewritten(path: Path, change=lambda tensors: None, **header: str) -> Path:
    """The file with other tensors or another header."""
    with safe_open(path, framework="pt") as file:
        known = dict(file.metadata())
    tensors = load_file(path)
    change(tensors)
    save_file(tensors, path, {**known, **header})
    return path


def layers_of(path: Path) -> dict:
    with safe_open(path, framework="pt") as file:
        return json.loads(file.metadata()["layers"])


@pytest.mark.parametrize("share", [0.0, 0.01, 0.3, 0.9, 0.999])
def test_a_truncated_file_is_refused(stored: Path, share: float) -> None:
    whole = stored.read_bytes()
    stored.write_bytes(whole[: int(len(whole) * share)])
    with pytest.raises(ValueError, match="no quantised model of gptlite, or is damaged"):
        load_quantized(stored)


@pytest.mark.parametrize(
    ("change", "message"),
    [
        (lambda t: t.pop("blocks.0.mha.query_proj.zero"), "blocks.0.mha.query_proj.zero is missing or unknown"),
        (lambda t: t.update(more=torch.zeros(1)), "weight more is missing or unknown"),
        (
            lambda t: t.update({"blocks.0.mha.query_proj.packed": torch.zeros(24, 8, dtype=torch.uint8)}),
            r"has shape \(24, 8\), it must be \(24, 9\)",
        ),
        (
            lambda t: t.update({"blocks.0.mha.query_proj.packed": torch.zeros(24, 9, dtype=torch.int8)}),
            "has dtype torch.int8, it must be torch.uint8",
        ),
        (lambda t: t["blocks.1.ffwd.net.0.scale"].fill_(float("inf")), "holds values that are not finite"),
        (lambda t: t["ln.weight"].fill_(float("nan")), "weight ln.weight holds values that are not finite"),
    ],
)
def test_other_tensors_are_refused(stored: Path, change, message: str) -> None:
    with pytest.raises(ValueError, match=message):
        load_quantized(rewritten(stored, change))


@pytest.mark.parametrize(
    ("header", "message"),
    [
        ({"format": "gptlite-1"}, f"its header does not say {FORMAT}"),
        ({"chars": '"ab"'}, "it has 2 characters, its config a vocabulary of 13"),
        ({"chars": "[]"}, "its vocabulary is no text"),
        ({"layers": "[1"}, "damaged"),
        ({"layers": "[]"}, "damaged"),
        ({"config": "{}"}, "config is incomplete"),
        ({"config": json.dumps({**CONFIG.to_dict(), "n_layers": 10**9})}, "too small for the model"),
        ({"config": json.dumps({**CONFIG.to_dict(), "d_model": 10**12})}, "too small for the model"),
        ({"config": json.dumps({**CONFIG.to_dict(), "d_model": 24})}, "has shape"),
    ],
)
def test_other_headers_are_refused(stored: Path, header: dict[str, str], message: str) -> None:
    with pytest.raises(ValueError, match=message):
        load_quantized(rewritten(stored, **header))


@pytest.mark.parametrize(
    ("field", "value", "message"),
    [
        ("bits", 9, "has bits 9"),
        ("bits", True, "has bits True"),
        ("bits", 4, "has shape"),
        ("symmetric", "no", "symmetric 'no'"),
        ("symmetric", True, "zero is missing or unknown"),
        ("group_size", 0, "has group_size 0, it must be 1 to 20"),
        ("group_size", 21, "has group_size 21"),
        ("group_size", 2, "has shape"),
    ],
)
def test_a_header_that_describes_other_codes_is_refused(stored: Path, field: str, value, message: str) -> None:
    layers = layers_of(stored)
    layers["blocks.0.mha.query_proj"][field] = value
    with pytest.raises(ValueError, match=message):
        load_quantized(rewritten(stored, layers=json.dumps(layers)))


def test_an_unknown_layer_and_a_missing_file_are_refused(stored: Path, tmp_path: Path) -> None:
    layers = layers_of(stored)
    with pytest.raises(ValueError, match=r"layer blocks\.9 is unknown"):
        load_quantized(rewritten(stored, layers=json.dumps({"blocks.9": layers["blocks.0.mha.query_proj"]})))
    with pytest.raises(ValueError, match="there is no checkpoint"):
        load_quantized(tmp_path / "none.safetensors")


# -- what makes them ----------------------------------------------------------------------------------------------


def test_calibration_windows_are_spread_over_the_text() -> None:
    [batch] = calibration_windows(torch.arange(1000), 10, 4)
    assert batch.shape == (4, 10) and batch[:, 0].tolist() == [0, 330, 660, 990]
    [batch] = calibration_windows(torch.arange(25), 10, 4)
    assert batch[:, 0].tolist() == [0, 15]
    with pytest.raises(ValueError, match="the text has 9 tokens, a window of calibration needs 10"):
        calibration_windows(torch.arange(9), 10)


def test_a_latent_attention_is_refused_before_anything_is_done(tmp_path: Path) -> None:
    for method in ("rtn", "gptq", "awq"):
        with pytest.raises(ValueError, match="the model is not of its config's shape"):
            make_quantized("gptlite-mla128", method, Grid(4), gptlite.load_corpus(), tmp_path / "m.safetensors")
    assert not list(tmp_path.iterdir())


def test_an_unknown_method_is_refused() -> None:
    with pytest.raises(ValueError, match="method is 'qat', without training it must be rtn, gptq or awq"):
        quantize_model(small(), "qat", Grid(4), [])


@pytest.mark.parametrize("method", ["rtn", "gptq", "awq"])
def test_codes_are_not_made_of_codes(method: str) -> None:
    with pytest.raises(ValueError, match=r"layer blocks\.0\.mha\.query_proj holds codes already"):
        quantize_model(small(), method, Grid(4), [])


@pytest.mark.parametrize("name", QUANTIZED)
def test_the_shipped_one_is_small_and_as_good_as_its_card_says(name: str) -> None:
    path, card = checkpoint_path(name), read_card(name)
    assert path.stat().st_size < 1.6e6 and card["bytes_of_them"] < 1.3e6
    model, tokenizer = gptlite.load(name)
    assert {layer.bits for layer in linear_layers(model).values()} == {2}
    assert weight_bytes(model) == (card["bytes_of_them"], card["weights_in_codes"])
    assert card["command"].startswith("gptlite quantize --method qat --bits 2")
    text = tokenizer.encode(gptlite.load_corpus().held_out)
    base, _ = gptlite.load("gptlite")
    part = text[: 8 * 256 + 1]
    # the losses of a part differ from those of all, their difference hardly
    found = validation_loss(model, part) - validation_loss(base, part)
    assert found == pytest.approx(card["validation_loss"] - card["base_loss"], abs=0.05)
