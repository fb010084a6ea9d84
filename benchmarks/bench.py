"""The package beside other engines on the same weights: `make bench`.

    python benchmarks/bench.py                      quick, about a third of an hour
    python benchmarks/bench.py --full               more rounds and tokens
    python benchmarks/bench.py --shapes tiny --engines "transformers generate" gptlite    to try the benchmark itself

Every engine has the same random weights and answers the same prompts greedily, in a process of its own. Runs are
interleaved, so that a change in the machine's load meets all of them, and a ratio is the median over rounds of two runs
of the same round. In the same run tokens are compared (where two engines differ, their two tokens must be as good as
equal in the plain model's logits), and the machine's own roof is measured. With mixed requests the engines of PyTorch
share a process.
"""

import argparse
import json
import sys
import time
from contextlib import ExitStack, closing
from dataclasses import asdict, dataclass
from importlib.metadata import version
from importlib.util import find_spec
from pathlib import Path
from statistics import median
from typing import Any

import torch
from apart import Apart
from peers import COMPILED, CT2, ENGINES, EXACT, PEER, make_model, timed_answers, timed_engine
from serving_vs_transformers import CONTINUOUS, STATIC, Tokens, compare, times_as_fast
from serving_vs_transformers import engines as serving_engines
from torch import Tensor

import gptlite
from gptlite.arithmetic import ModelShape, decode_costs, prefill_costs, total
from gptlite.hardware import machine
from gptlite.measure import Roof, machine_roof
from gptlite.sampling import GREEDY
from gptlite.serving.arrivals import mixed_requests

# what is compared: its module and its package; the last two may be missing
PACKAGES = {
    "gptlite": "gptlite",
    "torch": "torch",
    "transformers": "transformers",
    "ctranslate2": "ctranslate2",
    "llama_cpp": "llama-cpp-python",
}
NEAR = 1e-3  # two logits that close are as good as equal: rounding may choose either
PAUSE = 0.3  # seconds before a run, until the idle threads of the engine before have stopped spinning


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


def run(engine: Apart, work: Work, prompt: Tensor) -> tuple[Tensor | None, float]:
    """One run of an engine. Returns: its new tokens (None for a prefill) and its seconds."""
    time.sleep(PAUSE)
    tokens, seconds = engine(prompt.tolist(), work.n_new)
    return None if tokens is None else torch.tensor(tokens), seconds


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
def measure(work: Work, made: dict[str, Apart], rounds: int, roof: Roof) -> dict[str, Any]:
    """Seconds of each engine in each round, and which rows agree."""
    model = make_model(work.shape)
    generator = torch.Generator().manual_seed(1)
    # the last character of the vocabulary is CTranslate2's end of the text
    prompt = torch.randint(model.fc_out.out_features - 1, (work.batch, work.n_prompt), generator=generator)
    agree: dict[str, int] = {}
    first: dict[str, float] = {}
    expected: Tensor | None = None
    for name, engine in made.items():  # the warm-up, which also compares
        tokens, first[name] = run(engine, work, prompt)
        if tokens is not None and name in EXACT:
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
        "first_seconds": first,  # a compiled step is compiled in it
        "rows_equal": agree,
        "least_seconds": work.least_seconds(roof),
    }


def measure_mixed(shape: str, threads: int, rounds: int, n_requests: int = 48, batch: int = 16) -> dict[str, Any]:
    """Requests of mixed lengths, at most `batch` at once: the engine beside static and continuous batching."""
    model = make_model(shape)
    longest = min(128, model.context_length // 4)  # answer, in tokens; half of it for a prompt
    text = torch.randint(model.fc_out.out_features - 1, (longest,), generator=torch.Generator().manual_seed(1))
    requests = mixed_requests(text, n_requests, (4, longest // 2), (8, longest), GREEDY)
    order = sorted(range(n_requests), key=lambda i: requests[i].n_new)
    groups = [order[start : start + batch] for start in range(0, n_requests, batch)]
    asked = [([requests[i].prompt for i in group], max(requests[i].n_new for i in group)) for group in groups]
    with closing(Apart(CT2, timed_answers, shape, threads, asked)) as peer:

        def by_length() -> tuple[Tokens, float, float]:
            outputs: Tokens = [[]] * n_requests
            answers, seconds, used = peer()
            for group, group_answers in zip(groups, answers, strict=True):
                for i, answer in zip(group, group_answers, strict=True):
                    outputs[i] = answer[: requests[i].n_new]
            return outputs, seconds, used

        runs = serving_engines(model, requests, batch) | {f"{CT2}, sorted by length": by_length}
        found = compare(model, requests, runs, rounds)
    return {"name": f"{shape}, {n_requests} mixed requests, at most {batch} at once", "requests": n_requests, **found}


def mixed_table(result: dict[str, Any]) -> str:
    """The result of `measure_mixed` in Markdown."""
    lines = ["| work | engine | median | of transformers' static | of its continuous | answers equal |"]
    lines.append("|---|---|---|---|---|---|")
    for name, speed in result["tokens_per_second"].items():
        over = [f"{times_as_fast(result['seconds'], name, peer):.2f} x" for peer in (STATIC, CONTINUOUS)]
        equal = f"{result['answers_equal'][name]} of {result['requests']}"
        lines.append(f"| {result['name']} | {name} | {speed:,.0f} token/s | {over[0]} | {over[1]} | {equal} |")
    share = 100 * result["overhead_outside_the_model"]
    return "\n".join([*lines, "", f"{share:.1f} % of a step of the engine with a paged cache is outside the model."])


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
            over = [
                f"{times_as_fast(result['seconds'], name, peer):.2f} x" if peer in result["seconds"] else ""
                for peer in (PEER, CT2)
            ]
            equal = f"{result['rows_equal'][name]} of {result['batch']}" if name in result["rows_equal"] else ""
            share = f"{100 * result['least_seconds'] / seconds:.0f} %"
            lines.append(f"| {result['name']} | {name} | {speed} | {over[0]} | {over[1]} | {share} | {equal} |")
    return "\n".join(lines)


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--full", action="store_true", help="9 rounds, and the compiled step for S2's batch too")
    parser.add_argument("--shapes", nargs="+", choices=("S1", "S2", "tiny"), default=["S1", "S2"])
    parser.add_argument("--engines", nargs="+", choices=ENGINES, default=ENGINES, metavar="ENGINE", help=str(ENGINES))
    parser.add_argument("--threads", type=int, default=torch.get_num_threads())
    parser.add_argument("--out", type=Path, help="JSON file; a table in Markdown goes to the standard output anyway")
    args = parser.parse_args()
    torch.set_num_threads(args.threads)
    roof = machine_roof()
    results, mixed = [], []
    for shape in args.shapes:
        with ExitStack() as stack:
            print(f"{shape}: starting the engines ...", file=sys.stderr, flush=True)
            made = {
                name: stack.enter_context(closing(Apart(name, timed_engine, shape, args.threads, name)))
                for name in args.engines
            }
            for work in WORKS:
                if work.shape == shape:
                    print(f"{work.name} ...", file=sys.stderr, flush=True)
                    # a prefill is never compiled, and a large model's batch takes minutes to compile
                    skips = not work.n_new or (shape == "S2" and work.batch > 1 and not args.full)
                    able = {name: engine for name, engine in made.items() if not (skips and name == COMPILED)}
                    results.append(measure(work, able, 9 if args.full else 3, roof))
        if shape != "S2" and CT2 in args.engines:
            print(f"{shape}, mixed requests ...", file=sys.stderr, flush=True)
            mixed.append(measure_mixed(shape, args.threads, 9 if args.full else 3))
    if args.out:
        content = {
            "benchmark": "bench",
            "machine": machine("cpu"),
            "threads": args.threads,
            "versions": {name: version(name) for module, name in PACKAGES.items() if find_spec(module)},
            "roof": {"bytes_per_second": roof.peak_bandwidth, "flop_per_second": roof.peak_flops},
            "results": results,
            "mixed": mixed,
        }
        args.out.write_text(json.dumps(content, indent=1) + "\n")
    print("\n\n".join([table(results, roof, args.threads), *map(mixed_table, mixed)]))


if __name__ == "__main__":
    main()
