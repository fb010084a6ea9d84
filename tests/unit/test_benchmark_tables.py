"""The book's tables of benchmarks say what the results say."""

import importlib.util
import json
from pathlib import Path

import pytest

ROOT = Path(__file__).resolve().parents[2]
SPEC = importlib.util.spec_from_file_location("benchmark_tables", ROOT / "book" / "_ext" / "benchmarks.py")
assert SPEC and SPEC.loader
tables = importlib.util.module_from_spec(SPEC)
SPEC.loader.exec_module(tables)

MACHINE = {"name": "a machine", "system": "Linux", "torch": "2.13.0"}
BENCH = {
    "machine": MACHINE,
    "threads": 2,
    "roof": {"bytes_per_second": 20e9, "flop_per_second": 1e11},
    "results": [
        {
            "name": "S1, batch 2",
            "batch": 2,
            "n_new": 10,
            "least_seconds": 0.5,
            "median_seconds": {tables.PEER: 4.0, "gptlite": 2.0},
            "seconds": {tables.PEER: [4.0, 4.0, 9.0], "gptlite": [2.0, 1.0, 3.0]},
        },
        {
            "name": "S1, prefill",
            "batch": 1,
            "n_new": 0,
            "least_seconds": 0.1,
            "median_seconds": {"gptlite": 0.2},
            "seconds": {"gptlite": [0.2, 0.1, 0.3]},
        },
    ],
    "mixed": [
        {
            "name": "mixed",
            "tokens_per_second": {"gptlite engine": 1234.4},
            "seconds": {"gptlite engine": [1.0], tables.STATIC: [3.5], tables.CONTINUOUS: [2.0]},
            "overhead_outside_the_model": 0.081,
        }
    ],
}


def test_ratios_are_medians_over_rounds_and_speeds_count_every_row() -> None:
    rows, caption = tables.decode(BENCH)
    assert rows[1:] == [
        ["S1, batch 2", tables.PEER, "5.0 token/s", "1.00", "", "12 %"],
        ["", "gptlite", "10.0 token/s", "3.00", "", "25 %"],  # of 2, 4 and 3
        ["S1, prefill", "gptlite", "200 ms", "", "", "50 %"],
    ]
    assert (
        "a machine, 2 threads, Linux, torch 2.13.0" in caption and "20.0 GB/s" in caption and "100 GFLOP/s" in caption
    )


def test_mixed_requests_and_the_share_outside_the_model() -> None:
    rows, caption = tables.mixed(BENCH)
    assert rows[1:] == [["mixed", "gptlite engine", "1,234 token/s", "3.50", "2.00"]]
    assert "8 % is outside the model" in caption


def test_the_fit_is_a_constant_and_a_bandwidth() -> None:
    content = {
        "machine": MACHINE, "shape": "S2", "largest_relative_error": 0.04, "kv_bytes_per_second": 1e9,
        "constant_seconds": {"4": 0.010},
        "points": [{"batch": 4, "context": 1024, "kv_bytes": 5e6, "seconds": 0.0152}],
    }  # fmt: skip
    rows, caption = tables.growth(content)
    assert rows[1:] == [["4", "1,024", "15.2", "15.0"]]
    assert "at most 4 % off" in caption and "1.0 GB/s" in caption


def test_a_build_is_told_by_page() -> None:
    content = {"machine": MACHINE, "points": [{"chapters": 3, "pages": 40, "samples": [9.0, 10.0], "seconds": 10.0}]}
    rows, caption = tables.build(content)
    assert rows[1:] == [["3", "40", "10", "0.25"]] and caption.endswith("a machine.")


@pytest.mark.parametrize("kind", list(tables.KINDS))
def test_the_stored_results_make_a_table(kind: str) -> None:
    file, make = tables.KINDS[kind]
    rows, caption = make(json.loads((ROOT / "benchmarks" / "results" / file).read_text(encoding="utf-8")))
    assert len(rows) > (3 if kind == "build" else 5) and len({len(row) for row in rows}) == 1
    assert all(cell for row in rows for cell in row[1:3]) and caption.endswith(".")
