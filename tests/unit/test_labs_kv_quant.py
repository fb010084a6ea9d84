"""The sweeps, the lab and the checks of the chapter on quantised keys and values."""

import pytest
import torch

from gptlite.cache.quantized_text import QuantizedText
from gptlite.config import preset
from gptlite.measure import validation_loss
from gptlite.notebook.checks_kv_quant import check_bits_per_value, check_centred
from gptlite.notebook.labs_kv_quant import KVQuantLab
from gptlite.quantize.kv import RECIPES, KVFormat, Rule, recipe
from gptlite.record import random_model, run_sweep
from gptlite.sweeps.kv_quant import axes_recipe, losses, quantized, read_case, spread_windows, summary


def lab(**settings) -> KVQuantLab:
    one = KVQuantLab("cpu")
    for name, value in {"preset": "nano", "repeats": 2, "context": 64, "residual": 32, **settings}.items():
        one.inputs[name].value = value
    return one


def test_a_sweep_measures_every_recipe_at_every_context() -> None:
    *_, recording = run_sweep("kv-quant", preset="nano", contexts=[40, 100], residual=32, batch=2, repeats=2, warmup=1)
    assert [(p.at["context"], p.at["recipe"]) for p in recording.points] == [(n, r) for n in (40, 100) for r in RECIPES]
    model = random_model(preset("nano", context_length=100))
    for point in recording.points:
        assert len(point.samples) == 2 and point.bytes > 0 and point.flops > 0
        cache = quantized(model, recipe(point.at["recipe"], 32), 2, point.at["context"])
        cache.prepare(range(2), torch.full((2, 1), point.at["context"]))
        # those before the last token are final, and so they are when one more is about to come; up to a step of 16
        assert abs(point.at["cache_bytes"] - cache.nbytes) < 2 * 2 * 2 * 64 * 4 * 17
    plain, smallest = recording.points[-5], recording.points[-1]
    assert smallest.at["cache_bytes"] < plain.at["cache_bytes"] / 2 and smallest.bytes < plain.bytes
    with pytest.raises(ValueError, match="must be above warmup"):
        list(run_sweep("kv-quant", preset="nano", contexts=[3], repeats=2, warmup=1))


def test_cases_are_read_as_they_are_written() -> None:
    assert read_case("int8") == recipe("int8")
    assert read_case("kivi2 32") == recipe("kivi2", 32)
    assert read_case("2 channel token 32") == recipe("kivi2", 32)
    odd = axes_recipe(4, "token", "channel", 64)
    assert (odd.keys, odd.values) == (KVFormat("even", 4, "token", 32), KVFormat("even", 4, "channel", 32))
    assert odd.key_rule == odd.value_rule == Rule(0, 64)
    for text, match in (
        ("", "must be like"),
        ("kivi2 x", "must be like"),
        ("3 token token 32", "bits is 3"),
        ("2 head token 32", "axes are"),
    ):
        with pytest.raises(ValueError, match=match):
            read_case(text)


def test_losses_are_those_of_the_package_and_summaries_by_hand() -> None:
    model = random_model(preset("nano"))
    text = torch.arange(400) % 50
    windows = spread_windows(text, 3, 64)
    assert windows.shape == (3, 65) and windows[0, 0] == 0 and windows[-1, -1] == text[-1]
    found = losses(model, windows)
    assert found[0].mean().item() == pytest.approx(validation_loss(model, windows[0], 64), abs=1e-5)
    rounded = losses(model, windows, QuantizedText(recipe("kivi2", 32)))
    torch.testing.assert_close(rounded[:, :32], found[:, :32])  # query 32 is the first that finds codes
    assert (rounded - found)[:, 32:].abs().max() > 1e-4
    added = torch.tensor([[1.0, 3.0], [2.0, 6.0]])
    assert summary(added, 2) == {"mean": 3.0, "error": 1.0, "by_part": [1.5, 4.5]}
    with pytest.raises(ValueError, match="at least 2"):
        spread_windows(text, 1, 64)


def test_the_lab_measures_and_tabulates() -> None:
    one = lab(batch=2).run()
    assert one.state == "done", one.message
    assert [(p.at["context"], p.at["recipe"]) for p in one.recording.points] == [
        (n, r) for n in (16, 64) for r in RECIPES
    ]
    rows = one.rows(one.recording)
    assert len(rows) == 10 and rows[0]["Bytes, times less"] == rows[0]["Times as fast"] == 1
    assert rows[-1]["Bytes, times less"] > 1
    html = one._repr_html_()
    assert "Time per output token (ms) against Cache of the batch (MB)" in html and "KIVI, 2 bits" in html
    left = one.recording.points.pop()
    one.recording.left_out.append({"at": left.at, "why": "needs 9.00 GiB, 1.00 GiB are free"})
    assert one.rows(one.recording)[-1]["Samples (ms)"] == "needs 9.00 GiB, 1.00 GiB are free"
    assert one.needed_bytes({"preset": "gpt2", "dtype": "float32", "batch": 1, "context": 512}) > 600e6


def test_a_stopped_run_draws_what_it_has() -> None:
    one = lab()
    recording = one.run().recording
    while recording.points:
        assert one._svg()
        recording.points.pop()
    assert one._svg() == ""


def test_checks_know_right_from_wrong(capsys) -> None:
    def centred(keys, bits):
        rest = keys - keys.mean(1, keepdim=True)
        low, high = rest.amin(-1, keepdim=True), rest.amax(-1, keepdim=True)
        step = (high - low) / (2**bits - 1)
        return low + step * ((rest - low) / step).round()

    check_bits_per_value(lambda bits, group, numbers: bits + 16 * numbers / group)
    check_centred(centred)
    assert capsys.readouterr().out.count("right") == 2
    check_bits_per_value(lambda bits, group, numbers: bits + 32 / group)
    check_centred(lambda keys, bits: keys - keys.mean(1, keepdim=True))
    assert capsys.readouterr().out.count("not yet") == 2
    check_centred(lambda keys, bits: centred(keys.float(), bits))
    assert capsys.readouterr().out == "right\n"
    for wrong in (lambda keys, bits: keys, lambda keys, bits: centred(keys, bits)[0], lambda keys, bits: None):
        check_centred(wrong)
        words = capsys.readouterr().out
        assert words.startswith("not yet: keys [1, 4, 3] and 2 bits: ") and len(words) < 130  # one number, no lists
