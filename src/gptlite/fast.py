"""What makes the same step faster without changing what it computes; applied last, on purpose."""

from __future__ import annotations

import copy
import itertools
import math
from collections.abc import Callable, Sequence
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from gptlite.cache.contract import Cache, Segment
from gptlite.layers import linear_layers, replace_linear
from gptlite.model import GPTlite, MultiHeadAttention

# a smaller layer is quicker as it is: calling another kernel takes longer than it saves
MIN_WEIGHTS = 2**17


class JoinedLinear(nn.Module):
    """Linear layers that read the same input, as one: the base of layers that read such a weight faster.

    Args:
        layers: linear layers with the same number of inputs, in fp32 on a CPU; their outputs follow one another.
    Raises: ValueError when a layer is not a plain one in fp32 on a CPU.
    """

    done: str  # what is done to the weights, in a word

    def __init__(self, *layers: nn.Linear) -> None:
        super().__init__()
        for layer in layers:
            self.check(layer)
        self.in_features = layers[0].in_features
        self.sizes = [layer.out_features for layer in layers]
        self.out_features = sum(self.sizes)
        self.weight = torch.cat([layer.weight.detach() for layer in layers])  # [out, in]
        biases = [layer.weight.new_zeros(layer.out_features) if layer.bias is None else layer.bias for layer in layers]
        self.bias = torch.cat([bias.detach() for bias in biases])  # [out]

    @classmethod
    def check(cls, layer: nn.Module) -> None:
        """Raises: ValueError with the reason when the layer cannot be taken."""
        if type(layer) is not nn.Linear:
            raise ValueError(f"a {type(layer).__name__} cannot be {cls.done}, only a plain Linear")
        if layer.weight.device.type != "cpu" or layer.weight.dtype != torch.float32:
            found = f"{layer.weight.dtype} on {layer.weight.device.type}"
            raise ValueError(f"a layer in {found} cannot be {cls.done}, it must be torch.float32 on cpu")

    def _save_to_state_dict(self, *args: Any) -> None:
        raise ValueError(f"{self.done} weights are not saved: save the model before it is {self.done}")


class PackedLinear(JoinedLinear):
    """A `JoinedLinear` with its weight in the blocked order of oneDNN's kernels.

    At batch 1 a linear layer takes as long as reading its weight, and a general product reads rows of it in an order
    that the processor's prefetching serves badly. Packed, the weight lies in memory in the order in which the kernel
    wants it, for one token and for many. Only sums are rounded in another order.

    Raises: ValueError when this build of torch has no oneDNN, too.
    """

    done = "packed"

    def __init__(self, *layers: nn.Linear) -> None:
        super().__init__(*layers)
        self.weight = torch.ops.mkldnn._reorder_linear_weight(self.weight, None)  # the same numbers, in blocks

    @classmethod
    def check(cls, layer: nn.Module) -> None:
        if not torch.backends.mkldnn.is_available():
            raise ValueError("this build of torch has no oneDNN, whose kernels read packed weights")
        super().check(layer)

    def forward(self, x: Tensor) -> Tensor:
        """x [..., in] -> [..., out], fp32."""
        return torch.ops.mkldnn._linear_pointwise(x, self.weight, self.bias, "none", [], "")


class SplitLinear(JoinedLinear):
    """A `JoinedLinear` whose product with one token is dealt out to the threads in parts.

    MKL can leave the product of a matrix and one vector to a single thread, and one core alone does not draw all that
    the memory can give. A batch of products it deals out. So rows of the weight, as they lie in memory, become a batch
    of smaller weights that all multiply the same token. Several tokens are multiplied as ever, and a build of torch
    without MKL does one part after another and gains nothing.

    There are as many parts as divide both the rows and the threads: one, the whole, when nothing else does.
    """

    done = "split"

    def __init__(self, *layers: nn.Linear) -> None:
        super().__init__(*layers)
        self.n_parts = math.gcd(self.out_features, torch.get_num_threads())
        self.weights = self.weight.view(self.n_parts, -1, self.in_features).mT  # [n, in, out / n]
        self.biases = self.bias.view(self.n_parts, 1, -1)  # [n, 1, out / n]

    def forward(self, x: Tensor) -> Tensor:
        """x [..., in] -> [..., out], fp32."""
        if self.n_parts == 1 or x.numel() != self.in_features:
            return F.linear(x, self.weight, self.bias)
        every = x.reshape(1, 1, -1).expand(self.n_parts, 1, -1)  # [n, 1, in]
        return torch.baddbmm(self.biases, every, self.weights).view(*x.shape[:-1], self.out_features)


class JoinedAttention(MultiHeadAttention):
    """Multi-head attention whose queries, keys and values come from one product."""

    qkv_proj: Any  # a `JoinedLinear`, or another layer with `sizes`
    shape: tuple[int, int, int]

    @property
    def kv_shape(self) -> tuple[int, int, int]:
        return self.shape

    def project(self, x: Tensor) -> tuple[Tensor, Tensor, Tensor | None]:
        q, k, v = torch.split_with_sizes(self.qkv_proj(x), self.qkv_proj.sizes, -1)
        n, (G, D, Dv) = len(x), self.shape
        return q.view(n, -1, D), k.view(n, G, D), v.view(n, G, Dv)


def pack(model: GPTlite) -> GPTlite:
    """Packs the weights of all large linear layers, for inference on a CPU; queries, keys and values become one layer.

    Good for steps of several tokens; for one, `split` may be faster. Convert, quantise and swap before: what replaced a
    linear layer stays as it is. The packed model can be neither trained nor saved.

    Args:
        model: in fp32 on a CPU; changed in place, and its old weights are dropped, so memory does not grow.
    Returns: the model, in eval mode.
    Raises: ValueError when this build of torch has no oneDNN, or the model is not in fp32 on a CPU.
    """
    return _join(model, PackedLinear)


def split(model: GPTlite) -> GPTlite:
    """Splits the product of each large linear layer with one token among the threads there are now, on a CPU.

    For batch 1 on several threads, where torch has MKL (`SplitLinear`); whether it pays there is to be measured.
    Queries, keys and values become one layer, as in `pack`, and what holds there of the order of changes, and of
    training and saving, holds here.

    Args:
        model: in fp32 on a CPU; changed in place, and its old weights are dropped, so memory does not grow.
    Returns: the model, in eval mode.
    Raises: ValueError when the model is not in fp32 on a CPU.
    """
    return _join(model, SplitLinear)


def _join(model: GPTlite, kind: type[JoinedLinear]) -> GPTlite:
    """Replaces the model's large linear layers by layers of this kind."""
    for layer in linear_layers(model, head=True).values():
        if type(layer) is nn.Linear:
            kind.check(layer)

    def make(name: str, layer: nn.Module) -> nn.Module:
        return kind(layer) if _large([layer]) else layer  # type: ignore[arg-type]

    for block in model.blocks:
        block.mha = fuse_projections(block.mha, _large, kind)
    return replace_linear(model.eval(), make, head=True)


def _large(layers: Sequence[nn.Module]) -> bool:
    plain = [layer for layer in layers if type(layer) is nn.Linear]
    return len(plain) == len(layers) and sum(layer.weight.numel() for layer in plain) >= MIN_WEIGHTS


def fuse_projections(
    mha: MultiHeadAttention, takes: Callable[[Sequence[nn.Module]], bool], make: Callable[..., nn.Module]
) -> MultiHeadAttention:
    """The same attention with one layer for queries, keys and values.

    Args:
        takes: whether `make` can have these three layers.
        make: makes one layer of them, with their `sizes`.
    Returns: a new attention that shares the rest; `mha` itself when its layers are not taken, or it has a `project` of
        its own.
    """
    names = ("query_proj", "key_proj", "value_proj")
    if type(mha).project is not MultiHeadAttention.project:
        return mha
    layers = [getattr(mha, name) for name in names]
    if not takes(layers):
        return mha
    shape = mha.kv_shape
    new: Any = copy.copy(mha)
    new._modules = {name: part for name, part in mha._modules.items() if name not in names}
    # its own `mix` and `mask` stay
    new.__class__ = type(f"Joined{type(mha).__name__}", (JoinedAttention, type(mha)), {})
    new.shape, new.qkv_proj = shape, make(*layers).train(mha.training)
    return new


_numbers = itertools.count()


def _compiled(function: Callable[..., Tensor], autotune: bool) -> Callable[..., Tensor]:
    """`torch.compile` of a function of one model, with its weights frozen into the program.

    The compiler counts by the name of the code how many programs it has made. All models share their code, so those of
    another would count too: each gets its own name.
    """

    def call(*args: Any) -> Tensor:
        return function(*args)

    call.__code__ = call.__code__.replace(co_name=f"call_{next(_numbers)}")
    options: dict[str, Any] = {
        "cpp_wrapper": True,
        "max_autotune": autotune,
        "max_autotune_report_choices_stats": False,  # it would print them
        "autotune_num_choices_displayed": 0,
        # frozen weights do not change, so looking at a hundred of them before each step finds nothing
        "guard_filter_fn": torch.compiler.skip_guard_on_all_nn_modules_unsafe,
    }
    # not dynamic: a program for any batch is slower for each, so every batch gets its own
    program = torch.compile(call, dynamic=False, options=options)
    # a first call compiles, and any later one whose shapes are new; as an option this setting is not seen
    freezing = torch._inductor.config.patch(freezing=True)  # made once: making it takes longer than a small product

    def frozen(*args: Any) -> Tensor:
        with freezing:
            return program(*args)

    return frozen


class CompiledStep:
    """A model's body with its decode step compiled for the weights it has; other steps run as they did.

    A decode step has one new token for each sequence, in a cache that has lines.

    Args:
        run: the body, `GPTlite.run`.
        autotune: see `compile_step`.
    """

    def __init__(self, run: Callable[[Tensor, list[Segment], Cache | None], Tensor], autotune: bool) -> None:
        self.plain = run
        self.compiled = _compiled(run, autotune)

    def __call__(self, tokens: Tensor, segments: list[Segment], cache: Cache | None = None) -> Tensor:
        """tokens [n_new] -> hidden states [n_new, d], as `GPTlite.run`."""
        segment = segments[0]
        alone = len(segments) == 1 and segment.positions.shape[1] == 1 and segment.mask is None
        # a batch that changes would want a program for each of its sizes: all lines of the cache never do
        step = cache.whole(segment) if alone and cache is not None else None
        if step is None:
            return self.plain(tokens, segments, cache)
        assert segment.lines is not None and step.k_pos is not None
        if step is not segment:
            tokens = tokens.new_zeros(len(step.positions)).index_copy(0, segment.lines, tokens)
        torch._dynamo.mark_dynamic(step.k_pos, 1)  # T grows with every step: one program serves all
        hidden = self.compiled(tokens, [step], cache)
        return hidden if step is segment else hidden[segment.lines]


class CompiledHead:
    """A model's head, compiled for 1, 2, 4, ... rows: who samples changes with every step of an engine.

    Args:
        head: `GPTlite.head`.
        autotune: see `compile_step`.
    """

    max_rows = 128  # the compiler makes eight programs at most

    def __init__(self, head: Callable[[Tensor], Tensor], autotune: bool) -> None:
        self.plain = head
        self.compiled = _compiled(head, autotune)

    def __call__(self, hidden: Tensor) -> Tensor:
        """hidden [..., d] -> logits [..., V], as `GPTlite.head`."""
        if hidden.dim() != 2 or not 1 <= len(hidden) <= self.max_rows:
            return self.plain(hidden)
        n = len(hidden)
        missing = (1 << (n - 1).bit_length()) - n
        rows = F.pad(hidden, (0, 0, 0, missing)) if missing else hidden.contiguous()  # [1, 2, 4, ..., d]
        return self.compiled(rows)[:n]


def compile_step(model: GPTlite, autotune: bool = True) -> GPTlite:
    """The same model with its decode step compiled, weights frozen into it; one program for any number of keys.

    A small model's step is mostly the cost of starting its operations. Compiled {cite}`pytorch2024`, those
    between two products become one, and a product's kernel is generated and timed for the very shape of its weight.
    It takes from ten seconds to minutes, once for each batch size, at the first step of that size. A small head stays
    as it is: calling a program takes longer than the product.

    Convert, quantise and swap before, and neither pack nor split: the compiler packs. Weights that it packs are copies,
    so the memory of the weights doubles; the parameters stay for prefill. Change none afterwards: the decode step would
    see some of the changes and not others.

    Args:
        model: in eval mode; its weights are shared with the result.
        autotune: time several kernels for each product; without it compiling is faster and the step slower.
    Returns: a model for `generate`, an engine or `decode_step`, over a cache that has lines (`StaticCache`); over
        another it runs as it did.
    Raises: ValueError when the model is in training mode, packed or split.
    """
    if model.training:
        raise ValueError("the model is in training mode, a compiled step needs model.eval()")
    for module in model.modules():
        if isinstance(module, JoinedLinear):
            raise ValueError(
                f"the model is {module.done}, compile it as it was before: the compiler packs its weights itself"
            )
    new: Any = copy.copy(model)
    new.run = CompiledStep(model.run, autotune)
    if model.fc_out.in_features * model.fc_out.out_features >= MIN_WEIGHTS:
        new.head = CompiledHead(model.head, autotune)
    return new
