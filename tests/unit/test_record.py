"""Recordings: what is written, what is refused, and what survives a stop, Ctrl-C and a lack of memory."""

import copy
import io
import json

import pytest
import torch

from gptlite import hardware, record
from gptlite.arithmetic import ModelShape
from gptlite.checkpoint import save_checkpoint
from gptlite.config import preset
from gptlite.data import CharTokenizer
from gptlite.measure import count_work
from gptlite.model import GPTlite
from gptlite.record import Point, Recording, all_sweeps, filled_cache, load_recording, random_model, run_sweep
from gptlite.sweeps import phases

SMALL = {"preset": "nano", "contexts": [32, 64], "batches": [1, 2], "repeats": 2, "warmup": 1}


@pytest.fixture
def log():
    return io.StringIO()


def test_a_sweep_is_written_and_read_again(tmp_path, log):
    out = tmp_path / "decode.json"
    made = record.record("decode", out, stream=log, **SMALL)
    assert load_recording(out) == made
    assert made.complete
    assert [point.at for point in made.points] == [
        {"batch": b, "context": n} for n in SMALL["contexts"] for b in SMALL["batches"]
    ]
    assert all(len(point.samples) == 2 for point in made.points)
    assert made.params == SMALL | {"device": "cpu", "dtype": "float32"}
    assert made.machine["name"] == hardware.device_name()
    assert made.versions["torch"] == torch.__version__
    assert "4/4" in log.getvalue()
    assert [path.name for path in tmp_path.iterdir()] == ["decode.json"]


def test_prefill_and_roof(tmp_path, log, monkeypatch):
    made = record.record("prefill", tmp_path / "p.json", stream=log, preset="nano", lengths=[8, 16], batch=2, repeats=2)
    assert [point.at["length"] for point in load_recording(tmp_path / "p.json").points] == [8, 16]
    assert made.points[1].flops > 1.9 * made.points[0].flops
    monkeypatch.setattr(phases, "ROOF_SIZES", {"cpu": (64, 2**16)})
    made = record.record("roof", tmp_path / "r.json", stream=log, repeats=2)
    assert [(point.flops, point.bytes) for point in made.points] == [(2 * 64**3, None), (None, 2**17)]


def test_a_point_states_the_work_of_the_step_that_was_timed():
    """The cost beside a sample is what the sample's step really does, at exactly the context it names."""
    model = GPTlite(preset("nano")).eval()
    cache = filled_cache(model, 3, 31, 32)
    with count_work() as work:
        phases.decode_step(model, torch.zeros(3, dtype=torch.int64), cache)
    shape = ModelShape.of(preset("nano"))
    cost = phases.total(phases.decode_costs(shape, 3, 32, bytes_per_weight=4, bytes_per_value=4))
    assert work.flops == cost.flops
    assert work.operand_bytes == cost.operand_bytes
    *_, made = run_sweep("decode", preset="nano", contexts=[32], batches=[3], repeats=2, warmup=1)
    assert (made.points[0].flops, made.points[0].bytes) == (cost.flops, cost.bytes)


def test_the_last_step_attends_to_exactly_the_context(monkeypatch):
    steps, held = phases.decode_step, []

    def watched(model, tokens, cache):
        logits = steps(model, tokens, cache)
        held.append(cache.next_position(0))
        return logits

    monkeypatch.setattr(phases, "decode_step", watched)
    list(run_sweep("decode", **SMALL))
    assert held == [30, 31, 32] * 2 + [62, 63, 64] * 2


def test_next_character_records_the_models_own_logits(tmp_path, log):
    tokenizer = CharTokenizer("\n RMEOabc")
    model = GPTlite(preset("nano", vocab_size=9)).eval()
    save_checkpoint(tmp_path / "m.safetensors", model, tokenizer, dtype=torch.float32)
    prompts = ["ROMEO\n", "a"]
    record.record(
        "next-character", tmp_path / "n.json", stream=log, model=str(tmp_path / "m.safetensors"), prompts=prompts
    )
    data = load_recording(tmp_path / "n.json").data
    assert data["chars"] == tokenizer.chars
    assert [entry["prompt"] for entry in data["prompts"]] == prompts
    for entry in data["prompts"]:
        expected = model(tokenizer.encode(entry["prompt"])[None])[0, -1]
        torch.testing.assert_close(torch.tensor(entry["logits"]), expected, atol=1e-4, rtol=0)


# -- ends before the end --------------------------------------------------------------------------------------------


def test_a_stop_keeps_what_was_measured(tmp_path, log):
    asked = []

    def stop() -> bool:
        asked.append(1)
        return len(asked) > 2

    record.record("decode", tmp_path / "d.json", stop, stream=log, **SMALL)
    made = load_recording(tmp_path / "d.json")
    assert len(made.points) == 2
    assert not made.complete


def test_ctrl_c_keeps_what_was_measured(tmp_path, log, monkeypatch):
    steps, calls = phases.decode_step, []

    def interrupted(*args):
        calls.append(1)
        if len(calls) == 8:  # in the third point
            raise KeyboardInterrupt
        return steps(*args)

    monkeypatch.setattr(phases, "decode_step", interrupted)
    made = record.record("decode", tmp_path / "d.json", stream=log, **SMALL)
    assert load_recording(tmp_path / "d.json") == made
    assert len(made.points) == 2
    assert not made.complete
    assert "stopped" in log.getvalue()


def test_what_does_not_fit_is_left_out_with_the_reason(monkeypatch):
    monkeypatch.setattr(hardware, "free_bytes", lambda device: 700_000)  # the weights are 522,000 bytes
    *_, made = run_sweep("decode", **SMALL | {"batches": [1, 200]})
    assert [point.at["batch"] for point in made.points] == [1, 1]
    assert [row["at"]["batch"] for row in made.left_out] == [200, 200]
    assert "GiB are free" in made.left_out[0]["why"]
    assert made.complete


def test_running_out_of_memory_leaves_a_point_out(monkeypatch):
    steps = phases.decode_step

    def hungry(model, tokens, cache):
        if len(tokens) == 2:
            raise torch.OutOfMemoryError("CUDA out of memory. Tried to allocate 20.00 GiB")
        return steps(model, tokens, cache)

    monkeypatch.setattr(phases, "decode_step", hungry)
    *_, made = run_sweep("decode", **SMALL)
    assert [point.at["batch"] for point in made.points] == [1, 1]
    assert [row["why"] for row in made.left_out] == ["ran out of memory"] * 2


def test_another_error_is_not_hidden(monkeypatch):
    monkeypatch.setattr(phases, "decode_step", lambda *args: (_ for _ in ()).throw(RuntimeError("device-side assert")))
    with pytest.raises(RuntimeError, match="device-side"):
        list(run_sweep("decode", **SMALL))


# -- what is refused ------------------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("name", "params", "message"),
    [
        ("decoding", {}, "no sweep 'decoding', there are attention, batching, .*, decode, .*, prefill, "),
        ("decode", {"batch": 1}, "has no parameter 'batch', it has device, dtype, preset, batches"),
        ("decode", {"batches": [1, 0]}, "batches is 0"),
        ("decode", {"batches": []}, "batches is \\[\\]"),
        ("decode", {"batches": "12"}, "it must be a list of int"),
        ("decode", {"repeats": 0}, "repeats is 0"),
        ("decode", {"repeats": True}, "repeats is True"),
        ("decode", {"contexts": [5]}, "must be above warmup \\+ repeats"),
        ("decode", {"preset": "huge"}, "no preset 'huge'"),
        ("decode", {"dtype": "int8"}, "dtype is 'int8'"),
        ("decode", {"device": "abacus"}, "device 'abacus' cannot be used"),
    ],
)
def test_bad_parameters_are_named_before_anything_is_written(tmp_path, name, params, message):
    with pytest.raises(ValueError, match=message):
        record.record(name, tmp_path / "x.json", **params)
    assert not list(tmp_path.iterdir())


def test_a_missing_folder_is_named(tmp_path):
    with pytest.raises(ValueError, match="no folder"):
        record.record("roof", tmp_path / "none" / "x.json")


@pytest.fixture(scope="module")
def good():
    recording = Recording("decode", {"batches": [1]}, complete=True)
    about = hardware.machine()
    recording.versions = {"gptlite": "0", "python": about.pop("python"), "torch": about.pop("torch")}
    recording.machine = about
    recording.points = [Point({"batch": 1}, [2.0, 1.0, 4.0], flops=3.0, bytes=5.0, peak_bytes=7)]
    return json.loads(recording.to_json())


@pytest.mark.parametrize(
    ("path", "value", "message"),
    [
        (["format"], "gptlite-recording-0", "format is 'gptlite-recording-0'"),
        (["name"], "", "name is empty"),
        (["complete"], 1, "complete must be a boolean"),
        (["machine", "kind"], "tpu", "machine.kind is 'tpu'"),
        (["machine", "cores"], True, "machine.cores must be an integer"),
        (["machine", "host"], "mine", "machine.host is unknown"),
        (["machine", "name"], None, "machine has no 'name'"),
        (["versions", "torch"], 2, "versions.torch must be a string"),
        (["points"], {}, "points must be an array"),
        (["points", 0, "samples"], [], r"points\[0\].samples is empty"),
        (["points", 0, "samples", 1], -1.0, r"points\[0\].samples\[1\] is -1.0"),
        (["points", 0, "samples", 1], float("inf"), r"points\[0\].samples\[1\] is inf"),
        (["points", 0, "samples", 1], float("nan"), r"points\[0\].samples\[1\] is nan"),
        (["points", 0, "median"], 3.0, r"points\[0\].median is not the median"),
        (["points", 0, "at"], None, r"points\[0\] has no 'at'"),
        (["extra"], 1, "extra is unknown"),
        (["data"], None, "the file has no 'data'"),
    ],
)
def test_a_damaged_recording_is_refused_with_the_place(tmp_path, good, path, value, message):
    values = copy.deepcopy(good)
    (tmp_path / "r.json").write_text(json.dumps(values))
    assert load_recording(tmp_path / "r.json").points[0].median == 2.0
    place = values
    for key in path[:-1]:
        place = place[key]
    if value is None:
        del place[path[-1]]
    else:
        place[path[-1]] = value
    (tmp_path / "r.json").write_text(json.dumps(values))
    with pytest.raises(ValueError, match=message):
        load_recording(tmp_path / "r.json")


@pytest.mark.parametrize("text", ["", "{", "[]", "[" * 100_000])
def test_what_is_no_recording_is_refused(tmp_path, text):
    (tmp_path / "r.json").write_text(text)
    with pytest.raises(ValueError, match=r"r\.json"):
        load_recording(tmp_path / "r.json")
    with pytest.raises(ValueError, match=r"none\.json"):
        load_recording(tmp_path / "none.json")


# -- parts ----------------------------------------------------------------------------------------------------------


def test_a_random_model_is_made_in_its_dtype():
    model = random_model(preset("nano"), dtype=torch.bfloat16)
    assert {parameter.dtype for parameter in model.parameters()} == {torch.bfloat16}
    assert torch.get_default_dtype() == torch.float32
    assert not model.training


def test_every_sweep_says_what_it_is():
    for name, sweep in all_sweeps().items():
        assert sweep.about
        assert "\n" not in sweep.about
        assert name == name.lower()
        assert sweep.defaults
