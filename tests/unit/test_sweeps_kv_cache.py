"""The sweep times equal work: each way gives the logits after the same text, and the cost beside it is what it does."""

import io

import pytest
import torch

from gptlite import cli
from gptlite.arithmetic import ModelShape, decode_costs, prefill_costs, total
from gptlite.config import GPTConfig, preset
from gptlite.generate import decode_step, prefill
from gptlite.measure import count_work
from gptlite.model import GPTlite
from gptlite.record import filled_cache, load_recording, record, run_sweep
from gptlite.sweeps import kv_cache

SMALL = {"preset": "nano", "positions": [16, 24], "repeats": 2, "warmup": 1}


def make_model(dtype: torch.dtype = torch.float64) -> GPTlite:
    torch.manual_seed(3)
    model = GPTlite(GPTConfig(17, 40, n_layers=2, d_model=20, n_heads=6, d_head=4, n_kv_heads=3)).eval()
    return model.to(dtype)


def test_every_position_is_measured_in_every_way(tmp_path) -> None:
    made = record("kv-cache", tmp_path / "kv.json", stream=io.StringIO(), **SMALL, batch=2)
    assert load_recording(tmp_path / "kv.json") == made and made.complete
    assert [point.at for point in made.points] == [
        {"cache": kind, "position": n, "batch": 2} for n in (16, 24) for kind in ("none", "dynamic", "static")
    ]
    shape = ModelShape.of(preset("nano", context_length=24))
    for point in made.points:
        costs = prefill_costs if point.at["cache"] == "none" else decode_costs
        cost = total(costs(shape, 2, point.at["position"], bytes_per_weight=4, bytes_per_value=4))
        assert (point.flops, point.bytes, len(point.samples)) == (cost.flops, cost.bytes, 2)


@pytest.mark.parametrize("kind", ["dynamic", "static"])
def test_all_ways_give_the_logits_after_the_same_text(kind: str) -> None:
    model = make_model()
    text = torch.randint(17, (2, 9), generator=torch.Generator().manual_seed(1))
    plain = model(text)[:, -1]
    torch.testing.assert_close(kv_cache.read_again(model, text), plain, rtol=0, atol=1e-12)
    static = kv_cache.StaticCache(model, 2, 9, bucket=1)
    prefill(model, text[:, :8], static)
    cache = kv_cache.grown(model, static) if kind == "dynamic" else static
    torch.testing.assert_close(decode_step(model, text[:, 8], cache), plain, rtol=0, atol=1e-12)


def test_reading_again_is_counted_as_a_prefill_with_one_logit_per_row() -> None:
    model = make_model(torch.float32)
    with count_work() as work:
        kv_cache.read_again(model, torch.zeros(3, 11, dtype=torch.int64))
    shape = ModelShape.of(model.config)
    cost = total(prefill_costs(shape, 3, 11, bytes_per_weight=4, bytes_per_value=4, computed=True))
    assert (work.flops, work.operand_bytes) == (cost.flops, cost.operand_bytes)


def test_a_timed_step_is_the_one_that_its_point_names(monkeypatch) -> None:
    """The last sample of each point attends to exactly `position` tokens, over the cache that the point names."""
    seen = []

    def watch(step, device, warmup, repeats):
        timing = time_call(step, device, warmup, repeats)
        if step.func is decode_step:
            seen.append((type(step.args[2]).__name__, step.args[2].next_position(1)))
        else:
            seen.append((step.func.__name__, step.args[1].shape[1]))
        return timing

    time_call = kv_cache.time_call
    monkeypatch.setattr(kv_cache, "time_call", watch)
    list(run_sweep("kv-cache", **SMALL, batch=2))
    assert seen == [(name, n) for n in (16, 24) for name in ("read_again", "DynamicCache", "StaticCache")]


def test_a_dynamic_copy_holds_what_the_static_one_does() -> None:
    model = make_model()
    static = filled_cache(model, 2, 5, 8)
    grown = kv_cache.grown(model, static)
    for sequence in (0, 1):
        ours, theirs = grown.export(sequence), static.export(sequence)
        assert ours.keys() == theirs.keys()
        assert all(torch.equal(ours[name], theirs[name]) for name in ours)


def test_memory_is_asked_for_the_cache_that_a_point_needs(monkeypatch) -> None:
    free = []
    monkeypatch.setattr("gptlite.hardware.free_bytes", lambda device: free[-1])
    free.append(1)
    recordings = list(run_sweep("kv-cache", **SMALL))
    assert not recordings[-1].points and len(recordings[-1].left_out) == 6
    assert "needs" in recordings[-1].left_out[0]["why"]


@pytest.mark.parametrize(
    ("params", "message"),
    [
        ({"positions": [3, 24]}, "positions has 3, it must be above warmup + repeats, 3"),
        ({"caches": ["none", "paged"]}, "caches has 'paged', it must be of none, dynamic, static"),
        ({"positions": [24, 0]}, "positions is 0, it must be a whole number of at least 1"),
        ({"batch": 0}, "batch is 0, it must be a whole number of at least 1"),
        ({"preset": "huge"}, "no preset 'huge'"),
    ],
)
def test_a_bad_parameter_is_named(params, message: str) -> None:
    with pytest.raises(ValueError) as raised:
        list(run_sweep("kv-cache", **{**SMALL, **params}))
    assert str(raised.value).startswith(message)


def test_the_command_records_it(tmp_path, capsys) -> None:
    out = tmp_path / "kv.json"
    options = [
        word
        for setting in ("preset=nano", "positions=16", "repeats=2", "caches=none,static")
        for word in ("--set", setting)
    ]
    assert cli.main(["record", "kv-cache", "--device", "cpu", "--out", str(out), *options]) == 0
    assert [point.at["cache"] for point in load_recording(out).points] == ["none", "static"]
