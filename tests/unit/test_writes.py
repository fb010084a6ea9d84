"""Writes are counted where they happen: joins by their result, writes in place by their values, and no integers."""

import torch
import torch.nn.functional as F

from gptlite.writes import count_writes


def test_each_kind_of_write_by_hand() -> None:
    a, b = torch.zeros(3, 4), torch.zeros(2, 4)
    with count_writes() as written:
        torch.cat([a, b])  # 5 x 4 values of 4 bytes
    assert (written.joined, written.in_place) == (80, 0)
    with count_writes() as written:
        torch.stack([a, a]), F.pad(a, (0, 0, 0, 2))  # 24 and 20 values
    assert (written.joined, written.in_place) == (176, 0)
    with count_writes() as written:
        a[torch.tensor([0, 2])] = b  # 8 values
    assert (written.joined, written.in_place) == (0, 32)


def test_integers_and_reads_are_no_writes_of_a_cache() -> None:
    tokens, line = torch.zeros(1, 5, dtype=torch.int64), torch.zeros(6, 4)
    with count_writes() as written:
        torch.cat([tokens, tokens], dim=1)
        line[:3], line @ line.mT
    assert (written.joined, written.in_place) == (0, 0)


def test_it_counts_in_inference_mode_too_and_no_more_after_the_block() -> None:
    line = torch.zeros(6, 4, dtype=torch.float64)
    with torch.inference_mode(), count_writes() as written:
        torch.cat([line, line])
    torch.cat([line, line])
    assert written.joined == 2 * 6 * 4 * 8
