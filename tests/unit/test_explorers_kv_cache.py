"""The charts of the chapter on the KV cache draw what `gptlite.arithmetic`, the caches and the recordings say."""

import json
import re

import pytest
import torch
from drawn import draw, marks, words

import gptlite
from gptlite.arithmetic import kv_bytes, kv_bytes_per_token, largest_batch, n_params, shipped_models
from gptlite.config import GPTConfig
from gptlite.hardware import gpu, gpus
from gptlite.model import GPTlite
from gptlite.notebook.explorers_kv_cache import cache_size, cache_slots, slot_trace, tpot_by_position
from gptlite.notebook.recordings import recorded
from gptlite.record import Point, Recording

MODELS, CARDS = list(shipped_models()), list(gpus())


# -- how large it is ----------------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("layers", "heads", "size", "value_bytes", "context", "weights", "card"),
    [
        (32, 8, 128, 2, 4096, 16, "H100 SXM"),
        (12, 12, 64, 4, 1024, 1, "T4"),
        (80, 8, 128, 1, 131_072, 141, "H200 SXM"),
        (1, 1, 16, 0.5, 1024, 0, "RTX 4090"),
        (128, 128, 256, 4, 8192, 10, "A100 80GB SXM"),
        (32, 32, 128, 2, 32_768, 100, "L4"),
    ],
)
def test_yours_is_the_formula_by_hand(layers, heads, size, value_bytes, context, weights, card) -> None:
    settings = {"layers": layers, "heads": heads, "size": size, "value_bytes": value_bytes, "context": context}
    scene = draw(cache_size(), **settings, weights=weights, card=CARDS.index(card))
    token = 2 * layers * heads * size * value_bytes
    left = gpu(card).memory_bytes * 0.9 - weights * 1e9
    fit = int(left // (token * context))
    first, second, _ = words(scene)
    assert first == f"yours: {token / 1024:,.1f} KiB per token, {token * context / 1e9:,.2f} GB each"
    if left < 0:
        assert second == "the weights do not fit"
    else:
        assert second == f"{max(0, fit):,} sequence{'' if fit == 1 else 's'} beside {weights} GB of weights"
    own = marks(scene, "symbol", "layer_3")
    assert len(own) == (fit >= 1)
    if own and token / 1024 >= 0.5 and fit <= 10_000:
        # x runs over 15 powers of 2 from 0.5 KiB, y over 4 powers of 10 in 278 px
        assert own[0]["x"] == pytest.approx(1000 * torch.tensor(token / 512).log2().item() / 15, abs=0.1)
        assert own[0]["y"] == pytest.approx(62 + 278 * (1 - torch.tensor(float(fit)).log10().item() / 4), abs=0.1)


@pytest.mark.parametrize(
    ("known", "card", "context", "value_bytes"),
    [
        *((known, "H100 SXM", 4096, 2) for known in range(len(MODELS))),
        *((MODELS.index(name), "B200 (DGX)", 32_768, 1) for name in ("DeepSeek-V2", "Gemma 2 9B", "Llama 3.1 70B")),
    ],
)
def test_a_known_model_lies_where_arithmetic_puts_it(known, card, context, value_bytes) -> None:
    name = MODELS[known]
    shape = shipped_models()[name]
    scene = draw(cache_size(), known=known, card=CARDS.index(card), context=context, value_bytes=value_bytes)
    each = kv_bytes(shape, context, value_bytes)
    fit = largest_batch(shape, context, gpu(card).memory_bytes, 0.1, 2, value_bytes)
    line = words(scene)[2]
    assert line.startswith(f"{name}: {each / context / 1024:,.1f} KiB, ")
    fits = gpu(card).memory_bytes * 0.9 >= 2 * n_params(shape)
    assert line.endswith(f"{fit:,} sequence{'' if fit == 1 else 's'}" if fits else "too large")
    assert len(marks(scene, "symbol", "layer_2")) == (fit >= 1)


def test_all_models_that_fit_are_drawn_and_the_line_passes_through_yours() -> None:
    scene = draw(cache_size())
    fitting = [s for s in shipped_models().values() if largest_batch(s, 4096, gpu("H100 SXM").memory_bytes)]
    assert len(marks(scene, "symbol", "layer_1")) == len(fitting)
    points = sorted((point["x"], point["y"]) for point in marks(scene, "line", "layer_0"))
    [own] = marks(scene, "symbol", "layer_3")
    (x1, y1), (x2, y2) = max(p for p in points if p[0] <= own["x"]), min(p for p in points if p[0] > own["x"])
    # 16 GB of weights leave room for 104.1 sequences: the line passes just above the 104 that fit
    assert own["y"] == pytest.approx(y1 + (y2 - y1) * (own["x"] - x1) / (x2 - x1), abs=0.2)


def test_the_sliders_begin_at_the_model() -> None:
    explorer = cache_size("Llama 2 7B", "L4", 2048)
    start = {control["name"]: control["value"] for control in explorer.controls}
    assert (start["layers"], start["heads"], start["size"], start["context"]) == (32, 32, 128, 2048)
    assert start["weights"] == round(2 * n_params(shipped_models()["Llama 2 7B"]) / 1e9)
    assert f"{kv_bytes_per_token(shipped_models()['Llama 2 7B']) / 1024:.1f} KiB" in repr(explorer)
    with pytest.raises(ValueError, match="'DeepSeek-V3', whose latent"):
        cache_size("DeepSeek-V3")


# -- where its tokens lie -----------------------------------------------------------------------------------------


@pytest.fixture(scope="module")
def model() -> GPTlite:
    torch.manual_seed(2)
    return GPTlite(GPTConfig(17, 40, n_layers=2, d_model=20, n_heads=6, d_head=4, n_kv_heads=3)).eval()


def cells(rows, cache, step):
    return [(row["position"], row["what"]) for row in rows if row["cache"] == cache and row["step"] == step]


def test_the_trace_by_hand(model: GPTlite) -> None:
    """Chunks of 2, 2 and 1: a window of 3 with chunks of 2 needs a ring of 4, so position 4 overwrites position 0."""
    rows = slot_trace(model, chunks=(2, 2, 1), max_tokens=6, window=3)
    ring = "ring (window 3)"
    assert cells(rows, "dynamic", 1) == [(0, "new"), (1, "new")]
    assert cells(rows, "dynamic", 2) == [(0, "copied"), (1, "copied"), (2, "new"), (3, "new")]
    assert cells(rows, "dynamic", 3) == [*((n, "copied") for n in range(4)), (4, "new")]
    assert cells(rows, "static", 1) == [(0, "new"), (1, "new"), *[(-1, "empty")] * 4]
    assert cells(rows, "static", 3) == [*((n, "kept") for n in range(4)), (4, "new"), (-1, "empty")]
    assert cells(rows, ring, 2) == [(0, "kept"), (1, "kept"), (2, "new"), (3, "new")]
    assert cells(rows, ring, 3) == [(4, "new"), (1, "kept"), (2, "kept"), (3, "kept")]
    assert all(block.mha.window is None for block in model.blocks)  # the reader's model is left alone


def test_chunks_that_do_not_fit_are_refused(model: GPTlite) -> None:
    with pytest.raises(ValueError, match="chunks have 7 tokens, the static cache holds 6"):
        slot_trace(model, chunks=(3, 4), max_tokens=6)


@pytest.mark.parametrize("cache", range(3))
@pytest.mark.parametrize("step", [1, 4, 8])
def test_the_player_shows_the_trace(model: GPTlite, cache: int, step: int) -> None:
    rows, scene = slot_trace(model), draw(cache_slots(model), cache=cache, step=step)
    name = list(dict.fromkeys(row["cache"] for row in rows))[cache]
    shown = [row for row in rows if row["cache"] == name and row["step"] <= step]
    assert len(marks(scene, "rect", "layer_0")) == len(shown)
    numbers = [text for text in words(scene) if isinstance(text, int) or str(text).isdigit()]
    assert sorted(map(int, numbers)) == sorted(row["position"] for row in shown if row["position"] >= 0)
    now = [row["what"] for row in shown if row["step"] == step]
    written = sum(row["what"] in ("new", "copied") for row in shown)
    [line] = [text for text in words(scene) if str(text).startswith("step")]
    assert line == f"step {step}: {now.count('new')} new, {now.count('copied')} copied; {written} written so far"


def test_the_facts_are_the_sums_of_the_chapter() -> None:
    """14 tokens in steps of 4, 4 and six of 1: all that is held is written again, or only what is new."""
    text = repr(cache_slots(gptlite.load("gptlite")[0]))
    assert "dynamic: tokens written per step 4, 8, 9, 10, 11, 12, 13, 14, 81 in all" in text
    for name in ("static", "ring (window 5)"):
        assert f"{name}: tokens written per step 4, 4, 1, 1, 1, 1, 1, 1, 14 in all" in text


# -- what a token then costs --------------------------------------------------------------------------------------


def recording(name: str = "TestCPU", batch: int = 1) -> Recording:
    points = [
        Point({"cache": kind, "position": n, "batch": batch}, [t, 2 * t, t / 2], flops=1.0, bytes=1.0)
        for n in (32, 64, 128)
        for kind, t in (("none", n * 1e-3), ("dynamic", 0.02), ("static", 0.016))
    ]
    machine = {"name": name, "kind": "cpu", "cores": 2, "threads": 1, "memory_bytes": 2**34, "system": "Linux"}
    params = {"device": "cpu", "dtype": "float32", "preset": "gpt2", "positions": [32, 64, 128], "batch": batch}
    return Recording("kv-cache", params, machine, {"gptlite": "0", "python": "3", "torch": "2"}, points)


@pytest.mark.parametrize("position", [32, 64, 128])
def test_the_times_are_the_medians_of_the_recording(position: int) -> None:
    scene = draw(tpot_by_position([recording()]), position=position)
    assert [line.replace(".0", "") for line in words(scene) if " ms " in str(line)] == [
        f"{position} ms without a cache",
        "20 ms dynamic, 16 static",
    ]
    assert f"{position / 16:g} times as long without as static" in words(scene)
    assert len(marks(scene, "symbol", "layer_1")) == 9
    assert len(marks(scene, "symbol", "layer_2")) == 3


def test_the_reader_chooses_among_machines() -> None:
    explorer = tpot_by_position([recording(), recording("OtherCPU", 8)])
    [labels] = [control["bind"]["labels"] for control in explorer.controls if control["name"] == "machine"]
    assert labels == ["TestCPU, gpt2 in fp32, batch 1", "OtherCPU, gpt2 in fp32, batch 8"]
    assert "position 128: no cache 128 ms, dynamic cache 20 ms, static cache 16 ms" in repr(explorer)
    with pytest.raises(ValueError, match="recordings is empty, one of the sweep 'kv-cache' is needed"):
        tpot_by_position([])


def test_the_book_has_a_recording_and_every_sample_of_it() -> None:
    for one in recorded("kv-cache"):
        assert one.name == "kv-cache" and one.complete and not one.left_out
        assert all(len(point.samples) >= 3 for point in one.points)
        last = max(one.params["positions"])
        at = {point.at["cache"]: point.median for point in one.points if point.at["position"] == last}
        assert at["none"] > 5 * at["static"]  # hundreds of times the work; if it is not, nothing was measured


# -- in a page ----------------------------------------------------------------------------------------------------

ALL = {
    "cache-size": cache_size,
    "cache-slots": lambda: cache_slots(gptlite.load("gptlite")[0]),
    "tpot-by-position": lambda: tpot_by_position([recording(), recording("OtherCPU")]),
}


@pytest.mark.parametrize("name", ALL)
def test_the_output_is_the_same_in_every_run_and_not_too_heavy(name: str) -> None:
    explorer = ALL[name]()
    bundle = explorer._repr_mimebundle_()
    assert bundle == ALL[name]()._repr_mimebundle_()
    assert explorer.name == name and len(json.dumps(bundle)) < 120_000


@pytest.mark.parametrize("name", ALL)
def test_every_colour_is_of_okabe_and_ito(name: str) -> None:
    allowed = {"#0072B2", "#E69F00", "#009E73", "#D55E00", "#56B4E9", "#CC79A7"}
    assert set(re.findall(r"#[0-9A-Fa-f]{6}\b", json.dumps(ALL[name]().spec))) <= allowed
