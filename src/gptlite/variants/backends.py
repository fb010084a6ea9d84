"""PyTorch's own fused attention: which back end of SDPA runs, why the others don't, and FlexAttention for any mask."""

from __future__ import annotations

import re
import warnings
from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

import torch.nn.functional as F
from torch import Tensor
from torch.nn.attention import SDPBackend, sdpa_kernel
from torch.nn.attention.flex_attention import BlockMask, create_block_mask, flex_attention
from torch.utils._python_dispatch import TorchDispatchMode

BACKENDS = {
    "math": SDPBackend.MATH,
    "efficient": SDPBackend.EFFICIENT_ATTENTION,
    "flash": SDPBackend.FLASH_ATTENTION,
    "cudnn": SDPBackend.CUDNN_ATTENTION,
}
NO_REASON = ("No viable backend", "No available kernel")  # how torch says that none is left
HEADINGS = {"efficient": "memory efficient", "flash": "flash attention", "cudnn": "cudnn attention"}


class _Kernels(TorchDispatchMode):
    """Notes the operators that run."""

    def __init__(self) -> None:
        super().__init__()
        self.names: list[str] = []

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        with self:  # in inference mode composites arrive whole: look at what they are made of
            result = func.decompose(*args, **(kwargs or {}))
        if result is not NotImplemented:
            return result
        self.names.append(func.overloadpacket.__name__)
        return func(*args, **(kwargs or {}))


@dataclass(frozen=True)
class Choice:
    """What became of one back end for one call.

    Args:
        backend: its name, of BACKENDS.
        kernel: the operator that ran, or None.
        reason: why it did not run; empty when it did.
    """

    backend: str
    kernel: str | None
    reason: str


def run_backend(
    backend: str, q: Tensor, k: Tensor, v: Tensor, mask: Tensor | None = None, causal: bool = False
) -> Tensor:
    """`scaled_dot_product_attention` by one back end and no other: q [B, H, S, D] -> [B, H, S, Dv].

    Args:
        backend: of BACKENDS. k, v: [B, G, T, D] and [B, G, T, Dv]. mask: bool, or None. causal: as is_causal.
    Raises: ValueError on an unknown name or a mask beside causal, which back ends take in different ways; RuntimeError
        when the back end can't do it, and then `try_backend` says why.
    """
    if mask is not None and causal:
        raise ValueError("mask is given and causal is True, it must be one or the other")
    if backend not in BACKENDS:
        raise ValueError(f"no back end {backend!r}, there are {', '.join(BACKENDS)}")
    with sdpa_kernel(BACKENDS[backend]):
        return F.scaled_dot_product_attention(
            q, k, v, attn_mask=mask, is_causal=causal, enable_gqa=q.shape[1] != k.shape[1]
        )


def kernel_of(fn: Callable[[], Any]) -> str:
    """The attention operator that a call runs; "matrix products" when it is done by those."""
    with _Kernels() as kernels:
        fn()
    return next((name for name in kernels.names if "attention" in name), "matrix products")


def count_operators(fn: Callable[[], Any]) -> int:
    """Operators that a call runs, each at least one kernel on a GPU; views are among them."""
    with _Kernels() as kernels:
        fn()
    return len(kernels.names)


def try_backend(
    backend: str, q: Tensor, k: Tensor, v: Tensor, mask: Tensor | None = None, causal: bool = False
) -> Choice:
    """Runs one back end and says which kernel that was, or why there was none, in torch's own words where it has some.

    Args:
        backend: of BACKENDS. q, k, v, mask, causal: as in `run_backend`, q [B, H, S, D].
    """
    with warnings.catch_warnings(record=True) as said:
        warnings.simplefilter("always")
        try:
            return Choice(backend, kernel_of(lambda: run_backend(backend, q, k, v, mask, causal)), "")
        except RuntimeError as error:
            message = str(error).splitlines()[0]
    reasons = reasons_under(HEADINGS.get(backend, ""), [str(warning.message) for warning in said])
    if not reasons and message.startswith(NO_REASON):
        reasons = [f"PyTorch has no such kernel for tensors on {q.device.type}"]
    return Choice(backend, None, " ".join(reasons) or message)


def reasons_under(heading: str, said: list[str]) -> list[str]:
    """Of torch's warnings, those about one kernel: they follow a line that says "... kernel not used because".

    Args:
        heading: how that line begins, in small letters. said: the warnings in their order.
    """
    found, inside = [], False
    for text in said:
        text = re.sub(r"\s*\(Triggered internally.*", "", text, flags=re.DOTALL)
        if "kernel not used because" in text:
            inside = text.lower().startswith(heading)
        elif inside:
            found.append(text)
    return found


def survey(
    q: Tensor, k: Tensor, v: Tensor, mask: Tensor | None = None, causal: bool = False
) -> tuple[str, list[Choice]]:
    """All back ends on the same call.

    Args:
        q, k, v, mask, causal: as in `run_backend`, q [B, H, S, D].
    Returns: the operator that runs when torch may choose, and what became of each back end.
    """
    gqa = q.shape[1] != k.shape[1]
    free = kernel_of(lambda: F.scaled_dot_product_attention(q, k, v, attn_mask=mask, is_causal=causal, enable_gqa=gqa))
    return free, [try_backend(backend, q, k, v, mask, causal) for backend in BACKENDS]


# a rule for one pair: (batch, head, query, key), each an index as a tensor -> whether the query sees the key
Rule = Callable[[Tensor, Tensor, Tensor, Tensor], Tensor]


def position_rule(q_pos: Tensor, k_pos: Tensor, window: int | None = None, sinks: int = 0) -> Rule:
    """`gptlite.attention.visible` as a rule for FlexAttention: q_pos [B, S] and k_pos [B, T]; -1 is a hole."""

    def rule(b: Tensor, h: Tensor, i: Tensor, j: Tensor) -> Tensor:
        q, k = q_pos[b, i], k_pos[b, j]
        seen = (k >= 0) & (k <= q)
        return seen if window is None else seen & ((q - k < window) | (k < sinks))

    return rule


def block_mask(rule: Rule, q: Tensor, k: Tensor, block: int = 128) -> BlockMask:
    """Which blocks of `block` queries and keys a rule hides, shows in part, or shows whole {cite}`dong2024flex`.

    Args:
        rule: the same for all heads. q: [B, H, S, D]. k: [B, G, T, D].
    Raises: ValueError when the block is below 1.
    """
    if block < 1:
        raise ValueError(f"block is {block}, it must be at least 1")
    return create_block_mask(rule, q.shape[0], None, q.shape[2], k.shape[2], device=q.device.type, BLOCK_SIZE=block)


def flex_attend(q: Tensor, k: Tensor, v: Tensor, mask: BlockMask, scale: float | None = None) -> Tensor:
    """FlexAttention without compilation: the same result, from the whole matrix of scores {cite}`dong2024flex`.

    `torch.compile(flex_attention)` makes a fused kernel of it that skips hidden blocks; on a CPU that needs a C++
    compiler and takes its time, so the book's cells call this one.

    Args:
        q, k, v: [B, H, S, D], [B, G, T, D], [B, G, T, Dv]. mask: of `block_mask`.
        scale: of the scores; None means 1 / sqrt(D).
    Returns: [B, H, S, Dv]; zeros where a query sees no key.
    """
    with warnings.catch_warnings():
        warnings.filterwarnings("ignore", message="flex_attention called without torch.compile")
        out = flex_attention(q, k, v, block_mask=mask, scale=scale, enable_gqa=q.shape[1] != k.shape[1])
    assert isinstance(out, Tensor)
    return out
