"""Checks of the exercises of the chapter on fewer KV heads."""

from __future__ import annotations

from collections.abc import Callable

import torch
from torch import Tensor

from gptlite.notebook.checks import Case, _report


def check_kept_share(kept_share: Callable[[int, int, int, int], float]) -> None:
    """Exercise of chapter 11: `kept_share(n_heads, n_kv_heads, d_head, d_latent)`, the share of the MHA cache."""
    cases: list[Case] = [
        ("32 heads over 8 KV heads of 128", (32, 8, 128, 0), 0.25),
        ("8 heads over 1 KV head of 32", (8, 1, 32, 0), 0.125),
        ("8 heads of 32 and a latent of 128", (8, 8, 32, 128), 0.25),
        ("16 heads of 128, a latent of 512 and whatever n_kv_heads says", (16, 16, 128, 512), 0.125),
        ("12 heads over 12", (12, 12, 64, 0), 1.0),
    ]
    _report(kept_share, cases)


def check_latent_queries(latent_queries: Callable[[Tensor, Tensor], Tensor]) -> None:
    """Exercise of chapter 11: `latent_queries(w_q, w_uk)`, the matrices [H, r, d] that turn x into latent queries.

    The reader's function gets the query weights [H, D, d] and the keys' up-projection [H, D, r].
    """
    small = torch.tensor([[[1.0, 2.0], [0.0, 1.0]]], dtype=torch.float64), torch.tensor([[[3.0], [1.0]]]).double()
    cases: list[Case] = [("w_q [[[1, 2], [0, 1]]] and w_uk [[[3], [1]]]", small, torch.tensor([[[3.0, 7.0]]]).double())]
    for H, D, d, r in ((2, 3, 5, 4), (1, 4, 4, 1), (3, 2, 6, 6)):
        generator = torch.Generator().manual_seed(H)
        w_q = torch.randn(H, D, d, generator=generator, dtype=torch.float64)
        w_uk = torch.randn(H, D, r, generator=generator, dtype=torch.float64)
        right = torch.stack([w_uk[h].T @ w_q[h] for h in range(H)])
        cases.append((f"H = {H}, D = {D}, d = {d}, r = {r}", (w_q, w_uk), right))
    _report(latent_queries, cases)
