"""Parallel sampling equals the plain loop, beam search equals enumeration and a search without a cache."""

import itertools

import pytest
import torch

from gptlite.cache.dense import DynamicCache, StaticCache
from gptlite.cache.paged import PagedCache
from gptlite.config import GPTConfig
from gptlite.generate import generate
from gptlite.model import GPTlite
from gptlite.sampling import SamplingParams
from gptlite.serving.beam import Beam, beam_search, parallel_sampling

VOCAB = 5
PROMPT = torch.tensor([1, 0, 3, 2, 4, 1])


@pytest.fixture(scope="module")
def model() -> GPTlite:
    torch.manual_seed(37)  # greedy decoding misses its best answer
    model = GPTlite(GPTConfig(VOCAB, 32, n_layers=2, d_model=12, n_heads=3, d_head=4)).eval().double()
    for parameter in model.parameters():
        torch.nn.init.normal_(parameter, std=0.7)
    return model


@torch.inference_mode()
def log_probability(model: GPTlite, new: tuple[int, ...]) -> float:
    """Of an answer, by one pass without a cache."""
    text = torch.cat([PROMPT, torch.tensor(new)])
    scores = model(text[None])[0].log_softmax(-1)  # [n, V]
    return sum(scores[len(PROMPT) - 1 + i, token].item() for i, token in enumerate(new))


def plain_search(model: GPTlite, n_beams: int, n_new: int) -> list[tuple[int, ...]]:
    """Beam search by its definition, each candidate scored anew."""
    beams: list[tuple[int, ...]] = [()]
    for _ in range(n_new):
        candidates = [(*beam, token) for beam in beams for token in range(VOCAB)]
        beams = sorted(candidates, key=lambda new: -log_probability(model, new))[:n_beams]
    return beams


CACHES = {
    "dynamic": DynamicCache,
    "static": lambda model: StaticCache(model, 40, 32),
    "paged": lambda model: PagedCache(model, 64, block_size=3, pages_per_split=1),
    "paged, prefix caching": lambda model: PagedCache(model, 64, block_size=3, prefix_caching=True),
}


@pytest.mark.parametrize("kind", CACHES)
@pytest.mark.parametrize("n_beams", [1, 2, 3, 6])
def test_beam_search_equals_the_search_without_a_cache(model: GPTlite, kind: str, n_beams: int) -> None:
    cache = CACHES[kind](model)
    found = beam_search(model, PROMPT, n_beams, 6, cache)
    assert [beam.tokens for beam in found] == plain_search(model, n_beams, 6)
    for beam in found:
        assert beam.score == pytest.approx(log_probability(model, beam.tokens), abs=1e-9)  # fp64
    if isinstance(cache, PagedCache):
        cache.check()
        assert cache.free_blocks == 64


def test_wide_enough_it_finds_the_best_of_all_answers(model: GPTlite) -> None:
    """With as many beams as there are answers one token short, nothing is dropped: the 5 best of all 625."""
    every = sorted(itertools.product(range(VOCAB), repeat=4), key=lambda new: -log_probability(model, new))
    found = beam_search(model, PROMPT, VOCAB**3, 4, DynamicCache(model))
    assert [beam.tokens for beam in found[:5]] == every[:5]
    assert len(found) == VOCAB**3
    # a narrow search need not: greedy decoding misses the best one here
    assert beam_search(model, PROMPT, 1, 4, DynamicCache(model))[0].tokens != every[0]


def test_one_beam_is_greedy_decoding(model: GPTlite) -> None:
    greedy = generate(model, PROMPT[None], 8, SamplingParams(temperature=0.0))[0, len(PROMPT) :]
    assert beam_search(model, PROMPT, 1, 8, DynamicCache(model))[0].tokens == tuple(greedy.tolist())


def test_answers_that_end_are_kept_and_compared(model: GPTlite) -> None:
    """Against all answers of up to 4 tokens, where token 2 ends one."""
    whole = [new for new in itertools.product(range(VOCAB), repeat=4) if 2 not in new[:-1]]
    short = [(*new, 2) for n in range(3) for new in itertools.product((0, 1, 3, 4), repeat=n)]
    every = sorted([*whole, *short], key=lambda new: -log_probability(model, new))
    cache = PagedCache(model, 300, block_size=4)
    found = beam_search(model, PROMPT, VOCAB**3, 4, cache, end=2)
    assert [beam.tokens for beam in found[:6]] == every[:6]
    assert any(beam.ended for beam in found[:6]) and any(not beam.ended for beam in found)
    assert all(beam.ended == (beam.tokens[-1] == 2) for beam in found)
    assert cache.free_blocks == 300


def test_the_search_stops_when_nothing_can_come_in(model: GPTlite) -> None:
    """The head prefers the end by far, so after two steps both places are taken by answers that ended."""
    with torch.no_grad():
        before = model.fc_out.bias.clone()
        model.fc_out.bias[2] += 30
    steps = []
    found = beam_search(model, PROMPT, 2, 20, DynamicCache(model), end=2, watch=lambda: steps.append(1))
    with torch.no_grad():
        model.fc_out.bias.copy_(before)
    assert found[0].tokens == (2,) and found[0].ended
    assert len(steps) == 2 and all(beam.ended for beam in found)


@pytest.mark.parametrize("n_beams", [1, 2, 3])
def test_stopping_early_loses_no_answer(model: GPTlite, n_beams: int) -> None:
    """Against the same search that always goes on to the last step, for each token as the end."""
    for end in range(VOCAB):
        beams, done = [()], []
        for _ in range(5):
            candidates = [(*beam, token) for beam in beams for token in range(VOCAB)]
            best = sorted(candidates, key=lambda new: -log_probability(model, new))[: 2 * n_beams]
            done += [new for new in best if new[-1] == end]
            beams = [new for new in best if new[-1] != end][:n_beams]
        expected = sorted([*done, *beams], key=lambda new: -log_probability(model, new))[:n_beams]
        found = beam_search(model, PROMPT, n_beams, 5, DynamicCache(model), end=end)
        assert [beam.tokens for beam in found] == expected


@pytest.mark.parametrize("kind", CACHES)
def test_samples_equal_those_of_the_plain_loop(model: GPTlite, kind: str) -> None:
    params = SamplingParams(temperature=1.2, top_k=4)
    expected = generate(model, PROMPT.expand(5, -1), 9, params, seed=7)[:, len(PROMPT) :]
    cache = CACHES[kind](model)
    for _ in range(2):  # nothing is left over for the second time
        assert torch.equal(parallel_sampling(model, PROMPT, 5, 9, cache, params, seed=7), expected)
    assert len({tuple(row) for row in expected.tolist()}) > 1
    assert cache.next_position(("sample", 0)) == 0


def test_the_prompt_is_held_once_and_each_sample_copies_one_block(model: GPTlite) -> None:
    cache = PagedCache(model, 40, block_size=4)
    used = []
    parallel_sampling(model, PROMPT, 3, 4, cache, watch=lambda: used.append(40 - cache.free_blocks))
    # 6 tokens are 2 blocks; the first new token goes into the second, so two of three samples copy it; the ninth
    # token takes a third block each
    assert used == [2, 4, 4, 7]
    assert cache.free_blocks == 40


def test_beams_that_share_most_of_their_way_share_most_of_their_blocks(model: GPTlite) -> None:
    cache = PagedCache(model, 200, block_size=2)
    entries, used = [], []

    def watch() -> None:
        cache.check()
        tables = [cache.table(key) for key in cache.positions]
        entries.append(sum(map(len, tables)))
        used.append(len({block for table in tables for block in table}))

    beam_search(model, PROMPT, 4, 12, cache, watch=watch)
    assert entries[-1] == 4 * cache.blocks_for(len(PROMPT) + 11)
    assert used[-1] < 0.6 * entries[-1]


def test_a_pool_that_is_too_small_is_refused_and_left_empty(model: GPTlite) -> None:
    cache = PagedCache(model, 3, block_size=4)
    for call in (
        lambda: beam_search(model, PROMPT, 4, 8, cache),
        lambda: parallel_sampling(model, PROMPT, 4, 8, cache),
    ):
        with pytest.raises(ValueError, match="are free"):
            call()
        assert cache.free_blocks == 3 and not cache.positions


@pytest.mark.parametrize(
    ("prompt", "numbers", "message"),
    [
        (PROMPT[None], (2, 2), r"prompt has shape \(1, 6\)"),
        (PROMPT[:0], (2, 2), r"prompt has shape \(0,\)"),
        (PROMPT, (0, 2), "is 0, it must be at least 1"),
        (PROMPT, (2, 0), "n_new is 0"),
        (PROMPT, (2, 40), "outside the context window"),
    ],
)
def test_what_makes_no_sense_is_refused(
    model: GPTlite, prompt: torch.Tensor, numbers: tuple[int, int], message: str
) -> None:
    for call in (beam_search, parallel_sampling):
        cache = DynamicCache(model)
        with pytest.raises(ValueError, match=message):
            call(model, prompt, *numbers, cache)
        assert not cache.positions


def test_a_beam_says_what_it_is() -> None:
    assert Beam((1, 2), -0.5) == Beam((1, 2), -0.5, False)
