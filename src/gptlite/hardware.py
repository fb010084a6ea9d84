"""The machines: data-sheet figures of GPUs, and the name, memory and versions of the machine at hand."""

import json
import os
import platform
from dataclasses import dataclass
from functools import cache
from pathlib import Path

import torch

from gptlite.arithmetic import ridge_point

FACTS = Path(__file__).parent / "facts"
CPUINFO = Path("/proc/cpuinfo")
OTHER_CARDS = {"ti", "super", "d", "laptop", "mobile", "max", "nvl", "ada"}  # words that make another card of a name


@dataclass(frozen=True)
class GPU:
    """What a data sheet promises.

    Args:
        name: as the book writes it.
        peak_flops: FLOP/s of a dense fp16 or bf16 matrix product that accumulates in fp32.
        bandwidth: of its memory, bytes/s.
        memory_bytes: of its memory; the data sheet's GB taken as 10^9 bytes.
        source: the data sheet or white paper.
        fp16_accumulate_flops: FLOP/s when the product accumulates in fp16; equal to peak_flops on most cards.
        matches: words that all stand in the name that the driver gives the card.
    """

    name: str
    peak_flops: float
    bandwidth: float
    memory_bytes: float
    source: str
    fp16_accumulate_flops: float
    matches: tuple[str, ...]

    @property
    def ridge_point(self) -> float:
        """FLOPs per byte above which its arithmetic is the limit {cite}`williams2009roofline`."""
        return ridge_point(self.peak_flops, self.bandwidth)


@cache
def gpus() -> dict[str, GPU]:
    """The table of GPUs by name, in the order of the book's page."""
    rows = json.loads((FACTS / "gpus.json").read_text(encoding="utf-8"))["gpus"]
    return {
        row["name"]: GPU(
            row["name"],
            row["tensor_tflops"] * 1e12,
            row["bandwidth_gb_s"] * 1e9,
            row["memory_gb"] * 1e9,
            row["source"],
            row.get("fp16_accumulate_tflops", row["tensor_tflops"]) * 1e12,
            tuple(row["matches"]),
        )
        for row in rows
    }


def gpu(name: str) -> GPU:
    """A GPU by the book's name. Raises: ValueError that lists the names when there is none."""
    if name not in gpus():
        raise ValueError(f"no GPU {name!r}, there are {', '.join(gpus())}")
    return gpus()[name]


def find_gpu(driver_name: str) -> GPU | None:
    """The GPU that a driver calls so, for example "NVIDIA A100-SXM4-80GB"; None when the table has none."""
    words = driver_name.lower().replace("-", " ").split()

    def fits(row: GPU) -> bool:
        # whole words: an L40S is no L4, and a laptop's 4090 no 4090
        return set(row.matches) <= set(words) and not OTHER_CARDS & set(words) - set(row.matches)

    return max(filter(fits, gpus().values()), key=lambda row: len(row.matches), default=None)


def device_name(device: str | torch.device = "cpu") -> str:
    """The name of a device for the title of a plot: the processor's model, never the machine's own name."""
    device = torch.device(device)
    if device.type == "cuda":
        return torch.cuda.get_device_name(device)
    name = ""
    if CPUINFO.is_file():
        for line in CPUINFO.read_text(errors="replace").splitlines():
            if line.startswith("model name"):
                name = line.partition(":")[2].strip()
                break
    name = name or platform.processor() or platform.machine() or "unknown processor"
    return f"{name} (MPS)" if device.type == "mps" else name


def memory_bytes(device: str | torch.device = "cpu") -> int:
    """All memory of the device, in bytes."""
    device = torch.device(device)
    if device.type == "cuda":
        return torch.cuda.get_device_properties(device).total_memory
    if device.type == "mps":
        return torch.mps.recommended_max_memory()
    return os.sysconf("SC_PAGE_SIZE") * os.sysconf("SC_PHYS_PAGES") if hasattr(os, "sysconf") else 0


def free_bytes(device: str | torch.device = "cpu") -> int:
    """Memory that a new tensor may take now, in bytes; half of all where the system doesn't say."""
    device = torch.device(device)
    if device.type == "cuda":
        unused = torch.cuda.memory_reserved(device) - torch.cuda.memory_allocated(device)
        return torch.cuda.mem_get_info(device)[0] + unused
    if device.type == "mps":
        return torch.mps.recommended_max_memory() - torch.mps.driver_allocated_memory()
    meminfo = Path("/proc/meminfo")
    if meminfo.is_file():
        for line in meminfo.read_text().splitlines():
            if line.startswith("MemAvailable:"):
                return int(line.split()[1]) * 1024
    return memory_bytes(device) // 2


def is_out_of_memory(error: BaseException) -> bool:
    """Whether an error says that memory ran out; each back end says it in its own way."""
    words = ("out of memory", "can't allocate memory", "not enough memory")
    return isinstance(error, MemoryError | torch.OutOfMemoryError) or any(w in str(error).lower() for w in words)


def machine(device: str | torch.device = "cpu") -> dict[str, str | int]:
    """What a recording says of the machine that made it; no path, no host, no user.

    Returns: name (device_name), kind (cpu, cuda, mps), cores (that this process may use), threads (that torch uses),
        memory_bytes, system, python and torch (versions).
    """
    device = torch.device(device)
    affinity = getattr(os, "sched_getaffinity", None)
    return {
        "name": device_name(device),
        "kind": device.type,
        "cores": len(affinity(0)) if affinity else os.cpu_count() or 1,
        "threads": torch.get_num_threads(),
        "memory_bytes": memory_bytes(device),
        "system": platform.system(),
        "python": platform.python_version(),
        "torch": torch.__version__,
    }
