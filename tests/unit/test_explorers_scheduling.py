"""The charts of the chapter on scheduling draw what the recordings hold and what `ArithmeticTime` computes."""

import re

import pytest
from drawn import draw, marks, words

from gptlite.arithmetic import shipped_models
from gptlite.hardware import gpu, gpus
from gptlite.notebook.explorers_fleets import LOADS, goodput_by_rate, routing_policies
from gptlite.notebook.explorers_scheduling import STEPS, stall_bound, stall_by_arithmetic, stall_recorded
from gptlite.record import Point, Recording
from gptlite.serving.step_time import ArithmeticTime

MACHINE = {"name": "TestCPU", "kind": "cpu", "cores": 2, "threads": 2, "memory_bytes": 2**34, "system": "Linux"}


def numbers(text):
    return [float(number.replace(",", "")) for number in re.findall(r"\d[\d,]*\.?\d*", text)]


def stall_recording():
    points = [
        Point({"what": what, "budget": budget}, [seconds, 9 * seconds, 0.1 * seconds])
        for budget, gap, mean, ttft in ((4, 0.010, 0.008, 0.060), (8, 0.020, 0.015, 0.040), (22, 0.030, 0.030, 0.030))
        for what, seconds in (("longest gap", gap), ("mean gap", mean), ("TTFT", ttft))
    ]
    steps = {
        "4": [[2, 2, 0.01]] * 6 + [[3, 0, 0.005]],
        "8": [[2, 6, 0.02]] * 2 + [[3, 0, 0.005]],
        "22": [[2, 20, 0.03], [3, 0, 0.005]],
    }
    params = {"budgets": [4, 8, 22], "running": 2, "prompt": 20}
    return Recording("chunked-prefill", params, MACHINE, points=points, data={"steps": steps})


@pytest.mark.parametrize(("place", "blocks", "gap", "ttft"), [(0, 7, 10, 60), (1, 3, 20, 40)])
def test_the_lanes_are_the_recorded_steps(place, blocks, gap, ttft):
    scene = draw(stall_recorded(stall_recording()), budget=place)
    bars = marks(scene, "rect", "layer_0")
    lanes = sorted({bar["y"] for bar in bars})
    count = [sum(bar["y"] == lane for bar in bars) for lane in lanes]
    assert count == [2, blocks]  # the whole prompt above, the chosen budget below
    widest = [max(bar["width"] for bar in bars if bar["y"] == lane) for lane in lanes]
    assert widest[0] / widest[1] == pytest.approx(30 / gap, rel=1e-6)
    lines = words(scene)
    assert numbers(next(line for line in lines if line.startswith("whole prompt:"))) == [30, 30]
    assert numbers(next(line for line in lines if line.startswith("chosen budget:"))) == [gap, ttft]
    assert any(f"budget of {(4, 8)[place]} tokens a step" in line for line in lines)


def test_a_recording_with_one_budget_is_refused():
    one = stall_recording()
    one.params["budgets"] = [22]
    with pytest.raises(ValueError, match="it takes two at least"):
        stall_recorded(one)


CARDS = list(gpus())
MODELS = [n for n, s in shipped_models().items() if not (s.n_sliding or s.d_latent or s.n_experts)]


@pytest.mark.parametrize(
    ("model", "card", "users", "context", "prompt", "budget"),
    [
        (3, 17, 32, 1024, 8192, 512),
        (0, 3, 1, 128, 1024, 256),
        (2, 12, 128, 8192, 32_768, 256),
        (7, 19, 9, 640, 5120, 8192),
    ],
)
def test_the_arithmetic_lanes_are_what_the_package_computes(model, card, users, context, prompt, budget):
    settings = {"model": model, "card": card, "users": users, "context": context, "prompt": prompt, "budget": budget}
    scene = draw(stall_by_arithmetic(), **settings)
    time = ArithmeticTime(shipped_models()[MODELS[model]], gpu(CARDS[card]))
    whole = stall_bound(time, users, context, prompt, None)
    chunked = stall_bound(time, users, context, prompt, budget)
    lines = words(scene)
    for name, (gap, ttft) in (("whole prompt", whole), ("chunked", chunked)):
        found = numbers(next(line for line in lines if line.startswith(f"{name}:")))
        assert found[:2] == pytest.approx([1e3 * gap, 1e3 * ttft], rel=5e-3)
    parts = -(-prompt // (budget - users))
    assert numbers(next(line for line in lines if line.startswith("chunked:")))[2] == parts
    alone = numbers(next(line for line in lines if line.startswith("users alone")))[0]
    assert alone == pytest.approx(1e3 * time([(context, 1)] * users), rel=5e-3)
    bars = marks(scene, "rect", "layer_0")
    lanes = sorted({bar["y"] for bar in bars})
    assert [sum(bar["y"] == lane for bar in bars) for lane in lanes] == [1 + STEPS, parts + STEPS]
    # whole, the prompt has its first token soonest, and the users wait longest
    assert whole[1] <= chunked[1] * (1 + 1e-9) and whole[0] >= chunked[0] * (1 - 1e-9)


def goodput_recording():
    def run(rate, system, ttft, tpot, gap):
        return {"workload": "chat", "rate": rate, "system": system, "ttft": ttft, "tpot": tpot, "gap": gap}

    runs = [
        run(2.0, "chunked", [100, 600, 100, 100], [9.0, 9.0, 20.0, 9.0], [30, 9, 30, 30]),
        run(4.0, "chunked", [100] * 4, [9.0] * 4, [9] * 4),
        run(2.0, "whole prompts", [900] * 4, [9.0] * 4, [9] * 4),
    ]
    params = {"machines": 2, "card": "L4", "model": "GPT-2", "reached": 0.5}
    return Recording("goodput", params, MACHINE, data={"runs": runs})


def test_goodput_is_counted_again_as_the_limits_move():
    def heights(**settings):
        scene = draw(goodput_by_rate(goodput_recording()), **settings)
        points = marks(scene, "symbol", "layer_2")
        return {(round(p["x"]), p["fill"]): p["y"] for p in points}

    first = heights()
    bottom = max(first.values())  # the whole prompts, of which none is in time
    top = min(first.values())  # 4 requests/s, all in time
    middle = sorted(first.values())[1]
    assert (bottom - middle) / (bottom - top) == pytest.approx(1.0 / 4)  # 2 of 4 at 2 requests/s
    looser = heights(ttft=2000)
    assert len(set(looser.values())) == 3
    by_gap = sorted(heights(pace=1).values())
    assert (bottom - by_gap[1]) / (bottom - top) == pytest.approx(0.0, abs=1e-6)  # the one with short gaps comes late
    facts = goodput_by_rate(goodput_recording()).facts
    assert "chat, chunked: 90 % keep 500 ms and 12 ms up to 4 requests/s" in facts
    assert "chat, whole prompts: 90 % keep 500 ms and 12 ms up to 0 requests/s" in facts


def step_recording():
    points = [
        Point({"decodes": d, "context": n, "chunk": c}, [0.01 + 1e-4 * (d + c) + 1e-6 * n * (d + (c > 0))])
        for d in (0, 1, 8)
        for n in (128, 512)
        for c in (0, 64, 256)
        if d or c
    ]
    return Recording("step-costs", {"preset": "gpt2"}, MACHINE, points=points)


def test_routing_shows_a_point_for_each_policy_and_moves_with_the_load():
    explorer = routing_policies(step_recording(), n_jobs=80)
    low, high = (draw(explorer, load=load) for load in (LOADS[0], LOADS[-1]))
    for scene in (low, high):
        points = marks(scene, "symbol", "layer_0")
        assert len(points) == 4 and len({point["shape"] for point in points}) == 4
        assert sum("busiest takes" in line for line in words(scene)) == 4
    facts = explorer.facts
    rate = {fact.split(":")[0].split(", ")[1]: numbers(fact)[-1] for fact in facts if fact.startswith("equally")}
    assert rate["cache-aware"] > rate["taking turns"]


def test_every_explorer_stands_on_a_page_without_scripts():
    for explorer in (
        stall_recorded(stall_recording()),
        stall_by_arithmetic(),
        goodput_by_rate(goodput_recording()),
        routing_policies(step_recording(), n_jobs=20),
    ):
        svg = explorer.still()
        assert svg.count("<title") == 1 and svg.count("<desc") == 1 and "NaN" not in svg
        assert len(explorer._repr_html_()) < 300_000
