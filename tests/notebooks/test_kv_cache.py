"""What the chapter on the KV cache prints is what an independent count gives; its exercises are checked well."""

import json
import re
from pathlib import Path

import pytest
import torch

from gptlite.arithmetic import kv_bytes, kv_bytes_per_token
from gptlite.notebook import checks_kv_cache as checks

CHAPTER = Path(__file__).resolve().parents[2] / "chapters" / "04_kv_cache.ipynb"
# by hand, the preset 7b: weights of a block, of the head, and FLOPs of a pair of query and key in all layers
BLOCK, HEAD, PAIR = 2 * 4096**2 + 2 * 4096 * 1024 + 8 * 4096**2, 4096 * 128_256, 4 * 32 * 4096


@pytest.fixture(scope="module")
def printed() -> str:
    """All text that the cells of the chapter print."""
    cells = json.loads(CHAPTER.read_text(encoding="utf-8"))["cells"]
    outputs = [output for cell in cells if cell["cell_type"] == "code" for output in cell["outputs"]]
    texts = [output.get("text") or output.get("data", {}).get("text/plain", "") for output in outputs]
    return "\n".join("".join(text) for text in texts)


def flops(n_new: int, n_past: int) -> int:
    """Of one pass of the preset 7b, with one row of logits."""
    pairs = sum(n_past + i + 1 for i in range(n_new))
    return 2 * 32 * BLOCK * n_new + 2 * HEAD + PAIR * pairs


def test_the_question_is_answered(printed: str) -> None:
    for name, early, late in (
        ("without a cache", flops(5, 0), flops(500, 0)),
        ("with a cache", flops(1, 4), flops(1, 499)),
    ):
        assert f"{name}: the 500th token takes {late / 1e9:,.1f} GFLOP, {late / early:.2f} times the 5th" in printed
    assert round(flops(500, 0) / flops(5, 0)) == 99 and round(100 * flops(1, 499) / flops(1, 4)) == 102
    assert "what is kept of 500 tokens: 65.5 MB in 16 bits, 128 KiB per token" in printed


@pytest.mark.parametrize("n", [5, 500, 2000, 8000])
def test_the_least_times_are_those_of_the_data_sheet(printed: str, n: int) -> None:
    """By hand, with 989 TFLOP/s and 3.35 TB/s: what each batch computes, and what it reads in 16 bits."""
    weights = 2 * (32 * (BLOCK + 2 * 4096 + 2 * 1024 + 4 * 4096 + 4096) + HEAD + 128_256)  # with the biases
    expected = []
    for batch in (1, 32):
        read = (weights + batch * n * 131_072) / 3.35e12
        expected += [max(batch * work / 989e12, read) for work in (flops(n, 0), flops(1, n - 1))]
    table = printed[printed.index("Least time of one token") :]
    found = next(line.split()[1:] for line in table.splitlines() if re.match(rf" *{n:,}( +[\d.,]+){{4}}$", line))
    assert [float(value.replace(",", "")) for value in found] == pytest.approx([1e3 * t for t in expected], rel=6e-3)


@pytest.mark.parametrize("n", [125, 250, 500, 1000])
def test_the_table_of_whole_texts_is_the_sum_of_their_passes(printed: str, n: int) -> None:
    linear = [sum(2 * 32 * BLOCK * t + 2 * HEAD for t in range(1, n + 1)), n * (2 * 32 * BLOCK + 2 * HEAD)]
    pairs = [sum(t * (t + 1) // 2 for t in range(1, n + 1)), n * (n + 1) // 2]
    table = printed[printed.index("A text of one token grows to n") :]
    row = next(line.split() for line in table.splitlines() if line.strip().startswith(f"{n:,} "))
    found = [float(value.replace(",", "")) for value in row[1:]]
    expected = [linear[0], PAIR * pairs[0], linear[1], PAIR * pairs[1]]
    assert found == pytest.approx([value / 1e12 for value in expected], rel=2e-3, abs=6e-5)


def test_every_check_of_the_chapter_said_yes(printed: str) -> None:
    assert printed.count("equal to within 1e-12") == 2
    assert len(re.findall(r"(?:dynamic|static|ring), float64: equal to within 1e-10", printed)) == 3
    assert len(re.findall(r"(?:dynamic|static|ring), float32: equal to within 0.0001", printed)) == 3
    assert "in used memory, and alone: equal to within 1e-10" in printed
    assert "same addresses after 40 steps: yes" in printed
    assert len(re.findall(r"^(?:without|with) a cache .* yes$", printed, re.M)) == 2
    assert len(re.findall(r"^(?:dynamic|static).* yes +[\d.]+$", printed, re.M)) == 4
    assert not re.search(r"\bno$", printed, re.M)


def test_keys_belong_to_the_whole_beginning(printed: str) -> None:
    assert "layer 0: the keys of 1 of 60 tokens changed" in printed
    assert "layer 1: the keys of 60 of 60 tokens changed" in printed


def test_written_bytes_are_those_by_hand(printed: str) -> None:
    token = 2 * 6 * 8 * 32 * 8  # keys and values, layers, heads, size, bytes
    dynamic, static = sum(range(20, 61)) * token / 1e3, 60 * token / 1e3
    numbers = {
        line.split()[0]: [float(value.replace(",", "")) for value in line.split()[1:]]
        for line in printed.splitlines()
        if re.match(r"(?:dynamic|static) +[\d,.]+ +[\d,.]+ +[\d,.]+$", line)
    }
    assert numbers["dynamic"] == pytest.approx([dynamic, 0, dynamic], rel=1e-3)
    assert numbers["static"] == pytest.approx([0, static, static], rel=1e-3)


def test_a_growing_shape_needs_a_program_for_each_step(printed: str) -> None:
    """4 steps from 31 to 34 keys: 4 shapes without a bucket, 2 with one of 16, 1 when all slots are read."""
    found = re.findall(r"^(dynamic|static, .*?) {2,}(\d) {2,}(\d)$", printed, re.M)
    assert [(int(fixed), int(general)) for _, fixed, general in found] == [(4, 2), (4, 2), (2, 2), (1, 1)]


def test_past_the_context_the_caller_gets_what_was_named(printed: str) -> None:
    assert re.search(r"^slide +250 +1 +256 +all 20$", printed, re.M)
    # six tokens fit, so the first seven agree by necessity
    [agree] = re.findall(r"^clamp +250 +1 +1 +the first (\d+)$", printed, re.M)
    assert 7 <= int(agree) < 20
    assert "error: 250 tokens and 20 new ones pass the context window of 256" in printed
    assert "clamp: overflow='clamp': past the context window the output differs" in printed


def test_the_trap_is_shown(printed: str) -> None:
    assert "seen by positions: [[1, 1, 1, 1, 1, 0], [1, 1, 1, 1, 1, 1]]" in printed
    assert "seen by is_causal: [[1, 0, 0, 0, 0, 0], [1, 1, 0, 0, 0, 0]]" in printed


def test_the_ring_of_the_exercise_holds_what_its_solution_says(printed: str) -> None:
    slots = dict(sorted((p % 8, p) for p in range(12, 20)))
    assert str(slots) in printed and slots[1] == 17


def test_what_fits_is_what_memory_leaves(printed: str) -> None:
    left = 80e9 * 0.9 - 2 * 6_723_000_000  # the parameters to the nearest million below are enough for three digits
    for batch in (1, 8, 32, 128):
        row = next(line.split() for line in printed.splitlines() if re.match(rf" *{batch} +[\d,]+ +12.3 ", line))
        assert float(row[1].replace(",", "")) == pytest.approx(left / (batch * 131_072), rel=5e-3)


# -- the exercises ------------------------------------------------------------------------------------------------


def upper_left(n_new, n_keys):
    return torch.ones(n_new, n_keys, dtype=torch.bool).tril()


def one_too_few(n_new, n_keys):
    return torch.ones(n_new, n_keys, dtype=torch.bool).tril(n_keys - n_new - 1)


def no_triangle(n_new, n_keys):
    return torch.ones(n_new, n_keys, dtype=torch.bool)


@pytest.mark.parametrize("wrong", [upper_left, one_too_few, no_triangle])
def test_a_wrong_mask_gets_a_counterexample(capsys, wrong) -> None:
    checks.check_step_mask(wrong)
    assert re.match(r"not yet: \d new tokens among \d keys gives .*, right is \[\[", capsys.readouterr().out)


def test_a_mask_of_numbers_is_refused_since_attention_would_add_it(capsys) -> None:
    checks.check_step_mask(lambda n_new, n_keys: torch.ones(n_new, n_keys).tril(n_keys - n_new))
    assert "the mask is torch.float32, not torch.bool" in capsys.readouterr().out
    checks.check_step_mask(lambda n_new, n_keys: torch.ones(n_new, n_keys, dtype=torch.bool).tril(n_keys - n_new))
    assert capsys.readouterr().out == "right\n"


def no_window(shape, batch, budget):
    return int(budget // (batch * kv_bytes_per_token(shape)))


def batch_forgotten(shape, batch, budget):
    n = 1
    while kv_bytes(shape, 2 * n) <= budget:
        n *= 2
    return n


def at_least_one(shape, batch, budget):
    n = 1
    while batch * kv_bytes(shape, n + 1) <= budget and n < 100_000:
        n += 1
    return n


@pytest.mark.parametrize("wrong", [no_window, batch_forgotten, at_least_one])
def test_a_wrong_longest_text_gets_a_counterexample(capsys, wrong) -> None:
    checks.check_longest_text(wrong)
    said = r"not yet: .* with \d+ sequences and [\d,]+ B gives [\d,]+, right is [\d,]+\n"
    assert re.fullmatch(said, capsys.readouterr().out)
