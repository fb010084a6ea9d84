"""Linear quantisation: half a step at most, scales by tensor, channel and group, zero points, and clipping."""

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from gptlite.quantize.groups import cut, per_group, spread
from gptlite.quantize.linear_quant import (
    clip_by_error,
    clip_by_percentile,
    quantize_linear,
    round_stochastic,
)

HOW = [{"symmetric": True}, {"symmetric": False}, {"symmetric": False, "contain_zero": False}]


def steps(coded):
    return spread(coded.scale, coded.axis, coded.group_size, coded.shape)


def test_by_hand_symmetric():
    coded = quantize_linear(torch.tensor([[-7.0, 3.4, 0.0, 6.6], [1.0, 0.5, -0.25, 14.0]]), 4)
    assert coded.scale.tolist() == [[1.0], [2.0]] and coded.zero is None and coded.codes.dtype == torch.int8
    assert coded.codes.tolist() == [[-7, 3, 0, 7], [0, 0, 0, 7]]  # 0.5 and 0.25 of a step go to the even code
    assert coded.dequantize().tolist() == [[-7.0, 3.0, 0.0, 7.0], [0.0, 0.0, 0.0, 14.0]]


def test_by_hand_with_a_zero_point():
    coded = quantize_linear(torch.tensor([-1.0, 0.0, 2.0, 0.9]), 2, symmetric=False)
    assert coded.scale.tolist() == [1.0] and coded.zero.tolist() == [1.0] and coded.codes.dtype == torch.uint8
    assert coded.codes.tolist() == [0, 1, 3, 2]
    assert coded.dequantize().tolist() == [-1.0, 0.0, 2.0, 1.0]
    # a range above 0 is widened to hold it, unless the caller has it otherwise
    x = torch.tensor([5.0, 5.5, 6.5, 8.0])
    assert quantize_linear(x, 2, symmetric=False).scale.tolist() == pytest.approx([8 / 3])
    own = quantize_linear(x, 2, symmetric=False, contain_zero=False)
    assert own.scale.tolist() == [1.0] and own.zero.tolist() == [-5.0]
    assert own.dequantize().tolist() == [5.0, 5.0, 7.0, 8.0]  # halves go to the even code


@pytest.mark.parametrize("how", HOW, ids=["symmetric", "with a zero", "own range"])
@pytest.mark.parametrize("bits", range(2, 9))
@pytest.mark.parametrize(("axis", "group"), [(None, None), (-1, None), (0, 2), (1, 4), (2, 100), (-1, 7), (0, 1)])
def test_the_error_is_at_most_half_a_step(how, bits, axis, group):
    x = torch.randn(5, 9, 11, dtype=torch.float64, generator=torch.Generator().manual_seed(bits))
    x[2], x[3, :, 4], x[4] = 0, 2.5, x[4] + 3
    coded = quantize_linear(x, bits, axis, group, **how)
    half = steps(coded) / 2
    assert ((coded.dequantize() - x).abs() <= half * (1 + 1e-12)).all()  # 1e-12: fp64's own rounding
    least, most = (-(2 ** (bits - 1)) + 1, 2 ** (bits - 1) - 1) if how["symmetric"] else (0, 2**bits - 1)
    assert least <= int(coded.codes.min()) and int(coded.codes.max()) <= most
    if how.get("contain_zero", True):
        assert (coded.dequantize()[x == 0] == 0).all()  # 0 is kept exactly


@settings(max_examples=200, deadline=None)
@given(data=st.data(), bits=st.integers(2, 8), how=st.sampled_from(HOW))
def test_any_values_of_any_size(data, bits, how):
    rows = st.lists(st.floats(-(2.0**100), 2.0**100, width=32), min_size=1, max_size=13)
    x = torch.tensor(data.draw(rows))
    group = data.draw(st.integers(1, 14))
    coded = quantize_linear(x, bits, -1, group, **how)
    assert coded.codes.shape == x.shape and coded.scale.shape == (-(-len(x) // min(group, len(x))),)
    assert (coded.scale > 0).all() and coded.scale.isfinite().all()
    # half a step, and what fp32 rounds off of the largest value of the group
    largest = spread(cut(x.abs(), 0, coded.group_size).amax(-1), 0, coded.group_size, x.shape)
    error = (coded.dequantize().double() - x.double()).abs()
    assert (error <= steps(coded).double() * (0.5 + 1e-4) + largest * 2.0**-21).all()


def test_codes_of_8_bits_never_reach_minus_128():
    coded = quantize_linear(torch.linspace(-1, 0.3, 1001), 8)
    assert coded.codes.min() == -127 and coded.dequantize().min() == -1


@pytest.mark.parametrize("how", HOW, ids=["symmetric", "with a zero", "own range"])
def test_a_row_of_zeros_and_a_constant_row_stay_finite(how):
    x = torch.zeros(4, 6)
    x[1], x[2], x[3, 0] = 0.7, -1e-42, 5
    coded = quantize_linear(x, 4, **how)
    back = coded.dequantize()
    assert back.isfinite().all() and (back[0] == 0).all()
    torch.testing.assert_close(back[1], x[1])
    assert coded.scale[0] == 1


@pytest.mark.parametrize("how", HOW, ids=["symmetric", "with a zero", "own range"])
@pytest.mark.parametrize("sign", [1.0, -1.0, torch.tensor([1.0, -1.0, 1.0, -1.0])], ids=["plus", "minus", "both"])
def test_a_range_beyond_fp32_stays_finite(how, sign):
    """From -3e38 to 3e38 is more than fp32 holds, its step is not."""
    x = torch.full((4,), 3e38) * sign
    for clip in (None, 0.5):
        back = quantize_linear(x, 4, clip=clip, **how).dequantize()
        assert back.isfinite().all()
    torch.testing.assert_close(quantize_linear(x, 4, **how).dequantize(), x, rtol=0.07, atol=0)  # half of 1 step in 7.5


def test_axes_and_groups_are_what_they_say():
    x = torch.randn(6, 10)
    x[:, 3] *= 50
    whole, rows, columns = (quantize_linear(x, 4, axis) for axis in (None, 1, 0))
    assert (whole.scale.shape, rows.scale.shape, columns.scale.shape) == ((), (6, 1), (1, 10))
    assert whole.scale == x.abs().max() / 7
    torch.testing.assert_close(rows.scale[:, 0], x.abs().amax(1) / 7)
    torch.testing.assert_close(columns.scale[0], x.abs().amax(0) / 7)
    groups = quantize_linear(x, 4, 1, 4)
    assert groups.scale.shape == (6, 3) and groups.group_size == 4
    torch.testing.assert_close(groups.scale, torch.stack([p.abs().amax(1) / 7 for p in x.split(4, 1)], 1))
    # each group alone gives the same, the short last one too
    alone = [quantize_linear(part, 4, 1) for part in x.split(4, 1)]
    assert torch.equal(groups.codes, torch.cat([part.codes for part in alone], 1))
    assert torch.equal(groups.dequantize(), torch.cat([part.dequantize() for part in alone], 1))


def test_along_an_axis_is_along_the_last_one_of_the_turned_tensor():
    x = torch.randn(3, 8, 5)
    one, turned = quantize_linear(x, 3, 1, 3, False), quantize_linear(x.mT.contiguous(), 3, -1, 3, False)
    assert torch.equal(one.codes.mT, turned.codes)
    assert torch.equal(one.scale.mT, turned.scale) and torch.equal(one.zero.mT, turned.zero)


def test_dtypes():
    x = torch.randn(4, 8)
    assert quantize_linear(x.double(), 8).scale.dtype == torch.float64
    coded = quantize_linear(x.bfloat16(), 8)
    assert coded.scale.dtype == torch.float32 and coded.dequantize(torch.bfloat16).dtype == torch.bfloat16
    assert torch.equal(coded.codes, quantize_linear(x.bfloat16().float(), 8).codes)


def test_bits_per_value_count_scales_and_zero_points():
    x = torch.randn(4, 128)
    assert quantize_linear(x, 4, -1, 32).bits_per_value() == 4 + 16 / 32
    assert quantize_linear(x, 4, -1, 32, False).bits_per_value() == 4 + (16 + 4) / 32
    assert quantize_linear(x, 2, -1, 32, False).bits_per_value(32, 16) == 2 + (32 + 16) / 32
    assert quantize_linear(x, 8, None).bits_per_value() == 8 + 16 / 512
    assert quantize_linear(x, 4, -1, 100).bits_per_value() == 4 + 2 * 16 / 128  # a short group has a whole scale


def test_clipping_cuts_off_the_ends():
    x = torch.tensor([-10.0, -1.0, 0.5, 4.0])
    assert quantize_linear(x, 4, clip=0.5).dequantize().tolist() == pytest.approx([-5.0, -5 / 7, 5 / 7, 30 / 7])
    coded = quantize_linear(torch.tensor([0.0, 1.0, 2.0, 3.0]), 2, symmetric=False, contain_zero=False, clip=1 / 3)
    assert coded.dequantize().tolist() == pytest.approx([1.0, 1.0, 2.0, 2.0])  # towards the middle
    per_row = quantize_linear(x.view(2, 2), 4, clip=torch.tensor([[0.5], [1.0]]))
    assert per_row.dequantize()[:, 0].tolist() == pytest.approx([-5.0, 4 / 7])


def test_clipping_by_percentile():
    x = torch.arange(-10.0, 11.0)  # magnitudes 0, 1, 1, 2, 2, ... 10, 10
    assert clip_by_percentile(x, 90).tolist() == pytest.approx([0.9])
    assert clip_by_percentile(x, 100).tolist() == [1.0]
    sparse = torch.zeros(2, 8)
    sparse[0, 0] = 3
    assert clip_by_percentile(sparse, 50).tolist() == [[1.0], [1.0]]  # nothing but zeros below: left whole
    x = torch.randn(3, 11)
    expected = torch.stack([clip_by_percentile(part, 80) for part in x.split(4, 1)], 1)[..., 0]
    torch.testing.assert_close(clip_by_percentile(x, 80, 1, 4), expected)  # the short group by its own values


@pytest.mark.parametrize("how", HOW, ids=["symmetric", "with a zero", "own range"])
def test_clipping_by_error_is_never_worse_and_finds_the_best_tried(how):
    x = torch.randn(6, 50, generator=torch.Generator().manual_seed(0)) + 0.5
    x[:, 7] = 9
    clip = clip_by_error(x, 3, -1, 16, n_steps=20, **how)

    def errors(part):
        back = quantize_linear(x, 3, -1, 16, clip=part, **how).dequantize()
        return cut((back - x).square(), 1, 16, 0.0).sum(-1)

    tried = torch.stack([errors(part) for part in torch.linspace(1, 0.3, 20).tolist()])
    torch.testing.assert_close(errors(clip), tried.amin(0))
    assert (errors(clip) < errors(None)).any()
    assert clip_by_error(x, 3, None, n_steps=5, **how).shape == ()


def test_stochastic_rounding_is_right_on_the_mean():
    x = torch.full((40_000,), 2.3)
    rounded = round_stochastic(x, torch.Generator().manual_seed(0))
    assert set(rounded.tolist()) == {2.0, 3.0}
    assert float(rounded.mean()) == pytest.approx(2.3, abs=4 * (0.3 * 0.7 / 40_000) ** 0.5)  # four standard errors
    assert torch.equal(round_stochastic(torch.tensor([-3.0, 0.0, 5.0])), torch.tensor([-3.0, 0.0, 5.0]))
    coded = quantize_linear(torch.full((4000,), 0.3), 2, clip=1.0, rounding=round_stochastic)
    assert coded.codes.unique().tolist() == [1]  # the largest is on the grid
    again = torch.cat([torch.tensor([1.0]), torch.full((4000,), 0.3)])
    coded = quantize_linear(again, 2, rounding=lambda s: round_stochastic(s, torch.Generator().manual_seed(1)))
    assert float(coded.dequantize()[1:].mean()) == pytest.approx(0.3, abs=0.03)


def test_groups():
    x = torch.arange(10.0).view(2, 5)
    assert cut(x, 1, 2).tolist() == [[[0, 1], [2, 3], [4, 4]], [[5, 6], [7, 8], [9, 9]]]
    assert cut(x, 1, 2, 0.0)[0].tolist() == [[0, 1], [2, 3], [4, 0]]
    assert cut(x, 0, 2).shape == (5, 1, 2) and cut(x, None, 10).shape == (1, 10)
    assert per_group(torch.zeros(5, 1), 0).shape == (1, 5) and per_group(torch.zeros(1), None).shape == ()
    assert spread(torch.tensor([[1, 2, 3], [4, 5, 6]]), 1, 2, x.shape).tolist() == [[1, 1, 2, 2, 3], [4, 4, 5, 5, 6]]
    assert spread(torch.ones(2, 1), 1, 5, x.shape).shape == (2, 1)


@pytest.mark.parametrize(
    ("changes", "says"),
    [
        ({"bits": 1}, "bits is 1, it must be 2 to 8"),
        ({"bits": 9}, "bits is 9, it must be 2 to 8"),
        ({"bits": 0, "symmetric": False}, "bits is 0, it must be 1 to 8 with a zero point"),
        ({"axis": 2}, "axis is 2, x has 2 axes"),
        ({"axis": None, "group_size": 4}, "group_size is 4, groups need an axis"),
        ({"group_size": 0}, "group_size is 0, it must be at least 1"),
        ({"x": torch.ones(2, 3, dtype=torch.long)}, "x has dtype torch.int64"),
        ({"x": torch.ones(2, 0)}, "axis 1 of x has length 0"),
        ({"x": torch.ones(0), "axis": None}, "x is empty"),
        ({"x": torch.tensor([1.0, float("inf")])}, "infinity or NaN"),
        ({"x": torch.tensor([float("nan")])}, "infinity or NaN"),
        ({"clip": 0.0}, "clip is 0.0, it must be above 0 and at most 1"),
        ({"clip": 1.5}, "clip is 1.5"),
        ({"clip": torch.ones(2, 1)}, r"clip has shape \(2, 1\), the scales have \(3, 1\)"),
    ],
)
def test_bad_arguments_are_named(changes, says):
    with pytest.raises(ValueError, match=says):
        quantize_linear(**{"x": torch.randn(3, 4), "bits": 4, **changes})


def test_bad_clips_are_named():
    with pytest.raises(ValueError, match="percent is 0, it must be above 0 and at most 100"):
        clip_by_percentile(torch.ones(3), 0)
    with pytest.raises(ValueError, match="infinity or NaN"):
        clip_by_percentile(torch.tensor([float("nan")]), 50)
    with pytest.raises(ValueError, match="n_steps is 0"):
        clip_by_error(torch.ones(3), 4, n_steps=0)
