"""The sweep and the lab on KV heads measure what they say; conversions and recipes are read as they are written."""

import pytest
import torch

from gptlite.arithmetic import kv_bytes_per_token, n_params
from gptlite.cache.dense import StaticCache
from gptlite.config import preset
from gptlite.notebook.labs_kv_heads import KVHeadsLab, divisors
from gptlite.record import run_sweep
from gptlite.sweeps.kv_heads import (
    read_conversion,
    read_recipe,
    settings_of,
    sized_model,
    sized_shape,
)
from gptlite.variants.convert import Conversion
from gptlite.variants.mla import LatentAttention
from gptlite.variants.stored import attention_of


def lab(**settings) -> KVHeadsLab:
    one = KVHeadsLab("cpu")
    for name, value in {"preset": "nano", "repeats": 2, "batch": 2, "context": 64, "latent": 32, **settings}.items():
        one.inputs[name].value = value
    return one


@pytest.mark.parametrize(("kind", "size"), [("grouped", 4), ("grouped", 1), ("latent", 24)])
def test_a_sized_model_has_the_parameters_and_the_cache_of_its_shape(kind: str, size: int) -> None:
    base = preset("nano")
    model, shape = sized_model(base, kind, size, "cpu", torch.float32), sized_shape(base, kind, size)
    assert {attention_of(block.mha) for block in model.blocks} == {(kind, size)}
    assert isinstance(model.blocks[0].mha, LatentAttention) == (kind == "latent")
    cache = StaticCache(model, 1, 10, bucket=1)
    held = sum(layer.shape[1] * layer.shape[3] for layer in (*cache.k, *cache.v))
    assert held * 4 == kv_bytes_per_token(shape, 4)
    if kind == "grouped":
        assert model.n_params == n_params(shape)


def test_a_sweep_measures_every_size_at_every_batch_and_context() -> None:
    params = {"preset": "nano", "kv_heads": [4, 1], "latents": [16], "batches": [1, 2], "contexts": [8, 32]}
    *_, recording = run_sweep("kv-heads", **params, repeats=2, warmup=1)
    sizes = [("grouped", 4), ("grouped", 1), ("latent", 16)]
    assert [(p.at["attention"], p.at["size"], p.at["context"], p.at["batch"]) for p in recording.points] == [
        (kind, size, context, batch) for kind, size in sizes for context in (8, 32) for batch in (1, 2)
    ]
    # nano: 2 layers, heads of 16, 4 bytes a value
    assert [p.at["cache_bytes"] for p in recording.points[::4]] == [2 * 2 * 4 * 16 * 4, 2 * 2 * 16 * 4, 2 * 16 * 4]
    assert all(len(p.samples) == 2 and p.bytes > 0 and p.flops > 0 for p in recording.points)


@pytest.mark.parametrize(
    ("changes", "message"),
    [({"kv_heads": [3]}, "n_kv_heads is 3"), ({"contexts": [3]}, "must be above"), ({"latents": [0]}, "latents is 0")],
)
def test_a_sweep_that_makes_no_sense_is_refused(changes, message) -> None:
    with pytest.raises(ValueError, match=message):
        list(run_sweep("kv-heads", preset="nano", **{"kv_heads": [4], "contexts": [32], **changes}))


def test_conversions_and_recipes_are_read_as_they_are_written() -> None:
    assert read_conversion("latent 128 data") == Conversion("latent", 128, "data")
    assert read_recipe("none") == {}
    assert settings_of({}, 40_960, 8) == (None, "--precision bf16")  # no steps, but losses are measured
    recipe = read_recipe("optimizer=adamw lr=0.002 parts=attention teacher=no")
    settings, options = settings_of(recipe, 40_960, 8)
    assert (settings.steps, settings.optimizer, settings.lr, settings.cooldown) == (20, "adamw", 0.002, 1.0)
    assert options == (
        "--steps 20 --lr 0.002 --precision bf16 --save-every 3 --batch-size 8 --optimizer adamw --parts attention"
        " --no-teacher"
    )
    for text in ("latent 128", "latent wide data", "sparse 2 mean"):
        with pytest.raises(ValueError):
            read_conversion(text)
    for text in ("", "fast", "speed=3", "lr="):
        with pytest.raises(ValueError, match="recipe is"):
            read_recipe(text)


# -- the lab ------------------------------------------------------------------------------------------------------


def test_divisors() -> None:
    assert divisors(12) == [12, 6, 4, 3, 2, 1]
    assert divisors(1) == [1]


def test_the_lab_measures_every_divisor_down_to_the_fewest_and_the_latent() -> None:
    one = lab(kv_heads=2).run()
    assert one.state == "done", one.message
    assert [(p.at["attention"], p.at["size"]) for p in one.recording.points] == [
        ("grouped", 4),
        ("grouped", 2),
        ("latent", 32),
    ]
    assert {(p.at["batch"], p.at["context"]) for p in one.recording.points} == {(2, 64)}
    rows = one.rows(one.recording)
    assert [row["Attention"] for row in rows] == ["G = 4", "G = 2", "r = 32"]
    assert rows[0]["Times as fast as the first"] == 1
    assert rows[0]["Cache of the batch (GB)"] == pytest.approx(2 * 2 * 4 * 16 * 4 * 2 * 64 / 1e9, rel=5e-3)
    html = one._repr_html_()
    assert "Time per output token (ms) against Cache (KiB per token)" in html
    one.recording.points.pop()
    one.recording.left_out.append({"at": {"attention": "latent", "size": 32}, "why": "ran out of memory"})
    assert one.rows(one.recording)[-1]["Samples (ms)"] == "ran out of memory"
    assert one._svg()


def test_more_kv_heads_than_heads_are_refused() -> None:
    one = lab(kv_heads=5).run()
    assert one.state == "failed"
    assert one.message == "The fewest KV heads are 5, the model has 4 heads"


def test_needed_memory_is_that_of_all_heads_whatever_the_preset_has() -> None:
    settings = {"preset": "1b", "dtype": "bfloat16", "batch": 8, "context": 1024}
    least = 2 * (2 * 16 * 32 * 64) * 8 * 1024  # 32 heads of 64 in 16 layers, keys and values
    assert KVHeadsLab("cpu").needed_bytes(settings) > least + 2 * 1.2e9
