"""Attention by each back end against the context, and the tiles of one head of the trained model, one by one."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from functools import partial
from typing import Any

import torch
from torch import Tensor

from gptlite.checkpoint import load
from gptlite.measure import peak_memory, time_call
from gptlite.model import MultiHeadAttention
from gptlite.record import Point, Recording, Step, sweep
from gptlite.variants.backends import BACKENDS, run_backend, try_backend
from gptlite.variants.flash import flash_attend, flash_states

TILED = "tiled"  # the package's own, among torch's back ends


def attention_of(backend: str, q: Tensor, k: Tensor, v: Tensor, tile: int) -> Callable[[], Tensor]:
    """Causal attention of q, k, v [B, H, S, D] over themselves, ready to be called.

    Args:
        backend: of BACKENDS, or TILED. tile: queries and keys of a tile, for TILED.
    """
    if backend != TILED:
        return partial(run_backend, backend, q, k, v, None, True)
    positions = torch.arange(q.shape[2], device=q.device).expand(q.shape[0], -1)
    return partial(flash_attend, q, k, v, q_pos=positions, k_pos=positions, tile_q=tile, tile_k=tile)


@sweep(
    "attention",
    "seconds and peak memory of causal attention, by back end and context",
    backends=["math", "efficient", "flash", "cudnn", TILED],
    contexts=[128, 256, 512, 1024, 2048, 4096],
    batch=1,
    n_heads=8,
    d_head=64,
    tile=128,
    repeats=5,
    warmup=1,
)
def _attention(recording: Recording) -> Iterator[Step]:
    params = recording.params
    device, dtype = params["device"], getattr(torch, params["dtype"])
    B, H, D = params["batch"], params["n_heads"], params["d_head"]
    if unknown := [name for name in params["backends"] if name not in (*BACKENDS, TILED)]:
        raise ValueError(f"backends has {unknown[0]!r}, there are {', '.join((*BACKENDS, TILED))}")
    kernels: dict[str, str] = {TILED: "matrix products"}
    for backend in params["backends"]:
        if backend != TILED:
            few = torch.zeros(B, H, 16, D, device=device, dtype=dtype)
            choice = try_backend(backend, few, few, few, causal=True)
            if choice.kernel:
                kernels[backend] = choice.kernel
            else:
                recording.left_out.append({"at": {"backend": backend}, "why": choice.reason})
    recording.data["kernels"] = kernels

    def measure(backend: str, n: int) -> Point:
        q, k, v = (torch.randn(B, H, n, D, device=device, dtype=dtype) for _ in range(3))
        with torch.inference_mode():
            call = attention_of(backend, q, k, v, params["tile"])
            timing = time_call(call, device, params["warmup"], params["repeats"])
            peak = peak_memory(call, device)
        pairs = B * H * n * (n + 1) / 2
        return Point({"backend": backend, "context": n}, timing.wall, 4 * D * pairs, 4 * q.nbytes, peak_bytes=peak)

    for n in params["contexts"]:
        for backend in params["backends"]:
            if backend in kernels:
                # queries, keys, values, output; and the matrix as scores, weights and mask where it exists
                needed = B * H * n * dtype.itemsize * (4 * D + (3 * n if backend == "math" else 8 * D))
                yield {"backend": backend, "context": n}, needed, partial(measure, backend, n)


@sweep(
    "flash-tiles",
    "the running maximum, sum and output of one head of the trained model, tile by tile; no times",
    model="gptlite",
    prompt="To be, or not to",
    layer=5,
    head=4,
    tile=4,
    shown=8,
)
def _flash_tiles(recording: Recording) -> Iterator[Step]:
    params = recording.params
    model, tokenizer = load(params["model"], params["device"], getattr(torch, params["dtype"]))
    tokens = tokenizer.encode(params["prompt"])[None].to(params["device"])
    heads = model.blocks[0].mha.query_proj.out_features // model.blocks[0].mha.d_head
    for name, most in (("layer", len(model.blocks)), ("head", heads)):
        if params[name] > most:
            raise ValueError(f"{name} is {params[name]}, the model has {most}, counted from 1")
    recording.data |= trace_tiles(
        *head_of(model, tokens, params["layer"] - 1, params["head"] - 1), params["tile"], params["shown"]
    )
    return iter(())


@torch.inference_mode()
def head_of(model: Any, tokens: Tensor, layer: int, head: int) -> tuple[Tensor, Tensor, Tensor]:
    """Queries, keys and values [1, 1, S, D] of one head while the model reads tokens [1, S].

    Args:
        model: the GPTlite. layer, head: counted from 0.
    """
    seen: list[tuple[Tensor, Tensor, Tensor]] = []

    class Watched(MultiHeadAttention):
        def mix(self, q: Tensor, k: Tensor, v: Tensor, q_pos: Tensor, k_pos: Tensor, mask: Tensor | None) -> Tensor:
            seen.append((q, k, v))
            return super().mix(q, k, v, q_pos, k_pos, mask)

    kind = type(model.blocks[layer].mha)
    model.blocks[layer].mha.__class__ = Watched
    try:
        model(tokens)
    finally:
        model.blocks[layer].mha.__class__ = kind
    q, k, v = seen[0]
    group = head * k.shape[1] // q.shape[1]
    return q[:, head, None], k[:, group, None], v[:, group, None]


def trace_tiles(q: Tensor, k: Tensor, v: Tensor, tile: int, shown: int) -> dict[str, Any]:
    """What the package's own attention holds after each tile, for q, k, v [1, 1, S, D] under a causal mask.

    Args:
        tile: queries and keys of a tile. shown: components of the output to keep.
    Returns: "steps", in order: the tiles "i" (queries) and "j" (keys), and of each query m, l, shrink (by what the sums
        so far were multiplied) and out (acc / l); "n" queries, "tile", and "out", the rows of the result.
    """
    n = q.shape[2]
    pos = torch.arange(n, device=q.device)[None]
    before: dict[int, Tensor] = {}
    steps: list[dict[str, Any]] = []

    def rounded(x: Tensor) -> Any:
        return [[round(value, 4) for value in row] for row in x.tolist()] if x.dim() == 2 else rounded(x[None])[0]

    def observe(i: int, j: int, m: Tensor, l: Tensor, acc: Tensor) -> None:
        m, l, acc = m.flatten(), l.flatten(), acc.flatten(0, -2)  # [s], [s], [s, Dv]
        shrink = (before[i] - m).exp() if i in before else torch.ones_like(m)
        before[i] = m
        row = {"m": m, "l": l, "shrink": shrink, "out": (acc / l[:, None])[:, :shown]}
        steps.append({"i": i, "j": j} | {name: rounded(x) for name, x in row.items()})

    out, _ = flash_states(q, k, v, q_pos=pos, k_pos=pos, tile_q=tile, tile_k=tile, observe=observe)
    return {"n": n, "tile": tile, "steps": steps, "out": rounded(out[0, 0, :, :shown])}
