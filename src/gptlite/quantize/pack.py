"""Packing: codes of a few bits each, side by side in bytes."""

from __future__ import annotations

from math import gcd

import torch
from torch import Tensor


def packed_length(n: int, bits: int) -> int:
    """Bytes that n codes of `bits` bits take, in whole words of the fewest bytes that hold a whole number of codes.

    Raises: ValueError when bits is not 1 to 8, or n below 1.
    """
    per, width = _word(bits)
    if n < 1:
        raise ValueError(f"n is {n}, there must be at least 1 code")
    return -(-n // per) * width


def pack(codes: Tensor, bits: int) -> Tensor:
    """Codes side by side in bytes, the first one in the lowest bits; each row is filled up to whole words with zeros.

    Two codes of 4 bits make a byte, eight codes of 3 bits make three bytes.

    Args:
        codes: uint8 [..., n], each below 2^bits.
        bits: 1 to 8.
    Returns: uint8 [..., packed_length(n, bits)].
    Raises: ValueError when bits is out of range, or a code does not fit.
    """
    per, width = _word(bits)
    if codes.dtype != torch.uint8 or not codes.numel():
        raise ValueError(
            f"codes have dtype {codes.dtype} and shape {tuple(codes.shape)}, they must be uint8, not empty"
        )
    if int(codes.max()) >= 2**bits:
        raise ValueError(f"a code is {int(codes.max())}, {bits} bits hold 0 to {2**bits - 1}")
    missing = -codes.shape[-1] % per
    words = torch.nn.functional.pad(codes, (0, missing)).unflatten(-1, (-1, per)).long()  # [..., n_words, per]
    words = (words << (bits * torch.arange(per, device=codes.device))).sum(-1, keepdim=True)  # [..., n_words, 1]
    return (words >> (8 * torch.arange(width, device=codes.device)) & 255).to(torch.uint8).flatten(-2)


def unpack(packed: Tensor, bits: int, n: int) -> Tensor:
    """The first n codes of each row, as `pack` wrote them.

    Args:
        packed: uint8 [..., packed_length(n, bits)].
    Returns: uint8 [..., n].
    Raises: ValueError when the rows are not that long.
    """
    per, width = _word(bits)
    if packed.dtype != torch.uint8 or packed.shape[-1] != packed_length(n, bits):
        raise ValueError(
            f"packed has dtype {packed.dtype} and {packed.shape[-1]} bytes a row, {n} codes of {bits} bits take "
            f"{packed_length(n, bits)}"
        )
    wide = torch.uint8 if width == 1 else torch.int32 if width == 3 else torch.int64  # that holds a word
    words = packed.unflatten(-1, (-1, width)).to(wide)  # [..., n_words, width]
    word = words[..., :1]
    for byte in range(1, width):
        word = word | words[..., byte : byte + 1] << (8 * byte)
    codes = word >> (bits * torch.arange(per, dtype=wide, device=packed.device))  # [..., n_words, per]
    return (codes & (2**bits - 1)).to(torch.uint8).flatten(-2)[..., :n]


def _word(bits: int) -> tuple[int, int]:
    """Codes in a word, and its bytes. Raises: ValueError when bits is not 1 to 8."""
    if not 1 <= bits <= 8:
        raise ValueError(f"bits is {bits}, it must be 1 to 8")
    return 8 // gcd(bits, 8), bits // gcd(bits, 8)
