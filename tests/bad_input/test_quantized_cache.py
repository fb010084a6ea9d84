"""States that a quantised cache cannot take are refused with a line, and leave it as it was."""

import pytest
import torch

from gptlite.cache.quantized import QuantizedCache
from gptlite.cache.quantized_paged import QuantizedPagedCache
from gptlite.config import GPTConfig
from gptlite.model import GPTlite
from gptlite.quantize.kv import KVFormat, Recipe, Rule

INT8 = Recipe(*[KVFormat("even", 8, symmetric=True)] * 2, Rule(0, 2), Rule(0, 2))
MODEL = GPTlite(GPTConfig(11, 32, n_layers=2, d_model=10, n_heads=4, d_head=3, n_kv_heads=2)).eval()
CACHES = {
    "dense": lambda: QuantizedCache(MODEL, INT8),
    "pool": lambda: QuantizedPagedCache(MODEL, INT8, 8, 8, 2, 4),
}


def state(n: int = 6) -> dict[str, torch.Tensor]:
    return {"k_pos": torch.arange(n)} | {f"{p}.{i}": torch.randn(2, n, 3) for p in "kv" for i in range(2)}


def spoiled(name: str, part: torch.Tensor | None) -> dict[str, torch.Tensor]:
    one = state()
    if part is None:
        del one[name]
    else:
        one[name] = part
    return one


def with_number(number: float) -> torch.Tensor:
    part = torch.randn(2, 6, 3)
    part[1, 2, 0] = number
    return part


@pytest.mark.parametrize("kind", CACHES)
@pytest.mark.parametrize(
    ("broken", "match"),
    [
        (spoiled("k_pos", None), "no k_pos"),
        (spoiled("k_pos", torch.arange(6.0)), "must be integers"),
        (spoiled("k_pos", torch.arange(-1, 5)), "no holes"),
        (spoiled("v.1", None), r"v\.1 is missing"),
        (spoiled("k.0", torch.randn(2, 5, 3)), r"k\.0 is \(2, 5, 3\)"),
        (spoiled("k.1", torch.randn(2, 6, 4)), r"k\.1 is \(2, 6, 4\)"),
        (spoiled("k.1", with_number(float("nan"))), "infinity or NaN"),
        (spoiled("v.0", with_number(float("inf"))), "infinity or NaN"),
        (spoiled("v.1", with_number(1e9)), "beyond 65,504"),
    ],
)
def test_a_broken_state_is_refused_and_nothing_is_begun(kind: str, broken: dict, match: str) -> None:
    cache = CACHES[kind]()
    cache.load("there", state())
    before = cache.export("there")
    with pytest.raises(ValueError, match=match):
        cache.load("new", broken)
    assert cache.next_position("new") == 0
    assert all(torch.equal(part, before[name]) for name, part in cache.export("there").items())
    with pytest.raises(ValueError, match="already holds"):
        cache.load("there", state())
    cache.load("new", state())  # there is room for it still
    if isinstance(cache, QuantizedPagedCache):
        cache.check()


@pytest.mark.parametrize("kind", CACHES)
def test_a_sequence_that_has_become_nan_is_refused_by_the_step_that_would_quantise_it(kind: str) -> None:
    cache = CACHES[kind]()
    cache.load("fine", state(4))
    (segment,) = cache.prepare(["sick"], torch.arange(2)[None])
    for layer in range(2):
        nan = torch.full((1, 2, 2, 3), float("nan"))
        cache.update(layer, nan, nan, segment)
    for _ in range(2):  # and is refused again, since nothing has changed
        with pytest.raises(ValueError, match="infinity or NaN"):
            cache.prepare(["fine", "sick"], torch.tensor([[4], [2]]))
        assert (cache.next_position("fine"), cache.next_position("sick")) == (4, 2)
    cache.free("sick")
    cache.prepare(["fine"], torch.tensor([[4]]))
    assert cache.next_position("fine") == 5


@pytest.mark.parametrize("tile", [0, -1, 1.5, True])
def test_a_tile_is_a_whole_number(tile) -> None:
    with pytest.raises(ValueError, match="tile"):
        QuantizedCache(MODEL, INT8, tile)
