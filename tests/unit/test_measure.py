"""Measuring against known amounts of work: a device with a clock of its own, known allocations, known losses."""

import math
import time

import pytest
import torch

from gptlite.arithmetic import Cost
from gptlite.cache.dense import DynamicCache, StaticCache
from gptlite.config import preset
from gptlite.measure import (
    GenerationTiming,
    Timing,
    achieved,
    count_work,
    machine_roof,
    mfu,
    peak_memory,
    time_call,
    time_generation,
    validation_loss,
)
from gptlite.model import GPTlite


class FakeGPU:
    """A device that takes work at once and does it later, on a clock that only this test moves."""

    LAUNCH = 0.001  # seconds that the host needs to hand a piece of work over

    def __init__(self) -> None:
        self.now = 0.0
        self.busy_until = 0.0
        self.waits = 0

    def clock(self) -> float:
        return self.now

    def work(self, seconds: float) -> None:
        self.now += self.LAUNCH
        self.busy_until = max(self.busy_until, self.now) + seconds

    def wait(self, device: object) -> None:
        self.waits += 1
        self.now = max(self.now, self.busy_until)


# -- time -----------------------------------------------------------------------------------------------------------


def test_the_timer_waits_for_the_device():
    gpu = FakeGPU()
    timing = time_call(lambda: gpu.work(2.0), warmup=3, repeats=4, wait=gpu.wait, clock=gpu.clock)
    # neither the launch alone nor the warm-up's unfinished work is in a sample
    assert timing.wall == pytest.approx([2.0 + gpu.LAUNCH] * 4)
    assert gpu.waits == 8


def test_a_timer_that_does_not_wait_is_caught():
    """What the test above would see: the launch instead of the work."""
    gpu = FakeGPU()
    lazy = time_call(lambda: gpu.work(2.0), repeats=4, wait=lambda device: None, clock=gpu.clock)
    assert lazy.median == pytest.approx(gpu.LAUNCH)

    def only_after() -> float:  # waits at the end alone, so it pays for the work that was under way
        gpu.work(2.0)
        start = gpu.clock()
        gpu.work(2.0)
        gpu.wait(None)
        return gpu.clock() - start

    assert only_after() > 3.9


def test_a_known_time_on_the_real_clock():
    calls = []
    timing = time_call(lambda: (calls.append(1), time.sleep(0.02)), warmup=1, repeats=3)
    assert len(calls) == 4
    assert len(timing.wall) == 3
    assert 0.02 <= timing.median < 0.2
    assert timing.device == timing.wall


def test_the_median_is_of_all_samples():
    assert Timing([3.0, 1.0, 9.0, 2.0], [1.0, 1.0, 1.0, 5.0]).median == 2.5
    assert Timing([3.0], [1.0, 2.0, 9.0]).device_median == 2.0


@pytest.mark.parametrize("options", [{"repeats": 0}, {"warmup": -1}])
def test_bad_counts_are_named(options):
    with pytest.raises(ValueError, match="must be at least 1 and 0"):
        time_call(lambda: None, **options)


def test_generation_is_timed_token_by_token(monkeypatch):
    gpu, model = FakeGPU(), GPTlite(preset("nano")).eval()
    tokens = torch.randint(60, (3, 10))
    run = model.run

    def slow_run(packed, segments, cache):
        gpu.work(0.5 * len(packed))  # half a second per token
        return run(packed, segments, cache)

    monkeypatch.setattr(model, "run", slow_run)
    timing = time_generation(model, tokens, 4, lambda: DynamicCache(model), wait=gpu.wait, clock=gpu.clock)
    assert timing.ttft == pytest.approx(0.5 * 30 + gpu.LAUNCH)
    assert timing.gaps == pytest.approx([0.5 * 3 + gpu.LAUNCH] * 3)
    assert timing.tpot == pytest.approx(1.5 + gpu.LAUNCH)
    assert timing.throughput == pytest.approx(12 / (15 + 4.5 + 4 * gpu.LAUNCH))
    without = time_generation(model, tokens, 2, wait=gpu.wait, clock=gpu.clock)
    assert without.tpot == pytest.approx(0.5 * 33 + gpu.LAUNCH)  # no cache: all of the text again


def test_one_token_has_no_gap():
    with pytest.raises(ValueError, match="at least 2"):
        _ = GenerationTiming(1, 0.5).tpot
    with pytest.raises(ValueError, match="n_new is 0"):
        time_generation(GPTlite(preset("nano")), torch.zeros(1, 3, dtype=torch.int64), 0)


@pytest.mark.parametrize("kind", ["cuda", "mps"])
def test_device_time_is_between_the_devices_own_events(monkeypatch, kind):
    """The device's events leave out the host's time before and after, which the wall clock sees."""
    gpu = FakeGPU()

    class Event:
        def __init__(self, enable_timing: bool) -> None:
            assert enable_timing

        def record(self) -> None:
            self.at = max(gpu.now, gpu.busy_until)  # the device notes it when it gets there

        def elapsed_time(self, end: "Event") -> float:
            return 1e3 * (end.at - self.at)

    monkeypatch.setattr(f"torch.{kind}.Event", Event)
    monkeypatch.setattr(f"torch.{kind}.synchronize", lambda *device: gpu.wait(device))

    def call() -> None:
        gpu.work(2.0)
        gpu.now += 0.5  # the host dawdles while the device works

    timing = time_call(call, kind, repeats=3, clock=gpu.clock)
    assert timing.device == pytest.approx([2.0 + gpu.LAUNCH] * 3)
    assert timing.wall == pytest.approx([2.0 + gpu.LAUNCH] * 3)
    timing = time_call(lambda: gpu.work(0.0), kind, repeats=1, clock=gpu.clock)
    assert timing.wall == pytest.approx([gpu.LAUNCH])


# -- memory ---------------------------------------------------------------------------------------------------------


def test_peak_memory_of_known_allocations():
    assert peak_memory(lambda: torch.empty(1_000_000)) == 4_000_000

    def frees_before_it_takes_again():
        a = torch.empty(500_000)
        b = torch.empty(250_000)
        del a
        return b, torch.empty(100_000)

    assert peak_memory(frees_before_it_takes_again) == 3_000_000
    held = torch.ones(1_000_000)
    assert peak_memory(lambda: held.neg()) == 4_000_000  # what was there before doesn't count
    assert peak_memory(lambda: held.neg_()) == 0


def test_peak_memory_of_a_static_cache():
    model = GPTlite(preset("nano")).eval()
    kept = StaticCache(model, 4, 64)
    assert kept.nbytes <= peak_memory(lambda: StaticCache(model, 4, 64)) < 1.1 * kept.nbytes


def test_peak_memory_on_a_gpu_is_the_allocators(monkeypatch):
    allocator = {"held": 100, "peak": 5000}
    monkeypatch.setattr("torch.cuda.synchronize", lambda device: None)
    monkeypatch.setattr("torch.cuda.memory_allocated", lambda device: allocator["held"])
    monkeypatch.setattr("torch.cuda.max_memory_allocated", lambda device: allocator["peak"])
    monkeypatch.setattr("torch.cuda.reset_peak_memory_stats", lambda device: allocator.update(peak=allocator["held"]))
    assert peak_memory(lambda: allocator.update(peak=allocator["held"] + 700), "cuda") == 700

    pool = {"bytes": 900, "emptied": 0}  # a driver's pool, which only grows until it is emptied
    monkeypatch.setattr("torch.mps.synchronize", lambda: None)
    monkeypatch.setattr("torch.mps.driver_allocated_memory", lambda: pool["bytes"])
    monkeypatch.setattr("torch.mps.empty_cache", lambda: pool.update(bytes=300, emptied=pool["emptied"] + 1))
    assert peak_memory(lambda: pool.update(bytes=pool["bytes"] + 250), "mps") == 250
    assert pool["emptied"] == 1


def test_measuring_memory_writes_nothing(capfd):
    peak_memory(lambda: torch.empty(10))
    assert capfd.readouterr() == ("", "")


# -- work -----------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("mode", [torch.inference_mode, torch.no_grad, torch.enable_grad])
def test_work_of_known_products(mode):
    x, linear = torch.randn(3, 5), torch.nn.Linear(5, 7)
    with mode(), count_work() as work:
        linear(x)
    assert work.flops == 2 * 3 * 5 * 7
    assert work.operand_bytes == 4 * (3 * 5 + 5 * 7 + 7 + 3 * 7)
    q, k, v = torch.randn(2, 4, 3, 8), torch.randn(2, 2, 6, 8), torch.randn(2, 2, 6, 8)
    with mode(), count_work() as work:
        torch.nn.functional.scaled_dot_product_attention(q, k, v, enable_gqa=True)
    assert work.flops == 2 * 2 * 4 * 3 * 6 * (8 + 8)
    assert work.operand_bytes >= 4 * (2 * q.numel() + k.numel() + v.numel())
    with mode(), count_work() as work:
        torch.bmm(torch.randn(2, 3, 4), torch.randn(2, 4, 5)) + 1
    assert work.flops == 2 * 2 * 3 * 4 * 5
    assert work.operand_bytes == 4 * 2 * (12 + 20 + 15)


def test_rates():
    cost = Cost(flops=6e12, weight_bytes=1e9, kv_bytes=2e9, activation_bytes=5e9)
    assert achieved(cost, 0.5) == (12e12, 6e9)
    assert mfu(cost, 0.5, 24e12) == 0.5
    with pytest.raises(ValueError, match="seconds is 0"):
        achieved(cost, 0)
    with pytest.raises(ValueError, match="peak_flops is 0"):
        mfu(cost, 1, 0)


def test_the_roof_is_above_what_a_step_reaches(monkeypatch):
    monkeypatch.setattr("gptlite.measure.ROOF_SIZES", {"cpu": (256, 2**22)})
    roof = machine_roof(repeats=3)
    assert len(roof.flops) == len(roof.bandwidth) == 3
    assert roof.peak_flops == max(roof.flops) > 1e8
    assert roof.peak_bandwidth == max(roof.bandwidth) > 1e8


# -- quality --------------------------------------------------------------------------------------------------------


def by_hand(model: GPTlite, tokens: torch.Tensor, context: int) -> float:
    """Token by token: each but the first, from the tokens of its window before it."""
    losses = []
    for i in range(1, len(tokens)):
        start = (i - 1) // context * context
        logits = model(tokens[None, start:i])[0, -1].double()
        losses.append(-torch.log_softmax(logits, -1)[tokens[i]].item())
    return sum(losses) / len(losses)


@pytest.mark.parametrize(("n", "context"), [(2, 8), (8, 8), (9, 8), (10, 8), (41, 8), (40, None), (130, None), (7, 1)])
def test_validation_loss_predicts_every_token_once(n, context):
    torch.manual_seed(0)
    model = GPTlite(preset("nano")).double()
    tokens = torch.randint(60, (n,))
    expected = by_hand(model.eval(), tokens, context or 64)
    for batch_size in (1, 3, 100):
        assert validation_loss(model, tokens, context, batch_size) == pytest.approx(expected, abs=1e-6)


def test_validation_loss_of_known_models():
    model = GPTlite(preset("nano", dropout=0.5)).train()
    for parameter in model.parameters():
        torch.nn.init.zeros_(parameter)
    tokens = torch.randint(68, (100,))
    assert validation_loss(model, tokens) == pytest.approx(math.log(68), abs=1e-6)  # knows nothing
    assert model.training  # left as it was
    model.fc_out.bias.data[7] = 50.0
    assert validation_loss(model, torch.full((100,), 7)) == pytest.approx(0, abs=1e-6)  # knows everything


def test_validation_loss_refuses_what_it_cannot_do():
    model = GPTlite(preset("nano"))
    with pytest.raises(ValueError, match="at least 2 tokens"):
        validation_loss(model, torch.zeros(1, dtype=torch.int64))
    with pytest.raises(ValueError, match="context is 65"):
        validation_loss(model, torch.zeros(9, dtype=torch.int64), 65)
