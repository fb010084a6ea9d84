"""Formats of cached keys and values: how they become codes, how many bytes those take, and which tokens have them."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, replace
from typing import Literal

import torch
from torch import Tensor

from gptlite.quantize.linear_quant import quantize_linear
from gptlite.quantize.pack import pack, unpack

Parts = tuple[Tensor, ...]  # of a piece of keys or values: the codes, and the scales and least values if there are any
Kind = Literal["even", "fp8", "plain"]
E4M3_LARGEST = 448.0  # of float8_e4m3fn; a larger value has no code, so it is cut to this


@dataclass(frozen=True)
class KVFormat:
    """How keys, or values, are stored.

    Args:
        kind: "even": whole codes on an even grid; "fp8": 8-bit floats E4M3 without a scale {cite}`micikevicius2022fp8`;
            "plain": as they are, nothing is rounded.
        bits: of a code on an even grid: 2, 4 or 8.
        per: who shares a scale: "token", neighbouring channels of one token and head; "channel", one channel of
            neighbouring tokens.
        group: how many of them share it, at least 1; None, with "token" alone: all channels of the head.
        symmetric: codes around 0 and no least value beside the scale, with 8 bits alone; else the grid goes from the
            least to the largest value.
    Raises: ValueError when these do not go together.
    """

    kind: Kind = "even"
    bits: int = 8
    per: Literal["token", "channel"] = "token"
    group: int | None = None
    symmetric: bool = False

    def __post_init__(self) -> None:
        if self.kind not in ("even", "fp8", "plain"):
            raise ValueError(f"kind is {self.kind!r}, it must be 'even', 'fp8' or 'plain'")
        if self.bits not in (2, 4, 8):
            raise ValueError(f"bits is {self.bits}, it must be 2, 4 or 8")
        if self.per not in ("token", "channel"):
            raise ValueError(f"per is {self.per!r}, it must be 'token' or 'channel'")
        if (self.group is None and self.per == "channel") or (self.group is not None and self.group < 1):
            raise ValueError(f"group is {self.group}, it must be at least 1; per token None stands for all channels")
        if self.symmetric and self.bits != 8:
            raise ValueError(f"symmetric codes have 8 bits here, not {self.bits}: fewer would waste one of few codes")

    @property
    def tokens(self) -> int:
        """How many neighbouring tokens must be there to be quantised together."""
        return self.group if self.kind == "even" and self.per == "channel" and self.group else 1

    def encode(self, x: Tensor) -> Parts:
        """Quantises a piece of keys or values.

        Args:
            x: [..., n, D], any float dtype.
        Returns: the codes, [..., n, D] or packed [..., n, D bits / 8]; on an even grid also the scales and, unless
            symmetric, the least values, each in fp16: [..., n, groups] per token, [..., groups, D] per channel. A piece
            without values comes back as it is.
        Raises: ValueError when a value on an even grid is not finite, or beyond what a 16-bit scale can hold.
        """
        if self.kind == "plain" or not x.shape[-1]:
            return (x.clone(),)
        if self.kind == "fp8":
            return (x.clamp(-E4M3_LARGEST, E4M3_LARGEST).to(torch.float8_e4m3fn),)
        if not x.shape[-2]:
            return tuple(part[..., :0, :] for part in self.encode(x.new_zeros(*x.shape[:-2], 1, x.shape[-1])))
        found = quantize_linear(
            x, self.bits, -1 if self.per == "token" else -2, self.group, self.symmetric, contain_zero=False
        )
        codes = found.codes if self.bits == 8 else pack(found.codes, self.bits)
        numbers = [found.scale if found.zero is None else -found.zero * found.scale]
        numbers = numbers if found.zero is None else [found.scale, *numbers]
        small = [number.to(torch.float16) for number in numbers]
        if not all(bool(part.isfinite().all()) for part in small):
            raise ValueError("a key or value is beyond 65,504, the largest number that a 16-bit scale can hold")
        return (codes, *small)

    def decode(self, parts: Parts, d: int, dtype: torch.dtype) -> Tensor:
        """The values that codes stand for.

        Args:
            parts: from `encode`. d: D, channels. dtype: of the result; computed in fp32 or, if wider, in it.
        Returns: [..., n, D].
        """
        if self.kind != "even" or not d:
            return parts[0].to(dtype)
        codes, scale, *least = parts
        codes = codes if self.bits == 8 else unpack(codes, self.bits, d)
        axis, group = (codes.dim() - 1, self.group or d) if self.per == "token" else (codes.dim() - 2, self.group or 1)
        wide = torch.promote_types(dtype, torch.float32)
        values = codes.to(wide) * _spread(scale.to(wide), axis, group, codes.shape[axis])
        for number in least:
            values += _spread(number.to(wide), axis, group, codes.shape[axis])
        return values.to(dtype)

    def rounded(self, x: Tensor) -> Tensor:
        """What is left of keys or values x [..., n, D] after quantising and back: [..., n, D], in x's dtype."""
        return self.decode(self.encode(x), x.shape[-1], x.dtype)

    def slice(self, parts: Parts, begin: int, end: int) -> Parts:
        """The codes of some of the tokens; per channel, begin and end lie between groups."""
        codes, *numbers = parts
        step = self.tokens
        return codes[..., begin:end, :], *(part[..., begin // step : -(-end // step), :] for part in numbers)

    def token_bytes(self, d: int, plain_bytes: float = 2) -> float:
        """Bytes that a token of one head with D channels takes, its share of the scales included.

        Args:
            d: D. plain_bytes: of a value that is stored as it is.
        """
        if self.kind != "even":
            return d * (plain_bytes if self.kind == "plain" else 1)
        numbers = 2 * (1 if self.symmetric else 2)  # bytes of the 16-bit numbers beside each group
        groups = -(-d // min(self.group or d, d)) if self.per == "token" and d else d / self.tokens
        return -(-d * self.bits // 8) + numbers * groups


@dataclass(frozen=True)
class Rule:
    """Which tokens of a sequence have codes: all but the most recent, a step at a time.

    Args:
        recent: final tokens that keep their full precision at least. step: how many are quantised at once.
    Raises: ValueError when recent is below 0 or step below 1.
    """

    recent: int = 0
    step: int = 1

    def __post_init__(self) -> None:
        if self.recent < 0 or self.step < 1:
            raise ValueError(f"recent is {self.recent} and step {self.step}, they must be at least 0 and at least 1")

    def n_quantized(self, n_final: int) -> int:
        """How many of a sequence's final tokens, from its first, have codes."""
        return max(0, n_final - self.recent) // self.step * self.step

    def bound(self, n_new: int) -> int:
        """The most tokens in full precision, in a step of that many new tokens."""
        return self.recent + self.step - 1 + n_new


@dataclass(frozen=True)
class Recipe:
    """How a cache quantises: the formats of keys and values, and which tokens of each.

    Raises: ValueError when a rule would cut through a group of tokens that share scales.
    """

    keys: KVFormat
    values: KVFormat
    key_rule: Rule
    value_rule: Rule

    def __post_init__(self) -> None:
        for name, kv_format, rule in (("keys", self.keys, self.key_rule), ("values", self.values, self.value_rule)):
            if rule.step % kv_format.tokens:
                raise ValueError(
                    f"{name} are quantised {rule.step} tokens at a time, not a multiple of the {kv_format.tokens} "
                    "that share a scale"
                )

    def in_blocks(self, block_size: int) -> Recipe:
        """The same formats for a pool of blocks, whose tokens are quantised together once the recent ones are newer.

        Raises: ValueError when groups of tokens that share scales do not fill the blocks.
        """
        rule = Rule(self.value_rule.recent, block_size)
        return replace(self, key_rule=rule, value_rule=rule)

    def token_bytes(self, shapes: Sequence[tuple[int, int, int]], plain_bytes: float = 2) -> float:
        """Bytes of one quantised token over all layers.

        Args:
            shapes: (G, Dk, Dv) of each layer. plain_bytes: of a value that is stored as it is.
        """
        return sum(
            G * (self.keys.token_bytes(Dk, plain_bytes) + self.values.token_bytes(Dv, plain_bytes))
            for G, Dk, Dv in shapes
        )


RECIPES = ("plain", "int8", "fp8", "kivi4", "kivi2")


def recipe(name: str, residual: int = 128, group: int = 32) -> Recipe:
    """A recipe by its name.

    Args:
        name: "plain" rounds nothing; "int8" has a scale per token and head, "fp8" none; "kivi4" and "kivi2" are KIVI
            {cite}`liu2024kivi` with 4 and 2 bits: keys per channel, values per token.
        residual: R of KIVI. When R keys have gathered they are quantised together; values when R newer ones are there.
        group: of KIVI, values that share a scale: so many tokens of a channel, or channels of a token.
    Raises: ValueError when there is no such recipe, or the residual is not a multiple of the group.
    """
    if name not in RECIPES:
        raise ValueError(f"recipe is {name!r}, it must be one of {', '.join(RECIPES)}")
    if name.startswith("kivi"):
        bits = int(name.removeprefix("kivi"))
        keys, values = KVFormat("even", bits, "channel", group), KVFormat("even", bits, "token", group)
        return Recipe(keys, values, Rule(0, residual), Rule(residual, 1))
    both = KVFormat("even", 8, symmetric=True) if name == "int8" else KVFormat("fp8" if name == "fp8" else "plain")
    return Recipe(both, both, Rule(0, 16), Rule(0, 16))


def _spread(numbers: Tensor, axis: int, group: int, n: int) -> Tensor:
    """From one number for each group along an axis to one for each of its n values; the last group may be shorter."""
    if numbers.shape[axis] == 1:
        return numbers
    return numbers.repeat_interleave(group, axis).narrow(axis, 0, n)
