"""The charts of the chapter on quantised keys and values draw what the arithmetic and the recordings say."""

import re

import pytest
import torch
from drawn import draw, marks, words

from gptlite.arithmetic import n_params
from gptlite.config import preset
from gptlite.hardware import gpus
from gptlite.notebook.explorers_kv_quant import (
    CONTEXTS,
    NAMES,
    added_loss,
    bytes_and_batch,
    channel_map,
    keys_and_values,
    outlier_channels,
    relative_error,
    sequence_bytes,
    sized_models,
    step_times,
)
from gptlite.notebook.recordings import recorded
from gptlite.quantize.kv import KVFormat
from gptlite.record import Point, Recording, random_model


def losses(cases: dict[str, float]) -> Recording:
    rows = [{"case": case, "mean": mean, "error": 0.001, "by_part": [mean, mean]} for case, mean in cases.items()]
    return Recording("kv-rounding", {}, data={"losses": rows, "plain": 1.4})


LOSSES = losses({"int8": 0.0001, "fp8": -0.0002, "kivi4 32": 0.002, "kivi2 32": 0.0123, "kivi2 128": 0.5})


def test_the_loss_of_a_recipe_is_the_recorded_one_at_the_asked_residual() -> None:
    assert {name: row["mean"] for name, row in added_loss([LOSSES]).items()} == {
        "plain": 0.0, "int8": 0.0001, "fp8": -0.0002, "kivi4": 0.002, "kivi2": 0.0123,
    }  # fmt: skip
    assert added_loss([LOSSES], 128)["kivi2"]["mean"] == 0.5


@pytest.mark.parametrize("model", [0, 3])
@pytest.mark.parametrize(("power", "residual", "group"), [(0, 128, 1), (4, 64, 0), (8, 512, 1), (0, 512, 1)])
def test_bars_and_counts_are_those_of_the_package(model: int, power: int, residual: int, group: int) -> None:
    models, cards = sized_models(), list(gpus().values())
    shape, card = list(models.values())[model], cards[2]
    values = {"model": model, "card": 2, "contextPower": power, "residual": residual, "groupPower": group}
    scene = draw(bytes_and_batch([LOSSES]), **values)
    found = [re.fullmatch(r"([\d.]+) GB, ([\d,]+) fit", text) for text in words(scene)]
    found = [match for match in found if match]
    assert len(found) == len(NAMES)
    room = 0.9 * card.memory_bytes - 2 * n_params(shape)
    expected = {}
    for name in NAMES:
        size = sequence_bytes(name, shape, CONTEXTS[power], residual, 16 * 2**group)
        expected[f"{size / 1e9:.3g}"] = max(0, int(room // size))
    for match in found:
        size, n = match[1], int(match[2].replace(",", ""))
        assert expected[f"{float(size):.3g}"] == n
    assert sorted({f"{float(match[1]):.3g}" for match in found}) == sorted(expected)


def test_the_words_say_what_was_lost() -> None:
    scene = draw(bytes_and_batch([LOSSES]))
    assert sorted(text for text in words(scene) if text.startswith("loss")) == sorted(
        ["loss +0.000"] * 3 + ["loss +0.002", "loss +0.012"]
    )
    assert "not recorded" in words(draw(bytes_and_batch([losses({"int8": 0.0})])))


@pytest.mark.parametrize("control", ["model", "card", "contextPower", "groupPower"])
def test_every_choice_draws_finite_text(control: str) -> None:
    explorer = bytes_and_batch([LOSSES])
    options = next(c for c in explorer.controls if c["name"] == control)["bind"]["options"]
    for choice in options:
        said = words(draw(explorer, **{control: choice}))
        assert not any(bad in text for text in said for bad in ("NaN", "undefined", "Infinity", "null"))


def test_bytes_of_a_sequence_by_hand() -> None:
    llama = sized_models()["Llama 3.1 8B"]  # 32 layers, 8 KV heads of 128
    heads = 32 * 8
    assert sequence_bytes("plain", llama, 1000) == heads * 2 * 1000 * 256
    assert sequence_bytes("fp8", llama, 1001) == heads * (992 * 256 + 9 * 512)  # 62 steps of 16 tokens are final
    # 300 tokens: 256 keys and 171 values have codes of 2 bits and two numbers for each 32
    codes = 128 * 3 / 8
    assert sequence_bytes("kivi2", llama, 300) == heads * ((256 + 171) * codes + (44 + 129) * 256)
    assert sequence_bytes("kivi2", llama, 100) == sequence_bytes("plain", llama, 100)


def test_the_map_shows_the_models_own_keys_and_values() -> None:
    model = random_model(preset("nano"))
    with torch.no_grad():
        for block in model.blocks:  # enough to show all colours
            block.mha.key_proj.weight *= 30
            block.mha.value_proj.weight *= 30
    tokens = torch.arange(40)[None] % 20
    explorer = channel_map(model, tokens, n_shown=8)
    found = keys_and_values(model, tokens)
    assert found["keys"][0].shape == (4, 40, 16)
    for what, name in enumerate(("keys", "values")):
        for layer in (1, 2):
            scene = draw(explorer, what=what, layerNumber=layer)
            cells = sorted(marks(scene, "rect"), key=lambda cell: (cell.get("x", 0), cell.get("y", 0)))
            shown = found[name][layer - 1][0, -8:].flatten()  # tokens from left to right, channels downwards
            assert len(cells) == len(shown) == 8 * 16
            colours = [[int(part) for part in re.findall(r"\d+", cell["fill"])] for cell in cells]
            warmth = torch.tensor([red - blue for red, _, blue in colours])
            assert warmth.min() == -178 and warmth.max() == 213  # blue and vermilion, where it is beyond 6 either way
            by_value = warmth[shown.sort().indices]
            assert (by_value.diff() >= -5).all()  # the colour says a number to a tenth
            x = found[name][layer - 1]
            both = [100 * relative_error(x, KVFormat("even", 2, axis, 32)) for axis in ("channel", "token")]
            assert f"error {both[0]:.0f} % per channel, {both[1]:.0f} % per token" in words(scene)


def test_error_and_outliers_of_made_up_keys() -> None:
    x = torch.randn(2, 64, 32, generator=torch.Generator().manual_seed(0))
    x[..., 4] += 30
    assert outlier_channels(x) > 20
    per = {axis: relative_error(x, KVFormat("even", 2, axis, 32)) for axis in ("channel", "token")}
    assert per["token"] > 2 * per["channel"]


def test_step_times_are_the_recorded_ones() -> None:
    points = [
        Point({"recipe": name, "context": n, "batch": batch, "cache_bytes": 1000 * n}, [n * 1e-3])
        for batch in (1, 4) for n in (10, 20) for name in NAMES
    ]  # fmt: skip
    recording = Recording("kv-quant", {"preset": "gpt2", "dtype": "float32"}, machine={"name": "a CPU"}, points=points)
    explorer = step_times([recording])
    for what in (0, 1):
        for load in (0, 1):
            assert len(marks(draw(explorer, load=load, what=what), "symbol", "layer_1")) == 2 * len(NAMES)
    assert "batch 4: gpt2 in float32 on a CPU" in repr(explorer)


def test_the_books_recordings_are_there() -> None:
    assert set(added_loss(recorded("kv-rounding"))) == set(NAMES)
    assert repr(step_times(recorded("kv-quant")))
