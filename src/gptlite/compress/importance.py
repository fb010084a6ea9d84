"""How much a head, a neuron or a channel matters: by its weights, its activations or its gradient."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from gptlite.compress.structured import Kept, ffn_layers, n_heads
from gptlite.layers import calibrate
from gptlite.model import GPTlite

CRITERIA = ("activation", "magnitude", "taylor", "random")


@dataclass(frozen=True)
class Scores:
    """Importance of the structures of a model; only scores of one kind and one block compare.

    Args:
        heads: of each block [H]. neurons: of each block [d_ff]. channels: of the residual stream [d].
    """

    heads: list[Tensor]
    neurons: list[Tensor]
    channels: Tensor


def calibration_batches(tokens: Tensor, context: int, n_windows: int = 64, batch_size: int = 16) -> list[Tensor]:
    """Windows spread evenly over a text, in batches [B, S]: the few inputs that importance is judged by.

    Args:
        tokens: the text [n]. context: S. n_windows: at most as many as the text has room for.
    Raises: ValueError when the text is shorter than a window, or there are to be none.
    """
    if n_windows < 1:
        raise ValueError(f"n_windows is {n_windows}, it must be at least 1")
    if len(tokens) < context:
        raise ValueError(f"the text has {len(tokens)} tokens, a window needs {context}")
    n = min(n_windows, len(tokens) // context)
    starts = torch.linspace(0, len(tokens) - context, n).long()  # [n]
    return list(tokens[starts[:, None] + torch.arange(context)].split(batch_size))


def structure_scores(model: GPTlite, batches: Sequence[Tensor], by: str = "activation", seed: int = 0) -> Scores:
    """How much each head, neuron and channel matters.

    Args:
        model: in eval mode. batches: tokens [B, S] that it is judged on.
        by: "activation", "magnitude", "taylor" (see the functions of these names), or "random", the null model.
        seed: of the random one.
    Raises: ValueError when there is no such criterion.
    """
    if by not in CRITERIA:
        raise ValueError(f"by is {by!r}, it must be one of {', '.join(CRITERIA)}")
    if by == "random":
        generator = torch.Generator().manual_seed(seed)

        def some(n: int) -> Tensor:
            return torch.rand(n, generator=generator)

        blocks = model.blocks
        neurons = [some(ffn_layers(block)[0].out_features) for block in blocks]
        return Scores([some(n_heads(block.mha)) for block in blocks], neurons, some(model.ln.weight.numel()))
    return {"activation": activation, "taylor": taylor}[by](model, batches) if by != "magnitude" else magnitude(model)


def activation(model: GPTlite, batches: Sequence[Tensor]) -> Scores:
    """Size of what each structure puts out, over all tokens {cite}`muralidharan2024minitron`.

    A head counts by the mean norm of its output [D], a neuron by its mean activation (not negative, after the ReLU),
    a channel by the mean size of the normalised stream in it, over all norms that the blocks read.

    Args:
        batches: tokens [B, S].
    """
    heads, neurons = [], []
    channels = torch.zeros(model.ln.weight.numel(), device=model.ln.weight.device)
    for at in calibrate(model, batches):
        name, mha = f"blocks.{at.index}", at.block.mha
        mixed = at.inputs[f"{name}.mha.out_proj"].unflatten(-1, (n_heads(mha), -1))  # [n, H, Dv]
        heads.append(mixed.norm(dim=-1).mean(0))  # [H]
        neurons.append(at.inputs[f"{name}.ffwd.net.2"].abs().mean(0))  # [d_ff]
        for reader in ("mha.query_proj", "ffwd.net.0"):
            channels += at.inputs[f"{name}.{reader}"].abs().mean(0)  # [d]
    return Scores(heads, neurons, channels)


@torch.no_grad()
def magnitude(model: GPTlite) -> Scores:
    """Norm of the weights that belong to each structure; needs no data, and looks at none."""
    heads, neurons = [], []
    channels = model.token_embedding.weight.float().square().sum(0)
    channels = channels + model.position_embedding.weight.float().square().sum(0)  # [d]
    for block in model.blocks:
        mha, (into, out_of) = block.mha, ffn_layers(block)
        H = n_heads(mha)
        queries = mha.query_proj.weight.float().square().sum(1).unflatten(0, (H, -1)).sum(1)  # [H]
        outputs = mha.out_proj.weight.float().square().sum(0).unflatten(0, (H, -1)).sum(1)
        shared = [  # of the KV head that a query head reads
            p.weight.float()
            .square()
            .sum(1)
            .unflatten(0, (mha.kv_shape[0], -1))
            .sum(1)
            .repeat_interleave(H // mha.kv_shape[0])
            for p in (mha.key_proj, mha.value_proj)
        ]
        heads.append((queries + outputs + shared[0] + shared[1]).sqrt())
        first, second = into.weight.float(), out_of.weight.float()
        neurons.append((first.square().sum(1) + second.square().sum(0)).sqrt())  # [d_ff]
        for reader in (mha.query_proj, mha.key_proj, mha.value_proj, into):
            channels += reader.weight.float().square().sum(0)
        channels += mha.out_proj.weight.float().square().sum(1) + second.square().sum(1)
    return Scores(heads, neurons, (channels + model.fc_out.weight.float().square().sum(0)).sqrt())


def taylor(model: GPTlite, batches: Sequence[Tensor]) -> Scores:
    """First-order estimate of what the loss rises by when a structure's output becomes 0.

    With a gate g = 1 on an output a, the estimate is |dL/dg| = |sum of a dL/da| {cite}`molchanov2019importance`, here
    averaged over windows without letting windows cancel, as for heads in {cite}`michel2019heads`.

    Args:
        batches: tokens [B, S], each window with its own next tokens as targets.
    Raises: ValueError when there are no batches.
    """
    if not batches:
        raise ValueError("the gradient needs at least 1 batch, there are 0")
    device = model.ln.weight.device
    heads = [torch.zeros(n_heads(block.mha), device=device) for block in model.blocks]
    neurons = [torch.zeros(ffn_layers(block)[0].out_features, device=device) for block in model.blocks]
    channels = torch.zeros(model.ln.weight.numel(), device=device)
    seen: dict[str, Tensor] = {}

    def watch(name: str) -> Callable[[nn.Module, tuple[Tensor, ...]], tuple[Tensor]]:
        def see(_: nn.Module, args: tuple[Tensor, ...]) -> tuple[Tensor]:
            seen[name] = args[0] if args[0].requires_grad else args[0].requires_grad_()  # where weights are frozen
            return (seen[name],)

        return see

    hooks = [
        reader.register_forward_pre_hook(watch(f"{kind}.{i}"))
        for i, block in enumerate(model.blocks)
        for kind, reader in (("heads", block.mha.out_proj), ("neurons", block.ffwd.net[2]), ("channels", block.ln2))
    ]
    n_windows = 0
    try:
        for tokens in batches:
            for window in tokens.to(device):  # [S], one at a time, so that each has its own gradient
                logits = model(window[None, :-1])[0]
                loss = F.cross_entropy(logits.float(), window[1:])
                gates = torch.autograd.grad(loss, list(seen.values()))
                felt = {name: a.detach() * g for (name, a), g in zip(seen.items(), gates)}
                for i in range(len(model.blocks)):
                    heads[i] += felt[f"heads.{i}"].sum(0).unflatten(0, (len(heads[i]), -1)).sum(1).abs()
                    neurons[i] += felt[f"neurons.{i}"].sum(0).abs()
                    channels += felt[f"channels.{i}"].sum(0).abs()
                n_windows += 1
    finally:
        for hook in hooks:
            hook.remove()
    return Scores([s / n_windows for s in heads], [s / n_windows for s in neurons], channels / n_windows)


def choose_heads(scores: Tensor, n_kv_heads: int, n_keep: int, whole: bool = False) -> Tensor:
    """The most important query heads that can be kept together, as ascending indices [n_keep].

    Args:
        scores: of the query heads [H]. n_kv_heads: G; query head h reads KV head h // (H / G).
        n_keep: heads that are left.
        whole: groups go whole, with their KV head; else each group keeps as many, and all KV heads stay.
    Raises: ValueError when n_keep heads cannot be left so.
    """
    H = len(scores)
    if not 1 <= n_keep <= H:
        raise ValueError(f"{n_keep} heads are to be kept, it must be 1 to {H}")
    size = H // n_kv_heads
    if whole:
        if n_keep % size:
            raise ValueError(f"{n_keep} heads are to be kept, whole groups have {size}: it must be a multiple")
        groups = scores.unflatten(0, (n_kv_heads, size)).sum(1).topk(n_keep // size).indices.sort().values
        return (groups[:, None] * size + torch.arange(size, device=scores.device)).flatten()
    if size == 1:
        return scores.topk(n_keep).indices.sort().values
    if n_keep % n_kv_heads:
        raise ValueError(f"{n_keep} heads are to be kept, each of the {n_kv_heads} KV heads needs as many: a multiple")
    best = scores.unflatten(0, (n_kv_heads, size)).topk(n_keep // n_kv_heads, dim=1).indices  # [G, n_keep / G]
    return (best + torch.arange(n_kv_heads, device=scores.device)[:, None] * size).flatten().sort().values


def choose(
    scores: Scores, model: GPTlite, n_heads: int = 0, n_neurons: int = 0, n_channels: int = 0, whole: bool = False
) -> Kept:
    """What to keep of each block by its scores; 0 leaves all of a kind.

    Args:
        n_heads, n_neurons: left in each block. n_channels: left of the stream. whole: see `choose_heads`.
    Raises: ValueError when more is to be kept than there is, or less than nothing.
    """

    def top(part: Tensor, n: int, what: str) -> Tensor:
        if not 1 <= n <= len(part):
            raise ValueError(f"{n} {what} are to be kept, it must be 1 to {len(part)}")
        return part.topk(n).indices.sort().values

    heads = neurons = None
    if n_heads:
        heads = [choose_heads(s, b.mha.kv_shape[0], n_heads, whole) for s, b in zip(scores.heads, model.blocks)]
    if n_neurons:
        neurons = [top(s, n_neurons, "neurons") for s in scores.neurons]
    return Kept(heads, neurons, top(scores.channels, n_channels, "channels") if n_channels else None)
