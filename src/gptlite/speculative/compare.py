"""What drafters are worth on this machine: acceptance beside what drafting itself costs, and the real speed-up."""

from __future__ import annotations

import time
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field
from functools import partial
from statistics import median

import torch
from torch import Tensor

from gptlite.cache.dense import StaticCache
from gptlite.generate import generate
from gptlite.measure import synchronize
from gptlite.model import GPTlite
from gptlite.sampling import GREEDY, SamplingParams
from gptlite.speculative.decode import Verdict, speculate
from gptlite.speculative.drafters import Draft, Drafter, Text
from gptlite.speculative.theory import Tally


@dataclass
class Comparison:
    """One drafter beside the plain loop, over the same prompts.

    Args:
        n_new: tokens that each generation adds, of all rows together.
        plain, speculative: seconds of each generation, in pairs.
        proposing: seconds of each speculative generation that the drafter took.
        tally: of what was drafted and kept in rounds that drafted in full.
        drafted: tokens that were drafted in all rounds, which is what `proposing` paid for.
        equal: at temperature 0, whether both gave the same tokens.
    """

    n_new: int
    plain: list[float] = field(default_factory=list)
    speculative: list[float] = field(default_factory=list)
    proposing: list[float] = field(default_factory=list)
    tally: Tally = field(default_factory=lambda: Tally([]))
    drafted: int = 0
    equal: bool = True

    @property
    def speedup(self) -> float:
        """Times faster than the plain loop: the median over pairs."""
        return median(plain / own for plain, own in zip(self.plain, self.speculative, strict=True))

    @property
    def propose_share(self) -> float:
        """Part of the time of a speculative generation that drafting took."""
        return median(part / whole for part, whole in zip(self.proposing, self.speculative, strict=True))

    def row(self, name: str) -> dict[str, str | float]:
        """The comparison as a line of a table."""
        return {
            "drafter": name,
            "acceptance": round(self.tally.acceptance, 2),
            "tokens per round": round(self.tally.tokens_per_round, 2),
            "drafting, of the time (%)": round(100 * self.propose_share),
            "drafting (ms per drafted token)": round(1e3 * sum(self.proposing) / max(1, self.drafted), 3),
            "plain (ms per token)": round(1e3 * median(self.plain) / self.n_new, 3),
            "speculative (ms per token)": round(1e3 * median(self.speculative) / self.n_new, 3),
            "speed-up (times)": round(self.speedup, 2),
        }


class Timed(Drafter):
    """Another drafter, whose time is counted.

    Args:
        drafter: the other. device: waited for before each clock read.
    """

    def __init__(self, drafter: Drafter, device: torch.device, clock: Callable[[], float] = time.perf_counter) -> None:
        self.drafter, self.device, self.clock, self.seconds = drafter, device, clock, 0.0
        self.wants_hidden, self.vocab_size = drafter.wants_hidden, drafter.vocab_size

    def propose(self, texts: Sequence[Text], n_draft: int, hidden: Sequence[Tensor] | None = None) -> Draft:
        synchronize(self.device)
        start = self.clock()
        draft = self.drafter.propose(texts, n_draft, hidden)
        synchronize(self.device)
        self.seconds += self.clock() - start
        return draft

    def keep(self, texts: Sequence[Text], kept: Sequence[Sequence[int]]) -> None:
        start = self.clock()
        self.drafter.keep(texts, kept)
        self.seconds += self.clock() - start

    def free(self, text: Text) -> None:
        self.drafter.free(text)


def compare(
    model: GPTlite,
    drafters: Mapping[str, Drafter],
    prompts: Sequence[Tensor],
    n_new: int,
    n_draft: int = 4,
    params: SamplingParams = GREEDY,
    spare: int = 0,
    clock: Callable[[], float] = time.perf_counter,
) -> dict[str, Comparison]:
    """Generates after each prompt with the plain loop and with every drafter, all over static caches.

    The runs of a prompt follow each other, so that a change in the machine's load meets them alike; one more prompt
    is read first and not counted.

    Args:
        prompts: [B, n] each. n_new: tokens per row. n_draft: gamma, of a tree its depth.
        spare: tokens that the cache holds beyond the text, which trees need.
        clock: seconds; can be replaced to test what depends on it.
    Returns: a comparison by drafter.
    """
    device = model.token_embedding.weight.device
    found = {name: Comparison(n_new * len(prompts[0])) for name in drafters}
    traces: dict[str, list[list[Verdict]]] = {name: [] for name in drafters}

    def timed(run: Callable[[], Tensor]) -> tuple[Tensor, float]:
        synchronize(device)
        start = clock()
        out = run()
        synchronize(device)
        return out, clock() - start

    for i, tokens in enumerate([prompts[0], *prompts]):
        B, longest = len(tokens), tokens.shape[1] + n_new
        plain = partial(generate, model, tokens, n_new, params, StaticCache(model, B, longest), seed=i)
        out, seconds = timed(plain)
        for name, drafter in drafters.items():
            watched, cache = Timed(drafter, device, clock), StaticCache(model, B, longest + spare)
            trace: list[list[Verdict]] = []
            drafted = partial(speculate, model, tokens, n_new, watched, n_draft, params, cache, i, trace)
            own, taken = timed(drafted)
            if i == 0:
                continue  # the warm-up
            one = found[name]
            one.plain.append(seconds)
            one.speculative.append(taken)
            one.proposing.append(watched.seconds)
            one.equal = one.equal and (params.temperature > 0 or torch.equal(own, out))
            traces[name] += trace
    for name, one in found.items():
        one.tally, one.drafted = Tally(traces[name], n_draft), Tally(traces[name]).drafted
    return found
