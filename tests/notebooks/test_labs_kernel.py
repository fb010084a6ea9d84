"""Labs in a real kernel, driven as a front end drives them: by the widgets' messages, while no cell is running."""

import html
import re
import time
from queue import Empty

import pytest
from jupyter_client.manager import KernelManager

SET_UP = """
import gc, time, weakref
import torch
from gptlite.config import preset
from gptlite.data import CharTokenizer
from gptlite.model import GPTlite
from gptlite.notebook.controls import Menu, Slider
from gptlite.notebook.lab import Lab, new_recording
from gptlite.notebook.labs import GenerationLab
from gptlite.record import Point

torch.manual_seed(0)
held = []

class SlowLab(Lab):
    name, title, shrinks = "slow", "Slow", "size"
    controls = (Slider("n", "Points", 3, 1, 1000, 1), Menu("mode", "Mode", "good", ("good", "memory", "lost")),
                Slider("size", "Size (GiB)", 0, 0, 2**20, 1))

    def needed_bytes(self, settings):
        return settings["size"] * 2**30

    def measure(self, settings, stop, progress):
        recording = new_recording(self.name, settings, self.device)
        progress.total = settings["n"]
        for i in range(settings["n"]):
            tensor = torch.zeros(1000)
            held.append(weakref.ref(tensor))
            time.sleep(0.02)
            if i == 1 and settings["mode"] == "memory":
                raise torch.OutOfMemoryError("CUDA out of memory. Tried to allocate 20.00 GiB")
            if i == 1 and settings["mode"] == "lost":
                raise RuntimeError("CUDA error: device-side assert triggered\\nmore lines")
            recording.points.append(Point({"i": i}, [0.02]))
            progress.update(i + 1, f"point {i}")
            yield recording

    def draw(self, axes, recording):
        axes.plot([p.at["i"] for p in recording.points], [p.median for p in recording.points])
        axes.set(xlabel="Point", ylabel="Time (s)")

slow = SlowLab()
chars = "\\n :ABCDEFGHIJKLMNOPQRSTUVWXYZabcdefghijklmnopqrstuvwxyz"
tokenizer = CharTokenizer(chars)
generation = GenerationLab(GPTlite(preset("nano", vocab_size=len(chars))).eval(), tokenizer)
"""


class FrontEnd:
    """Sends what a browser sends, and remembers the state of each widget that the kernel tells of."""

    def __init__(self):
        self.manager = KernelManager()
        self.manager.start_kernel()
        self.client = self.manager.client()
        self.client.start_channels()
        self.client.wait_for_ready(timeout=120)
        self.widgets = {}

    def close(self):
        self.client.stop_channels()
        self.manager.shutdown_kernel(now=True)

    def listen(self, seconds):
        """Takes in messages until none came for so long."""
        found = []
        while True:
            try:
                message = self.client.get_iopub_msg(timeout=seconds)
            except Empty:
                return found
            content = message["content"]
            if message["msg_type"] in ("comm_open", "comm_msg"):
                self.widgets.setdefault(content["comm_id"], {}).update(content["data"].get("state") or {})
            found.append(message)

    def run(self, code, timeout=120):
        """Runs a cell. Returns: what it prints."""
        request, text, end = self.client.execute(code), "", time.monotonic() + timeout
        while time.monotonic() < end:
            for message in self.listen(0.05):
                if message["parent_header"].get("msg_id") != request:
                    continue
                if message["msg_type"] == "stream":
                    text += message["content"]["text"]
                if message["msg_type"] == "error":
                    raise AssertionError("\n".join(message["content"]["traceback"]))
                if message["msg_type"] == "status" and message["content"]["execution_state"] == "idle":
                    return text.strip()
        raise AssertionError(f"the kernel was busy for {timeout} s with: {code}")

    def id_of(self, widget):
        return self.run(f"print({widget}.model_id)")

    def send(self, widget, data):
        message = self.client.session.msg("comm_msg", {"comm_id": self.id_of(widget), "data": data})
        self.client.shell_channel.send(message)

    def click(self, button):
        self.send(button, {"method": "custom", "content": {"event": "click"}})

    def move(self, widget, value):
        self.send(widget, {"method": "update", "state": {"value": value}, "buffer_paths": []})

    def status(self, lab):
        """The text of the lab's status line, as a browser would show it now."""
        identity = self.id_of(f"{lab}.status")
        self.listen(0.05)
        return html.unescape(re.sub("<.*?>", "", self.widgets[identity]["value"]))

    def until(self, lab, text, timeout=30):
        """Waits until the status line holds the text. Returns: the whole line."""
        end = time.monotonic() + timeout
        while time.monotonic() < end:
            if text in (now := self.status(lab)):
                return now
        raise AssertionError(f"the status line says {now!r}, not {text!r}")


@pytest.fixture(scope="module")
def front():
    front = FrontEnd()
    front.run(SET_UP)
    yield front
    front.close()


@pytest.fixture(autouse=True)
def _idle(front):
    yield
    assert (
        front.run("slow.stop(); generation.stop(); print(slow.wait(10), generation.wait(10), 1 + 1)") == "True True 2"
    )


def test_run_ends_with_a_figure_and_a_table(front):
    front.click("slow.run_button")
    front.until("slow", "Done")
    assert front.run("print(slow.state, len(slow.recording.points))") == "done 3"
    figure = front.widgets[front.id_of("slow._figure")]["value"]
    assert figure.startswith("<svg") and "Slow, on " in figure
    assert front.widgets[front.id_of("slow._table")]["value"].count("<tr>") == 4
    assert front.widgets[front.id_of("slow.run_button")]["disabled"] is False


def test_a_moved_slider_counts_for_the_next_run(front):
    front.move("slow.inputs['n']", 5)
    front.click("slow.run_button")
    front.until("slow", "Done")
    assert front.run("print(len(slow.recording.points), slow.recording.params['n'])") == "5 5"


def test_stop_in_the_middle_while_points_arrive(front):
    front.move("slow.inputs['n']", 1000)
    front.click("slow.run_button")
    front.until("slow", " of 1000")
    assert "left" in front.until("slow", "left")
    assert front.run("print(slow.state, slow._figure.value[:4])") == "running <svg"  # the kernel is free meanwhile
    front.click("slow.run_button")  # a second run does not begin
    front.click("slow.stop_button")
    front.until("slow", "Stopped")
    n_points = int(front.run("print(len(slow.recording.points))"))
    assert 0 < n_points < 1000
    front.move("slow.inputs['n']", 2)
    front.click("slow.run_button")
    front.until("slow", "Done")
    assert front.run("print(len(slow.recording.points))") == "2"


@pytest.mark.parametrize(
    ("mode", "says"),
    [
        ("memory", "its memory is free again, lower Size (GiB) and run again"),
        ("lost", "the kernel still works on the CPU"),
    ],
)
def test_a_failing_device_leaves_the_kernel_usable_and_memory_free(front, mode, says):
    choices = {"good": 0, "memory": 1, "lost": 2}
    front.run("held.clear()")
    front.send("slow.inputs['mode']", {"method": "update", "state": {"index": choices[mode]}, "buffer_paths": []})
    front.move("slow.inputs['n']", 4)
    front.click("slow.run_button")
    line = front.until("slow", says)
    assert "\n" not in line and "Traceback" not in line
    assert front.run("print(slow.state, len(held), [ref() for ref in held])") == "failed 2 [None, None]"
    assert front.run("print(len(slow.recording.points))") == "1"  # what was measured before is kept
    front.send("slow.inputs['mode']", {"method": "update", "state": {"index": 0}, "buffer_paths": []})
    front.click("slow.run_button")
    front.until("slow", "Done")
    assert front.run("print(len(slow.recording.points))") == "4"


def test_memory_is_checked_before_anything_is_allocated(front):
    front.run("held.clear()")
    front.move("slow.inputs['size']", 2**20)
    front.click("slow.run_button")
    line = front.until("slow", "the largest Size (GiB) that fits is ")
    largest = int(line.rsplit(" ", 1)[1])
    free = float(front.run("from gptlite.hardware import free_bytes; print(free_bytes('cpu') / 2**30)"))
    assert line.startswith("This needs 1048576.00 GiB, and ") and largest <= free + 1 and largest >= free - 2
    assert front.run("print(slow.state, len(held))") == "failed 0"
    front.move("slow.inputs['size']", 0)


def test_generation_streams_text_and_stops(front):
    front.move("generation.inputs['n_new']", 1000)
    front.click("generation.run_button")
    front.until("generation", "characters/s")
    assert "<pre" in front.widgets[front.id_of("generation._extra")]["value"]
    front.click("generation.stop_button")
    front.until("generation", "Stopped")
    assert 0 < int(front.run("print(len(generation.text))")) < 1000


def test_a_bad_prompt_is_one_clear_line(front):
    front.move("generation.inputs['prompt']", "caf\u00e9")
    front.click("generation.run_button")
    front.until("generation", "character 'é' at position 3 is not in the vocabulary of 55 characters")
    front.move("generation.inputs['prompt']", "")
    front.click("generation.run_button")
    front.until("generation", "The prompt is empty")
    front.move("generation.inputs['prompt']", "ROMEO:")
    front.move("generation.inputs['n_new']", 5)
    front.click("generation.run_button")
    front.until("generation", "Done")


def test_a_cell_that_runs_a_lab_keeps_its_last_run_as_output(front):
    front.move("generation.inputs['n_new']", 20)
    request = front.client.execute("generation.run()")
    end = time.monotonic() + 60
    outputs = []
    while not outputs and time.monotonic() < end:
        outputs = [
            message["content"]["data"]
            for message in front.listen(0.05)
            if message["msg_type"] == "execute_result" and message["parent_header"].get("msg_id") == request
        ]
    assert set(outputs[0]) == {"application/vnd.jupyter.widget-view+json", "text/html", "text/plain"}
    assert "<svg" in outputs[0]["text/html"] and "The last run, on " in outputs[0]["text/html"]
    assert outputs[0]["text/plain"].startswith("Lab generation: ")
