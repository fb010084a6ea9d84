"""The charts of the chapter on prefix caching draw what the stores recorded and what arithmetic says."""

import re

import pytest
from drawn import PLOT, draw, marks, words

from gptlite.arithmetic import ModelShape, kv_bytes, step_costs, total
from gptlite.config import preset
from gptlite.hardware import gpu, gpus
from gptlite.notebook.explorers_prefix_cache import (
    LINKS,
    STATES,
    STORES,
    chat_trace,
    frame_in_words,
    prefix_saving,
    saved_ttft,
)
from gptlite.notebook.recordings import recorded

CARDS = list(gpus())


@pytest.fixture(scope="module")
def recording():
    [one] = recorded("prefix-trace")
    return one


@pytest.mark.parametrize("store", range(2))
@pytest.mark.parametrize("step", [1, 2, 3, 5, 12, 14])
def test_each_step_draws_the_runs_that_the_store_held(recording, store, step):
    frame = recording.data[STORES[store]][step - 1]
    scene = draw(chat_trace(recording), store=store, step=step)
    bars = marks(scene, "rect", "layer_0")
    longest = max(run["end"] for name in STORES for one in recording.data[name] for run in one["runs"])
    scale = PLOT / (longest + 4)
    drawn = sorted((round(item["x"] / scale), round((item["x"] + item["width"]) / scale)) for item in bars)
    assert drawn == sorted((run["begin"], run["end"]) for run in frame["runs"])
    rows = len({item["y"] for item in bars})
    assert rows == len({run["row"] for run in frame["runs"]})
    said = words(scene)
    for line in frame_in_words(frame, step, 14):
        assert line in said


def test_a_phone_has_room_for_the_words(recording):
    """42 characters of the 250 px that a chart has there: what is longer is cut off."""
    frames = [(step, frame) for name in STORES for step, frame in enumerate(recording.data[name], 1)]
    said = [line for step, frame in frames for line in frame_in_words(frame, step, 14)]
    settings = [(model, prompt, share) for model in range(3) for prompt in (256, 32_768) for share in (0, 99)]
    for model, prompt, share in settings:
        said += words(draw(prefix_saving(), model=model, card=0, prompt=prompt, share=share, link=3))
    assert max(map(len, said)) <= 42 and len(said) > 100


def test_the_recorded_chat_is_what_the_stores_promise(recording):
    """Found and read add up, answers are found, room is kept to, and no store finds what it could not have."""
    texts = recording.data["texts"]
    capacity, size = recording.params["capacity"], recording.params["block_size"]
    for name in STORES:
        frames = recording.data[name]
        assert len(frames) == 14
        seen: list[str] = []
        for begin, end in zip(frames[::2], frames[1::2], strict=True):
            who = begin["who"]
            prompt = texts[who][: begin["prompt"]]
            longest = max((len(common(prompt, text)) for text in seen), default=0)
            assert begin["cached"] <= longest
            if name == "chain of blocks":
                assert begin["cached"] % size == 0
            seen.append(texts[who][: end["prompt"] - 1])
            for frame in (begin, end):
                held = sum(run["end"] - run["begin"] for run in frame["runs"] if run["state"] != "evicted")
                assert held <= capacity and {run["state"] for run in frame["runs"]} <= set(STATES)
            found = sum(run["end"] - run["begin"] for run in begin["runs"] if run["state"] == "found")
            assert found == begin["cached"]
    # the first prompt finds nothing, the second the opening and what both lines begin with, the third the answer too
    assert [frame["cached"] for frame in recording.data["radix tree"][::2]][:3] == [0, 32, 74]
    assert recording.data["radix tree"][4]["prompt"] > 74 > recording.data["radix tree"][0]["prompt"]


def common(a, b):
    n = next((i for i, (x, y) in enumerate(zip(a, b, strict=False)) if x != y), min(len(a), len(b)))
    return a[:n]


def test_a_new_recording_is_the_old_one(recording, tmp_path):
    """Greedy answers of the shipped weights, so that the trace is the same on every machine; a shorter one suffices."""
    from gptlite.record import record

    again = record("prefix-trace", tmp_path / "trace.json", n_new=2)
    for name in STORES:
        assert again.data[name][0] == recording.data[name][0] | {"runs": []}
        assert [frame["event"] for frame in again.data[name]] == [frame["event"] for frame in recording.data[name]]


# -- what a hit saves ---------------------------------------------------------------------------------------------


def least(cost, card):
    return max(cost.flops / gpu(card).peak_flops, cost.bytes / gpu(card).bandwidth)


def seconds(text):
    number, unit = re.search(r"([\d.,]+) (ms|s)\b", text).groups()
    return float(number.replace(",", "")) * {"ms": 1e-3, "s": 1}[unit]


@pytest.mark.parametrize(
    ("model", "card", "prompt", "share", "link"),
    [(2, 17, 8192, 90, 0), (2, 17, 8192, 90, 1), (2, 17, 8192, 90, 2), (1, 13, 256, 0, 3), (0, 0, 32_768, 99, 1)],
)
def test_the_saving_draws_what_arithmetic_computes(model, card, prompt, share, link):
    name, gpu_name = ("gpt2", "1b", "7b")[model], CARDS[card]
    shape, n_cached = ModelShape.of(preset(name)), prompt * share // 100
    whole = least(total(step_costs(shape, 1, prompt, 0)), gpu_name)
    rest = least(total(step_costs(shape, 1, prompt - n_cached, n_cached)), gpu_name)
    rate = 1e9 * list(LINKS.values())[link]
    fetch = kv_bytes(shape, n_cached) / rate if rate else 0
    assert saved_ttft(shape, gpu_name, prompt, n_cached, rate) == pytest.approx((whole, rest, fetch), rel=1e-9)
    scene = draw(prefix_saving(), model=model, card=card, prompt=prompt, share=share, link=link)
    said = words(scene)
    [miss] = [line for line in said if line.startswith("a miss: ")]
    [hit] = [line for line in said if line.startswith("a hit: ")]
    assert seconds(miss) == pytest.approx(whole, rel=5e-3) and f"{prompt:,} tokens" in miss
    assert seconds(hit) == pytest.approx(rest + fetch, rel=5e-3) and f"the last {prompt - n_cached:,}," in hit
    bars = sorted(
        (item["y"], item["x"], item["width"]) for item in marks(scene, "rect", "layer_0") if item["width"] > 0
    )
    assert bars[-1][2] / bars[0][2] == pytest.approx((fetch or rest) / whole, rel=1e-6)
    [pays] = [line for line in said if line.startswith("fetching pays above ")]
    if share:
        limit = float(re.search(r"([\d.,]+) GB/s", pays)[1].replace(",", "")) * 1e9
        assert limit == pytest.approx(kv_bytes(shape, n_cached) / (whole - rest), rel=5e-3)
    else:
        assert pays.endswith("no rate")


def test_links_are_lanes_times_rate_times_the_share_of_the_code():
    assert LINKS["CPU memory, PCIe 5.0 x16"] == pytest.approx(16 * 32 * 128 / 130 / 8, rel=1e-3)
    assert LINKS["a disk, PCIe 4.0 x4"] == pytest.approx(4 * 16 * 128 / 130 / 8, rel=1e-3)
    assert LINKS["network, 10 Gbit/s"] == 10 / 8
