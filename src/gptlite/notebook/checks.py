"""Checks of the exercises: each calls the reader's function and prints `right`, or the first counterexample."""

from __future__ import annotations

from collections.abc import Callable, Iterable
from typing import Any

import torch
from torch import Tensor

from gptlite.arithmetic import ModelShape, decode_costs, kv_bytes_per_token, shipped_models, total
from gptlite.config import GPTConfig, preset
from gptlite.model import GPTlite

Case = tuple[str, tuple[Any, ...], Any]  # in words, arguments, right answer


def check_count_params(count_params: Callable[[GPTConfig], int]) -> None:
    """Exercise of chapter 1: `count_params(config)` counts the parameters of any shape."""
    shapes = {
        "the preset gptlite with 74 characters": preset("gptlite", vocab_size=74),
        "d_model 48 with 4 heads of 8": GPTConfig(20, 16, 2, d_model=48, n_heads=4, d_head=8),
        "4 heads over 2 KV heads": GPTConfig(20, 16, 3, d_model=32, n_heads=4, d_head=8, n_kv_heads=2),
        "d_ff 50": GPTConfig(20, 16, 1, d_model=32, n_heads=4, d_head=8, d_ff=50),
    }
    with torch.device("meta"):  # shapes without memory
        cases = [(words, (config,), GPTlite(config).n_params) for words, config in shapes.items()]
    _report(count_params, cases)


def check_min_p(min_p: Callable[[Tensor, float], Tensor]) -> None:
    """Exercise of chapter 1: `min_p(probs [B, V], p)` keeps what is at least p times as probable as the row's best."""
    one = [[0.5, 0.3, 0.15, 0.05]]
    two = [[0.5, 0.3, 0.15, 0.05], [0.25, 0.25, 0.25, 0.25]]
    cases = [
        (one, 0.4, [[0.625, 0.375, 0.0, 0.0]]),
        (one, 0.0, one),
        (one, 1.0, [[1.0, 0.0, 0.0, 0.0]]),
        ([[0.5, 0.25, 0.25, 0.0]], 0.5, [[0.5, 0.25, 0.25, 0.0]]),  # exactly p times as probable stays
        (two, 0.55, [[0.625, 0.375, 0.0, 0.0], [0.25, 0.25, 0.25, 0.25]]),
    ]
    _report(min_p, [(f"{probs} with p = {p}", (_tensor(probs), p), _tensor(right)) for probs, p, right in cases])


def check_kv_per_token(kv_per_token: Callable[[dict[str, Any]], float]) -> None:
    """Exercise of chapter 3: `kv_per_token(config)`, bytes per token in 16 bits, from the dict of any config.json."""
    plain: dict[str, Any] = {"num_hidden_layers": 12, "hidden_size": 768, "num_attention_heads": 12, "vocab_size": 100}
    latent = {"kv_lora_rank": 96, "qk_rope_head_dim": 16, "qk_nope_head_dim": 32, "v_head_dim": 32}
    configs: dict[str, dict[str, Any]] = {
        "12 heads of 768 / 12": plain,
        "the same over 3 KV heads": {**plain, "num_key_value_heads": 3},
        "head_dim 128 over 3 KV heads": {**plain, "num_key_value_heads": 3, "head_dim": 128},
        "head_dim null": {**plain, "head_dim": None},
        "a latent of 96 and a rotary key of 16": {**plain, "num_key_value_heads": 12, **latent},
    }
    shapes = {words: (config, ModelShape.of(config)) for words, config in configs.items()}
    _report(kv_per_token, [(words, (config,), kv_bytes_per_token(s)) for words, (config, s) in shapes.items()])


def check_ridge_batch(ridge_batch: Callable[[ModelShape, int, float], int | None]) -> None:
    """Exercise of chapter 3: `ridge_batch(shape, n_context, ridge)`, the batch at the ridge point."""
    cases: list[Case] = []
    for model, n_context, ridge in (("Llama 3.1 8B", 128, 87), ("Llama 3.1 8B", 4096, 87), ("Qwen2.5 1.5B", 512, 150)):
        shape = shipped_models()[model]
        reached = (b for b in range(1, 1000) if total(decode_costs(shape, b, n_context)).intensity >= ridge)
        words = f"{model} at {n_context:,} tokens and {ridge} FLOP/B"
        cases.append((words, (shape, n_context, float(ridge)), next(reached, None)))
    _report(ridge_batch, cases)


def check_best_batch(best_batch: Callable[[dict[int, float], float], int | None]) -> None:
    """Exercise of chapter 2: `best_batch({batch: TPOT in ms}, limit)` is the batch with the most tokens per second."""
    rising = {1: 10.0, 2: 10.5, 4: 11.0, 8: 13.0, 16: 20.0, 32: 36.0}
    jump = {1: 10.0, 8: 12.0, 9: 19.0, 64: 200.0}
    cases = [
        (rising, 15.0, 8),
        (rising, 20.0, 16),  # a TPOT that equals the limit meets it
        (rising, 1000.0, 32),
        (rising, 9.0, None),
        (jump, 20.0, 8),  # 8 sequences every 12 ms beat 9 every 19
        (jump, 1000.0, 8),  # and 64 every 200
        ({32: 36.0, 1: 10.0, 4: 11.0}, 12.0, 4),  # in any order
    ]
    words = "{} with a limit of {} ms"
    _report(best_batch, [(words.format(tpots, limit), (dict(tpots), limit), right) for tpots, limit, right in cases])


def _report(function: Callable[..., Any], cases: Iterable[Case]) -> None:
    for words, arguments, right in cases:
        try:
            answer = function(*arguments)
        except Exception as error:  # whatever the reader's code raises is a counterexample too
            print(f"not yet: {words} raises {type(error).__name__}: {error}")
            return
        if not _same(answer, right):
            print(f"not yet: {words} gives {_difference(answer, right)}")
            return
    print("right")


def _same(answer: Any, right: Any) -> bool:
    if not isinstance(right, Tensor):
        return bool(answer == right)
    if not isinstance(answer, Tensor) or answer.shape != right.shape:
        return False
    return torch.allclose(answer.double(), right, rtol=0, atol=1e-6)  # an answer in fp32 is right too


def _difference(answer: Any, right: Any) -> str:
    """The wrong answer and the right one in words; of a large tensor the first number that is wrong."""
    if isinstance(right, Tensor) and not isinstance(answer, Tensor):
        return f"a {type(answer).__name__}, right is a tensor {list(right.shape)}"
    if isinstance(right, Tensor) and right.numel() > 48:
        if answer.shape != right.shape:
            return f"a tensor {list(answer.shape)}, right is one of {list(right.shape)}"
        wrong = ~torch.isclose(answer.double(), right.double(), rtol=0, atol=1e-6)
        at = tuple(wrong.nonzero()[0].tolist())
        return f"{_words(answer[at])} at {list(at)}, right is {_words(right[at])}"
    return f"{_words(answer)}, right is {_words(right)}"


def _words(value: Any) -> str:
    if isinstance(value, Tensor):
        return str(torch.round(value.double(), decimals=4).tolist())
    return f"{value:,}" if isinstance(value, int) else repr(value)


def _tensor(rows: list[list[float]]) -> Tensor:
    return torch.tensor(rows, dtype=torch.float64)
