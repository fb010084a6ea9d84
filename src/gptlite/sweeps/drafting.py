"""Drafting without a draft model: what each drafter costs and wins, a tree's verdicts, and heads trained together."""

from __future__ import annotations

import time
from collections.abc import Iterator
from functools import partial
from typing import Any

import torch
from torch import Tensor

from gptlite.cache.dense import StaticCache
from gptlite.checkpoint import load
from gptlite.config import GPTConfig, preset
from gptlite.data import CharTokenizer, load_corpus
from gptlite.generate import generate
from gptlite.measure import synchronize, validation_loss
from gptlite.model import GPTlite
from gptlite.record import Point, Recording, Step, sweep
from gptlite.sampling import SamplingParams
from gptlite.speculative.catalog import DRAFTERS, SPARE, make_drafter
from gptlite.speculative.compare import Timed
from gptlite.speculative.decode import Verdict, speculate
from gptlite.speculative.heads_train import agreement, train_heads
from gptlite.speculative.mtp import MTPHeads
from gptlite.sweeps.speculative import PROMPTS
from gptlite.train import TrainSettings
from gptlite.variants.uptrain import uptrain

PLAIN = "plain"
# a letter that repeats itself, as lists, code and quotations do
REPEATING = (
    "OLD SHEPHERD:\nThe first day of the first month, I counted ten white sheep and one black sheep in the field.\n"
    "The second day of the first month, I counted ten white sheep and"
)


def prompts_of(tokenizer: CharTokenizer, batch: int, text: str = "") -> Tensor:
    """Prompts [batch, n] of equal length: a text, or the book's four beginnings of speeches in turn."""
    rows = [tokenizer.encode(one) for one in ([text] if text else PROMPTS)]
    n = min(map(len, rows))
    return torch.stack([rows[b % len(rows)][:n] for b in range(batch)])


@sweep(
    "drafting",
    "seconds to generate with each drafter, its own part of them, and what it drafted and kept",
    model="gptlite",
    drafters=list(DRAFTERS),
    temperatures=[0.0, 1.0],
    batches=[1],
    n_draft=4,
    n_new=96,
    repeats=3,
    warmup=1,
    prompt="",
)
def _drafting(recording: Recording) -> Iterator[Step]:
    params = recording.params
    runs = recording.data.setdefault("runs", [])
    loaded: list[tuple[GPTlite, CharTokenizer]] = []
    plain: dict[tuple[int, float], list[Tensor]] = {}  # the plain loop's tokens by repeat

    def measure(name: str, batch: int, temperature: float) -> Point:
        if not loaded:
            loaded.append(load(params["model"], params["device"], getattr(torch, params["dtype"])))
        model, tokenizer = loaded[0]
        prompts = prompts_of(tokenizer, batch, params["prompt"]).to(model.token_embedding.weight.device)
        run = Run(model, prompts, params["n_new"], SamplingParams(temperature), params["n_draft"])
        at = {"drafter": name, "batch": batch, "temperature": temperature}
        samples, outs = [], []
        for repeat in range(-params["warmup"], params["repeats"]):
            out, seconds = run.plain(repeat) if name == PLAIN else run.drafted(name, repeat)
            if repeat >= 0:
                samples.append(seconds)
                outs.append(out.cpu())
        if name == PLAIN:
            plain[batch, temperature] = outs
        else:
            same = [torch.equal(own, out) for own, out in zip(outs, plain[batch, temperature], strict=True)]
            runs.append(at | run.counts(params["repeats"]) | {"equal": temperature > 0 or all(same)})
        return Point(at, samples)

    for batch in params["batches"]:
        for temperature in params["temperatures"]:
            for name in (PLAIN, *params["drafters"]):
                at = {"drafter": name, "batch": batch, "temperature": temperature}
                yield at, 0, partial(measure, name, batch, temperature)


class Run:
    """Generations of the same prompts, whose rounds and drafting times are kept."""

    def __init__(self, model: GPTlite, prompts: Tensor, n_new: int, params: SamplingParams, n_draft: int) -> None:
        self.model, self.prompts, self.n_new, self.params, self.n_draft = model, prompts, n_new, params, n_draft
        self.traces: list[list[list[Verdict]]] = []
        self.proposing: list[float] = []

    def plain(self, repeat: int) -> tuple[Tensor, float]:
        """The tokens [B, n + n_new] and seconds of the plain loop."""
        B, n = self.prompts.shape
        cache = StaticCache(self.model, B, n + self.n_new)
        return self._timed(partial(generate, self.model, self.prompts, self.n_new, self.params, cache, seed=repeat + 1))

    def drafted(self, name: str, repeat: int) -> tuple[Tensor, float]:
        """The tokens [B, n + n_new] and seconds with a drafter."""
        B, n = self.prompts.shape
        drafter = Timed(make_drafter(name, self.model, B), self.prompts.device)
        cache, trace = StaticCache(self.model, B, n + self.n_new + SPARE), list[list[Verdict]]()
        arguments = (self.model, self.prompts, self.n_new, drafter, self.n_draft, self.params, cache, repeat + 1, trace)
        out, seconds = self._timed(partial(speculate, *arguments))
        self.traces.append(trace)
        self.proposing.append(drafter.seconds)
        return out, seconds

    def _timed(self, call: partial[Tensor]) -> tuple[Tensor, float]:
        synchronize(self.prompts.device)
        begin = time.perf_counter()
        out = call()
        synchronize(self.prompts.device)
        return out, time.perf_counter() - begin

    def counts(self, repeats: int) -> dict[str, Any]:
        """What was drafted and kept over the counted generations, and the seconds that drafting took in each."""
        counted = self.traces[-repeats:]
        verdicts = [verdict for trace in counted for verdicts in trace for verdict in verdicts]
        return {
            "rounds": len(verdicts),
            "passes": sum(map(len, counted)),
            "drafted": sum(len(verdict.drafts) for verdict in verdicts),
            "kept": sum(len(verdict.kept) for verdict in verdicts),
            # in a chain the first rejected draft was tried too, and none after it
            "tried": sum(min(len(v.kept) + 1, len(v.drafts)) for v in verdicts if v.parents is None),
            "proposing": self.proposing[-repeats:],
        }


@sweep(
    "drafting-trace",
    "the trees of each round while the shipped model writes: nodes, probabilities and verdicts; no times",
    model="gptlite",
    drafters=["Medusa, tree", "EAGLE, tree"],
    n_draft=4,
    n_new=24,
    temperature=1.0,
    seed=3,
)
def _trace(recording: Recording) -> Iterator[Step]:
    params = recording.params
    model, tokenizer = load(params["model"], params["device"], getattr(torch, params["dtype"]))
    prompt = prompts_of(tokenizer, 1).to(model.token_embedding.weight.device)
    recording.data |= {"chars": tokenizer.chars, "prompt": tokenizer.decode(prompt[0].tolist()), "traces": []}
    for name in params["drafters"]:
        trace: list[list[Verdict]] = []
        cache = StaticCache(model, 1, prompt.shape[1] + params["n_new"] + SPARE)
        sampling = SamplingParams(params["temperature"])
        drafter = make_drafter(name, model)
        out = speculate(
            model, prompt, params["n_new"], drafter, params["n_draft"], sampling, cache, params["seed"], trace
        )
        done, rounds = prompt.shape[1] + 1, []
        for (verdict,) in trace:
            rounds.append({"before": tokenizer.decode(out[0, max(0, done - 24) : done].tolist()), **round_of(verdict)})
            done += len(verdict.emitted)
        recording.data["traces"].append({"drafter": name, "rounds": rounds})
    return iter(())


def round_of(verdict: Verdict) -> dict[str, Any]:
    """A tree and what became of it: tokens, parents, the target's probability of each node, kept ones, what follows."""
    parents = verdict.parents or list(range(-1, len(verdict.drafts) - 1))
    p = [1.0] * len(parents)
    if verdict.p is not None:
        p = [
            round(float(verdict.p[parent + 1, token]), 4) for parent, token in zip(parents, verdict.drafts, strict=True)
        ]
    return {"tokens": verdict.drafts, "parents": parents, "p": p, "kept": verdict.kept, "next": verdict.next_token}


@sweep(
    "drafting-together",
    "losses and guesses of a small model trained with heads for more tokens, and of heads trained on it afterwards",
    preset="draft",
    steps=200,
    batch=16,
    n_heads=2,
    weight=0.3,
    lr=0.01,
    n_held_out=51_200,
)
def _together(recording: Recording) -> Iterator[Step]:
    params = recording.params
    rows = recording.data.setdefault("rows", [])
    settings = TrainSettings(params["steps"], params["batch"], params["lr"], precision="bf16", save_every=10**6)

    def run(together: bool) -> Point:
        corpus = load_corpus()
        tokenizer = CharTokenizer.of(corpus.train, corpus.held_out)
        text = tokenizer.encode(corpus.train)
        held_out = tokenizer.encode(corpus.held_out)[: params["n_held_out"] + 1]
        begin = time.perf_counter()
        torch.manual_seed(settings.seed)
        config = GPTConfig.from_dict({**preset(params["preset"]).to_dict(), "vocab_size": tokenizer.vocab_size})
        model = GPTlite(config).to(params["device"])
        heads = MTPHeads(model, params["n_heads"]).to(params["device"])
        if together:
            train_heads(model, heads, text, settings, params["weight"])
        else:
            uptrain(model, text, settings, parts="all")
            train_heads(model, heads, text, settings)
        rows.append(
            {
                "trained": "together" if together else "afterwards",
                "trunk_loss": round(validation_loss(model, held_out), 4),
                "agreement": agreement(model, heads, held_out),
            }
        )
        return Point({"trained": rows[-1]["trained"]}, [time.perf_counter() - begin])

    for together in (True, False):
        yield {"trained": "together" if together else "afterwards"}, 0, partial(run, together)
