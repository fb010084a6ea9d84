"""What the chapter on FlashAttention prints is what an independent count gives."""

import json
import re
from pathlib import Path

import pytest

CHAPTER = Path(__file__).resolve().parents[2] / "chapters" / "10_flash_attention.ipynb"


@pytest.fixture(scope="module")
def printed():
    """All text that the compared cells of the chapter print."""
    cells = json.loads(CHAPTER.read_text(encoding="utf-8"))["cells"]
    outputs = [
        output
        for cell in cells
        if cell["cell_type"] == "code" and "nbval-ignore-output" not in cell["metadata"].get("tags", [])
        for output in cell["outputs"]
    ]
    texts = [output.get("text") or output.get("data", {}).get("text/plain", "") for output in outputs]
    return "\n".join("".join(text) for text in texts)


def moved(n, D, M):
    """Numbers that tiled attention moves, added up tile by tile."""
    tile_k = min(D, M // (8 * D))
    tile_q = (M - 2 * D * tile_k) // (2 * D + tile_k + 2)
    return sum(min(tile_q, n - i) * (2 * D + 1) + 2 * n * D for i in range(0, n, tile_q))


def test_the_question_is_answered(printed):
    """22 GB, 80 times the inputs and the output, and less than a quarter."""
    n, D, heads = 8192, 128, 32
    tiled = moved(n, D, 228 * 512)
    standard = tiled + 4 * n * n - n
    once = 4 * n * D
    row = [2 * heads * numbers / 1e9 for numbers in (once, n * n, standard, tiled)]
    shown = r" +".join(f"{round(value, 3):.4g}" for value in row)
    assert re.search(rf"8,192 +{shown}\n", printed)
    assert round(row[2]) == 22 and round(row[2] / row[0]) in range(80, 85) and 4 * row[3] < row[2]


def test_tiles_are_counted_pair_by_pair(printed):
    def kinds(S, T, tile, window=None):
        found = {"skipped": 0, "masked": 0, "whole": 0}
        for i in range(0, S, tile):
            first, last = T - S + i, T - S + min(i + tile, S) - 1
            for j in range(0, T, tile):
                end = min(j + tile, T) - 1
                gone = window is not None and first - end >= window
                all_seen = end <= first and (window is None or last - j < window)
                found["skipped" if j > last or gone else "whole" if all_seen else "masked"] += 1
        return " +".join(f"{count:,}" for count in found.values())

    for what, call in (
        ("8,192 tokens at once", (8192, 8192, 128)),
        ("the last 512 of them, behind a cache", (512, 8192, 128)),
        ("one new token", (1, 8192, 128)),
        ("8,192 at once, a window of 1,024", (8192, 8192, 128, 1024)),
    ):
        assert re.search(rf"^{what} +{kinds(*call)}$", printed, re.M), what


def test_flex_attention_skips_what_the_rule_hides(printed):
    text = [0] * 40 + [1] * 16 + [2] * 40
    counts = {0: 0, 64: 0}
    for i in range(0, 96, 8):
        for j in range(0, 96, 8):
            seen = sum(b <= a and text[a] == text[b] for a in range(i, i + 8) for b in range(j, j + 8))
            counts[seen] = counts.get(seen, 0) + 1
    masked = 144 - counts[0] - counts[64]
    assert f"of 144 blocks {masked} are masked, {counts[64]} are whole, {counts[0]} are skipped" in printed


def test_is_causal_is_shown_to_be_wrong(printed):
    assert "is_causal: [1, 2, 3]  by position: [6, 7, 8]" in printed
    assert "a single new token, with is_causal: [1]  without: [8]" in printed
    assert "causal_lower_right: [6, 7, 8]" in printed


def test_every_check_of_the_chapter_said_yes(printed):
    assert printed.count(": equal to within") == 10
    assert "gradcheck passes: yes" in printed and "the same 20 tokens: yes" in printed
    n, D = 512, 16
    assert f"standard: the largest tensor has {n * n:,} numbers" in printed
    assert f"tiled: the largest tensor has {n * D:,} numbers" in printed


def test_decode_saves_the_share_that_the_prose_says(printed):
    for D in (32, 64, 128):
        assert f"D = {D}: {2 / (D + 2):.1%} of the bytes" in printed


def test_waves_are_rounds_of_132(printed):
    for batch, splits in ((1, 1), (1, 4), (1, 16), (8, 1), (64, 1)):
        blocks, rounds = batch * 32 * splits, 0
        while blocks > 132 * rounds:
            rounds += 1
        shown = [f"{batch}", f"{splits}", f"{blocks:,}", f"{rounds}", f"{round(rounds / splits, 2):.4g}"]
        assert re.search(rf"^ *{' +'.join(shown)} +{round(100 * blocks / (132 * rounds), 1):.4g}$", printed, re.M)
