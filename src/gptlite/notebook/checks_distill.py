"""Checks of the exercises of the chapter on distillation."""

from __future__ import annotations

from collections.abc import Callable

import torch
from torch import Tensor

from gptlite.compress.distill import distillation_loss
from gptlite.notebook.checks import Case, _report


def check_soft_gradient(soft_gradient: Callable[[Tensor, Tensor, float], Tensor]) -> None:
    """Exercise of chapter 15: `soft_gradient(student, teacher, tau)`, what backward gives for logits [n, V]."""
    cases: list[Case] = []
    for n, V, tau in ((1, 2, 1.0), (3, 5, 2.0), (2, 7, 0.5), (4, 3, 16.0)):
        generator = torch.Generator().manual_seed(n)
        student, teacher = (torch.randn(n, V, generator=generator, dtype=torch.float64) for _ in range(2))
        asked = student.clone().requires_grad_()
        (right,) = torch.autograd.grad(distillation_loss(asked, teacher, tau), asked)
        cases.append((f"n = {n}, V = {V}, tau = {tau:g}", (student, teacher, tau), right))
    _report(soft_gradient, cases)


def check_store_bytes(store_bytes: Callable[[int, int, int], int]) -> None:
    """Exercise of chapter 15: `store_bytes(n_tokens, k, vocab_size)`, fp16 logarithms and the smallest indices."""
    cases: list[Case] = [
        ("1,000 tokens, k = 8, V = 74", (1000, 8, 74), 1000 * 8 * 3),
        ("1,000 tokens, k = 8, V = 256", (1000, 8, 256), 1000 * 8 * 3),
        ("1,000 tokens, k = 8, V = 257", (1000, 8, 257), 1000 * 8 * 4),
        ("10 tokens, k = 64, V = 50,272", (10, 64, 50_272), 10 * 64 * 4),
        ("10 tokens, k = 64, V = 65,536", (10, 64, 65_536), 10 * 64 * 4),
        ("10 tokens, k = 64, V = 128,256", (10, 64, 128_256), 10 * 64 * 6),
    ]
    _report(store_bytes, cases)
