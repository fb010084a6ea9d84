"""The sweeps and the lab on quantised weights measure what they say."""

import json
import math
from pathlib import Path

import pytest
import torch
from torch import nn

import gptlite
from gptlite import hardware
from gptlite.checkpoint import save_checkpoint
from gptlite.config import GPTConfig
from gptlite.measure import validation_loss
from gptlite.model import GPTlite
from gptlite.notebook.checks_quantize import check_passed_on, check_stored_bits
from gptlite.notebook.labs_quantize import QuantizedLinearLab
from gptlite.quantize.coded import CodedLinear
from gptlite.quantize.int8 import Int8Linear
from gptlite.quantize.kernels import KernelLinear
from gptlite.quantize.kv import recipe
from gptlite.quantize.rtn import Grid
from gptlite.record import run_sweep
from gptlite.sweeps.quantize import (
    FORMATS,
    bytes_in,
    cache_bytes,
    cached_loss,
    compared,
    layer_in,
    log_probabilities,
    read_grid,
)


def shallow(name: str, folder: Path) -> str:
    """A file with the first block of a shipped model."""
    model, tokenizer = gptlite.load(name)
    small = GPTlite(GPTConfig.from_dict({**model.config.to_dict(), "n_layers": 1}))
    small.load_state_dict(model.state_dict(), strict=False)
    path = folder / f"{name}.safetensors"
    save_checkpoint(path, small, tokenizer)
    return str(path)


def test_grids_are_read_as_they_are_written() -> None:
    assert read_grid("128", 4) == Grid(4, 128) and read_grid("rows", 8) == Grid(8, None)
    assert read_grid("32 clip", 2) == Grid(2, 32, clip=True)
    for text in ("", "wide", "128 cut", "128 clip clip"):
        with pytest.raises(ValueError, match="it must be like '128', 'rows' or '128 clip'"):
            read_grid(text, 4)


@pytest.mark.parametrize("format", FORMATS)
def test_a_layer_in_a_format_is_near_the_layer_and_has_its_bytes(format: str) -> None:
    torch.manual_seed(0)
    linear = nn.Linear(256, 64)
    x = torch.randn(5, 256)
    exact = linear(x)
    layer = layer_in(format, linear)
    kinds = {"int8 weights": KernelLinear, "int8 both": Int8Linear, "int4": KernelLinear}
    assert isinstance(layer, kinds.get(format, nn.Linear if format.endswith(("32", "16")) else CodedLinear))
    y = layer(x.bfloat16() if format == "bfloat16" else x).float()
    allowed = {"float32": 1e-9, "bfloat16": 0.02, "int8 weights": 0.03, "int8 both": 0.03, "int3 plain": 0.35}
    allowed |= {"int2 plain": 0.9}
    assert (y - exact).square().mean().sqrt() <= allowed.get(format, 0.2) * exact.std()
    if isinstance(layer, CodedLinear):
        # the two zero points of a row of 256 fill whole bytes, those of longer rows waste less
        assert layer.nbytes / (64 * 256) == pytest.approx(bytes_in(format), rel=0.03)


def test_an_unknown_format_and_one_without_a_kernel_are_refused() -> None:
    with pytest.raises(ValueError, match="format is 'int1'"):
        layer_in("int1", nn.Linear(8, 8))
    with pytest.raises(ValueError, match="has a kernel on the CPU alone, and not for this layer"):
        layer_in("int4", nn.Linear(100, 8))


@torch.no_grad()
def test_a_cached_loss_is_the_loss_where_the_cache_rounds_nothing() -> None:
    torch.manual_seed(0)
    model = GPTlite(GPTConfig(23, 16, n_layers=1, d_model=20, n_heads=6, d_head=4, n_kv_heads=3)).eval()
    tokens = torch.randint(23, (5 * 16 + 1,))
    plain = validation_loss(model, tokens)
    assert cached_loss(model, tokens, "plain", 2) == pytest.approx(plain, abs=1e-5)
    assert cached_loss(model, tokens, "int8") == pytest.approx(plain, abs=0.02)
    assert cache_bytes(model, "plain") == 2 * 3 * 4 * 2
    each = sum(part.nbytes for part in recipe("int8").keys.encode(torch.ones(3, 64, 4))) // 64
    assert cache_bytes(model, "int8") == 2 * each < cache_bytes(model, "plain") + 2 * 3 * 4


@pytest.mark.slow
def test_losses_are_recorded_for_every_method_bits_and_grid(tmp_path: Path) -> None:
    params = {"model": shallow("gptlite", tmp_path), "methods": ["rtn", "gptq"], "bits": [8, 2], "grids": ["rows"]}
    *_, recording = run_sweep("quantized-losses", **params, windows=1)
    rows = recording.data["rows"]
    assert [(row["method"], row["bits"]) for row in rows] == [("rtn", 8), ("gptq", 8), ("rtn", 2), ("gptq", 2)]
    assert recording.data["characters"] == 256
    assert rows[0]["loss"] == pytest.approx(recording.data["loss"], abs=0.01)
    assert rows[1]["layers"] == 6 and rows[1]["largest_error_ratio"] <= 1 and rows[0]["largest_error_ratio"] is None
    assert rows[2]["bytes_per_weight"] == pytest.approx(2 / 8 + 3 / 410, abs=3e-3)  # rows of 256 and of 1,024
    assert 0 < rows[0]["divergence"] < rows[2]["divergence"] and rows[0]["standard_error"] < rows[2]["standard_error"]
    assert rows[3]["divergence"] < rows[2]["divergence"]
    json.loads(recording.to_json())


def test_comparing_by_hand() -> None:
    reference = torch.tensor([[0.5, 0.5], [0.25, 0.75]]).log()
    found = torch.tensor([[0.25, 0.75], [0.25, 0.75]]).log()
    values = compared(found, reference, torch.tensor([0, 1]))
    assert values["loss"] == pytest.approx((math.log(4) + math.log(4 / 3)) / 2, abs=1e-5)
    assert values["divergence"] == pytest.approx((0.5 * math.log(2) + 0.5 * math.log(2 / 3)) / 2, abs=1e-6)
    # added to the first character ln 2, to the second nothing: their standard deviation over the root of two
    assert values["standard_error"] == pytest.approx(math.log(2) / 2**0.5 / 2**0.5, abs=1e-5)


@torch.no_grad()
def test_windows_are_read_as_the_loss_reads_them() -> None:
    torch.manual_seed(0)
    model = GPTlite(GPTConfig(23, 16, n_layers=1, d_model=20, n_heads=6, d_head=4)).eval()
    tokens = torch.randint(23, (3 * 16 + 1,))
    found = log_probabilities(model, tokens, batch_size=2)
    assert found.shape == (48, 23)
    assert compared(found, found, tokens[1:])["loss"] == pytest.approx(validation_loss(model, tokens), abs=1e-5)


def test_times_are_recorded_for_every_format_and_phase() -> None:
    formats = ["float32", "int8 both", "int2 plain"]
    params = {"preset": "nano", "formats": formats, "batches": [1, 2], "context": 16, "prompt": 8}
    *_, recording = run_sweep("quantized-steps", **params, repeats=1, warmup=1)
    assert [(p.at["format"], p.at["phase"], p.at["batch"]) for p in recording.points] == [
        (name, phase, batch) for name in formats for phase, batch in (("decode", 1), ("decode", 2), ("prefill", 1))
    ]
    assert recording.points[0].bytes > recording.points[3].bytes > recording.points[6].bytes
    with pytest.raises(ValueError, match="it must be above warmup"):
        list(run_sweep("quantized-steps", **{**params, "context": 2}, repeats=1, warmup=1))


@pytest.mark.slow
def test_together_is_recorded_for_every_combination(tmp_path: Path) -> None:
    name = shallow("gptlite-gqa2", tmp_path)
    *_, recording = run_sweep("quantized-together", models=[name], weights=["16 bits", "rtn 4"], windows=1)
    rows = recording.data["rows"]
    assert [(row["weights"], row["cache"]) for row in rows] == [
        ("16 bits", "plain"), ("16 bits", "int8"), ("rtn 4", "plain"), ("rtn 4", "int8"),
    ]  # fmt: skip
    model, _ = gptlite.load(name)
    assert rows[0]["model_bytes"] == 2 * model.n_params > 2.5 * rows[2]["model_bytes"]
    assert rows[0]["cache_bytes"] == 2 * 128 > rows[1]["cache_bytes"]


# -- the lab and the checks ---------------------------------------------------------------------------------------


def lab(**settings) -> QuantizedLinearLab:
    one = QuantizedLinearLab("cpu")
    for name, value in {"width": 512, "largest": 4, "repeats": 3, **settings}.items():
        one.inputs[name].value = value
    return one


def test_the_lab_measures_every_format_at_every_batch() -> None:
    one = lab().run()
    assert one.state == "done", one.message
    names = ["float32", "bfloat16", "int8 weights", "int8 both", "int4", "int4 plain"]
    assert [(p.at["format"], p.at["batch"]) for p in one.recording.points] == [(n, b) for n in names for b in (1, 4)]
    rows = one.rows(one.recording)
    assert rows[0]["Times as fast as fp32"] == 1 and rows[0]["Weight (MB)"] == pytest.approx(512**2 * 4 / 1e6, rel=5e-3)
    assert "Time of the layer (ms) against Batch (tokens)" in one._repr_html_()
    left = one.recording.points.pop()
    one.recording.left_out.append({"at": left.at, "why": "ran out of memory"})
    assert one.rows(one.recording)[-1]["Samples (ms)"] == "ran out of memory" and one._svg()
    fewer = lab(compare="plain ways left out").run()
    assert {p.at["format"] for p in fewer.recording.points} == set(names[:-1])


def test_too_little_memory_names_the_width_that_fits(monkeypatch) -> None:
    one = lab(width=8192)
    free = one.needed_bytes({**one.settings, "width": 1024})
    monkeypatch.setattr(hardware, "free_bytes", lambda device: free)
    one.run()
    assert one.state == "failed" and one.message.endswith("the largest Width (inputs and outputs) that fits is 1024")


def test_the_checks_know_right_from_wrong(capsys) -> None:
    check_stored_bits(lambda bits, group, zero: bits + (16 + bits * zero) / group)
    check_passed_on(lambda w, v, U: w[1:] - (w[0] - v) / U[0, 0] * U[0, 1:])
    right = capsys.readouterr().out
    check_stored_bits(lambda bits, group, zero: bits)
    check_passed_on(lambda w, v, U: w[1:] + (w[0] - v) / U[0, 0] * U[0, 1:])
    wrong = capsys.readouterr().out
    assert right != wrong
