"""The package beside other engines on the same weights: `make bench`.

    python benchmarks/bench.py                      quick, about five minutes
    python benchmarks/bench.py --full               more rounds and tokens
    python benchmarks/bench.py --shapes tiny --engines "transformers generate" gptlite    to try the benchmark itself

Every engine has the same random weights and answers the same prompts greedily. Runs are interleaved, so that a change
in the machine's load meets all of them, and a ratio is the median over rounds of two runs of the same round. In the
same run tokens are compared (where two engines differ, their two tokens must be as good as equal in the plain model's
logits), and the machine's own roof is measured.
"""

import argparse
import json
import sys
import time
from dataclasses import asdict, dataclass
from pathlib import Path
from statistics import median
from typing import Any

import torch
from peers import CT2, CT2_INT8, PACKED, PEER, PLAIN, Engine, engines, make_model
from torch import Tensor

import gptlite
from gptlite.arithmetic import ModelShape, decode_costs, prefill_costs, total
from gptlite.hardware import machine
from gptlite.measure import Roof, machine_roof

NEAR = 1e-3  # two logits that close are as good as equal: rounding may choose either


@dataclass(frozen=True)
class Work:
    """What is measured: n_new tokens after a prompt, or with n_new 0 the reading of the prompt."""

    shape: str
    batch: int
    n_prompt: int
    n_new: int

    @property
    def name(self) -> str:
        """In words."""
        if not self.n_new:
            return f"{self.shape}, prefill of {self.batch} x {self.n_prompt}"
        return f"{self.shape}, batch {self.batch}, {self.n_prompt} + {self.n_new} tokens"

    def least_seconds(self, roof: Roof) -> float:
        """The least time by bytes and FLOPs, fp32: the later of the two, per step."""
        shape = ModelShape.of(make_model(self.shape).config)
        options = {"bytes_per_value": 4, "bytes_per_weight": 4}
        read = total(prefill_costs(shape, self.batch, self.n_prompt, **options))
        seconds = max(read.flops / roof.peak_flops, read.bytes / roof.peak_bandwidth)
        for n in range(self.n_prompt, self.n_prompt + self.n_new - 1):
            step = total(decode_costs(shape, self.batch, n, **options))
            seconds += max(step.flops / roof.peak_flops, step.bytes / roof.peak_bandwidth)
        return seconds


WORKS = [
    Work("S1", 1, 32, 128),
    Work("S1", 16, 32, 128),
    Work("S2", 1, 32, 64),
    Work("S2", 16, 32, 32),
    Work("S2", 1, 512, 0),
    Work("tiny", 2, 8, 8),
    Work("tiny", 1, 32, 0),
]


def run(engine: Engine, work: Work, prompt: Tensor) -> tuple[Tensor | None, float]:
    """One run of an engine. Returns: its new tokens (None for a prefill) and its seconds."""
    start = time.perf_counter()
    tokens = engine.generate(prompt, work.n_new) if work.n_new else engine.prefill(prompt)
    seconds = time.perf_counter() - start
    return tokens if work.n_new else None, seconds


def check(model: gptlite.GPTlite, prompt: Tensor, expected: Tensor, tokens: Tensor, name: str) -> int:
    """How many rows agree. Raises: SystemExit when one differs by more than rounding explains."""
    agree = 0
    for row, a, b in zip(prompt, expected, tokens, strict=True):
        if torch.equal(a, b):
            agree += 1
            continue
        if a.shape != b.shape:
            raise SystemExit(f"{name} gives {len(b)} tokens where {len(a)} are asked for")
        at = int((a != b).nonzero()[0])
        logits = model(torch.cat([row, a[:at]])[None])[0, -1]
        if abs(float(logits[a[at]] - logits[b[at]])) > NEAR:
            raise SystemExit(f"{name} differs from {PEER}, and not by rounding: nothing to compare")
    return agree


@torch.inference_mode()
def measure(work: Work, made: dict[str, Engine], rounds: int, roof: Roof) -> dict[str, Any]:
    """Seconds of each engine in each round, and which rows agree."""
    model = make_model(work.shape)
    generator = torch.Generator().manual_seed(1)
    # the last character of the vocabulary is CTranslate2's end of the text
    prompt = torch.randint(model.fc_out.out_features - 1, (work.batch, work.n_prompt), generator=generator)
    agree: dict[str, int] = {}
    expected: Tensor | None = None
    for name, engine in made.items():  # the warm-up, which also compares
        tokens, _ = run(engine, work, prompt)
        if tokens is not None and engine.exact:
            expected = tokens if expected is None else expected
            agree[name] = check(model, prompt, expected, tokens, name)
    seconds: dict[str, list[float]] = {name: [] for name in made}
    for i in range(rounds):
        for name in list(made) if i % 2 == 0 else reversed(made):
            seconds[name].append(run(made[name], work, prompt)[1])
    return asdict(work) | {
        "name": work.name,
        "seconds": seconds,
        "median_seconds": {name: median(values) for name, values in seconds.items()},
        "rows_equal": agree,
        "least_seconds": work.least_seconds(roof),
    }


def ratio(result: dict[str, Any], name: str, over: str) -> float:
    """How many times as fast `name` is as `over`: the median over rounds."""
    seconds = result["seconds"]
    return median(theirs / own for theirs, own in zip(seconds[over], seconds[name], strict=True))


def table(results: list[dict[str, Any]], roof: Roof, threads: int) -> str:
    """The results in Markdown."""
    lines = [
        f"{machine('cpu')['name']}, {threads} threads; measured {roof.peak_bandwidth / 1e9:.1f} GB/s and "
        f"{roof.peak_flops / 1e9:.0f} GFLOP/s in fp32.",
        "",
        "| work | engine | median | of transformers | of CTranslate2 | of the roof | rows equal |",
        "|---|---|---|---|---|---|---|",
    ]
    for result in results:
        for name, seconds in result["median_seconds"].items():
            work = result["batch"] * result["n_new"]
            speed = f"{work / seconds:,.1f} token/s" if work else f"{1e3 * seconds:,.0f} ms"
            over = [f"{ratio(result, name, peer):.2f} x" if peer in result["seconds"] else "" for peer in (PEER, CT2)]
            equal = f"{result['rows_equal'][name]} of {result['batch']}" if name in result["rows_equal"] else ""
            share = f"{100 * result['least_seconds'] / seconds:.0f} %"
            lines.append(f"| {result['name']} | {name} | {speed} | {over[0]} | {over[1]} | {share} | {equal} |")
    return "\n".join(lines)


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--full", action="store_true", help="9 rounds instead of 3")
    parser.add_argument("--shapes", nargs="+", choices=("S1", "S2", "tiny"), default=["S1", "S2"])
    parser.add_argument("--engines", nargs="+", default=[PEER, PLAIN, PACKED, CT2, CT2_INT8])
    parser.add_argument("--threads", type=int, default=torch.get_num_threads())
    parser.add_argument("--out", type=Path, help="JSON file; a table in Markdown goes to the standard output anyway")
    args = parser.parse_args()
    torch.set_num_threads(args.threads)
    roof = machine_roof()
    results = []
    for shape in args.shapes:
        made = engines(shape, args.threads, args.engines)
        for work in WORKS:
            if work.shape == shape:
                print(f"{work.name} ...", file=sys.stderr, flush=True)
                results.append(measure(work, made, 9 if args.full else 3, roof))
    if args.out:
        content = {
            "benchmark": "bench",
            "machine": machine("cpu"),
            "threads": args.threads,
            "versions": {"gptlite": gptlite.__version__, "torch": torch.__version__},
            "roof": {"bytes_per_second": roof.peak_bandwidth, "flop_per_second": roof.peak_flops},
            "results": results,
        }
        args.out.write_text(json.dumps(content, indent=1) + "\n")
    print(table(results, roof, args.threads))


if __name__ == "__main__":
    main()
