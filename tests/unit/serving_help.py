"""What the tests of the serving engine share: a minute model, a pool without blocks, and runs of requests alone."""

import functools
import random

import torch

import gptlite
from gptlite.cache.dense import DynamicCache, StaticCache
from gptlite.cache.paged import PagedCache
from gptlite.config import GPTConfig
from gptlite.model import GPTlite
from gptlite.sampling import SamplingParams
from gptlite.serving.sequence import Request

VOCAB, CONTEXT = 11, 24
LONGEST = 20  # tokens of the longest request of the bank, but for the last, which is never read


class Pairs:
    """A tokenizer whose tokens have one character or two, so that a stop string may end inside a token."""

    texts = ("a", "b", "c", "ab", "ba", "bb", "ca", "d", "da", "cd", "e")

    def decode(self, tokens):
        return "".join(self.texts[token] for token in tokens)


@functools.cache
def tiny(dtype: torch.dtype = torch.float64) -> GPTlite:
    """A minute model with grouped heads and a width that is not heads times head size; its attention is sharp."""
    torch.manual_seed(3)
    model = GPTlite(GPTConfig(VOCAB, CONTEXT, n_layers=1, d_model=10, n_heads=4, d_head=3, n_kv_heads=2, d_ff=12))
    for parameter in model.parameters():
        torch.nn.init.normal_(parameter, std=0.4)
    return model.eval().to(dtype)


class SmallPool(DynamicCache):
    """A dense cache that holds so many tokens in all: a pool without blocks, as simple as can be."""

    def __init__(self, model: GPTlite, n_tokens: int) -> None:
        super().__init__(model)
        self.longest = n_tokens

    def fits(self, new):
        return sum(map(len, self.positions.values())) + sum(new.values()) <= self.longest

    def fork(self, sequence, new):
        if not self.fits({new: len(self.positions[sequence])}):
            raise ValueError("no room")
        super().fork(sequence, new)


CACHES = {
    "a pool of tokens": lambda model, room: SmallPool(model, LONGEST + 4 * room),
    "two lines": lambda model, room: StaticCache(model, 1 + room % 3, LONGEST, bucket=8),
    "pages": lambda model, room: PagedCache(model, 7 + room, block_size=3),
    "pages, shared prefixes": lambda model, room: PagedCache(model, 7 + room, block_size=3, prefix_caching=True),
}


@functools.cache
def bank() -> list[Request]:
    """Requests of all kinds; many begin alike, so that prefixes are shared."""
    rng = random.Random(7)
    stems = [[rng.randrange(VOCAB) for _ in range(9)] for _ in range(3)]
    requests = []
    for i in range(240):
        n_prompt = rng.randint(1, 14)
        prompt = [*stems[i % 3][:n_prompt], *(rng.randrange(VOCAB) for _ in range(n_prompt - 9))]
        if i % 4 == 0:
            prompt = [rng.randrange(VOCAB) for _ in range(n_prompt)]
        params = rng.choice(
            [SamplingParams(0.0), SamplingParams(0.7), SamplingParams(1.3, top_k=4), SamplingParams(1.0, top_p=0.8)]
        )
        stop = rng.choice([(), (), ("bab",), ("abc", "e"), ("dd",)])
        requests.append(Request(torch.tensor(prompt), rng.randint(1, LONGEST + 1 - n_prompt), params, i % 17, stop))
    return requests


@functools.cache
def solo(request: Request, sample: int = 0) -> tuple[list[int], str]:
    """What the plain loop gives for a request alone, without a cache; and its text, cut before a stop string."""
    prompt = torch.tensor(request.prompt)[None]
    seed = request.seed + sample
    tokens = gptlite.generate(tiny(), prompt, request.n_new, request.params, seed=seed)[0, prompt.shape[1] :].tolist()
    text = Pairs().decode(tokens)
    cuts = [(text.find(stop), stop) for stop in request.stop if stop in text]
    if not cuts:
        return tokens, text
    # the answer ends with the token that completes the stop string which is complete first
    done = min(at + len(stop) for at, stop in cuts)
    n = next(n for n in range(len(tokens) + 1) if len(Pairs().decode(tokens[:n])) >= done)
    so_far = Pairs().decode(tokens[:n])
    cut = min(so_far.find(stop) for stop in request.stop if stop in so_far)
    whole = [i for i in range(n + 1) if len(Pairs().decode(tokens[:i])) <= cut]
    return tokens[: max(whole)], text[:cut]
