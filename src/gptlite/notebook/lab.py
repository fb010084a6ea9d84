"""The base of every lab: sliders, Run and Stop, a live figure, and a kernel that survives whatever goes wrong."""

import contextlib
import contextvars
import gc
import html
import threading
import time
import traceback
from collections.abc import Callable, Iterator
from typing import Any

import ipywidgets as widgets
import matplotlib
import torch
from matplotlib.axes import Axes

import gptlite
from gptlite import hardware
from gptlite.notebook.controls import Control, live_view
from gptlite.notebook.style import STYLE, new_figure, to_svg
from gptlite.notebook.tables import Table
from gptlite.progress import Progress, clock
from gptlite.record import Recording, run_sweep

REFRESH = 0.4  # s between two drawings, so that drawing takes little of the time
LIVE = (
    "With a live kernel the sliders, Run and Stop stand here: open the page in Colab or Binder, or the notebook in your"
    " own Jupyter, and run its cells."
)


class Lab:
    """A measurement on the reader's device, with inputs; as the last value of a cell it shows itself.

    A lab declares its `name` (that of its sweep in `gptlite.record`), `title`, `controls` and `draw`, and overrides
    `measure` when it is no sweep. Runs happen on a thread, so that the kernel stays free to hear Stop.

    Args:
        device: that it measures on.
    """

    name = ""
    title = ""
    controls: tuple[Control, ...] = ()
    shrinks = ""  # name of the control to lower when memory is short

    def __init__(self, device: str | torch.device = "cpu") -> None:
        self.device = torch.device(device)
        self.recording: Recording | None = None
        self.state = "ready"  # then running, and done, stopped or failed
        self.message = ""
        self.inputs = {control.name: control.widget() for control in self.controls}
        self._stopping = threading.Event()
        self._thread: threading.Thread | None = None
        self._build()

    # -- what a lab declares --------------------------------------------------------------------------------------

    def measure(self, settings: dict[str, Any], stop: Callable[[], bool], progress: Progress) -> Iterator[Recording]:
        """Measures; by default the sweep of the lab's name with these parameters.

        Args:
            settings: values of the controls by name.
            stop: asked between points; True ends the run.
            progress: told of each point.
        Yields: the recording so far, after each point.
        Raises: ValueError, shown to the reader as it is, when a setting is not allowed.
        """
        return run_sweep(self.name, stop, progress, device=str(self.device), **settings)

    def needed_bytes(self, settings: dict[str, Any]) -> float:
        """Returns: memory that a run takes at most, in bytes; rises with the control that `shrinks` names."""
        return 0.0

    def draw(self, axes: Axes, recording: Recording) -> None:
        """Draws what was measured so far, with units on both axes."""
        raise NotImplementedError

    def rows(self, recording: Recording) -> list[dict[str, Any]]:
        """Returns: the table: what was varied, every sample, and their median."""
        measured = [
            {**point.at, "Samples (ms)": ", ".join(f"{s * 1e3:.3g}" for s in point.samples)}
            | {"Median (ms)": float(f"{point.median * 1e3:.3g}")}
            for point in recording.points
        ]
        return measured + [
            {**left["at"], "Samples (ms)": left["why"], "Median (ms)": ""} for left in recording.left_out
        ]

    def extra(self) -> str:
        """Returns: HTML above the figure, such as generated text."""
        return ""

    # -- running --------------------------------------------------------------------------------------------------

    @property
    def settings(self) -> dict[str, Any]:
        """Values of the controls by name."""
        return {name: widget.value for name, widget in self.inputs.items()}

    def start(self) -> None:
        """Begins a run and returns at once; while one is running it does nothing."""
        if self.state == "running":
            return
        self._stopping.clear()
        self.recording = None
        self.bar.value, self._table.value = 0, ""
        self._say("running", "Starting")
        # the context tells the kernel which cell the widgets' messages belong to
        context = contextvars.copy_context()
        self._thread = threading.Thread(target=context.run, args=(self._run, self.settings), daemon=True)
        self._thread.start()

    def stop(self) -> None:
        """Ends the run after the point that is being measured."""
        self._stopping.set()
        self.stop_button.disabled = True

    def wait(self, timeout: float | None = None) -> bool:
        """Waits for the run to end, for at most `timeout` seconds. Returns: whether it has ended."""
        if self._thread:
            self._thread.join(timeout)
        return self.state != "running"

    def run(self) -> "Lab":
        """Runs and waits; interrupting the kernel stops it as Stop does. Returns: the lab itself, to be shown."""
        self.start()
        try:
            self.wait()
        finally:
            self.stop()
        return self

    def _run(self, settings: dict[str, Any]) -> None:
        """One run, on its thread: whatever happens, the lab can run again and memory is free."""
        state, message = "failed", ""
        progress = _Bar(self)
        try:
            self._check_memory(settings)
            points = self.measure(settings, self._stopping.is_set, progress)
            for recording in points:
                self.recording = recording
                self._refresh()
                if self._stopping.is_set():
                    break
            del points  # and what its frame holds
            state = "stopped" if self._stopping.is_set() else "done"
            message = f"{state.capitalize()} after {clock(time.monotonic() - progress.begin)}"
        except Exception as error:  # a lab must leave the kernel usable, whatever its code or the device does
            message = self._explain(error)
            traceback.clear_frames(error.__traceback__)  # who keeps the error keeps no tensors
        _release()
        self._refresh(final=True)
        self._say(state, message)

    def _check_memory(self, settings: dict[str, Any]) -> None:
        needed, free = self.needed_bytes(settings), hardware.free_bytes(self.device)
        if needed <= free:
            return
        text = f"This needs {needed / 2**30:.2f} GiB, and {free / 2**30:.2f} GiB are free on {self._machine()}"
        for control in self.controls:
            if control.name == self.shrinks:
                smaller = [value for value in control.values() if value < settings[self.shrinks]]
                fits = [v for v in smaller if self.needed_bytes({**settings, self.shrinks: v}) <= free]
                text += f": the largest {control.label} that fits is {max(fits)}" if fits else ": nothing smaller fits"
        raise ValueError(text)

    def _explain(self, error: Exception) -> str:
        first = (str(error).strip().splitlines() or [type(error).__name__])[0]
        if hardware.is_out_of_memory(error):
            label = next((c.label for c in self.controls if c.name == self.shrinks), "a setting")
            return f"Out of memory on {self._machine()}: its memory is free again, lower {label} and run again"
        if _is_device_lost(error):
            return (
                f"{self.device} is gone ({first}): the kernel still works on the CPU, restart it to use {self.device}"
            )
        return str(error) if isinstance(error, ValueError) else f"{type(error).__name__}: {first}"

    # -- showing --------------------------------------------------------------------------------------------------

    def _machine(self) -> str:
        if self.recording:
            return self.recording.machine["name"]
        try:
            return hardware.device_name(self.device)
        except (RuntimeError, AssertionError):  # a device that is gone has no name
            return str(self.device)

    def _build(self) -> None:
        buttons = {}
        for name, icon, action in (
            ("Run", "play", self.start),
            ("Stop", "stop", self.stop),
            ("Save my recording", "download", self.save),
        ):
            buttons[name] = widgets.Button(description=name, icon=icon, layout={"width": "auto"})
            buttons[name].on_click(lambda _, action=action: action())
        self.run_button, self.stop_button, self.save_button = buttons.values()
        self.bar = widgets.FloatProgress(value=0, min=0, max=1, layout={"width": "min(100%, 34em)"})
        self.status = widgets.HTML()
        self._extra, self._figure, self._table = widgets.HTML(), widgets.HTML(), widgets.HTML()
        self._drawn = 0.0
        self.box = widgets.VBox(
            [
                widgets.HTML(f"<strong>{html.escape(self.title)}</strong>, on {html.escape(self._machine())}"),
                *self.inputs.values(),
                widgets.HBox(list(buttons.values()), layout={"flex_flow": "row wrap"}),
                self.bar,
                self.status,
                self._extra,
                self._figure,
                self._table,
            ]
        )
        self._say("ready", "Ready")

    def _say(self, state: str, message: str) -> None:
        self.message = message
        self.status.value = f'<span role="status">{html.escape(message)}</span>'
        self.run_button.disabled = state == "running"
        self.stop_button.disabled = state != "running" or self._stopping.is_set()
        self.save_button.disabled = state == "running" or not (self.recording and self.recording.points)
        self.state = state  # last: who waits for it finds the rest in place

    def _refresh(self, final: bool = False) -> None:
        if not final and time.monotonic() - self._drawn < REFRESH:
            return
        self._extra.value = self.extra()
        self._figure.value = self._svg()
        if final:
            self._table.value = self._rows_html()
        self._drawn = time.monotonic()

    def _svg(self) -> str:
        """The figure of what was measured so far; empty before the first point."""
        if not self.recording or not self.recording.points:
            return ""
        figure = new_figure()
        with matplotlib.rc_context(STYLE):
            axes = figure.subplots()
            self.draw(axes, self.recording)
            axes.set_title(f"{self.title}\n{self._machine()}")
        alt = f"{self.title}: {len(self.recording.points)} points, {axes.get_ylabel()} against {axes.get_xlabel()}"
        return to_svg(figure, f"{self.title}, on {self._machine()}", alt, f"lab-{self.name}")

    def _rows_html(self) -> str:
        if not self.recording or not self.recording.points:
            return ""
        return Table(self.rows(self.recording), f"{self.title}, on {self._machine()}")._repr_html_()

    def save(self, path: str | None = None) -> str:
        """Writes the recording, as `gptlite record` does, next to the notebook.

        Args:
            path: of the file; None means `NAME.json`.
        Returns: the path. Raises: ValueError when nothing was measured.
        """
        if not self.recording or not self.recording.points:
            raise ValueError("there is no recording yet: run the lab first")
        path = path or f"{self.name}.json"
        self.recording.save(path)
        self._say(self.state, f"Saved as {path}")
        return path

    def __repr__(self) -> str:
        lines = [f"Lab {self.name}: {self.title}"]
        lines += [f"  {control.label}: starts at {control.start!r}" for control in self.controls]
        return "\n".join([*lines, f"  {LIVE}"])

    def _repr_html_(self) -> str:
        """What the page keeps of the lab: its last run, with the machine's name."""
        note = LIVE
        if self.recording:
            versions = ", ".join(f"{name} {version}" for name, version in self.recording.versions.items())
            note = f"The last run, on {self._machine()} ({versions}). {LIVE}"
        if self.state == "failed":
            note = f"The last run failed: {self.message}. {note}"
        return (
            f'<section class="gptlite-lab" aria-label="{html.escape(self.title)}"><p class="gptlite-lab-note">'
            f"{html.escape(note)}</p>{self.extra()}{self._svg()}{self._rows_html()}</section>"
        )

    def _repr_mimebundle_(self, include: Any = None, exclude: Any = None) -> dict[str, Any]:
        return {**live_view(self.box), "text/html": self._repr_html_(), "text/plain": repr(self)}


class _Bar(Progress):
    """Progress that a lab shows, with the time left."""

    def __init__(self, lab: Lab) -> None:
        self.lab, self.total, self.begin, self.shown = lab, 1, time.monotonic(), 0.0

    def update(self, done: int, note: str = "") -> None:
        now = time.monotonic()
        if now - self.shown < REFRESH and done < self.total:
            return
        self.shown = now
        left = f", {clock((now - self.begin) / done * (self.total - done))} left" if done else ""
        self.lab.bar.value = done / max(self.total, 1)
        self.lab._say("running", f"{done} of {self.total}: {note}{left}")

    def close(self) -> None:
        pass


def new_recording(name: str, params: dict[str, Any], device: torch.device) -> Recording:
    """Returns: an empty recording that names the machine and the versions."""
    about = hardware.machine(device)
    versions = {"gptlite": gptlite.__version__} | {key: str(about.pop(key)) for key in ("python", "torch")}
    return Recording(name, params, about, versions)


def _release() -> None:
    """Gives back what a run has left, on a device that may be gone."""
    gc.collect()
    with contextlib.suppress(RuntimeError):
        if torch.cuda.is_available():
            torch.cuda.empty_cache()
        elif torch.backends.mps.is_available():
            torch.mps.empty_cache()


def _is_device_lost(error: Exception) -> bool:
    """Whether an error comes from an accelerator itself; after one, CUDA refuses all further work in this process."""
    accelerator = getattr(torch, "AcceleratorError", ())  # torch 2.8 and newer
    return isinstance(error, accelerator) or "CUDA error" in str(error) or "No CUDA GPUs" in str(error)
