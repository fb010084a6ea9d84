"""Recordings: a sweep measured on this machine and kept as JSON, with every sample and the machine's name."""

from __future__ import annotations

import json
import sys
from collections.abc import Callable, Iterable, Iterator
from dataclasses import asdict, dataclass, field
from importlib import import_module
from pathlib import Path
from statistics import median
from typing import Any, TextIO

import torch
from torch import Tensor

import gptlite
from gptlite import hardware
from gptlite.arithmetic import Cost, ModelShape, kv_bytes, n_params
from gptlite.cache.dense import StaticCache
from gptlite.checkpoint import write_atomically
from gptlite.config import GPTConfig
from gptlite.measure import Timing
from gptlite.model import GPTlite
from gptlite.progress import Progress

FORMAT = "gptlite-recording-1"
DTYPES = ("float32", "bfloat16", "float16", "float64")
SCHEMA = Path(__file__).parent / "facts" / "recording.schema.json"


@dataclass
class Point:
    """One measured point of a sweep.

    Args:
        at: what was varied, by name.
        samples: seconds, every one of them.
        flops, bytes: work of one sample by `gptlite.arithmetic`; bytes are weights, keys and values.
        peak_bytes: most memory held at once during one sample, where the sweep measures it.
    """

    at: dict[str, Any]
    samples: list[float]
    flops: float | None = None
    bytes: float | None = None
    peak_bytes: int | None = None

    @property
    def median(self) -> float:
        """Median of the samples, in seconds."""
        return median(self.samples)

    @classmethod
    def of(cls, at: dict[str, Any], timing: Timing, cost: Cost) -> Point:
        """The point of a timing and the cost of one call."""
        return cls(at, timing.wall, cost.flops, cost.bytes)


@dataclass
class Recording:
    """A sweep on one machine; the fields are those of `facts/recording.schema.json`."""

    name: str
    params: dict[str, Any]
    machine: dict[str, Any] = field(default_factory=dict)
    versions: dict[str, str] = field(default_factory=dict)
    points: list[Point] = field(default_factory=list)
    left_out: list[dict[str, Any]] = field(default_factory=list)
    data: dict[str, Any] = field(default_factory=dict)
    complete: bool = False

    def to_json(self) -> str:
        """The text of its file, one point a line."""
        fields: dict[str, Any] = {"format": FORMAT, **asdict(self)}
        fields["points"] = [
            {key: value for key, value in asdict(point).items() if value is not None} | {"median": point.median}
            for point in self.points
        ]
        lines = []
        for key, value in fields.items():
            text = json.dumps(value, ensure_ascii=False)
            if key in ("points", "left_out") and value:
                text = "[\n  " + ",\n  ".join(json.dumps(row, ensure_ascii=False) for row in value) + "\n ]"
            lines.append(f" {json.dumps(key)}: {text}")
        return "{\n" + ",\n".join(lines) + "\n}\n"

    def save(self, path: str | Path) -> None:
        """Writes the file; it is whole or not there."""
        write_atomically(Path(path), self.to_json().encode())


def load_recording(path: str | Path) -> Recording:
    """Reads a recording and checks it against the schema.

    Raises: ValueError that names the file, the place in it and what is wrong there.
    """
    path = Path(path)
    try:
        values = json.loads(path.read_text(encoding="utf-8"))
    except (OSError, ValueError, RecursionError) as error:
        raise ValueError(f"cannot read the recording {path.name}: {error}") from None
    problem = next(iter(problems(values, json.loads(SCHEMA.read_text(encoding="utf-8")))), None)
    if problem:
        raise ValueError(f"{path.name} is no recording: {problem}")
    points = []
    for i, row in enumerate(values.pop("points")):
        stated = row.pop("median")
        points.append(Point(**row))
        if abs(points[-1].median - stated) > 1e-9 * stated:
            raise ValueError(f"{path.name} is no recording: points[{i}].median is not the median of its samples")
    del values["format"]
    return Recording(points=points, **values)


def problems(value: Any, schema: dict[str, Any], where: str = "the file") -> Iterator[str]:
    """What is wrong with a JSON value, by the part of JSON Schema that our schema uses."""
    kinds: dict[str, Any] = {"object": dict, "array": list, "string": str, "boolean": bool, "integer": int}
    kinds["number"] = (int, float)
    kind = schema.get("type")
    if kind and (not isinstance(value, kinds[kind]) or (isinstance(value, bool) and kind != "boolean")):
        yield f"{where} must be {'an' if kind[0] in 'aio' else 'a'} {kind}"
        return
    if "const" in schema and value != schema["const"]:
        yield f"{where} is {value!r}, it must be {schema['const']!r}"
    if "enum" in schema and value not in schema["enum"]:
        yield f"{where} is {value!r}, it must be one of {', '.join(map(repr, schema['enum']))}"
    if "minimum" in schema and not schema["minimum"] <= value < float("inf"):
        yield f"{where} is {value}, it must be a number of at least {schema['minimum']}"
    if (
        len(value) < max(schema.get("minItems", 0), schema.get("minLength", 0))
        if kind in ("array", "string")
        else False
    ):
        yield f"{where} is empty"
    if kind == "array" and "items" in schema:
        for i, item in enumerate(value):
            yield from problems(item, schema["items"], f"{where}[{i}]")
    if kind == "object":
        for name in schema.get("required", ()):
            if name not in value:
                yield f"{where} has no {name!r}"
        known, rest = schema.get("properties", {}), schema.get("additionalProperties", True)
        for name, item in value.items():
            below = name if where == "the file" else f"{where}.{name}"
            if name in known or isinstance(rest, dict):
                yield from problems(item, known.get(name, rest), below)
            elif rest is False:
                yield f"{below} is unknown"


# -- sweeps -------------------------------------------------------------------------------------------------------

Step = tuple[dict[str, Any], float, Callable[[], Point]]  # what is varied, bytes it needs, the measurement


@dataclass(frozen=True)
class Sweep:
    """A named series of measurements.

    Args:
        about: one line, for `gptlite record --help`.
        defaults: its parameters and their default values; each is a number, a string, or a tuple of these.
        steps: makes the measurements from the recording that they go into; nothing is measured until one is called.
    """

    about: str
    defaults: dict[str, Any]
    steps: Callable[[Recording], Iterable[Step]]


SWEEPS: dict[str, Sweep] = {}  # filled by the modules of gptlite.sweeps; ask `all_sweeps`


def all_sweeps() -> dict[str, Sweep]:
    """Every sweep of the package, by name."""
    import_module("gptlite.sweeps")  # each of its modules registers its own
    return dict(sorted(SWEEPS.items()))


def sweep(name: str, about: str, **defaults: Any) -> Callable[[Callable[[Recording], Iterable[Step]]], Any]:
    """Registers the function that makes a sweep's steps; the arguments are those of `Sweep`."""

    def register(steps: Callable[[Recording], Iterable[Step]]) -> Callable[[Recording], Iterable[Step]]:
        SWEEPS[name] = Sweep(about, defaults, steps)
        return steps

    return register


def run_sweep(
    name: str, stop: Callable[[], bool] = lambda: False, progress: Progress | None = None, **params: Any
) -> Iterator[Recording]:
    """Runs a sweep point by point; labs draw what it yields, `record` writes it.

    A point that doesn't fit the free memory, or runs out of it, is left out with the reason, and the sweep goes on.

    Args:
        stop: asked before each point; True ends the sweep, with what was measured.
        progress: told of each point; the total is set here.
        params: of the sweep, and `device` and `dtype` (a name, such as "bfloat16").
    Yields: the recording so far, the same object each time; `complete` is True at the end unless it was stopped.
    Raises: ValueError on an unknown sweep or parameter.
    """
    recording = Recording(name, _params(name, params))
    device = recording.params["device"]
    about = hardware.machine(device)
    recording.versions = {"gptlite": gptlite.__version__} | {key: str(about.pop(key)) for key in ("python", "torch")}
    recording.machine = about
    steps = list(all_sweeps()[name].steps(recording))
    for i, (at, needed, measure) in enumerate(steps):
        if stop():
            yield recording
            return
        if progress:
            progress.total = len(steps)
            progress.update(i, ", ".join(f"{key} {value}" for key, value in at.items()))
        free = hardware.free_bytes(device)
        if needed > free:
            why = f"needs {needed / 2**30:.2f} GiB, {free / 2**30:.2f} GiB are free"
            recording.left_out.append({"at": at, "why": why})
        else:
            try:
                recording.points.append(measure())
            except (RuntimeError, MemoryError) as error:
                if not hardware.is_out_of_memory(error):
                    raise
                recording.left_out.append({"at": at, "why": "ran out of memory"})
            if torch.device(device).type == "cuda":
                torch.cuda.empty_cache()
        recording.complete = i == len(steps) - 1
        yield recording
    if not steps:
        recording.complete = True
        yield recording
    if progress:
        progress.update(progress.total)
        progress.close()


def record(
    name: str, out: str | Path, stop: Callable[[], bool] = lambda: False, stream: TextIO | None = None, **params: Any
) -> Recording:
    """Measures a sweep and writes it as JSON; the file is written again after each point, so nothing is lost.

    Ctrl-C ends the sweep and keeps what was measured, as `stop` does.

    Args:
        name: one of `all_sweeps`. out: the file. stream: of the progress line; None means the standard error stream.
        stop, params: as in `run_sweep`.
    Returns: the recording, `complete` or not.
    Raises: ValueError on an unknown sweep or parameter, or a folder that isn't there.
    """
    out = Path(out)
    if not out.parent.is_dir():
        raise ValueError(f"there is no folder {out.parent} for {out.name}")
    recording = Recording(name, _params(name, params))
    try:
        for recording in run_sweep(name, stop, Progress(1, stream=stream), **params):
            recording.save(out)
    except KeyboardInterrupt:
        print("stopped; what was measured is kept", file=stream or sys.stderr)
    return recording


def _params(name: str, given: dict[str, Any]) -> dict[str, Any]:
    """The sweep's defaults, changed by what is given. Raises: ValueError on an unknown name, or a value of no use."""
    sweeps = all_sweeps()
    if name not in sweeps:
        raise ValueError(f"no sweep {name!r}, there are {', '.join(sweeps)}")
    defaults = {"device": "cpu", "dtype": "float32"} | sweeps[name].defaults
    if unknown := sorted(set(given) - set(defaults)):
        raise ValueError(f"sweep {name!r} has no parameter {unknown[0]!r}, it has {', '.join(defaults)}")
    params: dict[str, Any] = {key: given.get(key, default) for key, default in defaults.items()}
    for key, default in defaults.items():
        if isinstance(default, list):
            value, kind = params[key], type(default[0])
            if not value or not isinstance(value, list | tuple) or not all(isinstance(item, kind) for item in value):
                raise ValueError(f"{key} is {value!r}, it must be a list of {kind.__name__}")
            params[key] = list(value)
            wrong = [item for item in value if kind is int and item < 1]
        else:
            wrong = [params[key]] if isinstance(default, int) and not _positive(params[key]) else []
        if wrong:
            raise ValueError(f"{key} is {wrong[0]!r}, it must be a whole number of at least 1")
    if params["dtype"] not in DTYPES:
        raise ValueError(f"dtype is {params['dtype']!r}, it must be one of {', '.join(DTYPES)}")
    try:
        torch.empty(0, device=params["device"])
    except (RuntimeError, AssertionError) as error:
        raise ValueError(f"device {params['device']!r} cannot be used: {str(error).splitlines()[0]}") from None
    return params


def _positive(value: Any) -> bool:
    return isinstance(value, int) and not isinstance(value, bool) and value >= 1


def random_model(config: GPTConfig, device: str = "cpu", dtype: torch.dtype = torch.float32) -> GPTlite:
    """A model with random weights, made on its device in its dtype, so that a large one is never held twice."""
    before = torch.get_default_dtype()
    torch.set_default_dtype(dtype)
    try:
        with torch.device(device):
            return GPTlite(config).eval()
    finally:
        torch.set_default_dtype(before)


def filled_cache(model: GPTlite, n_sequences: int, n_cached: int, max_tokens: int) -> StaticCache:
    """A static cache that holds n_cached tokens per sequence, made up: the time of a step doesn't depend on them."""
    cache = StaticCache(model, n_sequences, max_tokens, bucket=1)
    for sequence in range(n_sequences):
        state: dict[str, Tensor] = {"k_pos": torch.arange(n_cached)}
        for layer, (G, Dk, Dv) in enumerate(cache.shapes):
            for part, width in (("k", Dk), ("v", Dv)):
                state[f"{part}.{layer}"] = torch.randn(G, n_cached, width, device=cache.device, dtype=cache.dtype)
        cache.load(sequence, state)
    return cache


class SweepModel:
    """Makes a sweep's model when the first point needs it, and only once."""

    def __init__(self, recording: Recording, config: GPTConfig) -> None:
        self.device, self.dtype = recording.params["device"], getattr(torch, recording.params["dtype"])
        self.config, self.shape = config, ModelShape.of(config)
        self.width = self.dtype.itemsize
        self._model: GPTlite | None = None

    def get(self) -> GPTlite:
        """The model; made at the first call."""
        if self._model is None:
            self._model = random_model(self.config, self.device, self.dtype)
        return self._model

    def needed(self, batch: int, n_tokens: int, n_new: int) -> float:
        """Bytes that a point takes: the weights if they are not there yet, the cache, and a step's activations."""
        weights = 0 if self._model else n_params(self.shape) * self.width
        widest = max(self.shape.d_ff, self.shape.d_attn, self.shape.d_model)
        activations = batch * (n_new * 6 * widest + self.shape.vocab_size) * self.width
        return weights + batch * kv_bytes(self.shape, n_tokens, self.width) + activations
