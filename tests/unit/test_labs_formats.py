"""The lab and the sweeps on number formats measure what they are asked for; wrong answers get a counterexample."""

import pytest
import torch

import gptlite
from gptlite import hardware
from gptlite.data import load_corpus
from gptlite.layers import replace_linear
from gptlite.measure import validation_loss
from gptlite.notebook.checks_formats import check_bits_with_scales, check_double_quantized, check_value_of
from gptlite.notebook.labs_formats import FormatLab
from gptlite.notebook.recordings import recorded
from gptlite.quantize.rounded import KINDS, RoundedLinear, signal_to_noise, to_codes
from gptlite.record import run_sweep
from gptlite.sweeps.formats import TENSORS, character_losses, tensor_of


def lab(**settings):
    one = FormatLab("cpu")
    for name, value in {"tensor": "normal", "n_values": 4**7, "repeats": 1, **settings}.items():
        one.inputs[name].value = value
    return one


@pytest.mark.parametrize(("shown", "axis"), [("error", "Signal-to-noise ratio (dB)"), ("time", "Time per value (ns)")])
def test_it_measures_every_format_both_ways(shown, axis):
    one = lab(shown=shown, group="32").run()
    assert one.state == "done", one.message
    assert [(point.at["format"], point.at["what"]) for point in one.recording.points] == [
        (kind, what) for kind in KINDS[1:] for what in ("encode", "decode")
    ]
    x = tensor_of("normal", 4**7, "cpu")
    for row in one.rows(one.recording):
        coded = to_codes(x, row["Format"], 32)
        assert row["Bits per value"] == pytest.approx(coded.bits_per_value(), abs=1e-3)
        assert row["Signal to noise (dB)"] == pytest.approx(signal_to_noise(x, coded.dequantize()), abs=0.06)
        assert row["Encode (ns per value)"] > 0 and row["Decode (ns per value)"] > 0
    assert axis in one._repr_html_()


def test_what_is_exact_is_called_so_and_left_out_of_the_figure():
    one = lab(tensor="weights").run()
    exact = [row["Format"] for row in one.rows(one.recording) if row["Signal to noise (dB)"] == "exact"]
    assert exact == ["fp16"] and one.recording.data["formats"]["fp16"]["snr"] is None
    assert "Infinity" not in one.recording.to_json()


def test_too_little_memory_names_the_largest_tensor_that_fits(monkeypatch):
    one = lab(n_values=4**9)
    free = one.needed_bytes({**one.settings, "n_values": 4**8})
    monkeypatch.setattr(hardware, "free_bytes", lambda device: free)
    one.run()
    assert one.state == "failed" and one.message.endswith("the largest Values that fits is 65536")


@pytest.mark.parametrize("name", TENSORS)
def test_tensors_have_as_many_values_as_asked_for(name):
    assert tensor_of(name, 300_000, "cpu").shape == (1171, 256)
    assert tensor_of(name, 300, "cpu").shape == (1, 256)


@pytest.mark.parametrize(
    ("sweep", "params", "says"),
    [
        ("formats", {"formats": ["int5"]}, "formats has 'int5', there are fp32"),
        ("formats", {"group": "some"}, "group is 'some', it must be own or a number of values"),
        ("formats", {"group": "0"}, "group is '0'"),
        ("formats", {"tensor": "noise"}, "tensor is 'noise', it must be one of normal"),
        ("formats", {"n_values": 255}, "n_values is 255, a row has 256"),
        ("format-losses", {"formats": ["fp9"]}, "formats has 'fp9', there are fp32"),
    ],
)
def test_bad_parameters_are_named(sweep, params, says):
    with pytest.raises(ValueError, match=says):
        list(run_sweep(sweep, **params))


def test_losses_are_those_of_the_rounded_model():
    *_, recording = run_sweep("format-losses", formats=["fp32", "int4"], n_chars=513)
    found = {(row["format"], row["what"]): row for row in recording.data["losses"]}
    assert recording.complete and len(found) == 4
    model, tokenizer = gptlite.load("gptlite")
    tokens = tokenizer.encode(load_corpus().held_out[:513])
    whole = validation_loss(model, tokens)
    assert recording.data["loss"] == pytest.approx(whole, abs=1e-6)
    for what in ("weights", "weights and activations"):
        assert abs(found["fp32", what]["change"]) < 1e-6  # the same products
    rounded = replace_linear(model, lambda name, layer: RoundedLinear(layer, "int4"))
    row = found["int4", "weights"]
    assert row["change"] == pytest.approx(validation_loss(rounded, tokens) - whole, abs=1e-6)
    assert row["bits"] == 4 + 16 / 256
    assert 0 < row["standard_error"] < 0.1
    with pytest.raises(ValueError, match="n_chars is 512, it must be one more than a multiple of 256"):
        character_losses(model, tokens[:512])


def test_the_recordings_of_the_book_hold_every_format():
    losses = recorded("format-losses")[0]
    assert losses.complete
    assert [row["format"] for row in losses.data["losses"][::2]] == list(KINDS)
    assert all(row["different"] == 0 for row in recorded("format-references")[0].data["formats"])
    assert list(recorded("formats")[0].data["formats"]) == list(KINDS[1:])


def without_subnormals(code, exponent_bits, mantissa_bits):
    e, m = divmod(code % 2 ** (exponent_bits + mantissa_bits), 2**mantissa_bits)
    sign = -1 if code >> (exponent_bits + mantissa_bits) else 1
    return sign * 2.0 ** (e - 2 ** (exponent_bits - 1) + 1) * (1 + m / 2**mantissa_bits)


def without_a_sign(code, exponent_bits, mantissa_bits):
    e, m = divmod(code % 2 ** (exponent_bits + mantissa_bits), 2**mantissa_bits)
    bias, part = 2 ** (exponent_bits - 1) - 1, m / 2**mantissa_bits
    return 2.0 ** (e - bias) * (1 + part) if e else 2.0 ** (1 - bias) * part


def right_value(code, exponent_bits, mantissa_bits):
    sign = -1 if code >> (exponent_bits + mantissa_bits) else 1
    return sign * without_a_sign(code, exponent_bits, mantissa_bits)


def right_scales(scales):
    from gptlite.quantize.linear_quant import quantize_linear

    return quantize_linear(scales - scales.mean(), 8, -1, 256).dequantize() + scales.mean()


@pytest.mark.parametrize(
    ("check", "right", "wrong", "said"),
    [
        (check_value_of, right_value, without_subnormals, "code 0x1 with 2 bits of exponent and 1 of mantissa"),
        (check_value_of, right_value, without_a_sign, "code 0x9 with 2 bits of exponent"),
        (
            check_bits_with_scales,
            lambda bits, group, scale, zero: bits + (scale + zero * bits) / group,
            lambda bits, group, scale, zero: bits + scale / group,
            "and a zero point gives 4.5, right is 4.625",
        ),
        (check_double_quantized, right_scales, lambda scales: scales, "5 scales gives"),
        (
            check_double_quantized,
            right_scales,
            lambda scales: torch.full_like(scales, float(scales.mean())),
            "scales 1, 2, 3 gives",
        ),
    ],
)
def test_right_answers_pass_and_wrong_ones_get_a_counterexample(capsys, check, right, wrong, said):
    check(right)
    assert capsys.readouterr().out == "right\n"
    check(wrong)
    out = capsys.readouterr().out
    assert out.startswith("not yet: ") and said in out
