"""Measuring done right: time, memory, achieved work per second, the machine's own roof, and the loss.

A GPU answers before it has finished: a clock read without waiting for it times the launch. Everything here waits.
"""

import os
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass, field
from itertools import pairwise
from statistics import median
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor
from torch.utils._python_dispatch import TorchDispatchMode
from torch.utils.flop_counter import FlopCounterMode

from gptlite.arithmetic import Cost
from gptlite.cache.contract import Cache
from gptlite.generate import stream
from gptlite.model import GPTlite
from gptlite.sampling import SamplingParams

Device = str | torch.device
ROOF_SIZES = {"cpu": (1024, 2**28), "gpu": (8192, 2**30)}  # rows of the matrices, bytes of the copy


def synchronize(device: Device) -> None:
    """Waits until the device has done all it was given; a CPU always has."""
    kind = torch.device(device).type
    if kind == "cuda":
        torch.cuda.synchronize(device)
    elif kind == "mps":
        torch.mps.synchronize()


# -- time ---------------------------------------------------------------------------------------------------------


@dataclass(frozen=True)
class Timing:
    """Samples of the time of one call, in seconds.

    Args:
        wall: what a clock on the host saw, from a device at rest to a device at rest.
        device: what the device's own events saw, without the host's time before and after; on a CPU the same.
    """

    wall: list[float]
    device: list[float]

    @property
    def median(self) -> float:
        """Median of the wall samples, in seconds."""
        return median(self.wall)

    @property
    def device_median(self) -> float:
        """Median of the device samples, in seconds."""
        return median(self.device)


def time_call(
    fn: Callable[[], Any],
    device: Device = "cpu",
    warmup: int = 2,
    repeats: int = 5,
    wait: Callable[[Device], None] = synchronize,
    clock: Callable[[], float] = time.perf_counter,
) -> Timing:
    """Times a call: warm up, then for each sample wait, read the clock, call, wait, read the clock.

    Args:
        fn: the call; what it returns is dropped.
        device: where its work runs.
        warmup: calls before the first sample, which pay for compilation, allocation and cold caches.
        repeats: samples, at least 1.
        wait: waits for the device. clock: seconds. Both can be replaced to test what depends on them.
    Returns: all samples.
    Raises: ValueError when repeats is below 1 or warmup below 0.
    """
    if repeats < 1 or warmup < 0:
        raise ValueError(f"repeats is {repeats} and warmup {warmup}, they must be at least 1 and 0")
    for _ in range(warmup):
        fn()
    timing = Timing([], [])
    events = _events(device)
    for _ in range(repeats):
        wait(device)
        start = clock()
        if events:
            events[0].record()
        fn()
        if events:
            events[1].record()
        wait(device)
        timing.wall.append(clock() - start)
        timing.device.append(events[0].elapsed_time(events[1]) / 1e3 if events else timing.wall[-1])
    return timing


def _events(device: Device) -> tuple[Any, Any] | None:
    kind = torch.device(device).type
    if kind == "cpu":
        return None
    event = torch.cuda.Event if kind == "cuda" else torch.mps.Event
    return event(enable_timing=True), event(enable_timing=True)


@dataclass(frozen=True)
class GenerationTiming:
    """The times of one generation.

    Args:
        batch: B, sequences.
        ttft: time to first token, seconds from the call until the first token of every row is there.
        gaps: seconds from each token to the next [n_new - 1].
    """

    batch: int
    ttft: float
    gaps: list[float] = field(default_factory=list)

    @property
    def tpot(self) -> float:
        """Time per output token: median gap, in seconds. Raises: ValueError when only one token was generated."""
        if not self.gaps:
            raise ValueError("time per output token needs at least 2 generated tokens")
        return median(self.gaps)

    @property
    def throughput(self) -> float:
        """Generated tokens per second, of all rows together, the prompt's time included."""
        return self.batch * (1 + len(self.gaps)) / (self.ttft + sum(self.gaps))


def time_generation(
    model: GPTlite,
    tokens: Tensor,
    n_new: int,
    make_cache: Callable[[], Cache] | None = None,
    params: SamplingParams | None = None,
    warmup: int = 1,
    wait: Callable[[Device], None] = synchronize,
    clock: Callable[[], float] = time.perf_counter,
) -> GenerationTiming:
    """Times `gptlite.generate.stream` token by token; the head start of a first call goes into the warm-up.

    Args:
        tokens: prompts [B, n]. n_new: tokens to generate per row, at least 1.
        make_cache: makes the empty cache of one run; None generates without a cache.
        params: greedy when None, so that each run does the same work.
        warmup: generations before the one that is timed.
        wait, clock: as in `time_call`.
    """
    if n_new < 1:
        raise ValueError(f"n_new is {n_new}, it must be at least 1")
    params = params or SamplingParams(temperature=0.0)
    for run in range(warmup + 1):
        cache = make_cache() if make_cache else None
        wait(tokens.device)
        times = [clock()]
        for _ in stream(model, tokens, n_new, params, cache):
            wait(tokens.device)
            times.append(clock())
        if run == warmup:
            gaps = [after - before for before, after in pairwise(times)]
    return GenerationTiming(len(tokens), gaps[0], gaps[1:])


# -- memory -------------------------------------------------------------------------------------------------------


def peak_memory(fn: Callable[[], Any], device: Device = "cpu") -> int:
    """Most bytes that a call held at once, beyond what was held before it.

    On CUDA the allocator's own statistics; on a CPU the profiler's record of each allocation, kernels' scratch memory
    included; on MPS the growth of the driver's pool, which is coarser.

    Args:
        fn: the call; what it returns is dropped after the measurement.
        device: whose memory is meant.
    Returns: bytes.
    """
    kind = torch.device(device).type
    synchronize(device)
    if kind == "cuda":
        torch.cuda.reset_peak_memory_stats(device)
        before = torch.cuda.memory_allocated(device)
        fn()
        synchronize(device)
        return torch.cuda.max_memory_allocated(device) - before
    if kind == "mps":
        torch.mps.empty_cache()
        before = torch.mps.driver_allocated_memory()
        fn()
        synchronize(device)
        return torch.mps.driver_allocated_memory() - before
    os.environ.setdefault("KINETO_LOG_LEVEL", "99")  # else the profiler writes its own progress to stderr
    with torch.profiler.profile(activities=[torch.profiler.ProfilerActivity.CPU], profile_memory=True) as profiler:
        result = fn()
    events = [event for event in profiler.profiler.kineto_results.events() if event.name() == "[memory]"]
    held = peak = 0
    for event in sorted(events, key=lambda event: event.start_ns()):
        held += event.nbytes()
        peak = max(peak, held)
    del result
    return peak


# -- work ---------------------------------------------------------------------------------------------------------


class _OperandBytes(TorchDispatchMode):
    """Adds up the bytes of the operands and the result of every matrix product that runs."""

    def __init__(self) -> None:
        super().__init__()
        self.bytes = 0

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        with self:  # in inference mode composites such as linear arrive whole: count what they are made of
            result = func.decompose(*args, **(kwargs or {}))
        if result is not NotImplemented:
            return result
        result = func(*args, **(kwargs or {}))
        name = func.overloadpacket.__name__
        if name in ("mm", "addmm", "bmm", "baddbmm"):
            operands = [*args, result]
        elif name.startswith("_scaled_dot_product"):
            operands = [*args[:3], result[0]]  # queries, keys, values, outputs: the mask is no operand of a product
        else:
            operands = []
        self.bytes += sum(x.numel() * x.element_size() for x in operands if isinstance(x, Tensor))
        return result


def _attention_flops(q: Any, k: Any, v: Any, *args: Any, out_shape: Any = None, **kwargs: Any) -> int:
    B, H, S, D = q
    return 2 * B * H * S * k[2] * (D + v[3])


# torch's counter knows the GPU's attention kernels, not the CPU's
CPU_ATTENTION = {torch.ops.aten._scaled_dot_product_flash_attention_for_cpu: _attention_flops}


@dataclass
class Work:
    """FLOPs of the matrix products that ran, and the bytes of their operands and results; filled in at the end."""

    flops: int = 0
    operand_bytes: int = 0


@contextmanager
def count_work() -> Iterator[Work]:
    """Counts the work done inside a `with` block, for comparison with `gptlite.arithmetic`.

    FLOPs are `torch.utils.flop_counter`'s, 2 per multiply-add, masked pairs of an attention kernel included (so
    compare with `step_costs(computed=True)`). Bytes follow `Cost.operand_bytes`.

    Yields: a Work that is filled in when the block ends.
    """
    work = Work()
    with FlopCounterMode(display=False, custom_mapping=CPU_ATTENTION) as flops, _OperandBytes() as operands:
        yield work
    work.flops, work.operand_bytes = flops.get_total_flops(), operands.bytes


def achieved(cost: Cost, seconds: float) -> tuple[float, float]:
    """What a step reached: (FLOP/s, bytes/s of weights, keys and values).

    Args:
        cost: the step's, from `gptlite.arithmetic`. seconds: its time.
    """
    if seconds <= 0:
        raise ValueError(f"seconds is {seconds}, it must be positive")
    return cost.flops / seconds, cost.bytes / seconds


def mfu(cost: Cost, seconds: float, peak_flops: float) -> float:
    """Model FLOPs utilisation: the model's FLOP/s over the machine's peak {cite}`chowdhery2022palm`, in [0, 1]."""
    if peak_flops <= 0:
        raise ValueError(f"peak_flops is {peak_flops}, it must be positive")
    return achieved(cost, seconds)[0] / peak_flops


@dataclass(frozen=True)
class Roof:
    """The measured roof of a machine {cite}`williams2009roofline`: every sample, and the best of them as its limit.

    Args:
        flops: FLOP/s of a large matrix product, each sample.
        bandwidth: bytes/s of a large copy, read and written bytes together, each sample.
    """

    flops: list[float]
    bandwidth: list[float]

    @property
    def peak_flops(self) -> float:
        """FLOP/s, the best sample."""
        return max(self.flops)

    @property
    def peak_bandwidth(self) -> float:
        """Bytes/s, the best sample."""
        return max(self.bandwidth)


def time_product(
    device: Device = "cpu", dtype: torch.dtype = torch.float32, size: int = 1024, repeats: int = 7
) -> Timing:
    """Times the product of two square matrices of `size` rows: 2 size^3 FLOPs."""
    a = torch.randn(size, size, device=device).to(dtype)
    out = torch.empty_like(a)
    return time_call(lambda: torch.mm(a, a, out=out), device, repeats=repeats)


def time_copy(
    device: Device = "cpu", dtype: torch.dtype = torch.float32, n_bytes: int = 2**28, repeats: int = 7
) -> Timing:
    """Times the copy of a tensor of n_bytes, which reads and writes as many: 2 n_bytes move."""
    source = torch.ones(n_bytes // dtype.itemsize, device=device, dtype=dtype)
    target = torch.empty_like(source)
    return time_call(lambda: target.copy_(source), device, repeats=repeats)


def machine_roof(device: Device = "cpu", dtype: torch.dtype = torch.float32, repeats: int = 7) -> Roof:
    """Measures the machine's own roof: a square matrix product, and a copy too large for its caches.

    Args:
        dtype: of both.
        repeats: samples of each.
    """
    size, n_bytes = ROOF_SIZES["cpu" if torch.device(device).type == "cpu" else "gpu"]
    product, copy = time_product(device, dtype, size, repeats), time_copy(device, dtype, n_bytes, repeats)
    return Roof([2 * size**3 / t for t in product.device], [2 * n_bytes / t for t in copy.device])


# -- quality ------------------------------------------------------------------------------------------------------


@torch.inference_mode()
def validation_loss(model: GPTlite, tokens: Tensor, context: int | None = None, batch_size: int = 16) -> float:
    """Mean negative log-likelihood over all of a text, in nats per token (per character, for a character model).

    The text is read in consecutive windows of `context` tokens. A window of tokens i to i + n - 1 predicts i + 1 to
    i + n, so every token but the first is predicted exactly once, from at most `context` tokens before it; the last
    window may be shorter. The model is put into eval mode for it.

    Args:
        tokens: [n], the whole text. context: None means the model's context length.
        batch_size: windows that are read at once; the result doesn't depend on it.
    Raises: ValueError when there are fewer than 2 tokens, or the context is not 1 to the model's.
    """
    context = model.context_length if context is None else context
    if tokens.dim() != 1 or len(tokens) < 2:
        raise ValueError(f"tokens has shape {tuple(tokens.shape)}, it must be [n] with at least 2 tokens")
    if not 1 <= context <= model.context_length:
        raise ValueError(f"context is {context}, it must be 1 to the model's {model.context_length} tokens")
    device = next(model.parameters()).device
    training = model.training
    model.eval()
    total, size = 0.0, context * batch_size
    for inputs, targets in zip(tokens[:-1].split(size), tokens[1:].split(size)):
        whole = len(inputs) // context * context
        rest = (inputs[None, whole:], targets[whole:])  # the last window of the text, when it is shorter
        for x, y in ((inputs[:whole].view(-1, context), targets[:whole]), rest):
            if len(y):
                logits = model(x.to(device)).flatten(0, 1).float()  # [B * S, V]
                total += F.cross_entropy(logits, y.to(device), reduction="none").cpu().double().sum().item()
    model.train(training)
    return total / (len(tokens) - 1)
