"""The charts of the chapter on quantised weights draw what was recorded, and what the arithmetic says."""

import pytest
from drawn import draw, marks, words

from gptlite.arithmetic import decode_costs, n_params, prefill_costs, shipped_models, total
from gptlite.hardware import gpu, gpus
from gptlite.notebook.explorers_quantize import GRIDS, METHODS, MODELS, bits_against_loss, loss_rows, predicted_steps
from gptlite.notebook.recordings import recorded
from gptlite.record import Recording

NEAR = {"standard_error": 0.001, "divergence": 0.002}


def row(method: str, bits: int, grid: str, loss: float) -> dict:
    each = bits / 8 + (0.02 if grid != "rows" else 0.002)
    return {
        "method": method,
        "bits": bits,
        "grid": grid,
        "loss": loss,
        "bytes_per_weight": each,
        "model_bytes": 2e6,
    } | NEAR


LOSSES = Recording(
    "quantized-losses",
    {},
    data={
        "loss": 1.5,
        "rows": [
            row("rtn", 2, "128", 2.1),
            row("gptq", 2, "128", 1.6),
            row("awq", 2, "rows", 2.6),
            row("rtn", 8, "rows", 1.501),
            row("gptq", 4, "32", 1.502),
        ],
    },
)
TRAINED = Recording(
    "quantized-training",
    {"grid": "128 clip"},
    data={
        "rows": [
            {"bits": 2, "loss": 1.53, "bytes_of_them": 270, "weights_in_codes": 1000, "model_bytes": 2e6} | NEAR,
        ]
    },
)


def test_rows_are_those_of_the_recordings_in_the_order_of_their_bits() -> None:
    rows = loss_rows([LOSSES], [TRAINED])
    assert [(r["bits"], r["grid"], r["method"]) for r in rows] == [
        (8, "rows", "rtn"), (4, "32", "gptq"), (2, "128", "rtn"), (2, "128", "gptq"), (2, "128 clip", "qat"),
        (2, "rows", "awq"),
    ]  # fmt: skip
    assert rows[2]["added"] == pytest.approx(0.6) and rows[4]["bytes_per_weight"] == 0.27


@pytest.mark.parametrize(
    ("grid", "method", "top", "least", "shown", "above", "best"),
    [
        (0, 0, 2.0, 2, 4, 2, "least: 1.501, round to nearest"),
        (0, 0, 3.5, 2, 6, 0, "least: 1.501, round to nearest"),
        (1, 0, 2.0, 2, 1, 1, "least: 1.600, GPTQ"),
        (0, 4, 2.0, 2, 1, 0, "least: 1.530, trained (QAT)"),
        (0, 0, 2.0, 4, 2, 0, "least: 1.501, round to nearest"),
        (1, 4, 2.0, 2, 0, 0, None),
    ],
)
def test_what_is_drawn_is_what_is_asked_for(grid, method, top, least, shown, above, best) -> None:
    scene = draw(bits_against_loss([LOSSES], [TRAINED]), grid=grid, method=method, top=top, least=least)
    assert len(marks(scene, "symbol", "layer_1")) == shown
    said = words(scene)
    assert [text for text in said if "above" in text] == ([f"{above} above the top of the axis"] if above else [])
    assert (best in said) if best else not said
    assert all(len(text) <= 42 for text in said)


def test_every_recorded_number_of_bits_and_loss_has_a_place_on_the_axes() -> None:
    rows = loss_rows(recorded("quantized-losses"), recorded("quantized-training"))
    spec = bits_against_loss(recorded("quantized-losses"), recorded("quantized-training")).chart.to_dict()
    low, high = spec["layer"][1]["encoding"]["x"]["scale"]["domain"]
    assert all(low <= 8 * row["bytes_per_weight"] <= high for row in rows)
    [top] = [one for one in spec["params"] if one["name"] == "top"]
    assert all(row["loss"] <= top["bind"]["max"] for row in rows)


def test_the_menus_offer_what_was_recorded() -> None:
    said = repr(bits_against_loss([LOSSES]))
    assert "Scales: one of all, groups of 128, groups of 32, whole rows; now all" in said
    assert "trained (QAT)" not in said and "2 bits, GPTQ, groups of 128: 2.16 bits stored, loss 1.60" in said
    assert list(METHODS) == ["rtn", "gptq", "awq", "qat"] and next(iter(GRIDS)) == "128"


@pytest.mark.parametrize(
    ("model", "card", "bits", "inputs", "context", "prompt"),
    [
        ("Llama 3.1 8B", "H100 SXM", 4.2, 0, 1000, 1000),
        ("Llama 3.1 8B", "H100 SXM", 4.2, 1, 32_000, 8000),
        ("GPT-2", "H100 SXM", 2.2, 0, 100, 100),
        ("Llama 3.1 70B", "H100 SXM", 8.2, 1, 5000, 2000),
    ],
)
def test_times_are_those_of_the_arithmetic(model, card, bits, inputs, context, prompt) -> None:
    scene = draw(
        predicted_steps(),
        model=MODELS.index(model),
        card=list(gpus()).index(card),
        bits=bits,
        inputs=inputs,
        context=context,
        prompt=prompt,
    )
    shape, one = shipped_models()[model], gpu(card)
    cost = total(decode_costs(shape, 1, context))
    before = max(cost.flops / one.peak_flops, cost.bytes / one.bandwidth)
    stored = cost.weight_bytes * bits / 16 + cost.kv_bytes
    after = max(cost.flops / one.peak_flops / (inputs + 1), stored / one.bandwidth)
    said = words(scene)
    times = [text for text in said if text.startswith("batch 1")]
    assert len(times) == 1
    # a step also writes the keys and values of its token, and reads as many fewer: a part in a thousand
    assert float(times[0].split()[2]) == pytest.approx(before / after, rel=0.01, abs=0.01)
    size = n_params(shape) * 2 / 1e9
    assert said[0].startswith(f"{model}: ") and float(said[0].split()[-5].replace(",", "")) == pytest.approx(
        size, rel=0.01
    )
    read = total(prefill_costs(shape, 1, prompt)).flops / one.peak_flops * 1e3
    [line] = [text for text in said if text.startswith("prefill")]
    found = [float(word.replace(",", "")) for word in line.replace(" ms", "").split(": ")[1].split(", then ")]
    # every token is counted with its logits here, a prefill needs those of the last one alone
    assert (
        read <= found[0] * 1.01 and found[0] < 2 * read and found[1] == pytest.approx(found[0] / (inputs + 1), rel=0.01)
    )
    assert all(len(text) <= 42 for text in said)


@pytest.mark.parametrize(("model", "card"), [*((model, 0) for model in range(len(MODELS))), (0, len(gpus()) - 1)])
def test_every_choice_draws_finite_lines(model: int, card: int) -> None:
    for bits, context in ((2.2, 100), (8.2, 32_000)):
        scene = draw(predicted_steps(), model=model, card=card, bits=bits, context=context)
        points = marks(scene, "symbol", "layer_1")
        assert len(points) == 18 and all(0 <= point["y"] <= 341 for point in points)
        assert not any("NaN" in text or "Infinity" in text for text in words(scene))
