"""Mixed requests on the shipped model: gptlite's engine beside transformers' static and continuous batching.

    python benchmarks/serving_vs_transformers.py --out results/serving_vs_transformers.json

All serve the same requests greedily, with the same weights (exported as OPT), dtype, threads and sequences at once.
Runs alternate, so that a change in the machine's load meets all of them, and ratios are medians over rounds. The tokens
are compared in the same run: where two engines differ, their two tokens must be as good as equal in the plain model's
logits, and otherwise nothing is reported.

One row has packed weights (`gptlite.fast.pack`), and one a compiled decode step (`gptlite.fast.compile_step`) over a
dense cache, compiled in the warm-up; all other rows of both packages leave the weights as they were loaded.

Processor seconds stand beside the clock's: on a machine that does other work too, `--threads 1` and the processor's
seconds say more.

transformers' continuous batching asks its paged cache for a length that OPT's code wants and the cache does not tell;
OPT needs it for positions that it is given anyway, so the benchmark adds that one method.
"""

import argparse
import copy
import json
import sys
import time
from collections.abc import Callable
from pathlib import Path
from statistics import median
from typing import Any

import torch
import transformers
from transformers import GenerationConfig, OPTConfig, OPTForCausalLM
from transformers.generation import ContinuousBatchingConfig
from transformers.generation.continuous_batching.cache import PagedAttentionCache

import gptlite
from gptlite.cache.dense import StaticCache
from gptlite.cache.paged import PagedCache
from gptlite.export import opt_config, opt_weights
from gptlite.fast import compile_step, pack
from gptlite.hardware import machine
from gptlite.sampling import GREEDY
from gptlite.serving.arrivals import mixed_requests
from gptlite.serving.engine import Engine
from gptlite.serving.metrics import overhead
from gptlite.serving.sequence import Request
from gptlite.serving.static import StaticScheduler

OURS, OURS_PACKED = "gptlite engine, paged cache", "gptlite engine, packed weights"
OURS_COMPILED = "gptlite engine, compiled step"
STATIC, CONTINUOUS = "transformers static", "transformers continuous"
NEAR = 1e-3  # two logits this close may change places by rounding
Tokens = list[list[int]]
overheads: list[float] = []


def ours(model: gptlite.GPTlite, requests: list[Request], max_batch: int, kind: str) -> Tokens:
    """New tokens of each request by our engine."""
    longest = max(len(request.prompt) + request.n_new for request in requests)
    if kind in ("paged", "packed"):
        cache: Any = PagedCache(model, max_batch * -(-longest // 16), 16)
    else:
        cache = StaticCache(model, max_batch, longest)
    scheduler = StaticScheduler(cache, max_batch) if kind == "static" else None
    engine = Engine(model, cache, max_batch, scheduler=scheduler, trace=True)
    sequences = [engine.add(request) for request in requests]
    engine.run()
    if kind == "paged":
        assert engine.trace is not None
        overheads.append(overhead(engine.trace))
    return [sequence.output for sequence in sequences]


def static(peer: OPTForCausalLM, requests: list[Request], max_batch: int) -> Tokens:
    """New tokens of each request by `generate` on groups, padded on the left as it wants, until their longest ends."""
    outputs: Tokens = []
    for start in range(0, len(requests), max_batch):
        group = requests[start : start + max_batch]
        longest = max(len(request.prompt) for request in group)
        pads = [longest - len(request.prompt) for request in group]
        tokens = torch.tensor([[0] * pad + request.prompt for pad, request in zip(pads, group, strict=True)])
        mask = torch.tensor([[0] * pad + [1] * (longest - pad) for pad in pads])
        n_new = max(request.n_new for request in group)
        answers = peer.generate(tokens, attention_mask=mask, max_new_tokens=n_new, do_sample=False)
        outputs += [row[longest : longest + r.n_new].tolist() for row, r in zip(answers, group, strict=True)]
    return outputs


def continuous(peer: OPTForCausalLM, requests: list[Request], max_batch: int) -> tuple[Tokens, float, float]:
    """New tokens of each request by transformers' continuous batching; its seconds without starting and stopping."""
    longest = max(len(request.prompt) + request.n_new for request in requests)
    config = ContinuousBatchingConfig(
        page_size=16,
        num_blocks=max_batch * (-(-longest // 16) + 1),
        max_batch_tokens=max_batch * longest,
        max_requests_per_batch=max_batch,
    )
    generation = GenerationConfig(do_sample=False, eos_token_id=-1, pad_token_id=0, max_new_tokens=longest)
    answers: dict[str, list[int]] = {}
    with peer.continuous_batching_context_manager(
        generation_config=generation, continuous_batching_config=config, block=True, timeout=5
    ) as manager:
        start, used = time.perf_counter(), time.process_time()
        names = [manager.add_request(request.prompt, max_new_tokens=request.n_new) for request in requests]
        while len(answers) < len(requests):
            result = manager.get_result(timeout=60)
            if result is None or result.error:
                raise SystemExit(f"{CONTINUOUS} failed: {result and result.error}")
            if result.is_finished():
                answers[result.request_id] = list(result.generated_tokens)
        seconds, used = time.perf_counter() - start, time.process_time() - used
    return [answers[name] for name in names], seconds, used


@torch.inference_mode()
def same(model: gptlite.GPTlite, requests: list[Request], ours: Tokens, theirs: Tokens, name: str) -> int:
    """How many answers agree. Raises: SystemExit when one differs by more than rounding explains."""
    agree = 0
    for request, a, b in zip(requests, ours, theirs, strict=True):
        if a == b:
            agree += 1
            continue
        at = next((i for i, pair in enumerate(zip(a, b, strict=False)) if pair[0] != pair[1]), None)
        if at is None:
            raise SystemExit(f"{name} gives {len(b)} tokens where {len(a)} are asked for")
        logits = model(torch.tensor([request.prompt + a[:at]]))[0, -1]
        if abs(float(logits[a[at]] - logits[b[at]])) > NEAR:
            raise SystemExit(f"{name} differs from {OURS}, and not by rounding: nothing to compare")
    return agree


Run = Callable[[], tuple[Tokens, float, float]]  # new tokens of each request, seconds, the processor's seconds


def timed(run: Callable[[], Tokens]) -> Run:
    """The same run with its times."""

    def call() -> tuple[Tokens, float, float]:
        start, used = time.perf_counter(), time.process_time()
        return run(), time.perf_counter() - start, time.process_time() - used

    return call


def engines(model: gptlite.GPTlite, requests: list[Request], batch: int) -> dict[str, Run]:
    """The ways to serve the requests, all with the model's weights."""
    packed, compiled = pack(copy.deepcopy(model)), compile_step(model)
    PagedAttentionCache.get_seq_length = lambda self, layer_idx=0: 0  # see above
    peer = OPTForCausalLM(OPTConfig(**opt_config(model) | {"eos_token_id": None, "pad_token_id": 0})).eval()
    peer.load_state_dict(opt_weights(model), strict=True)
    peer.generation_config.eos_token_id = None  # every answer has its full length
    return {
        OURS: timed(lambda: ours(model, requests, batch, "paged")),
        OURS_PACKED: timed(lambda: ours(packed, requests, batch, "packed")),
        OURS_COMPILED: timed(lambda: ours(compiled, requests, batch, "compiled")),
        "gptlite engine, dense cache": timed(lambda: ours(model, requests, batch, "dense")),
        "gptlite static": timed(lambda: ours(model, requests, batch, "static")),
        STATIC: timed(lambda: static(peer, requests, batch)),
        CONTINUOUS: lambda: continuous(peer, requests, batch),
    }


@torch.inference_mode()
def compare(model: gptlite.GPTlite, requests: list[Request], runs: dict[str, Run], rounds: int) -> dict[str, Any]:
    """Seconds of each way in each round, alternating, and how many answers agree with the first one's."""
    samples: dict[str, list[float]] = {name: [] for name in runs}
    processor: dict[str, list[float]] = {name: [] for name in runs}
    agree: dict[str, int] = {}
    expected: Tokens = []
    for name, run in runs.items():  # the warm-up, which also compares
        tokens = run()[0]
        expected = expected or tokens
        agree[name] = same(model, requests, expected, tokens, name)
    overheads.clear()
    for i in range(rounds):
        for name in list(runs) if i % 2 == 0 else reversed(runs):
            time.sleep(0.3)  # until the idle threads of the engine before have stopped spinning
            _, seconds, used = runs[name]()
            samples[name].append(seconds)
            processor[name].append(used)
    n_new = sum(request.n_new for request in requests)
    return {
        "new_tokens": n_new,
        "seconds": samples,
        "tokens_per_second": {name: n_new / median(seconds) for name, seconds in samples.items()},
        "processor_seconds": processor,
        "answers_equal": agree,
        "overhead_outside_the_model": median(overheads),
    }


def times_as_fast(samples: dict[str, list[float]], name: str, over: str) -> float:
    """How many times as fast `name` is as `over`: the median over rounds."""
    return median(theirs / own for theirs, own in zip(samples[over], samples[name], strict=True))


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--requests", type=int, default=48)
    parser.add_argument("--batch", type=int, default=16, help="sequences at once")
    parser.add_argument("--threads", type=int, help="of torch; without it, its own choice")
    parser.add_argument("--rounds", type=int, default=5)
    parser.add_argument("--out", type=Path, help="JSON file; without it the result goes to the standard output")
    args = parser.parse_args()
    if args.threads:
        torch.set_num_threads(args.threads)
    transformers.logging.set_verbosity_error()
    model, tokenizer = gptlite.load("gptlite")
    text = gptlite.generate(
        model, tokenizer.encode("\n")[None], model.context_length - 1, cache=StaticCache(model, 1, 256)
    )
    requests = mixed_requests(text[0], args.requests, params=GREEDY)
    runs = engines(model, requests, args.batch)
    found = compare(model, requests, runs, args.rounds)
    ratios, by_processor = (
        {name: times_as_fast(found[kind], OURS, name) for name in runs} for kind in ("seconds", "processor_seconds")
    )
    result = {
        "benchmark": "serving_vs_transformers",
        "machine": machine("cpu"),
        "versions": {"gptlite": gptlite.__version__, "transformers": transformers.__version__},
        "params": {key: value for key, value in vars(args).items() if key != "out"},
        **found,
        "engine_over": ratios,  # above 1: our engine is faster
        "engine_over_by_processor": by_processor,
    }
    text_of_result = json.dumps(result, indent=1) + "\n"
    if args.out:
        args.out.write_text(text_of_result)
    else:
        print(text_of_result, end="")
    rates, agree = found["tokens_per_second"], found["answers_equal"]
    rows = [
        f"{args.requests} requests, {found['new_tokens']} new tokens, at most {args.batch} at once, "
        f"{machine('cpu')['name']}, {torch.get_num_threads()} threads:",
        "",
        "| engine | token/s | our engine is faster by | by processor time | same answers |",
        "|---|---|---|---|---|",
        *(
            f"| {n} | {rates[n]:,.0f} | {ratios[n]:.2f} × | {by_processor[n]:.2f} × | {agree[n]} of {args.requests} |"
            for n in runs
        ),
        "",
        f"Of a step of {OURS}, {100 * found['overhead_outside_the_model']:.1f} % is outside the model.",
    ]
    print("\n".join(rows), file=sys.stderr)


if __name__ == "__main__":
    main()
