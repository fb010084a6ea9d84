import gc
import re
import threading
import time
import weakref

import nbformat
import pytest
import torch

from gptlite import hardware
from gptlite.config import preset
from gptlite.data import CharTokenizer
from gptlite.generate import generate
from gptlite.model import GPTlite
from gptlite.notebook.controls import Menu, Slider
from gptlite.notebook.lab import Lab, new_recording
from gptlite.notebook.labs import GenerationLab
from gptlite.record import Point, load_recording
from gptlite.sampling import SamplingParams

CHARS = "\n :ABCDEFGHIJKLMNOPQRSTUVWXYZabcdefghijklmnopqrstuvwxyz"


class Counting(Lab):
    """Measures nothing, point by point; `fail` is raised at the third one."""

    name, title, shrinks = "counting", "Counting <&", "batch"
    controls = (Slider("n", "Points", 4, 1, 100, 1), Slider("batch", "Batch", 8, 1, 64, 1))
    fail: Exception | None = None
    gate: threading.Event | None = None

    def __init__(self):
        super().__init__()
        self.held = []

    def needed_bytes(self, settings):
        return settings["batch"] * 1000

    def measure(self, settings, stop, progress):
        recording = new_recording(self.name, settings, self.device)
        progress.total = settings["n"]
        for i in range(settings["n"]):
            tensor = torch.zeros(10)
            self.held.append(weakref.ref(tensor))
            if self.fail and i == 2:
                raise self.fail
            if self.gate:
                assert self.gate.wait(10)
            recording.points.append(Point({"Point": i}, [0.001, 0.003, 0.002]))
            recording.complete = i + 1 == settings["n"]
            progress.update(i + 1, f"point {i}")
            yield recording

    def draw(self, axes, recording):
        axes.plot([point.at["Point"] for point in recording.points], [point.median * 1e3 for point in recording.points])
        axes.set(xlabel="Point", ylabel="Time (ms)")


def test_a_run_draws_tabulates_and_names_the_machine():
    lab = Counting().run()
    assert (lab.state, len(lab.recording.points), lab.recording.complete) == ("done", 4, True)
    assert lab.bar.value == 1
    output = lab._repr_html_()
    machine = hardware.device_name("cpu")
    assert f"The last run, on {machine} (gptlite " in output
    assert output.count(f"Counting &lt;&amp;, on {machine}") == 2  # the figure's title and the table's caption
    assert "1, 3, 2</td>" in output and ">2</td>" in output  # every sample, and their median
    assert "Time (ms) against Point" in output and "Run" in output


def test_output_is_valid_in_a_notebook_and_its_text_does_not_depend_on_the_run():
    before, after = Counting(), Counting().run()
    assert repr(before) == repr(after)
    bundle = after._repr_mimebundle_()
    assert set(bundle) == {"application/vnd.jupyter.widget-view+json", "text/html", "text/plain"}
    assert bundle["text/plain"] == repr(after) and not re.search(r"0x[0-9a-f]{6,}", bundle["text/plain"])
    output = nbformat.v4.new_output("execute_result", bundle, execution_count=1)
    nbformat.validate(nbformat.v4.new_notebook(cells=[nbformat.v4.new_code_cell("", outputs=[output])]))


def test_stop_ends_the_run_after_the_point_and_a_second_start_does_nothing():
    lab = Counting()
    lab.gate, lab.inputs["n"].value = threading.Event(), 100
    lab.start()
    first = lab._thread
    lab.start()
    assert lab._thread is first and lab.run_button.disabled and not lab.stop_button.disabled
    assert not lab.wait(0.05)
    lab.stop()
    assert lab.stop_button.disabled
    lab.gate.set()
    assert lab.wait(10) and lab.state == "stopped"
    assert len(lab.recording.points) == 1 and not lab.recording.complete
    assert lab.run().state == "done" and len(lab.recording.points) == 100


OUT_OF_MEMORY = [
    torch.OutOfMemoryError("CUDA out of memory. Tried to allocate 2.00 GiB. GPU 0 has"),
    RuntimeError("[enforce fail at alloc_cpu.cpp] DefaultCPUAllocator: can't allocate memory: you tried"),
    MemoryError(),
]


@pytest.mark.parametrize("error", OUT_OF_MEMORY, ids=["cuda", "cpu", "python"])
def test_out_of_memory_frees_it_keeps_the_points_and_lets_the_lab_run_again(error):
    lab = Counting()
    lab.fail = error
    lab.run()
    assert lab.state == "failed" and lab.message.startswith("Out of memory on ") and "lower Batch" in lab.message
    del error
    lab.fail = None
    assert [ref() for ref in lab.held] == [None] * 3
    assert len(lab.recording.points) == 2 and not lab.run_button.disabled
    assert lab.run().state == "done"


def test_a_lost_device_and_an_unknown_fault_are_one_line_each():
    lab = Counting()
    lab.fail = RuntimeError("CUDA error: an illegal memory access was encountered\nCUDA kernel errors might be")
    lab.run()
    assert lab.message.startswith("cpu is gone (CUDA error: an illegal memory access was encountered): the kernel")
    assert "The last run failed: cpu is gone" in lab._repr_html_()
    lab.fail = KeyError("k")
    assert lab.run().message == "KeyError: 'k'"
    lab.fail = ValueError("batch is 3, it must be even")
    assert lab.run().message == "batch is 3, it must be even"
    lab.fail = None
    assert lab.run().state == "done"


def test_a_device_without_a_name_still_shows_a_lab(monkeypatch):
    def gone(device):
        raise RuntimeError("CUDA error: no device")

    monkeypatch.setattr(hardware, "device_name", gone)
    assert "cpu" in Counting().box.children[0].value


@pytest.mark.parametrize(
    ("free", "says"),
    [(64_000, None), (7_999, "the largest Batch that fits is 7"), (1_000, "fits is 1"), (999, "nothing smaller fits")],
)
def test_memory_is_checked_before_anything_is_measured(monkeypatch, free, says):
    monkeypatch.setattr(hardware, "free_bytes", lambda device: free)
    lab = Counting().run()
    if says is None:
        assert lab.state == "done"
    else:
        assert (
            lab.state == "failed"
            and says in lab.message
            and not lab.held
            and lab.message.startswith("This needs 0.00 GiB")
        )


def test_a_saved_recording_is_read_back(tmp_path):
    lab = Counting()
    with pytest.raises(ValueError, match="no recording yet"):
        lab.save()
    assert lab.save_button.disabled
    lab.run()
    assert not lab.save_button.disabled
    again = load_recording(lab.save(str(tmp_path / "mine.json")))
    assert again == lab.recording and again.points[0].samples == [0.001, 0.003, 0.002]
    assert again.params == {"n": 4, "batch": 8}


class Decode(Lab):
    name, title = "decode", "Time of a decode step"
    controls = (Menu("preset", "Model", "nano", ("nano", "gpt2")),)

    def measure(self, settings, stop, progress):
        return super().measure({**settings, "batches": [1, 2], "contexts": [16], "repeats": 3}, stop, progress)

    def draw(self, axes, recording):
        axes.plot([point.at["batch"] for point in recording.points], [point.median * 1e3 for point in recording.points])
        axes.set(xlabel="Batch (sequences)", ylabel="Time (ms)")


def test_a_lab_runs_the_sweep_of_its_name():
    lab = Decode().run()
    assert (lab.state, lab.message[:4]) == ("done", "Done")
    assert [point.at for point in lab.recording.points] == [{"batch": b, "context": 16} for b in (1, 2)]
    assert all(len(point.samples) == 3 for point in lab.recording.points)
    assert "Samples (ms)" in lab._repr_html_()


def test_the_controls_are_labelled_inputs_with_their_ranges():
    lab = Counting()
    slider = lab.inputs["batch"]
    assert (slider.description, slider.min, slider.max, slider.step, slider.value) == ("Batch", 1, 64, 1, 8)
    assert Slider("t", "T", 0.5, 0.0, 1.0, 0.1).values()[-1] == pytest.approx(1.0)
    assert len(Slider("t", "T", 0.5, 0.0, 1.0, 0.1).values()) == 11
    lab.inputs["n"].value = 2
    assert lab.settings == {"n": 2, "batch": 8}


@pytest.fixture(scope="module")
def model():
    torch.manual_seed(0)
    return GPTlite(preset("nano", vocab_size=len(CHARS))).eval()


def generation(model, **settings):
    lab = GenerationLab(model, CharTokenizer(CHARS))
    for name, value in settings.items():
        lab.inputs[name].value = value
    return lab


def test_generation_gives_the_text_of_the_plain_loop(model):
    tokenizer = CharTokenizer(CHARS)
    lab = generation(model, prompt="ROMEO:\n", n_new=100, temperature=0.7, top_k=5, top_p=0.9, seed=3).run()
    assert lab.state == "done", lab.message
    params = SamplingParams(0.7, 5, 0.9)
    expected = generate(
        model, tokenizer.encode("ROMEO:\n")[None], 100, params, overflow="slide", seed=3
    )  # past the window of 64
    assert "ROMEO:\n" + lab.text == tokenizer.decode(expected[0])
    assert [point.at["context"] for point in lab.recording.points] == list(range(7, 107))
    rate = len(lab.text) / sum(point.samples[0] for point in lab.recording.points)
    shown = re.findall(r"<td[^>]*>([\d,.]+)</td>", lab._repr_html_())[1]
    assert float(shown.replace(",", "")) == pytest.approx(rate, rel=1e-3)  # to four digits
    assert "<strong>ROMEO:\n</strong>" in lab.extra()


@pytest.mark.parametrize(
    ("prompt", "says"),
    [
        ("caf\u00e9", "character 'é' at position 3 is not in the vocabulary of 55 characters"),
        ("", "The prompt is empty: type at least one"),
    ],
)
def test_generation_refuses_a_bad_prompt_in_one_line(model, prompt, says):
    lab = generation(model, n_new=3).run()
    lab.inputs["prompt"].value = prompt
    lab.run()
    assert lab.state == "failed" and lab.message.startswith(says) and "\n" not in lab.message
    assert "<pre" not in lab.extra() and lab.recording is None  # nothing is left of the run before
    lab.inputs["prompt"].value = "A"
    assert lab.run().state == "done"


def test_text_cannot_inject_markup(model):
    lab = generation(model)
    lab.prompt, lab.text = "<b>", "<script>alert(1)</script>"
    assert "<script" not in lab.extra() and "<b>" not in lab.extra()


def test_a_lab_that_is_dropped_lets_go_of_its_model():
    model = GPTlite(preset("nano", vocab_size=len(CHARS))).eval()
    lab, ref = generation(model, n_new=2).run(), weakref.ref(model)
    lab.box.close_all()
    time.sleep(0.05)
    del lab, model
    gc.collect()
    assert ref() is None
