"""A linear layer that holds its weights as packed codes, and really takes fewer bytes."""

from __future__ import annotations

from collections.abc import Callable

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from gptlite.quantize.linear_quant import LinearCodes
from gptlite.quantize.pack import pack, packed_length, unpack


class CodedLinear(nn.Module):
    """y = x W^T + b with W in packed codes; W is made again at every call, in the dtype of x.

    That is the plain way, right for any number of bits, group size and device; `quantize.kernels` has faster ones.

    Args:
        coded: of the weight [d_out, d_in], as a `Grid` makes them, with scales that fp16 holds.
        bias: [d_out] or None; copied, in its own dtype.
    Raises: ValueError when the codes are not those of a matrix along its rows.
    """

    def __init__(self, coded: LinearCodes, bias: Tensor | None = None) -> None:
        super().__init__()
        if len(coded.shape) != 2 or coded.axis != 1:
            raise ValueError(f"the codes have shape {tuple(coded.shape)} and axis {coded.axis}, they must be 2 and 1")
        codes = coded.codes
        if coded.zero is None:  # -Q..Q becomes 1..2Q + 1, so that no sign has to be packed
            codes = codes.to(torch.int16) + 2 ** (coded.bits - 1)
        zero = None if coded.zero is None else pack(coded.zero.to(torch.uint8), coded.bits)
        packed = pack(codes.to(torch.uint8), coded.bits)
        self._hold(coded.shape, coded.bits, coded.group_size, packed, coded.scale.half(), zero, bias)

    def _hold(
        self, shape: tuple[int, ...], bits: int, group_size: int, packed: Tensor, scale: Tensor, zero: Tensor | None,
        bias: Tensor | None,
    ) -> None:  # fmt: skip
        self.out_features, self.in_features = shape
        self.bits, self.group_size, self.symmetric = bits, group_size, zero is None
        self.packed: Tensor
        self.scale: Tensor
        self.zero: Tensor | None
        self.register_buffer("packed", packed)  # uint8 [d_out, bytes of a row]
        self.register_buffer("scale", scale)  # fp16 [d_out, n_groups]
        self.register_buffer("zero", zero)  # uint8, packed like the codes [d_out, bytes]
        self.bias = None if bias is None else nn.Parameter(bias.detach().clone(), requires_grad=False)

    @classmethod
    def of(
        cls, shape: tuple[int, int], bits: int, group_size: int, parts: dict[str, Tensor], bias: Tensor | None
    ) -> CodedLinear:
        """The layer of parts that are packed already, and that it shares.

        Args:
            shape: (d_out, d_in). parts: as in `shapes`: packed and scale [d_out, n], and zero unless it is symmetric.
            bias: [d_out] or None.
        """
        layer = cls.__new__(cls)
        nn.Module.__init__(layer)
        layer._hold(shape, bits, group_size, parts["packed"], parts["scale"], parts.get("zero"), bias)
        return layer

    @staticmethod
    def shapes(d_out: int, d_in: int, bits: int, group_size: int, symmetric: bool) -> dict[str, tuple[int, int]]:
        """Shapes of what is stored of a weight, by name: packed and zero in uint8, scale in fp16."""
        n_groups = -(-d_in // group_size)
        shapes = {"packed": (d_out, packed_length(d_in, bits)), "scale": (d_out, n_groups)}
        return shapes if symmetric else {**shapes, "zero": (d_out, packed_length(n_groups, bits))}

    @property
    def coded(self) -> LinearCodes:
        """The codes [d_out, d_in], one to a byte again, with scales and zero points [d_out, n_groups]."""
        codes = unpack(self.packed, self.bits, self.in_features)
        scale = self.scale.float()
        zero = None if self.zero is None else unpack(self.zero, self.bits, scale.shape[1]).to(scale.dtype)
        if self.symmetric:
            codes = (codes.to(torch.int16) - 2 ** (self.bits - 1)).to(torch.int8)
        shape = torch.Size((self.out_features, self.in_features))
        return LinearCodes(codes, scale, zero, self.bits, 1, self.group_size, shape)

    @property
    def nbytes(self) -> int:
        """Bytes of the stored weight: codes, scales and zero points, without the bias."""
        return sum(part.nbytes for part in (self.packed, self.scale, self.zero) if part is not None)

    def dequantize(self, dtype: torch.dtype = torch.float32) -> Tensor:
        """The weight [d_out, d_in] that the codes stand for."""
        return self.coded.dequantize(dtype)

    def forward(self, x: Tensor) -> Tensor:
        return F.linear(x, self.dequantize(x.dtype), None if self.bias is None else self.bias.to(x.dtype))

    def _apply(self, fn: Callable[[Tensor], Tensor], recurse: bool = True) -> CodedLinear:
        """Moves with its model, but keeps its scales in fp16 when the model changes its dtype."""
        scale = self.scale
        super()._apply(fn, recurse)
        self.scale = scale.to(self.packed.device)
        return self

    def extra_repr(self) -> str:
        return f"in_features={self.in_features}, out_features={self.out_features}, bits={self.bits}"
