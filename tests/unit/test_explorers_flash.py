"""The charts of the chapter on FlashAttention draw what `gptlite.variants` computes and what was recorded."""

import re

import pytest
import torch
from drawn import draw, marks, words

import gptlite
from gptlite.attention import attend, visible
from gptlite.hardware import gpu, gpus
from gptlite.notebook.explorers_flash import SRAM_KIB, hbm_bytes, least_times, sram_bytes
from gptlite.notebook.explorers_tiles import attention_measured, tile_steps
from gptlite.notebook.recordings import recorded
from gptlite.record import run_sweep
from gptlite.sweeps.flash import head_of, trace_tiles
from gptlite.variants.traffic import flash_tiles, flash_traffic, standard_traffic


def numbers(text):
    return [float(number.replace(",", "")) for number in re.findall(r"-?[\d,]*\.?\d+(?:e[+-]?\d+)?", text)]


# -- what moves -----------------------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("context", "d", "heads", "sram", "card"),
    [
        (8192, 128, 32, 228, "H100 SXM"),
        (1024, 32, 1, 16, "T4"),
        (65_536, 64, 128, 164, "A100 80GB SXM"),
        (3072, 256, 8, 100, "RTX 3090"),
    ],
)
def test_bytes_by_context_are_those_of_the_formula(context, d, heads, sram, card):
    scene = draw(hbm_bytes(), context=context, d=d, heads=heads, sram=sram, card=list(gpus()).index(card))
    standard, tiled, matrix = words(scene)
    moved = {"standard": standard_traffic(context, d, sram * 512), "tiled": flash_traffic(context, d, sram * 512)}
    times = least_times(context, d, heads, sram, card)
    for kind, line in (("standard", standard), ("tiled", tiled)):
        gigabytes, milliseconds = numbers(line)
        assert gigabytes == pytest.approx(2 * heads * moved[kind].total / 1e9, rel=5e-3)
        assert milliseconds == pytest.approx(1e3 * times[kind], rel=5e-3)
        compute = 4 * heads * d * context**2 / gpu(card).peak_flops
        assert line.endswith("compute" if compute == times[kind] else "memory")
    assert numbers(matrix) == [pytest.approx(2 * heads * context**2 / 1e9, rel=5e-3)]


def test_the_least_time_by_hand():
    """A chip that holds everything: 4 n D numbers and the n log-sum-exps, or 4 n^2 D operations."""
    times = least_times(64, 8, 2, 1024, "T4")
    assert times["tiled"] == pytest.approx(max(4 * 2 * 8 * 64**2 / 65e12, 2 * 2 * (4 * 64 * 8 + 64) / 300e9))


@pytest.mark.parametrize(("context", "d"), [(8192, 128), (1024, 64), (65_536, 256)])
def test_bytes_by_sram_are_those_of_the_formula(context, d):
    lines = [line for line in words(draw(sram_bytes(), context=context, d=d)) if "MB" in line]
    assert [line.partition(":")[0] for line in lines] == list(SRAM_KIB)
    for line, kib in zip(lines, SRAM_KIB.values(), strict=True):
        moved = flash_traffic(context, d, kib * 512).total
        assert numbers(line.partition(":")[2])[0] == pytest.approx(2 * moved / 1e6, rel=5e-3)


def test_the_facts_are_those_of_the_formula():
    for line in hbm_bytes().facts:
        n, heads, d, kib, standard, tiled = numbers(line)
        sram = int(kib) * 512
        assert standard == pytest.approx(2 * heads * standard_traffic(int(n), int(d), sram).total / 1e9, rel=1e-3)
        assert tiled == pytest.approx(2 * heads * flash_traffic(int(n), int(d), sram).total / 1e9, rel=1e-3)
    assert f"tiles of {flash_tiles(128, 228 * 512)[0]} queries" in sram_bytes().facts[-1]


# -- tiles one after the other --------------------------------------------------------------------------------------


@pytest.fixture(scope="module")
def trace():
    return recorded("flash-tiles")[0]


def test_the_recording_is_what_the_trained_model_does(trace):
    params, data = trace.params, trace.data
    model, tokenizer = gptlite.load("gptlite")
    tokens = tokenizer.encode(params["prompt"])[None]
    q, k, v = head_of(model, tokens, params["layer"] - 1, params["head"] - 1)
    pos, tile, shown = torch.arange(data["n"])[None], params["tile"], params["shown"]
    out = attend(q, k, v, visible(pos, pos))[0, 0, :, :shown]
    torch.testing.assert_close(torch.tensor(data["out"]), out, atol=1e-3, rtol=0)
    for step in data["steps"]:
        rows, seen = slice(step["i"] * tile, (step["i"] + 1) * tile), (step["j"] + 1) * tile
        part, lse = attend(
            q[:, :, rows], k[:, :, :seen], v[:, :, :seen], visible(pos[:, rows], pos[:, :seen]), need_lse=True
        )
        found = {name: torch.tensor(step[name]) for name in ("m", "l", "out")}
        torch.testing.assert_close(found["m"] + found["l"].log(), lse[0, 0], atol=1e-3, rtol=0)
        torch.testing.assert_close(found["out"], part[0, 0, :, :shown], atol=1e-3, rtol=0)


def test_the_head_that_is_traced_is_the_right_one():
    torch.manual_seed(0)
    model = gptlite.GPTlite(gptlite.config.preset("nano", n_heads=4, n_kv_heads=2, d_head=8)).eval()
    tokens = torch.tensor([[3, 1, 2]])
    before = type(model.blocks[1].mha)
    q, k, v = head_of(model, tokens, 1, 3)
    assert type(model.blocks[1].mha) is before
    x = model.token_embedding(tokens[0]) + model.position_embedding(torch.arange(3))
    segments = [gptlite.cache.contract.whole_batch(torch.arange(3)[None])]
    x = model.blocks[0](x, segments, None, 0)
    right = model.blocks[1].mha.project(model.blocks[1].ln1(x))
    for found, part, head in ((q, right[0], 3), (k, right[1], 1), (v, right[2], 1)):
        torch.testing.assert_close(found[0, 0], part[:, head])


def test_the_steps_are_the_closed_form_and_shrink_says_by_what(trace):
    q, k, v = (torch.randn(1, 1, 12, 4, generator=torch.Generator().manual_seed(i)) for i in range(3))
    steps = trace_tiles(q, k, v, 4, 2)["steps"]
    assert [(step["i"], step["j"]) for step in steps] == [(0, 0), (1, 0), (1, 1), (2, 0), (2, 1), (2, 2)]
    first, second = steps[1], steps[2]
    for before, after, shrink in zip(first["m"], second["m"], second["shrink"]):
        assert shrink == pytest.approx(min(1.0, 2.718281828 ** (before - after)), abs=1e-3)


@pytest.mark.parametrize("step", [1, 3, 10])
def test_the_player_shows_the_state_after_the_step(trace, step):
    scene = draw(tile_steps(trace), step=step)
    lines, steps, tile = words(scene), trace.data["steps"], trace.data["tile"]
    state = {}
    for done in steps[:step]:
        for row in range(len(done["m"])):
            state[done["i"] * tile + row] = (done["m"][row], done["l"][row])
    values = [float(line.replace("−", "-")) for line in lines if re.fullmatch(r"[−-]?\d+\.\d\d", line)]
    now = steps[step - 1]
    shrunk = [value for value in now["shrink"] if value < 1]
    expected = [value for m, l in state.values() for value in (m, l)] + shrunk
    assert sorted(values) == pytest.approx(sorted(expected), abs=6e-3)
    assert any(line.startswith(f"step {step} of {len(steps)}: queries {now['i'] * tile + 1} to ") for line in lines)


def test_tiles_are_marked_by_what_happened_to_them(trace):
    steps, colours = trace.data["steps"], {}
    for item in marks(draw(tile_steps(trace), step=4), "rect"):
        if item.get("fillOpacity") == 0.55:
            colours.setdefault(item["fill"], []).append(item)
    n_tiles = trace.data["n"] // trace.data["tile"]
    counts = sorted(len(items) for items in colours.values())
    assert counts == sorted([1, 3, len(steps) - 4, n_tiles**2 - len(steps)])


# -- back ends, measured --------------------------------------------------------------------------------------------


@pytest.fixture(scope="module")
def measured():
    *_, recording = run_sweep(
        "attention", backends=["math", "cudnn", "flash", "tiled"], contexts=[16, 32], n_heads=2, d_head=8, repeats=2
    )
    return recording


def test_the_sweep_measures_what_runs_and_says_why_not(measured):
    assert measured.complete
    assert [(point.at["context"], point.at["backend"]) for point in measured.points] == [
        (n, backend) for n in (16, 32) for backend in ("math", "flash", "tiled")
    ]
    assert measured.left_out == [{"at": {"backend": "cudnn"}, "why": "PyTorch has no such kernel for tensors on cpu"}]
    assert measured.data["kernels"]["flash"] == "_scaled_dot_product_flash_attention_for_cpu"
    point = measured.points[3]
    assert point.flops == 4 * 8 * 2 * sum(range(1, 33)) and point.bytes == 4 * 2 * 32 * 8 * 4
    assert all(one.peak_bytes >= 2 * 16 * 8 * 4 for one in measured.points)  # the output at least


def test_the_measured_explorer_draws_time_or_memory(measured):
    explorer = attention_measured([measured])
    for what, value in ((0, lambda point: 1e3 * point.median), (1, lambda point: point.peak_bytes / 1e6)):
        drawn = marks(draw(explorer, what=what), "symbol")
        assert len(drawn) == len(measured.points)
        by_height = sorted(zip(measured.points, drawn, strict=True), key=lambda pair: value(pair[0]))
        heights = [item["y"] for _, item in by_height]
        assert heights == sorted(heights, reverse=True)
    assert any("cudnn: PyTorch has no such kernel" in fact for fact in explorer.facts)


def test_bad_arguments_are_named(trace):
    with pytest.raises(ValueError, match="recordings is empty"):
        attention_measured([])
    with pytest.raises(ValueError, match="backends has 'fast'"):
        list(run_sweep("attention", backends=["fast"]))
    with pytest.raises(ValueError, match="layer is 7, the model has 6"):
        list(run_sweep("flash-tiles", layer=7))
    with pytest.raises(ValueError, match="head is 9, the model has 8"):
        list(run_sweep("flash-tiles", head=9))


def test_every_chart_stays_small(trace):
    for explorer in (hbm_bytes(), sram_bytes(), tile_steps(trace)):
        assert len(explorer._repr_html_()) < 150_000
        assert explorer.spec["width"] == "container"
