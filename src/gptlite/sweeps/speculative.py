"""Speculative decoding with the shipped pair: its speed, a trace of drafts and verdicts, acceptance by kind of text."""

from __future__ import annotations

import re
from collections.abc import Iterator
from functools import partial
from pathlib import Path
from typing import Any

import torch
from torch import Tensor

from gptlite.cache.dense import StaticCache
from gptlite.checkpoint import load
from gptlite.data import CharTokenizer, load_corpus
from gptlite.generate import generate
from gptlite.measure import time_call
from gptlite.model import GPTlite
from gptlite.record import Point, Recording, Step, sweep
from gptlite.sampling import SamplingParams
from gptlite.speculative.acceptance import acceptance_along, logits_along
from gptlite.speculative.decode import Verdict, speculate
from gptlite.speculative.drafters import ModelDrafter
from gptlite.speculative.theory import Tally

PLAIN = "plain"
PROMPTS = (
    "KING HENRY:\nNow, my good lords, what news from France? Speak",
    "JULIET:\nO, what a night is this! The moon doth hide, and",
    "MACBETH:\nI have no words for what I saw; my hand is cold,",
    "VIOLA:\nGood madam, let me see your face, and then I will",
)


class Pair:
    """The target and the draft model, loaded when the first point needs them."""

    def __init__(self, recording: Recording) -> None:
        self.params = recording.params
        self._models: tuple[GPTlite, GPTlite, CharTokenizer] | None = None

    def get(self) -> tuple[GPTlite, GPTlite, CharTokenizer]:
        """Target, draft model and tokenizer."""
        if self._models is None:
            where = (self.params["device"], getattr(torch, self.params["dtype"]))
            model, tokenizer = load(self.params["model"], *where)
            draft, _ = load(self.params["draft"], *where)
            self._models = model, draft, tokenizer
        return self._models

    def prompts(self, batch: int) -> Tensor:
        """Prompts [batch, n] of equal length, the four texts in turn."""
        model, _, tokenizer = self.get()
        rows = [tokenizer.encode(text) for text in PROMPTS]
        n = min(map(len, rows))
        return torch.stack([rows[b % len(rows)][:n] for b in range(batch)]).to(model.token_embedding.weight.device)


@sweep(
    "speculative-speed",
    "seconds to generate, token by token and with drafts, by their number, temperature and batch",
    model="gptlite",
    draft="draft",
    n_drafts=[1, 2, 3, 4, 5, 6, 8],
    temperatures=[0.0, 1.0],
    batches=[1, 8],
    n_new=128,
    repeats=3,
    warmup=1,
)
def _speed(recording: Recording) -> Iterator[Step]:
    params, pair = recording.params, Pair(recording)
    recording.data["runs"] = []

    def measure(kind: str, batch: int, temperature: float, n_draft: int) -> Point:
        model, draft, _ = pair.get()
        prompts, n_new, sampling = pair.prompts(batch), params["n_new"], SamplingParams(temperature)
        n_tokens = prompts.shape[1] + n_new
        drafter, trace = ModelDrafter(draft, batch), list[list[Verdict]]()

        def run() -> None:
            trace.clear()
            if kind == "speculative":
                cache = StaticCache(model, batch, n_tokens)
                speculate(model, prompts, n_new, drafter, n_draft, sampling, cache, trace=trace)
            else:
                one = draft if kind == "draft" else model
                generate(one, prompts, n_new, sampling, StaticCache(one, batch, n_tokens))

        timing = time_call(run, params["device"], params["warmup"], params["repeats"])
        at = {"kind": kind, "batch": batch, "temperature": temperature, "n_draft": n_draft}
        tally = Tally(trace, n_draft)
        recording.data["runs"].append(
            at | {"rounds": tally.rounds, "tried": tally.tried, "kept": tally.kept, "passes": len(trace)}
        )
        return Point(at, timing.wall)

    for batch in params["batches"]:
        for temperature in params["temperatures"]:
            for kind, n_drafts in ((PLAIN, [0]), ("draft", [0]), ("speculative", params["n_drafts"])):
                for n_draft in n_drafts:
                    at = {"kind": kind, "batch": batch, "temperature": temperature, "n_draft": n_draft}
                    yield at, 0, partial(measure, kind, batch, temperature, n_draft)


@sweep(
    "speculative-trace",
    "drafts and verdicts of each round while the shipped pair writes; no times",
    model="gptlite",
    draft="draft",
    n_draft=4,
    n_new=64,
    temperatures=[0.0, 0.7, 1.0],
)
def _trace(recording: Recording) -> Iterator[Step]:
    params, pair = recording.params, Pair(recording)
    model, draft, tokenizer = pair.get()
    recording.data["chars"] = tokenizer.chars
    recording.data["prompt"] = tokenizer.decode(pair.prompts(1)[0].tolist())
    recording.data["traces"] = [
        trace_rounds(model, draft, pair.prompts(1), temperature, params) for temperature in params["temperatures"]
    ]
    return iter(())


def trace_rounds(
    model: GPTlite, draft: GPTlite, prompt: Tensor, temperature: float, params: dict[str, Any]
) -> dict[str, Any]:
    """What each round drafted, kept and added.

    Returns: `temperature`; `first`, the token that came of the prompt alone; and `rounds`, per round `drafts` [n],
        `kept` (how many stayed), `next` (the token that follows), `p` and `q` of each draft (rounded; empty at
        temperature 0), and `start`, the number of tokens generated before the round.
    """
    trace: list[list[Verdict]] = []
    drafter, sampling = ModelDrafter(draft), SamplingParams(temperature)
    out = speculate(model, prompt, params["n_new"], drafter, params["n_draft"], sampling, seed=1, trace=trace)
    found, start = [], 1
    for (verdict,) in trace:
        chances: dict[str, list[float]] = {"p": [], "q": []}
        if verdict.p is not None and verdict.q is not None:
            for i, token in enumerate(verdict.drafts):
                chances["p"].append(round(float(verdict.p[i, token]), 4))
                chances["q"].append(round(float(verdict.q[i, token]), 4))
        found.append(
            {"start": start, "drafts": verdict.drafts, "kept": len(verdict.kept), "next": verdict.next_token, **chances}
        )
        start += len(verdict.emitted)
    return {"temperature": temperature, "first": int(out[0, prompt.shape[1]]), "rounds": found}


# texts of other kinds than the corpus, in characters that it has; the plays in it have lost their stage directions
OTHER = {
    "stage directions": (
        "Enter the King, with lords and a long train. They walk about the stage and sit. A drum is heard within. "
        "Enter a messenger with letters; he kneels, and gives them to the Queen, who reads. Exeunt all but the fool. "
        "Thunder and lightning. The ghost comes up by the trap, and points to the door. Alarum; they fight, and one "
        "of them falls. Soldiers bear off the body. A flourish, and the curtain."
    ),
    "modern English": (
        "The train to the airport leaves every ten minutes, but on Sundays you have to change buses at the stadium. "
        "If your phone battery is low, print the ticket before you go. The software update failed again because the "
        "disk was full, so we deleted some old videos and restarted the computer. Next week the whole team will meet "
        "online to talk about the budget, the new website and who is going to answer the customers."
    ),
    "Latin": (
        "Gallia est omnis divisa in partes tres, quarum unam incolunt Belgae, aliam Aquitani, tertiam qui ipsorum "
        "lingua Celtae, nostra Galli appellantur. Hi omnes lingua, institutis, legibus inter se differunt. Gallos ab "
        "Aquitanis Garumna flumen, a Belgis Matrona et Sequana dividit. Horum omnium fortissimi sunt Belgae."
    ),
    "letters at random": (
        "qzvk jwpx mbtg ydnc fhal roes uiqx zkvj wpgm tbnd ycfh alre soiu xqkz vjwg pmbt ndyc hfla eros iuqz kxvj "
        "gwpm btdn cyhf laer soui zqxk jvwp gmtb ndcy fhla oser uiqk zxjv wgpm tbnd hycf alro esui qzxv kjpw mgbt dnyc"
    ),
}
WHOLE = "all of the play"  # its row, beside those of its parts
FRENCH = ("Alice, tu as ete", "C'est assez pour une fois")  # a scene of Henry V, from here to here


def kinds_of_text(text: str) -> list[str]:
    """The kind of each character of a play: a speaker's name, verse, prose, a one-line speech, or French.

    A speech whose lines all begin with a capital is verse, if it has two at least; one with a line that does not is
    prose. What lies between speeches counts as one-line speeches.
    """
    kinds = ["one-line speeches"] * len(text)
    for found in re.finditer(r"(?:^|(?<=\n\n))([A-Z][A-Z '&.-]*:)\n((?:.+\n?)*)", text):
        kinds[found.start(1) : found.end(1)] = ["names"] * len(found[1])
        lines = found[2].splitlines()
        kind = "prose" if any(line[:1].islower() for line in lines) else "verse" if len(lines) > 1 else None
        if kind:
            kinds[found.start(2) : found.end(2)] = [kind] * len(found[2])
    begin = text.find(FRENCH[0])
    end = text.find(FRENCH[1], begin)
    if 0 <= begin < end:
        kinds[begin:end] = ["names" if kind == "names" else "French" for kind in kinds[begin:end]]
    return kinds


@sweep(
    "speculative-texts",
    "acceptance along texts of several kinds, by draft model and temperature; no times",
    model="gptlite",
    drafts=["draft"],
    temperatures=[0.0, 1.0],
    n_chars=24_000,
)
def _texts(recording: Recording) -> Iterator[Step]:
    params = recording.params
    model, tokenizer = load(params["model"], params["device"], getattr(torch, params["dtype"]))
    plays = load_corpus().held_out
    begin = max(0, plays.find(FRENCH[0]) - params["n_chars"] // 2)  # around the scene in French
    play = plays[begin : begin + params["n_chars"]]
    passages = [(play, kinds_of_text(play)), *((text, [kind] * len(text)) for kind, text in OTHER.items())]
    texts = [(tokenizer.encode(text).to(params["device"]), kinds[1:]) for text, kinds in passages]
    expected = [logits_along(model, tokens) for tokens, _ in texts]
    rows = recording.data["rows"] = list[dict[str, Any]]()
    for name in params["drafts"]:
        draft, _ = load(name, params["device"], getattr(torch, params["dtype"]))
        drafted = [logits_along(draft, tokens) for tokens, _ in texts]
        for temperature in params["temperatures"]:
            sums: dict[str, list[float]] = {}
            for target, guess, (_, kinds) in zip(expected, drafted, texts, strict=True):
                along = acceptance_along(target, guess, SamplingParams(temperature)).tolist()
                for kind, chance in zip(kinds, along, strict=True):
                    sums.setdefault(kind, []).append(chance)
                if target is expected[0]:
                    sums[WHOLE] = along
            for kind, chances in sums.items():
                mean = sum(chances) / len(chances)
                row = {"draft": Path(name).stem, "temperature": temperature, "kind": kind}
                rows.append(row | {"chars": len(chances), "acceptance": round(mean, 4)})
    return iter(())
