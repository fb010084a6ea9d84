"""What the chapter on prefill and decode prints is what an independent count gives; its exercise is checked well."""

import json
import re
from pathlib import Path

import pytest

from gptlite.notebook import checks

CHAPTER = Path(__file__).resolve().parents[2] / "chapters" / "02_prefill_decode.ipynb"


@pytest.fixture(scope="module")
def printed():
    """All text that the cells of the chapter print."""
    cells = json.loads(CHAPTER.read_text(encoding="utf-8"))["cells"]
    outputs = [output for cell in cells if cell["cell_type"] == "code" for output in cell["outputs"]]
    texts = [output.get("text") or output.get("data", {}).get("text/plain", "") for output in outputs]
    return "\n".join("".join(text) for text in texts)


def test_tokens_read_are_counted(printed):
    without = sum(len(range(100 + i)) for i in range(60))
    assert re.search(r"with a cache +60 +100 +1 +159 +159\n", printed)
    assert re.search(rf"without +60 +100 +159 +{without:,} +{without:,}\n", printed)
    assert f"without a cache {without / 159:.0f} times as many tokens are read" in printed


def test_the_question_is_answered(printed):
    """By hand: what 7b reads and computes in 16 bits, with the two figures of the H100's data sheet."""
    d, layers, kv, vocabulary = 4096, 32, 8 * 128, 128_256
    block = 2 * d * d + 2 * d * kv + 8 * d * d
    weights = 2 * (layers * (block + d + 2 * kv + d + 4 * d + d) + d * vocabulary + vocabulary)  # with the biases
    keys = 2 * layers * 2 * kv
    step = (weights + 1024 * keys) / 3.35e12
    pairs = 1024 * 1025 / 2
    prefill = (2 * layers * block * 1024 + 4 * layers * d * pairs + 2 * d * vocabulary) / 989e12
    assert f"255 decode steps take {255 * step / prefill:.0f} times as long as the prefill" in printed
    many = (weights + 32 * 1024 * keys) / 3.35e12
    assert f"a decode step for 32 sequences takes {many / step:.2f} times as long as one for 1" in printed


def test_every_check_of_the_chapter_said_yes(printed):
    assert printed.count("equal to within 1e-10") == 3
    assert printed.count("within 1 %: yes") == 4 and "within 1 %: no" not in printed
    assert "both give the same text: yes" in printed
    assert re.search(r"^waiting: +50\.01 ms\s+not waiting: 0\.01 ms", printed, re.M)


def largest_allowed(tpots, limit):
    return max((batch for batch in tpots if tpots[batch] <= limit), default=None)


def strictly_below(tpots, limit):
    allowed = {batch: tpot for batch, tpot in tpots.items() if tpot < limit}
    return max(allowed, key=lambda batch: batch / allowed[batch], default=None)


def never_none(tpots, limit):
    return max(tpots, key=lambda batch: (tpots[batch] <= limit) * batch / tpots[batch])


def stops_at_the_first_too_slow(tpots, limit):
    best = None
    for batch, tpot in tpots.items():
        if tpot > limit:
            break
        best = batch
    return best


@pytest.mark.parametrize("wrong", [largest_allowed, strictly_below, never_none, stops_at_the_first_too_slow])
def test_a_wrong_best_batch_gets_a_counterexample(capsys, wrong):
    checks.check_best_batch(wrong)
    said = r"not yet: \{.*\} with a limit of [\d.]+ ms gives (\d+|None), right is (\d+|None)\n"
    assert re.fullmatch(said, capsys.readouterr().out)
