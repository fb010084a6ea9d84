"""Does a decode step cost what its bytes say? TPOT against context and batch, beside `gptlite.arithmetic`.

    python benchmarks/growth.py --out benchmarks/results/growth.json

For each batch a constant (the weights' products, and starting the operations), and for all of them one bandwidth at
which keys and values are read: TPOT = constant of the batch + bytes of keys and values / bandwidth. The fit keeps the
largest relative error small, and prints it.
"""

import argparse
import copy
import json
import sys
import time
from pathlib import Path
from statistics import median
from typing import Any

import torch
from peers import make_model

import gptlite
from gptlite.arithmetic import ModelShape, kv_bytes_per_token
from gptlite.fast import pack
from gptlite.generate import decode_step
from gptlite.hardware import machine
from gptlite.record import filled_cache


@torch.inference_mode()
def step_seconds(model: gptlite.GPTlite, batch: int, n_context: int, n_steps: int) -> float:
    """Median seconds of a decode step of so many sequences that each have n_context tokens."""
    cache = filled_cache(model, batch, n_context, n_context + n_steps)
    tokens, seconds = torch.zeros(batch, dtype=torch.int64), []
    for _ in range(n_steps):
        start = time.perf_counter()
        tokens = decode_step(model, tokens, cache).argmax(-1)
        seconds.append(time.perf_counter() - start)
    return median(seconds[1:])


def fit(points: list[dict[str, float]]) -> tuple[dict[int, float], float, float]:
    """Constants by batch, a bandwidth, and the largest relative error of TPOT: least squares on relative errors."""
    batches = sorted({int(point["batch"]) for point in points})
    rows = [[float(point["batch"] == b) for b in batches] + [point["kv_bytes"]] for point in points]
    measured = torch.tensor([point["seconds"] for point in points], dtype=torch.float64)  # [n]
    design = torch.tensor(rows, dtype=torch.float64) / measured[:, None]  # [n, batches + 1]
    found = torch.linalg.lstsq(design, torch.ones_like(measured)[:, None], driver="gelsd").solution[:, 0]
    error = float((design @ found - 1).abs().max())
    return dict(zip(batches, found[:-1].tolist(), strict=True)), 1 / float(found[-1]), error


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--batches", type=int, nargs="+", default=[1, 4, 16])
    parser.add_argument("--contexts", type=int, nargs="+", default=[32, 128, 512, 1024, 2040])
    parser.add_argument("--steps", type=int, default=8)
    parser.add_argument("--rounds", type=int, default=3)
    parser.add_argument("--shape", choices=("S1", "S2", "tiny"), default="S2")
    parser.add_argument("--out", type=Path, help="JSON file; a table in Markdown goes to the standard output anyway")
    args = parser.parse_args()
    model = make_model(args.shape)
    per_token = kv_bytes_per_token(ModelShape.of(model.config), bytes_per_value=4)
    model = pack(copy.deepcopy(model))
    samples: dict[tuple[int, int], list[float]] = {}
    for _ in range(args.rounds):  # interleaved, so that a change in the machine's load meets all sizes
        for batch in args.batches:
            for n in args.contexts:
                samples.setdefault((batch, n), []).append(step_seconds(model, batch, n, args.steps))
    points: list[dict[str, Any]] = [
        # half of the steps' own tokens are there on average
        {"batch": b, "context": n, "kv_bytes": b * (n + args.steps / 2) * per_token, "seconds": median(seconds)}
        for (b, n), seconds in samples.items()
    ]
    constants, bandwidth, error = fit(points)
    result = {
        "benchmark": "growth",
        "machine": machine("cpu"),
        "shape": args.shape,
        "points": points,
        "samples": [{"batch": b, "context": n, "seconds": seconds} for (b, n), seconds in samples.items()],
        "constant_seconds": constants,
        "kv_bytes_per_second": bandwidth,
        "largest_relative_error": error,
    }
    if args.out:
        args.out.write_text(json.dumps(result, indent=1) + "\n")
    print(f"{machine('cpu')['name']}, {args.shape}, fp32, packed weights\n", file=sys.stderr)
    print("| batch | context | TPOT | fitted |\n|---|---|---|---|")
    for p in points:
        fitted = constants[p["batch"]] + p["kv_bytes"] / bandwidth
        print(f"| {p['batch']} | {p['context']:,} | {1e3 * p['seconds']:.1f} ms | {1e3 * fitted:.1f} ms |")
    print(f"\nkeys and values are read at {bandwidth / 1e9:.1f} GB/s; largest error {100 * error:.0f} %")


if __name__ == "__main__":
    main()
