"""Arithmetic against the figures that are published for real models, and against work counted while it runs."""

import json
import struct

import pytest
import torch
from safetensors.torch import save_file

from gptlite.arithmetic import (
    PARTS,
    Cost,
    ModelShape,
    attention_share,
    crossover_6d,
    crossover_last_token,
    crossover_prefill,
    decode_costs,
    kaplan_flops,
    kv_budget,
    kv_bytes,
    kv_bytes_per_token,
    largest_batch,
    n_params,
    params_from_safetensors_header,
    prefill_costs,
    ridge_point,
    shipped_models,
    step_bound,
    step_costs,
    total,
)
from gptlite.attention import visible
from gptlite.cache.dense import DynamicCache, StaticCache
from gptlite.config import GPTConfig, preset
from gptlite.generate import decode_step, prefill
from gptlite.hardware import gpu
from gptlite.measure import count_work
from gptlite.model import GPTlite

KiB, GiB = 2**10, 2**30
LLAMA, QWEN = shipped_models()["Llama 3.1 8B"], shipped_models()["Qwen2.5 1.5B"]


# -- the published figures, to the printed digit --------------------------------------------------------------------


@pytest.mark.parametrize(
    ("name", "kind", "per_token", "at_128k"),
    [
        ("Llama 3.1 8B", "GQA", "128.0", "16.00"),
        ("Llama 2 7B", "MHA", "512.0", "64.00"),
        ("Qwen2.5 7B", "GQA", "56.0", "7.00"),
        ("Mistral 7B v0.3", "GQA", "128.0", "16.00"),
        ("DeepSeek-V3", "MLA", "68.6", "8.58"),
    ],
)
def test_kv_table(name, kind, per_token, at_128k):
    shape = shipped_models()[name]
    assert shape.kind == kind
    assert f"{kv_bytes_per_token(shape) / KiB:.1f}" == per_token
    assert f"{kv_bytes(shape, 131_072) / GiB:.2f}" == at_128k


def test_kv_of_qwen_1_5b_and_opt_13b():
    assert kv_bytes_per_token(QWEN) == 28 * KiB
    # PagedAttention's paper, section 3: 800 KB per token
    assert kv_bytes_per_token(shipped_models()["OPT-13B"]) == 800 * KiB


@pytest.mark.parametrize(
    ("context", "sequences", "tflops", "share"),
    [(4096, 104, "61.6", "7%"), (32_768, 13, "738.9", "38%"), (131_072, 3, "6333.3", "71%")],
)
def test_budget_table(context, sequences, tflops, share):
    assert f"{kv_budget(LLAMA, 80e9) / 1e9:.1f}" == "55.9"
    assert largest_batch(LLAMA, context, 80e9) == sequences
    assert f"{sum(kaplan_flops(LLAMA, context)) / 1e12:.1f}" == tflops
    assert f"{attention_share(LLAMA, context):.0%}" == share


def test_the_largest_batch_fits_and_one_more_does_not():
    for context in (100, 5000):
        batch = largest_batch(LLAMA, context, 80e9)
        budget = kv_budget(LLAMA, 80e9)
        assert batch * kv_bytes(LLAMA, context) <= budget < (batch + 1) * kv_bytes(LLAMA, context)
    assert largest_batch(LLAMA, 4096, 8e9) == 0


def test_crossovers():
    assert f"{crossover_prefill(LLAMA):,.0f}" == "53,250"
    assert crossover_6d(LLAMA) == 24_576
    assert crossover_last_token(LLAMA) == crossover_prefill(LLAMA) / 2
    # where N is 12 L d^2 (MHA of width d, d_ff = 4 d), the last token's crossover is the rule of thumb
    plain = ModelShape(1000, 7, 512, 8, 8, 64, 2048, gated=False)
    assert crossover_last_token(plain) == crossover_6d(plain)
    # and at the crossover the two halves are equal, by either count
    matrices, attention = kaplan_flops(plain, round(crossover_prefill(plain)))
    assert matrices == attention
    costs = decode_costs(plain, 1, crossover_6d(plain))
    assert costs["scores"].flops + costs["mix"].flops == costs["projections"].flops + costs["feed-forward"].flops


def test_step_bound_of_qwen_on_a_2080_ti():
    card = gpu("RTX 2080 Ti")
    for batch, printed in ((1, "5.1"), (16, "5.8")):
        seconds, limit = step_bound(total(decode_costs(QWEN, batch, 1024)), card.peak_flops, card.bandwidth)
        assert f"{seconds * 1e3:.1f}" == printed
        assert limit == "memory"
    assert step_bound(total(prefill_costs(QWEN, 1, 1024)), card.peak_flops, card.bandwidth)[1] == "compute"


@pytest.mark.parametrize(("context", "printed"), [(1024, "42"), (4096, "23"), (32_768, "9")])
def test_intensity_of_qwen_at_batch_64(context, printed):
    assert f"{total(decode_costs(QWEN, 64, context)).intensity:.0f}" == printed


def test_ridge_points():
    turing = gpu("RTX 2080 Ti")
    assert round(turing.ridge_point) == 87
    assert round(ridge_point(turing.fp16_accumulate_flops, turing.bandwidth)) == 175
    assert round(gpu("H100 SXM").ridge_point) == 295
    assert round(ridge_point(gpu("A100 40GB").peak_flops, 1.5e12)) == 208
    assert round(gpu("A100 40GB").ridge_point) == 201
    assert round(gpu("A100 80GB SXM").ridge_point) == 153


@pytest.mark.parametrize(
    ("name", "published"),  # of the checkpoints' safetensors headers
    [
        ("GPT-2", 124_439_808),
        ("Llama 2 7B", 6_738_415_616),
        ("Llama 3.1 8B", 8_030_261_248),
        ("Llama 3.1 70B", 70_553_706_496),
        ("Mistral 7B v0.3", 7_248_023_552),
        ("Mixtral 8x7B", 46_702_792_704),
        ("Qwen2.5 1.5B", 1_543_714_304),
        ("Qwen2.5 7B", 7_615_616_512),
        ("Qwen3 8B", 8_190_735_360),
        ("Gemma 2 9B", 9_241_705_984),
        ("Gemma 3 1B", 999_885_952),
        ("Phi-3 mini 4k", 3_821_079_552),
        ("DeepSeek-V2", 235_741_434_880),
        ("DeepSeek-V3", 671_026_419_200 - 58 * 256),  # without the routers' correction biases, which are no weights
    ],
)
def test_parameters(name, published):
    assert n_params(shipped_models()[name]) == published


# -- against work counted while it runs -----------------------------------------------------------------------------


@pytest.mark.parametrize("n_kv_heads", [4, 2])
@pytest.mark.parametrize("batch", [1, 8])
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
def test_predicted_work_is_the_counted_work(n_kv_heads, batch, dtype):
    config = GPTConfig(
        vocab_size=300, context_length=96, n_layers=2, d_model=96, n_heads=4, d_head=40, n_kv_heads=n_kv_heads
    )
    model, shape = GPTlite(config).eval().to(dtype), ModelShape.of(config)
    assert n_params(shape) == model.n_params
    tokens = torch.randint(300, (batch, 64))
    width = {"bytes_per_weight": dtype.itemsize, "bytes_per_value": dtype.itemsize, "computed": True}
    caches = {"exact": DynamicCache(model), "padded": StaticCache(model, batch, 96, bucket=32)}
    for keys, cache in caches.items():
        with count_work() as work:
            prefill(model, tokens, cache)
        predicted = total(prefill_costs(shape, batch, 64, **width))
        assert work.flops == pytest.approx(predicted.flops, rel=0.01)
        assert work.operand_bytes == pytest.approx(predicted.operand_bytes, rel=0.01)
        with count_work() as work:
            decode_step(model, tokens[:, 0], cache)
        # a static cache reads whole buckets: 65 keys are 96
        predicted = total(decode_costs(shape, batch, 65 if keys == "exact" else 96, **width))
        assert work.flops == pytest.approx(predicted.flops, rel=0.01)
        assert work.operand_bytes == pytest.approx(predicted.operand_bytes, rel=0.01)


def test_counted_work_changes_with_the_model():
    """The comparison above can fail: a wider or a deeper model is not within 1 %."""
    config = preset("nano")
    tokens = torch.randint(60, (2, 32))
    with count_work() as work:
        prefill(GPTlite(config).eval(), tokens, DynamicCache(GPTlite(config)))
    for change in ({"n_layers": 3}, {"d_ff": 300}, {"n_heads": 5}, {"n_kv_heads": 2}):
        other = ModelShape.of(preset("nano", **change))
        predicted = total(prefill_costs(other, 2, 32, bytes_per_weight=4, bytes_per_value=4, computed=True))
        assert work.flops != pytest.approx(predicted.flops, rel=0.01)
        assert work.operand_bytes != pytest.approx(predicted.operand_bytes, rel=0.01)


# -- by hand --------------------------------------------------------------------------------------------------------

TINY = ModelShape(vocab_size=10, n_layers=3, d_model=4, n_heads=2, n_kv_heads=1, d_head=3, d_ff=5, gated=True)


def test_a_step_by_hand():
    costs = step_costs(TINY, batch=2, n_new=3, n_past=4, bytes_per_weight=2, bytes_per_value=1, n_logits=1)
    assert tuple(costs) == PARTS
    projections = 4 * 6 + 2 * 4 * 3 + 6 * 4
    assert costs["projections"].flops == 2 * 6 * 3 * projections
    assert costs["projections"].weight_bytes == 2 * 3 * projections
    pairs = 5 + 6 + 7
    assert costs["scores"].flops == costs["mix"].flops == 2 * 2 * 3 * pairs * 2 * 3
    assert costs["scores"].kv_bytes == costs["mix"].kv_bytes == 2 * 3 * 7 * 3
    assert costs["scores"].activation_bytes == 2 * 2 * 3 * 3 * 2 * 3
    assert costs["feed-forward"].flops == 2 * 6 * 3 * 3 * 4 * 5
    assert costs["head"].flops == 2 * 2 * 4 * 10
    assert costs["head"].weight_bytes == 2 * 4 * 10
    assert total(costs).bytes == sum(c.weight_bytes + c.kv_bytes for c in costs.values())
    assert total(costs).intensity == total(costs).flops / total(costs).bytes


@pytest.mark.parametrize(
    ("n_new", "n_past", "window"), [(1, 0, 3), (1, 9, 3), (5, 0, 3), (5, 2, 3), (4, 1, 9), (6, 7, 5)]
)
def test_windows_count_what_visible_shows(n_new, n_past, window):
    shape = ModelShape(10, 1, 4, 1, 1, 1, 4, window=window, n_sliding=1)
    q_pos, k_pos = torch.arange(n_past, n_past + n_new)[None], torch.arange(n_past + n_new)[None]
    mask = visible(q_pos, k_pos, window)[0, 0]
    costs = step_costs(shape, 1, n_new, n_past, bytes_per_value=1)
    assert costs["scores"].flops == 2 * mask.sum()
    assert costs["scores"].kv_bytes == mask.any(0).sum()


def test_sliding_layers_stop_growing():
    gemma = shipped_models()["Gemma 3 1B"]
    assert (gemma.window, gemma.n_sliding, gemma.n_layers) == (512, 22, 26)
    assert kv_bytes(gemma, 512) == 512 * kv_bytes_per_token(gemma)
    assert kv_bytes(gemma, 513) - kv_bytes(gemma, 512) == 4 * 2 * 1 * 256 * 2  # only the 4 global layers
    assert shipped_models()["Qwen2.5 7B"].window == 0  # its config names a window that it does not use
    layers = {"layer_types": ["sliding_attention", "full_attention"] * 2, "sliding_window": 8, "model_type": "gpt_oss"}
    config = {"vocab_size": 9, "num_hidden_layers": 4, "hidden_size": 8, "num_attention_heads": 2} | layers
    assert ModelShape.of(config).n_sliding == 2


def test_mla_runs_absorbed_in_decode_and_expanded_in_prefill():
    shape = shipped_models()["DeepSeek-V3"]
    decode = decode_costs(shape, 1, 1000)
    assert decode["scores"].flops == 2 * 61 * 1000 * 128 * (512 + 64)
    assert decode["mix"].flops == 2 * 61 * 1000 * 128 * 512
    assert decode["scores"].kv_bytes + decode["mix"].kv_bytes == kv_bytes(shape, 1000)
    prompt = prefill_costs(shape, 1, 10)
    assert prompt["scores"].flops == 2 * 61 * 55 * 128 * (128 + 64)
    assert prompt["mix"].flops == 2 * 61 * 55 * 128 * 128


def test_a_mixture_reads_the_experts_that_are_chosen():
    mixtral = shipped_models()["Mixtral 8x7B"]
    expert = 3 * 4096 * 14_336
    one, many = (decode_costs(mixtral, batch, 1)["feed-forward"] for batch in (1, 512))
    assert one.weight_bytes == pytest.approx(2 * 32 * (2 * expert + 4096 * 8))
    assert many.weight_bytes == pytest.approx(2 * 32 * (8 * expert + 4096 * 8))
    assert one.flops == 2 * 32 * (2 * expert + 4096 * 8)


def test_head_dim_is_respected():
    small = shipped_models()["Qwen3 0.6B"]
    assert small.d_attn == 16 * 128 != small.d_model
    assert kv_bytes_per_token(small) == 2 * 28 * 8 * 128 * 2


# -- bad input ------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("config", "message"),
    [
        ({}, "config.json has no 'num_hidden_layers'"),
        ({"num_hidden_layers": 0, "hidden_size": 8, "num_attention_heads": 2}, "num_hidden_layers is 0"),
        ({"num_hidden_layers": 2, "hidden_size": "8", "num_attention_heads": 2}, "hidden_size is '8'"),
        ({"num_hidden_layers": 2, "hidden_size": 8, "num_attention_heads": 2}, "config.json has no 'vocab_size'"),
        (
            {
                "num_hidden_layers": 2,
                "hidden_size": 8,
                "num_attention_heads": 4,
                "num_key_value_heads": 3,
                "vocab_size": 9,
            },
            "n_kv_heads is 3, it must divide the 4",
        ),
        ({"num_hidden_layers": 2, "hidden_size": 8, "num_attention_heads": 2, "vocab_size": -1}, "vocab_size is -1"),
        (7, "config is a int"),
    ],
)
def test_bad_configs_are_named(config, message):
    with pytest.raises(ValueError, match=message):
        ModelShape.of(config)


def test_bad_counts_are_named():
    with pytest.raises(ValueError, match="batch is 0"):
        step_costs(TINY, 0, 1)
    with pytest.raises(ValueError, match="n_past is -1"):
        decode_costs(TINY, 1, 0)
    with pytest.raises(ValueError, match="n_logits is 5"):
        step_costs(TINY, 1, 4, n_logits=5)
    with pytest.raises(ValueError, match="reserve is 1"):
        kv_budget(TINY, 1e9, reserve=1)
    with pytest.raises(ValueError, match="n_context is 0"):
        largest_batch(TINY, 0, 1e9)
    with pytest.raises(ValueError, match="bandwidth 0"):
        step_bound(Cost(1, 1), 1.0, 0)


# -- headers of safetensors files -----------------------------------------------------------------------------------


def test_header_counts_what_the_file_holds(tmp_path):
    tensors = {"a": torch.zeros(3, 5), "b": torch.zeros(7, dtype=torch.bfloat16), "scalar": torch.zeros(())}
    save_file(tensors, tmp_path / "m.safetensors", metadata={"format": "pt"})
    assert params_from_safetensors_header(tmp_path / "m.safetensors") == {"F32": 16, "BF16": 7}


def file_of(header: object, data: int = 8, length: int | None = None) -> bytes:
    text = header if isinstance(header, bytes) else json.dumps(header).encode()
    return struct.pack("<Q", len(text) if length is None else length) + text + bytes(data)


GOOD = {"dtype": "F32", "shape": [2], "data_offsets": [0, 8]}


@pytest.mark.parametrize(
    "content",
    [
        b"",
        b"abc",
        file_of({"a": GOOD}, length=2**62),
        file_of({"a": GOOD}, length=10**9),
        file_of(b"not json"),
        file_of(b"[" * 100_000),
        file_of([GOOD]),
        file_of({"a": GOOD}, data=7),
        file_of({"a": GOOD}, data=9),
        file_of({"a": GOOD, "b": GOOD}),
        file_of({"a": GOOD | {"shape": [2, 10**30]}}),
        file_of({"a": GOOD | {"shape": [-2]}}),
        file_of({"a": GOOD | {"shape": "2"}}),
        file_of({"a": GOOD | {"dtype": "F99"}}),
        file_of({"a": GOOD | {"data_offsets": [8, 0]}}),
        file_of({"a": GOOD | {"data_offsets": [0, 8, 9]}}),
        file_of({"a": 3}),
    ],
)
def test_headers_are_not_trusted(tmp_path, content):
    path = tmp_path / "bad.safetensors"
    path.write_bytes(content)
    with pytest.raises(ValueError, match=r"bad\.safetensors"):
        params_from_safetensors_header(path)
    with pytest.raises(ValueError, match="no file"):
        params_from_safetensors_header(tmp_path / "none.safetensors")
