"""The lab on the KV cache measures the positions that its inputs ask for, at the batch of the reader, within memory."""

import pytest

from gptlite import hardware
from gptlite.arithmetic import ModelShape, kv_bytes, n_params
from gptlite.config import preset
from gptlite.notebook.labs_kv_cache import CacheLab


def lab(**settings) -> CacheLab:
    one = CacheLab("cpu")
    for name, value in {"preset": "nano", "repeats": 2, **settings}.items():
        one.inputs[name].value = value
    return one


def test_it_measures_every_position_in_every_way_at_the_readers_batch() -> None:
    one = lab(longest=64, batch=3).run()
    assert one.state == "done", one.message
    assert [point.at for point in one.recording.points] == [
        {"cache": kind, "position": n, "batch": 3} for n in (32, 64) for kind in ("none", "dynamic", "static")
    ]
    at = {(point.at["position"], point.at["cache"]): point.median for point in one.recording.points}
    rows = one.rows(one.recording)
    assert [row["Position"] for row in rows] == [32, 64]
    for row in rows:
        n = row["Position"]
        assert row["static cache: median (ms)"] == pytest.approx(1e3 * at[n, "static"], rel=5e-3)
        assert row["no cache over static (times)"] == pytest.approx(at[n, "none"] / at[n, "static"], rel=5e-3)
        assert len(row["dynamic cache: samples (ms)"].split(", ")) == 2
    html = one._repr_html_()
    assert "Time of the token (ms) against Position of the token" in html
    assert all(text in html for text in ("no cache", "dynamic cache", "static cache", "proportional to the position"))


def test_a_point_that_does_not_fit_is_named_in_its_row(monkeypatch) -> None:
    one = lab(longest=32)
    recording = one.run().recording
    left = recording.points.pop(0)
    recording.left_out.append({"at": left.at, "why": "needs 9.00 GiB, 1.00 GiB are free"})
    [row] = one.rows(recording)
    assert row["no cache: samples (ms)"] == "needs 9.00 GiB, 1.00 GiB are free"
    assert row["no cache: median (ms)"] == row["no cache over static (times)"] == ""
    assert row["static cache: median (ms)"] > 0


def test_a_stopped_run_draws_what_it_has() -> None:
    one = lab(longest=32)
    recording = one.run().recording
    for _ in range(3):
        assert one._svg()
        recording.points.pop()
    assert one._svg() == ""


def test_needed_memory_holds_the_weights_both_caches_and_the_text_that_is_read_again() -> None:
    settings = {"preset": "gpt2", "dtype": "float32", "batch": 8, "longest": 1024}
    shape = ModelShape.of(preset("gpt2"))
    least = 4 * n_params(shape) + 2 * 8 * kv_bytes(shape, 1024, 4)
    needed = CacheLab("cpu").needed_bytes(settings)
    assert least < needed
    grows = [CacheLab("cpu").needed_bytes({**settings, "longest": n}) for n in (32, 256, 8192)]
    assert grows == sorted(grows) and CacheLab("cpu").needed_bytes({**settings, "batch": 16}) > needed


def test_too_little_memory_names_the_last_position_that_fits(monkeypatch) -> None:
    one = lab(preset="gpt2", longest=8192)
    free = one.needed_bytes({**one.settings, "longest": 512})
    monkeypatch.setattr(hardware, "free_bytes", lambda device: free)
    one.run()
    assert one.state == "failed" and one.recording is None
    assert one.message.endswith("the largest Last position (tokens) that fits is 512")
