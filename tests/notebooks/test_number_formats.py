"""What the chapter on number formats prints is what an independent count gives."""

import json
import math
import re
from pathlib import Path

import pytest

CHAPTER = Path(__file__).resolve().parents[2] / "chapters" / "12_number_formats.ipynb"


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


@pytest.fixture(scope="module")
def prose():
    cells = json.loads(CHAPTER.read_text(encoding="utf-8"))["cells"]
    return "\n".join("".join(cell["source"]) for cell in cells if cell["cell_type"] == "markdown")


def row(printed, name, after):
    """The numbers of the first row of that name after a caption."""
    found = re.search(rf"^{re.escape(name)}  +(.*)$", printed[printed.index(after) :], re.M)
    return re.findall(r"-?[\d,]*\.?\d+(?:e[-+]\d+)?", found[1])


def test_every_code_equals_its_reference(printed):
    part = printed[printed.index("Codes that were compared") : printed.index("Codes, scales or values that differ")]
    lines = part.splitlines()[2:]
    formats = ("fp32", "fp16", "bf16", "fp8 e5m2", "fp8 e4m3", "fp4 e2m1", "int8", "int4", "nf4", "mxfp4", "nvfp4")
    assert {line.split("  ")[0] for line in lines if line} >= set(formats)
    for line in filter(None, lines):
        compared, different = line.split()[-2:]
        assert int(compared.replace(",", "")) > 100_000 and different == "0"


def test_as_many_disagreements_are_printed_as_explained(printed, prose):
    part = printed[printed.index("Codes, scales or values that differ") :].split("\n")[2:10]
    assert all(line.strip() for line in part)
    section = prose[prose.index("### Where libraries disagree") : prose.index("### Half a step at most")]
    assert len(re.findall(r"^\d\. ", section, re.M)) == 8


def test_steps_by_arithmetic(printed):
    """8.03 billion weights of which an embedding row is read, 131,072 B per token of context, 3.35 TB/s."""
    matrices, kv = 7_504_658_432, 131_072 * 1024  # of Llama 3.1 8B: blocks and head, without the embedding table
    for name, bits in (("16 bits", 16), ("8-bit weights", 8.125), ("4-bit weights, groups of 32", 4.5)):
        numbers = row(printed, name, "Least time of a step")
        for shown, batch in ((float(numbers[1]), 1), (float(numbers[2]), 256)):
            assert shown == pytest.approx(1e3 * (matrices * bits / 8 + batch * kv) / 3.35e12, abs=0.006)
    whole = float(row(printed, "16 bits", "Least time of a step")[3])
    half = float(row(printed, "8-bit weights and activations", "Least time of a step")[3])
    assert half == pytest.approx(whole / 2, abs=0.006)


def test_numbers_of_the_prose():
    assert 10 * math.log10(12 * 127**2 / 16) == pytest.approx(40.8, abs=0.05)
    assert 10 * math.log10(12 * 49 / 16) == pytest.approx(15.7, abs=0.05)
    assert 20 * math.log10(15 / 7) == pytest.approx(6.6, abs=0.05)
    assert pytest.approx(0.127, abs=5e-4) == 8 / 64 + 32 / (64 * 256)


def test_the_error_stays_within_half_a_step(printed):
    assert printed.count("steps off the nearest code: equal to within 1e-09") == 8


def test_the_prediction_is_near(printed):
    part = printed[printed.index("Signal-to-noise ratio of the weights, a scale for each row") :].split("\n")[2:6]
    for line in part:
        _, predicted, found = map(float, line.split())
        assert abs(predicted - found) < 0.5


def test_what_the_prose_concludes_from_the_tables(printed):
    table = "Signal-to-noise ratio of each format"
    int8, e4m3 = row(printed, "int8", table), row(printed, "fp8 e4m3", table)
    assert float(int8[3 - 1]) < float(int8[1]) - 5  # heavy tails cost int8 several decibels
    assert float(e4m3[-3]) >= float(e4m3[-4])  # and e4m3 none
    rules = {
        rule: [float(x) for x in row(printed, rule, "by the rule for the scale")]
        for rule in ("floor", "even", "fit", "ceil")
    }
    assert all(max(rules[rule][i] for rule in rules) == rules["even"][i] for i in range(4))
    mx, nv = (
        row(printed, name, "Four formats of 4.25 bits") for name in ("mxfp4, blocks of 32", "nvfp4, blocks of 32")
    )
    assert all(float(a) < float(b) for a, b in zip(mx[1:], nv[1:], strict=True))
    nf = row(printed, "nf4, blocks of 128", "Four formats of 4.25 bits")
    assert all(float(nf[i]) > float(nv[i]) for i in (1, 3, 4)) and float(nf[2]) < float(mx[2])  # but on heavy tails


def test_what_the_prose_says_of_clipping(printed):
    part = printed[printed.index("Signal-to-noise ratio with part of the range") :].split("\n")[2:8]
    rows = {tuple(line.split()[:2]): [float(x) for x in line.split()[2:]] for line in part}
    for name in ("normal", "heavy-tailed"):
        assert max(rows["8", name][2:]) < rows["8", name][0] - 10  # much to lose
        assert rows["4", name][1] > rows["4", name][0] + 1 and min(rows["3", name][1:]) > rows["3", name][0]
    assert max(rows["4", "heavy-tailed"][2:]) < rows["4", "heavy-tailed"][0]


def test_what_the_prose_says_of_the_losses(printed):
    def changes(kind):
        found = row(printed, kind, "Change of the loss")
        return [(float(found[i]), float(found[i + 1])) for i in (1, 3)]  # weights; weights and activations

    four = {kind: changes(kind) for kind in ("int4", "nf4", "mxfp4", "nvfp4")}
    assert all(abs(change) < 2 * error for (change, error), _ in four.values())  # of weights alone: hardly seen
    activations = {kind: both[1][0] for kind, both in four.items()}
    assert max(activations, key=activations.get) == "int4" and min(activations, key=activations.get) == "nvfp4"
    assert four["int4"][1][0] > 2 * four["int4"][1][1]
    eight = {kind: [abs(change) for change, _ in changes(kind)] for kind in ("fp8 e5m2", "fp8 e4m3", "int8", "bf16")}
    assert all(max(eight, key=lambda kind: eight[kind][i]) == "fp8 e5m2" for i in (0, 1))
