"""The labs on prefill and decode measure the points that their inputs ask for, and stay within memory."""

import pytest
import torch

from gptlite import hardware
from gptlite.arithmetic import ModelShape, kv_bytes, n_params
from gptlite.config import preset
from gptlite.notebook.labs_phases import DecodeLab, PrefillLab, doubling, step_bytes


def lab(kind, **settings):
    one = kind("cpu")
    for name, value in {"preset": "nano", "repeats": 3, **settings}.items():
        one.inputs[name].value = value
    return one


@pytest.mark.parametrize(
    ("first", "last", "values"),
    [(1, 1, [1]), (1, 8, [1, 2, 4, 8]), (16, 100, [16, 32, 64, 100]), (16, 32, [16, 32]), (1, 9, [1, 2, 4, 8, 9])],
)
def test_doubling_ends_at_the_last_value(first, last, values):
    assert doubling(first, last) == values


def test_prefill_measures_every_length_up_to_the_longest():
    one = lab(PrefillLab, longest=64, batch=2).run()
    assert one.state == "done", one.message
    assert [point.at for point in one.recording.points] == [{"batch": 2, "length": n} for n in (16, 32, 64)]
    assert one.recording.params["preset"] == "nano" and all(len(point.samples) == 3 for point in one.recording.points)
    row = one.rows(one.recording)[2]
    assert row["Prompt (tokens)"] == 64
    assert row["Tokens read per s"] == pytest.approx(2 * 64 / one.recording.points[2].median, rel=5e-3)
    assert "Time to first token (ms) against Prompt (tokens)" in one._repr_html_()


def test_decode_measures_every_batch_at_both_contexts():
    one = lab(DecodeLab, largest=4, short=32, long=64).run()
    assert one.state == "done", one.message
    assert [(point.at["context"], point.at["batch"]) for point in one.recording.points] == [
        (n, B) for n in (32, 64) for B in (1, 2, 4)
    ]
    row = one.rows(one.recording)[2]
    assert row["Throughput (token/s)"] == pytest.approx(4 / one.recording.points[2].median, rel=5e-3)
    html = one._repr_html_()
    assert "Time per output token (ms) against Batch (sequences)" in html
    assert all(text in html for text in ("context 32", "context 64", "one after the other"))


def test_the_long_context_is_the_longer_one():
    one = lab(DecodeLab, short=128, long=64).run()
    assert (one.state, one.message) == ("failed", "The long context is 64, it must be above the short one")


def test_needed_memory_holds_weights_keys_and_values():
    settings = {"preset": "gpt2", "dtype": "float32", "largest": 64, "short": 64, "long": 1024}
    shape = ModelShape.of(preset("gpt2"))
    least = 4 * n_params(shape) + 64 * kv_bytes(shape, 1024, 4)
    assert least < DecodeLab("cpu").needed_bytes(settings) < 1.1 * least
    assert step_bytes({**settings, "dtype": "bfloat16"}, 64, 1024, 1) == step_bytes(settings, 64, 1024, 1) / 2
    prompt = {"preset": "gpt2", "dtype": "float32", "batch": 1}
    grows = [PrefillLab("cpu").needed_bytes({**prompt, "longest": n}) for n in (256, 1024, 8192)]
    assert grows == sorted(grows) and grows[0] > 4 * n_params(shape)


@pytest.mark.parametrize(("kind", "setting"), [(PrefillLab, "longest"), (DecodeLab, "largest")])
def test_too_little_memory_names_the_largest_setting_that_fits(monkeypatch, kind, setting):
    one = lab(kind, preset="gpt2")
    one.inputs[setting].value = one.controls[1].values()[-1]
    smaller = one.controls[1].values()[2]
    free = one.needed_bytes({**one.settings, setting: smaller})
    monkeypatch.setattr(hardware, "free_bytes", lambda device: free)
    one.run()
    assert one.state == "failed" and one.recording is None
    assert one.message.endswith(f"the largest {one.controls[1].label} that fits is {smaller}")


def test_formats_are_torch_dtypes():
    for name in PrefillLab("cpu").controls[3].options:
        assert isinstance(getattr(torch, name), torch.dtype)
