"""The figures on the page of corrections are the ones that arithmetic gives."""

from pathlib import Path

import pytest

PAGE = (Path(__file__).parents[2] / "book" / "corrections.md").read_text(encoding="utf-8").replace("{,}", ",")

# Llama 3.1 8B: 32 layers of width 4,096, 32 query and 8 KV heads of 128, feed-forward of 14,336, vocabulary of 128,256
L, D_MODEL, G, D_HEAD, D_FF, VOCAB = 32, 4096, 8, 128, 14_336, 128_256
LAYER = 2 * D_MODEL**2 + 2 * D_MODEL * G * D_HEAD + 3 * D_MODEL * D_FF + 2 * D_MODEL  # parameters, norms too
NON_EMBEDDING = L * LAYER + D_MODEL
READ = 2 * (L * (LAYER - 2 * D_MODEL) + VOCAB * D_MODEL)  # bytes in 16 bits of the matrices that a step reads
KV = 2 * L * G * D_HEAD * 2  # bytes per token in 16 bits
LLAMA_2_7B = 32 * (4 * 4096**2 + 3 * 4096 * 11_008 + 2 * 4096) + 2 * 32_000 * 4096 + 4096
# Qwen2.5-1.5B: 28 layers of width 1,536, 2 KV heads of 128, feed-forward of 8,960, biases on q, k and v, a tied head
QWEN_LAYER = 2 * 1536**2 + 2 * 1536 * 256 + 3 * 1536 * 8960 + 1536 + 2 * 256 + 2 * 1536
QWEN_NON_EMBEDDING = 28 * QWEN_LAYER + 1536
QWEN_STEP = 2 * (QWEN_NON_EMBEDDING + 151_936 * 1536) + 1024 * 28 * 1024  # bytes of a decode step at 1,024 tokens

SRAM = 100 * 1024 // 2  # numbers of 16 bits in 100 KiB


def streamed(n: int, d: int) -> float:
    """Numbers per token that tiled attention moves: queries and output, and keys and values per tile of queries."""
    keys = min(d, SRAM // (8 * d))
    queries = (SRAM - 2 * d * keys) // (2 * d + keys + 2)
    return 2 * d + 2 * d * -(-n // queries)


def step(batch: int, context: int) -> int:
    """Bytes that a decode step of Llama 3.1 8B reads."""
    return READ + batch * context * KV


def row(number: int) -> str:
    """The text of one correction."""
    start = PAGE.index(f"* - **{number}**,")
    return PAGE[start : min(i for i in (PAGE.find("\n* -", start), PAGE.find("\n```", start)) if i > 0)]


@pytest.mark.parametrize(
    ("number", "figures"),
    [
        (1, [f"{KV:,} B", f"{KV // 1024} **KiB**", f"{KV * 8192 // 2**30} **GiB**", f"{KV * 8192 / 1e9:.2f} GB"]),
        (2, [f"{6 * D_MODEL:,}", f"{LAYER / D_MODEL**2:.1f}"]),
        (2, [f"= {NON_EMBEDDING / (L * 4096 * k):,.0f}" for k in (1, 2)]),
        (3, [f"{READ / 1e9:.2f} GB", f"{READ / KV:,.0f} tokens", f"{READ / KV / 32:,.0f} each"]),
        (4, [f"{step(32, n) / step(1, n):.2f} times" for n in (128, 1024, 8192)]),
        (6, [f"{989e12 / 3.35e12:.0f} sequences"]),
        (8, [f"{4096 * 4096 * 16_384 / (4096 * 4096 + 4096 * 16_384 + 4096 * 16_384):,.0f} FLOP/B"]),
        (8, [f"{4096 * 16_384 / (4096 + 16_384):,.0f}"]),
        (9, [f"{2 * 40 * 40 * 128 * 2048 * 2 / 1e9:.2f} GB", f"{2048 * 5120 * 2 / 1e9:.3f} GB"]),
        (12, [f"{2 * 128 * 128:,}", f"{512 + 64}", f"{2 * 128 * 128 / (512 + 64):.1f} times"]),
        (13, [f"{LLAMA_2_7B:,}", f"{LLAMA_2_7B / 1e9:.1f} GB", f"{LLAMA_2_7B / 2e9:.1f} GB"]),
        (14, [f"{4 * 0.95:.1f} times", f"{(4 * 0.95 - 1) * 100:.0f} %"]),
        (17, [f"{4 / (1 + 5 * 0.1):.1f}"]),
        (21, [f"{312e12 / bandwidth:.0f}" for bandwidth in (1.5e12, 1555e9, 2039e9)]),
        (22, [f"{2 * 40 * 5120 * 2:,} B", f"{2 * 40 * 5120 * 2 * 2048 / 1e9:.2f} GB"]),
        (22, [f"{2 * 40 * 5120 * 2 * 2048 / 2**30:.2f} GiB"]),
        (23, [f"{100 * step(1, n) / step(100, n):.0f} times" for n in (128, 1024, 8192)]),
        (24, [f"{53.8e12 / 616e9:.0f}", f"about {53.8e12 / (2 * QWEN_NON_EMBEDDING) / (616e9 / QWEN_STEP):.0f}"]),
        (25, [f"{16.0005 / 4.8944:.2f} times", f"{71.93 / 29.17:.2f} times"]),
        (26, [f"{671e9 * 2 / 2**30:,.0f} GiB", f"{685 - 671}B"]),
        (29, [f"{SRAM:,} numbers", f"{64**2 / SRAM:.2f} for heads of 64", f"{128**2 / SRAM:.2f} for heads of 128"]),
        (29, [f"{1 + 4 * 4096 / streamed(4096, D):.1f}" for D in (64, 128)]),
    ],
)
def test_a_figure_is_what_arithmetic_gives(number: int, figures: list[str]) -> None:
    text = row(number)
    for figure in figures:
        assert figure in text, f"correction {number} should say {figure!r}"


def test_every_correction_is_numbered_once() -> None:
    numbers = [int(part.split("**")[0]) for part in PAGE.split("* - **")[1:]]
    assert numbers == list(range(1, len(numbers) + 1))
