"""Greedy text of the shipped pair: speculative decoding beside the plain loop, ours and transformers'.

    python benchmarks/speculative_vs_plain.py --out speculative.json

Four engines write the same text after the same prompts: gptlite's plain loop over a static cache, gptlite's speculative
loop, and transformers' `generate` on the exported pair without and with an assistant. Weights, dtype, threads, prompts,
drafts per round and number of new tokens are the same; the runs alternate, and nothing is reported when outputs differ.

Processor seconds stand beside the clock's: on a machine that does other work too, `--threads 1` and the processor's
seconds say more.
"""

import argparse
import json
import sys
import tempfile
import time
from collections.abc import Callable
from functools import partial
from pathlib import Path
from statistics import median

import torch
import transformers
from torch import Tensor
from transformers import OPTForCausalLM

import gptlite
from gptlite.cache.dense import StaticCache
from gptlite.export import export_hf
from gptlite.hardware import machine
from gptlite.measure import synchronize
from gptlite.sampling import GREEDY
from gptlite.speculative.decode import Verdict, speculate
from gptlite.speculative.drafters import ModelDrafter
from gptlite.speculative.theory import Tally, expected_tokens
from gptlite.sweeps.speculative import PROMPTS

PLAIN, OURS = "gptlite static cache", "gptlite speculative"
THEIRS, ASSISTED = "transformers generate", "transformers assisted generation"
Samples = dict[str, list[float]]


def exported(device: str, dtype: torch.dtype, n_draft: int) -> tuple[OPTForCausalLM, OPTForCausalLM]:
    """The shipped pair as transformers' models: target and assistant."""
    pair = []
    for name in ("gptlite", "draft"):
        model, tokenizer = gptlite.load(name)
        with tempfile.TemporaryDirectory() as folder:
            export_hf(model, tokenizer, folder)
            pair.append(OPTForCausalLM.from_pretrained(folder, dtype=dtype).eval().to(device))
    assistant = pair[1].generation_config
    assistant.num_assistant_tokens = n_draft
    assistant.num_assistant_tokens_schedule = "constant"
    assistant.assistant_confidence_threshold = 0.0  # draft as many, however unsure
    return pair[0], pair[1]


def engines(
    device: str, dtype: torch.dtype, prompts: list[Tensor], n_new: int, n_draft: int, trace: list[list[Verdict]]
) -> dict[str, Callable[[], list[Tensor]]]:
    """Each engine as a call that returns every prompt [1, n] with n_new greedy tokens."""
    model, draft = (gptlite.load(name, device, dtype)[0] for name in ("gptlite", "draft"))
    target, assistant = exported(device, dtype, n_draft)
    drafter = ModelDrafter(draft)

    def plain() -> list[Tensor]:
        return [
            gptlite.generate(model, tokens, n_new, GREEDY, StaticCache(model, 1, tokens.shape[1] + n_new))
            for tokens in prompts
        ]

    def speculative() -> list[Tensor]:
        trace.clear()
        return [
            speculate(
                model,
                tokens,
                n_new,
                drafter,
                n_draft,
                GREEDY,
                StaticCache(model, 1, tokens.shape[1] + n_new),
                trace=trace,
            )
            for tokens in prompts
        ]

    def theirs(**options: OPTForCausalLM) -> list[Tensor]:
        fixed = {"max_new_tokens": n_new, "do_sample": False, "eos_token_id": None, "pad_token_id": 0}
        return [
            target.generate(tokens, attention_mask=torch.ones_like(tokens), **fixed, **options) for tokens in prompts
        ]

    return {PLAIN: plain, OURS: speculative, THEIRS: theirs, ASSISTED: partial(theirs, assistant_model=assistant)}


def compare(runs: dict[str, Callable[[], list[Tensor]]], rounds: int, device: str) -> tuple[Samples, Samples]:
    """Seconds of each run in each round, by the clock and of the processor. Raises: SystemExit when outputs differ."""
    expected: list[Tensor] = []
    for name, run in runs.items():  # the warm-up, which also compares
        texts = run()
        expected = expected or texts
        if not all(torch.equal(a, b) for a, b in zip(texts, expected, strict=True)):
            raise SystemExit(f"{name} does not generate the tokens of {PLAIN}: nothing to compare")
    samples: Samples = {name: [] for name in runs}
    processor: Samples = {name: [] for name in runs}
    for i in range(rounds):
        # every other round backwards, so that none always runs after the same neighbour
        for name in list(runs) if i % 2 == 0 else reversed(runs):
            synchronize(device)
            start, used = time.perf_counter(), time.process_time()
            runs[name]()
            synchronize(device)
            samples[name].append(time.perf_counter() - start)
            processor[name].append(time.process_time() - used)
    return samples, processor


def ratios(samples: Samples) -> dict[str, float]:
    """How many times as fast as its own plain loop each speculative one was, the median over rounds."""
    pairs = {OURS: PLAIN, ASSISTED: THEIRS}
    return {
        name: median(plain / own for plain, own in zip(samples[base], samples[name], strict=True))
        for name, base in pairs.items()
    }


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--device", default="cpu")
    parser.add_argument("--dtype", default="float32")
    parser.add_argument("--prompts", type=int, default=2, help="of the four that the sweeps use")
    parser.add_argument("--tokens", type=int, default=128, help="tokens to generate after each prompt")
    parser.add_argument("--drafts", type=int, default=4, help="drafts per round")
    parser.add_argument("--threads", type=int, help="of torch; without it, its own choice")
    parser.add_argument("--rounds", type=int, default=7)
    parser.add_argument("--out", type=Path, help="JSON file; without it the result goes to the standard output")
    args = parser.parse_args()
    if args.threads:
        torch.set_num_threads(args.threads)
    transformers.logging.set_verbosity_error()
    transformers.logging.disable_progress_bar()
    _, tokenizer = gptlite.load("gptlite")
    prompts = [tokenizer.encode(text)[None].to(args.device) for text in PROMPTS[: args.prompts]]
    trace: list[list[Verdict]] = []
    with torch.inference_mode():
        runs = engines(args.device, getattr(torch, args.dtype), prompts, args.tokens, args.drafts, trace)
        samples, processor = compare(runs, args.rounds, args.device)
    tally = Tally(trace, args.drafts)
    result = {
        "benchmark": "speculative_vs_plain",
        "machine": machine(args.device),
        "versions": {"gptlite": gptlite.__version__, "transformers": transformers.__version__},
        "params": {key: value for key, value in vars(args).items() if key != "out"},
        "acceptance": tally.acceptance,
        "tokens_per_round": tally.tokens_per_round,
        "tokens_per_round_by_the_formula": expected_tokens(tally.acceptance, args.drafts),
        "seconds": samples,
        "processor_seconds": processor,
        "median_seconds": {name: median(values) for name, values in samples.items()},
        # above 1: faster than the same library's plain loop
        "speed_over_plain": ratios(samples),
        "processor_speed_over_plain": ratios(processor),
        "outputs_equal": True,
    }
    text = json.dumps(result, indent=1) + "\n"
    if args.out:
        args.out.write_text(text)
    for name, seconds in result["median_seconds"].items():
        ratio, by_processor = (result[key].get(name) for key in ("speed_over_plain", "processor_speed_over_plain"))
        words = f"{ratio:5.2f} x  {by_processor:5.2f} x of processor time" if ratio else ""
        print(f"{name:40}{seconds:8.3f} s  {words}", file=sys.stderr)
    if not args.out:
        print(text, end="")


if __name__ == "__main__":
    main()
