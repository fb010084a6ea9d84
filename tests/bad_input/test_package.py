"""What the package's functions refuse: a ValueError of one line that names the value and what is allowed."""

import re
from collections.abc import Callable
from typing import Any

import pytest
import torch

import gptlite
from gptlite.cache.dense import DynamicCache, RingCache, StaticCache
from gptlite.checkpoint import load, save_checkpoint
from gptlite.config import GPTConfig, preset
from gptlite.data import CharTokenizer, load_corpus, training_batch
from gptlite.generate import stream
from gptlite.model import GPTlite
from gptlite.sampling import SamplingParams, probabilities
from gptlite.train import TrainSettings

SIZES: dict[str, Any] = {
    "vocab_size": 7, "context_length": 8, "n_layers": 1, "d_model": 12, "n_heads": 4, "d_head": 2, "n_kv_heads": 2
}  # fmt: skip
MODEL = GPTlite(GPTConfig(**SIZES)).eval()
PROMPT = torch.tensor([[1, 2, 3]])


def used_cache() -> DynamicCache:
    cache = DynamicCache(MODEL)
    MODEL(PROMPT, cache=cache)
    return cache


CASES: list[tuple[Callable[[], Any], str]] = [
    # config
    *[
        (lambda f=field, v=value: GPTConfig(**SIZES | {f: v}), f"{field} is {re.escape(repr(value))}, it must be a wh")
        for field in ("vocab_size", "context_length", "n_layers", "d_model", "n_heads", "d_head", "n_kv_heads", "d_ff")
        for value in (0, -1, 2.0, "4", True)
    ],
    *[
        (lambda v=value: GPTConfig(**SIZES | {"dropout": v}), f"dropout is {re.escape(repr(value))}, it must be a num")
        for value in (-0.1, 1, 1.0, float("nan"), "0.1", None, True)
    ],
    (lambda: GPTConfig(**SIZES | {"n_kv_heads": 3}), "n_kv_heads is 3, it must divide n_heads, which is 4"),
    (lambda: GPTConfig.from_dict(SIZES | {"experts": 2}), "unknown config field 'experts', known are .*vocab_size"),
    (lambda: GPTConfig.from_dict({"vocab_size": 3}), "config is incomplete: .*context_length"),
    (lambda: preset("huge"), "no preset 'huge', there are nano, gptlite, draft"),
    (lambda: preset("nano", wings=2), "preset 'nano' cannot be changed so: .*wings"),
    # model
    (lambda: MODEL(torch.tensor([1, 2])), r"tokens has shape \(2,\), it must be \[B, S\]"),
    (lambda: MODEL(torch.zeros(1, 0, dtype=torch.int64)), r"tokens has shape \(1, 0\), .* at least one token"),
    (lambda: MODEL(torch.tensor([[7]])), "token 7 is outside the vocabulary of 7"),
    (lambda: MODEL(torch.tensor([[-1]])), "token -1 is outside the vocabulary of 7"),
    (lambda: MODEL(torch.ones(1, 9, dtype=torch.int64)), "position 8 is outside the context window of 8"),
    (lambda: MODEL(PROMPT, positions=torch.tensor([[0, 1, -2]])), "position -2 is outside the context window of 8"),
    (lambda: MODEL(PROMPT, positions=torch.tensor([[0, 1]])), r"positions has shape \(1, 2\), tokens \(1, 3\)"),
    # generate
    (lambda: gptlite.generate(MODEL, PROMPT, -1), "n_new is -1, it must be at least 0"),
    (lambda: gptlite.generate(MODEL, PROMPT[0], 1), r"tokens has shape \(3,\), it must be \[B, n\]"),
    (lambda: gptlite.generate(MODEL, PROMPT[:, :0], 1), r"tokens has shape \(1, 0\)"),
    (lambda: gptlite.generate(MODEL, torch.tensor([[9]]), 1), "token 9 is outside the vocabulary of 7"),
    (lambda: gptlite.generate(MODEL, PROMPT, 7), "3 tokens and 7 new ones pass the context window of 8"),
    (lambda: gptlite.generate(MODEL, PROMPT, 1, overflow="wrap"), "overflow is 'wrap', it must be 'error', 'slide' or"),  # type: ignore[arg-type]
    (lambda: gptlite.generate(MODEL, PROMPT, 9, overflow="clamp"), "overflow='clamp' .* needs a cache"),
    (lambda: gptlite.generate(MODEL, PROMPT, 1, cache=used_cache()), "the cache already holds text"),
    (lambda: stream(MODEL, PROMPT, -1), "n_new is -1"),  # before the first token is asked for
    # sampling
    *[
        (lambda v=value: SamplingParams(temperature=v), f"temperature is {value}, it must be 0 .greedy. or a positive")
        for value in (-1, -0.001, float("nan"), float("inf"))
    ],
    *[(lambda v=value: SamplingParams(top_k=v), f"top_k is {value}, it must be a whole") for value in (0, -5, 2.5)],
    *[
        (lambda v=value: SamplingParams(top_p=v), rf"top_p is {value}, it must be in \(0, 1\]")
        for value in (0, -0.5, 1.5, float("nan"))
    ],
    (lambda: probabilities(torch.zeros(3), SamplingParams()), r"logits has shape \(3,\), it must be \[B, V\]"),
    (lambda: probabilities(torch.zeros(2, 3), [SamplingParams()]), "1 sampling parameters for 2 rows"),
    (lambda: probabilities(torch.zeros(1, 3), SamplingParams(), torch.zeros(3).bool()), "no allowed token"),
    # caches
    (lambda: StaticCache(MODEL, 0, 8), "n_sequences is 0, it must be a whole number of at least 1"),
    (lambda: StaticCache(MODEL, 1, 0), "max_tokens is 0, it must be a whole number of at least 1"),
    (lambda: StaticCache(MODEL, 1, 8, bucket=0), "bucket is 0, it must be a whole number of at least 1"),
    (lambda: MODEL(PROMPT, cache=StaticCache(MODEL, 1, 2)), "needs 3 tokens, a line of the cache has 2"),
    (lambda: MODEL(PROMPT.expand(2, -1), cache=StaticCache(MODEL, 1, 8)), "2 new sequences .* 1 of 1 are free"),
    (lambda: RingCache(MODEL, 1), "a ring needs a window"),
    # data, training, checkpoints
    (lambda: CharTokenizer(""), "a vocabulary needs distinct characters and at least one, not ''"),
    (lambda: CharTokenizer("aba"), "a vocabulary needs distinct characters and at least one, not 'aba'"),
    (lambda: CharTokenizer("ab").encode("abc"), "character 'c' at position 2 is not in the vocabulary of 2"),
    (lambda: CharTokenizer("ab").decode([0, 2]), "token 2 is outside the vocabulary of 2"),
    (lambda: CharTokenizer("ab").decode([-1]), "token -1 is outside the vocabulary of 2"),
    (lambda: load_corpus("nowhere.txt"), "cannot read nowhere.txt: No such file"),
    (lambda: training_batch(torch.zeros(4), 0, 1, 4, 0), "the text has 4 tokens, a window of 4 needs at least 5"),
    *[
        (lambda n=name, v=value: TrainSettings(**{"steps": 10} | {n: v}), f"{name} is {value!r}, it must be")
        for name, value in [
            ("steps", 0), ("batch_size", 0), ("save_every", 0), ("lr", 0.0), ("lr", float("nan")), ("lr", float("inf")),
            ("optimizer", "sgd"), ("precision", "fp8"), ("cooldown", 0), ("cooldown", 1.1), ("warmup", -1),
            ("weight_decay", -0.5), ("weight_decay", float("nan")),
        ]
    ],
    (lambda: load("nowhere"), "there is no checkpoint nowhere"),
    (lambda: load(""), "there is no checkpoint"),
    (lambda: save_checkpoint("model.pt", MODEL, CharTokenizer("abcdefg")), "model.pt must end in .safetensors"),
]  # fmt: skip


@pytest.mark.parametrize(("call", "says"), CASES, ids=[says[:60] for _, says in CASES])
def test_refused(call: Callable[[], Any], says: str) -> None:
    with pytest.raises(ValueError, match=says) as caught:
        call()
    assert "\n" not in str(caught.value)
