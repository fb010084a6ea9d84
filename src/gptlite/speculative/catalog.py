"""Every drafter of the book by name, for the shipped model: what a table, a sweep and a lab go through."""

from __future__ import annotations

from collections.abc import Callable

import torch

from gptlite.checkpoint import load
from gptlite.model import GPTlite
from gptlite.speculative.drafters import Drafter, ModelDrafter
from gptlite.speculative.eagle import EagleDrafter
from gptlite.speculative.heads_stored import load_heads
from gptlite.speculative.lookup import LookupDrafter
from gptlite.speculative.medusa import MedusaDrafter
from gptlite.speculative.mtp import MTPDrafter
from gptlite.speculative.self_draft import early_exit, with_blocks

KEPT = (0, 3, 5)  # blocks of the shipped model when three are skipped, by `choose_blocks`
N_NODES = 12  # of a tree


def _draft_model(model: GPTlite, max_batch: int) -> Drafter:
    weight = model.token_embedding.weight
    return ModelDrafter(load("draft", weight.device, weight.dtype)[0], max_batch)


def _exit(layer: int) -> Callable[[GPTlite, int], Drafter]:
    return lambda model, n: ModelDrafter(early_exit(model, load_heads("gptlite-exit", model), layer), n)  # type: ignore[arg-type]


# how to make each for the shipped model and so many texts
DRAFTERS: dict[str, Callable[[GPTlite, int], Drafter]] = {
    "draft model": _draft_model,
    "look-up": lambda model, n: LookupDrafter(),
    "skipped layers": lambda model, n: ModelDrafter(with_blocks(model, KEPT), n),
    "exit after 2": _exit(2),
    "exit after 3": _exit(3),
    "Medusa, chain": lambda model, n: MedusaDrafter(load_heads("gptlite-medusa", model)),  # type: ignore[arg-type]
    "Medusa, tree": lambda model, n: MedusaDrafter(load_heads("gptlite-medusa", model), N_NODES),  # type: ignore[arg-type]
    "EAGLE, chain": lambda model, n: EagleDrafter(model, load_heads("gptlite-eagle", model), n),  # type: ignore[arg-type]
    "EAGLE, tree": lambda model, n: EagleDrafter(model, load_heads("gptlite-eagle", model), n, N_NODES),  # type: ignore[arg-type]
    "MTP": lambda model, n: MTPDrafter(model, load_heads("gptlite-mtp", model), n),  # type: ignore[arg-type]
}
TREES = ("Medusa, tree", "EAGLE, tree")
SPARE = N_NODES  # slots beyond the text that a tree takes in the target's cache


def make_drafter(name: str, model: GPTlite, max_batch: int = 1) -> Drafter:
    """A drafter by its name in DRAFTERS.

    Args:
        model: the shipped one, `gptlite.load("gptlite")`, in any dtype.
        max_batch: texts that it drafts for at once.
    Raises: ValueError when there is no such drafter.
    """
    if name not in DRAFTERS:
        raise ValueError(f"there is no drafter {name!r}, there are {', '.join(DRAFTERS)}")
    with torch.inference_mode(False):
        return DRAFTERS[name](model, max_batch)
