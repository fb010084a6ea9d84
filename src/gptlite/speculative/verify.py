"""Verification: which drafted tokens stay, and which token follows them, so that the target's distribution holds."""

from __future__ import annotations

from collections.abc import Sequence

import torch
from torch import Tensor

from gptlite.sampling import sample

Tree = Sequence[int]  # for each draft the index of its parent among the drafts, -1 for a child of the text


def verify(
    p: Tensor, q: Tensor | None, tokens: Tensor, u: Tensor, parents: Tensor | None = None
) -> tuple[Tensor, Tensor]:
    """Keeps or rejects drafts so that what is emitted is distributed as if the target had drawn every token itself.

    A draft x stays with probability min(1, p(x) / q(x)); where one is rejected, the next token comes from the
    residual max(p - q, 0), normalised {cite}`leviathan2023speculative,chen2023speculative`. In a tree, the siblings
    of a rejected draft are tried against the residual in turn {cite}`miao2024specinfer`.

    Args:
        p: the target's distribution after the text, and after each draft [B, n + 1, V], as `probabilities` gives it.
        q: the distribution that each draft was really drawn from [B, n, V], given the siblings drawn before it;
            None when the drafter had no choice, which is a q of 1 on its token.
        tokens: the drafts [B, n]; -1 at the end of a row that has fewer.
        u: uniform numbers in [0, 1) of each row's own generator [B, n + 1], the last for the token that follows.
        parents: [B, n] when the drafts are trees: index of each one's parent in its row, -1 for a child of the text,
            parents before children and siblings in the order in which they were drawn. None for a chain.
    Returns: which drafts stay, bool [B, n], one path from the text on; and the token that follows it [B], int64.
    Raises: ValueError when the shapes disagree.
    """
    B, n = tokens.shape
    shapes = {"p": (p, (B, n + 1, p.shape[-1])), "q": (q, (B, n, p.shape[-1])), "u": (u, (B, n + 1))}
    for name, (given, shape) in (shapes | {"parents": (parents, (B, n))}).items():
        if given is not None and given.shape != shape:
            raise ValueError(f"{name} has shape {tuple(given.shape)}, for {n} drafts it must be {shape}")
    if p.device.type == "mps":  # which has no fp64
        on_host = (None if part is None else part.cpu() for part in (p, q, tokens, u, parents))
        kept, following = verify(*on_host)  # type: ignore[arg-type]
        return kept.to(p.device), following.to(p.device)
    u = u.to(p.device)
    if parents is None:
        return _verify_chain(p, q, tokens, u)
    return _verify_tree(p, q, tokens, u, parents)


def _verify_chain(p: Tensor, q: Tensor | None, tokens: Tensor, u: Tensor) -> tuple[Tensor, Tensor]:
    B, n = tokens.shape
    drafted, x = tokens >= 0, tokens.clamp(min=0)[..., None]  # [B, n], [B, n, 1]
    p_x = p[:, :-1].gather(-1, x)[..., 0]  # [B, n]
    q_x = torch.ones_like(p_x) if q is None else q.gather(-1, x)[..., 0]  # [B, n]
    # u < p / q without the division: q = 0 does no harm, and p = 0 accepts nothing
    accepted = (u[:, :-1] * q_x < p_x) & drafted
    kept = accepted.cumprod(1).bool()  # a draft stays only with all before it
    n_kept = kept.sum(1)  # [B]
    rest = p[torch.arange(B, device=p.device), n_kept]  # [B, V]; when all are kept, the bonus token's
    if n:
        stopped = n_kept.clamp(max=n - 1)[:, None]  # [B, 1], the first rejected draft
        rejected = drafted.gather(1, stopped) & ~kept.gather(1, stopped)  # [B, 1], or none was
        rest = torch.where(rejected, _residual(rest, q, x, stopped[:, 0]), rest)
    return kept, sample(rest, u[:, -1])


def _verify_tree(p: Tensor, q: Tensor | None, tokens: Tensor, u: Tensor, parents: Tensor) -> tuple[Tensor, Tensor]:
    B, n = tokens.shape
    x = tokens.clamp(min=0)[..., None]  # [B, n, 1]
    kept = torch.zeros_like(tokens, dtype=torch.bool)
    end = tokens.new_full((B,), -1)  # [B], the draft that the kept path ends in; -1 is the text
    rest = p[:, 0]  # [B, V], what the target has left for the next token
    for i in range(n):
        q_x = 1.0 if q is None else q[:, i].gather(-1, x[:, i])[:, 0]  # [B]
        tried = (parents[:, i] == end) & (tokens[:, i] >= 0)  # [B]
        accepted = tried & (u[:, i] * q_x < rest.gather(-1, x[:, i])[:, 0])
        left = _residual(rest, q, x, tokens.new_full((B,), i))
        rest = torch.where((tried & ~accepted)[:, None], left / left.sum(-1, keepdim=True), rest)
        rest = torch.where(accepted[:, None], p[:, i + 1], rest)
        end = torch.where(accepted, i, end)
        kept[:, i] = accepted
    return kept, sample(rest, u[:, -1])


def _residual(p: Tensor, q: Tensor | None, x: Tensor, i: Tensor) -> Tensor:
    """What p [B, V] has more than the distribution of draft i [B] of each row: max(p - q, 0), not normalised."""
    rows = torch.arange(len(p), device=p.device)
    left = p.scatter(-1, x[rows, i], 0.0) if q is None else (p - q[rows, i]).clamp(min=0)  # [B, V]
    # rejected, so p(x) < q(x) and something is left, save where the two differ by rounding alone
    return torch.where(left.sum(-1, keepdim=True) > 0, left, p)


def verify_greedy(best: Sequence[int], tokens: Sequence[int], parents: Tree | None = None) -> tuple[list[int], int]:
    """What `verify` comes to at temperature 0, for one row, on the host: a draft stays when the target agrees.

    Args:
        best: the target's most probable token after the text, and after each draft [n + 1].
        tokens: the drafts [n].
        parents: as in `verify` [n].
    Returns: indices of the drafts that stay, one path; and the token that follows it.
    """
    path, end = list[int](), -1
    for i, token in enumerate(tokens):
        if (i - 1 if parents is None else parents[i]) == end and token == best[end + 1]:
            path.append(i)
            end = i
    return path, best[end + 1]
