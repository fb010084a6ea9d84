"""The lab on chunked prefill measures the budgets that its slider asks for, and stays within memory."""

import pytest

from gptlite import hardware
from gptlite.arithmetic import ModelShape, kv_bytes, n_params
from gptlite.config import preset
from gptlite.notebook.labs_scheduling import CONTEXT, ChunkedPrefillLab


def lab(**settings):
    one = ChunkedPrefillLab("cpu")
    for name, value in {"preset": "nano", "repeats": 1, "prompt": 96, **settings}.items():
        one.inputs[name].value = value
    return one


def test_every_budget_up_to_the_whole_prompt_is_measured():
    one = lab(budget=32, running=2).run()
    assert one.state == "done", one.message
    assert list(dict.fromkeys(point.at["budget"] for point in one.recording.points)) == [32, 64, 98]
    rows = one.rows(one.recording)
    assert [row["Token budget"] for row in rows] == [32, 64, 98]
    point = next(p for p in one.recording.points if p.at == {"what": "TTFT", "budget": 64})
    assert rows[1]["TTFT of the prompt (ms)"] == pytest.approx(1e3 * point.median, rel=5e-3)
    html = one._repr_html_()
    assert "longest gap of a running user" in html and "TTFT of the prompt" in html


@pytest.mark.parametrize("settings", [{"budget": 8, "running": 8}, {"budget": 128, "running": 2}])
def test_a_budget_that_leaves_nothing_to_measure_is_refused(settings):
    one = lab(**settings).run()
    assert one.state == "failed" and one.message.startswith(f"The token budget is {settings['budget']}, it must be")


def test_needed_memory_holds_weights_keys_and_values():
    one = ChunkedPrefillLab("cpu")
    settings = {"preset": "gpt2", "dtype": "float32", "running": 7, "prompt": 1024}
    shape = ModelShape.of(preset("gpt2"))
    assert one.needed_bytes(settings) > 4 * n_params(shape) + 8 * kv_bytes(shape, 1024 + CONTEXT, 4)


def test_too_little_memory_names_the_largest_prompt_that_fits(monkeypatch):
    one = lab(preset="gpt2", prompt=8192)
    free = one.needed_bytes({**one.settings, "prompt": 512})
    monkeypatch.setattr(hardware, "free_bytes", lambda device: free)
    one.run()
    assert one.state == "failed" and one.message.endswith("the largest Arriving prompt (tokens) that fits is 512")
