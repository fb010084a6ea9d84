"""The lab of the roofline, its sweep, and the box that does the arithmetic of any model."""

import json
from pathlib import Path

import nbformat
import pytest

from gptlite import hardware
from gptlite.arithmetic import ModelShape, decode_costs, prefill_costs, total
from gptlite.config import preset
from gptlite.notebook.controls import Menu
from gptlite.notebook.explorers_roofline import measured_roof
from gptlite.notebook.labs_roofline import ModelBox, RooflineLab, model_rows
from gptlite.record import Point, Recording, load_recording, run_sweep

CONFIGS = Path(hardware.FACTS) / "configs"


@pytest.fixture(autouse=True)
def small(monkeypatch):
    """A roof that is measured in no time."""
    monkeypatch.setattr("gptlite.sweeps.phases.ROOF_SIZES", {"cpu": (64, 2**16), "gpu": (64, 2**16)})


@pytest.fixture(scope="module")
def lab(request):
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr("gptlite.sweeps.phases.ROOF_SIZES", {"cpu": (64, 2**16), "gpu": (64, 2**16)})
        lab = RooflineLab()
        lab.inputs["preset"].value, lab.inputs["batch"].value, lab.inputs["context"].value = "nano", 4, 64
        yield lab.run()


def test_a_run_measures_the_roof_and_steps_below_it(lab, tmp_path):
    assert (lab.state, lab.recording.complete, lab.recording.left_out) == ("done", True, [])
    at = [point.at for point in lab.recording.points]
    assert at == [
        {"what": "matrix product"},
        {"what": "copy"},
        {"batch": 1, "context": 64},
        {"batch": 4, "context": 64},
        {"batch": 1, "length": 8},
        {"batch": 1, "length": 64},
    ]
    shape = ModelShape.of(preset("nano", context_length=64))
    for point, cost in (
        (lab.recording.points[3], decode_costs(shape, 4, 64, bytes_per_weight=4, bytes_per_value=4)),
        (lab.recording.points[5], prefill_costs(shape, 1, 64, bytes_per_weight=4, bytes_per_value=4)),
    ):
        assert (point.flops, point.bytes) == (total(cost).flops, total(cost).bytes)
    lab.save(str(tmp_path / "r.json"))
    assert load_recording(tmp_path / "r.json").points == lab.recording.points


def test_the_table_says_what_was_reached(lab):
    html = lab._repr_html_()
    for words in ("matrix product", "decode, batch 4, context 64", "prefill of 64 tokens", "Of the roof (%)"):
        assert words in html
    assert "Rate (GFLOP/s) against Work per byte (FLOP/B)" in html
    assert f"on {hardware.device_name('cpu')}" in html


def test_shares_of_the_roof_are_right():
    recording = Recording("roofline", {})
    assert measured_roof(recording) == (0, 0)
    recording.points = [
        Point({"what": "matrix product"}, [2.0, 1.0], flops=100e9),
        Point({"what": "copy"}, [1.0], bytes=10e9),
    ]
    assert measured_roof(recording) == (100e9, 10e9)  # ridge point 10 FLOP/B
    recording.points += [
        Point({"batch": 1, "context": 9}, [1.0], flops=5e9, bytes=5e9),  # 1 FLOP/B: 10 GFLOP/s allowed
        Point({"batch": 1, "length": 9}, [1.0], flops=50e9, bytes=1e9),  # 50 FLOP/B: 100 GFLOP/s allowed
    ]
    recording.left_out = [{"at": {"batch": 99, "context": 9}, "why": "ran out of memory"}]
    rows = RooflineLab().rows(recording)
    assert [row["Of the roof (%)"] for row in rows] == ["", "", "50", "50", ""]
    assert [row["Work per byte (FLOP/B)"] for row in rows][2:4] == ["1.00", "50.00"]
    assert rows[-1]["Step"] == "decode, batch 99, context 9" and rows[-1]["Samples (ms)"] == "ran out of memory"
    assert len({tuple(row) for row in rows}) == 1  # a table needs the same headers in each row


def test_too_large_a_model_is_refused_before_it_is_made(monkeypatch):
    monkeypatch.setattr(hardware, "free_bytes", lambda device: 20e9)
    lab = RooflineLab()
    lab.inputs["preset"].value, lab.inputs["batch"].value = "7b", 256
    assert lab.run().state == "failed"
    assert "GiB are free" in lab.message and "nothing smaller fits" in lab.message


def test_the_sweep_stops_and_keeps_what_it_has():
    calls = iter([False, False, False, True])
    recordings = list(
        run_sweep("roofline", lambda: next(calls), preset="nano", contexts=[32], batches=[1], lengths=[8], repeats=1)
    )
    assert not recordings[-1].complete
    assert len(recordings[-1].points) == 3


# -- the box --------------------------------------------------------------------------------------------------------


def test_the_box_answers_for_every_shipped_model_and_for_its_own_config():
    box = ModelBox()
    for path in sorted(CONFIGS.glob("*.json")):
        facts = json.loads(path.read_text(encoding="utf-8"))
        box.inputs["config"].value = ""
        box.inputs["model"].value = facts["name"]
        chosen = repr(box.table()).splitlines()[1:]
        box.inputs["config"].value = json.dumps(facts["config"])
        assert repr(box.table()).splitlines()[1:] == chosen
        assert repr(box).startswith("your model in 16 bits")


def test_the_box_knows_the_published_figures():
    box = ModelBox()
    box.inputs["context"].value = 32_768
    text = repr(box)
    for words in ("GQA, 32 query heads to 8 KV heads", "128.0", "4.29", "13", "53,250 and 26,625"):
        assert words in text
    box.inputs["model"].value = "DeepSeek-V3"
    assert "MLA, a latent of 512 + 64 for 128 heads" in repr(box) and "68.6" in repr(box)
    assert "Attention is half" not in repr(box)


@pytest.mark.parametrize(
    ("text", "message"),
    [
        ("{", "this is not JSON: "),
        ("[" * 100_000, "this is not JSON: "),
        ("7", "config is a int"),
        ("{}", "config.json has no &#x27;num_hidden_layers&#x27;"),
        (
            '{"num_hidden_layers": "<b>", "hidden_size": 8, "num_attention_heads": 2}',
            "num_hidden_layers is &#x27;&lt;b&gt;&#x27;",
        ),
    ],
)
def test_what_is_no_config_is_named(text, message):
    box = ModelBox()
    box.inputs["config"].value = text
    assert box._table.value.startswith('<p role="alert">') and message in box._table.value
    box.inputs["config"].value = ""
    assert "<table" in box._table.value


def test_its_output_is_valid_in_a_notebook_and_the_same_in_every_run():
    bundle = ModelBox()._repr_mimebundle_()
    assert set(bundle) == {"application/vnd.jupyter.widget-view+json", "text/html", "text/plain"}
    again = ModelBox()._repr_mimebundle_()
    assert all(bundle[kind] == again[kind] for kind in ("text/html", "text/plain"))
    output = nbformat.v4.new_output("execute_result", bundle, execution_count=1)
    nbformat.validate(nbformat.v4.new_notebook(cells=[nbformat.v4.new_code_cell("", outputs=[output])]))


def test_rows_and_menus_agree_with_the_tables_of_facts():
    assert len(model_rows(ModelShape.of(preset("gpt2")), "T4", 1024, 1)) == 9
    card = next(control for control in ModelBox().controls if control.name == "card")
    assert isinstance(card, Menu) and set(card.options) == set(hardware.gpus())
