"""Greedy generation on the same weights: gptlite's static cache beside transformers' `generate`.

    python benchmarks/generate_vs_transformers.py --out generate.json

Both run the `gpt2` preset with the same random weights, the same prompt, dtype, threads and number of new tokens. The
runs alternate, so that a change in the machine's load meets all of them, and their outputs are compared in the same
run: nothing is reported when they differ. Ratios are medians over rounds, each of two neighbouring runs.

Processor seconds stand beside the clock's: on a machine that does other work too, `--threads 1` and the processor's
seconds say more.
"""

import argparse
import copy
import json
import sys
import time
from collections.abc import Callable
from pathlib import Path
from statistics import median

import torch
import transformers
from torch import Tensor
from transformers import OPTConfig, OPTForCausalLM

import gptlite
from gptlite.cache.dense import DynamicCache, StaticCache
from gptlite.config import preset
from gptlite.export import opt_config, opt_weights
from gptlite.fast import pack
from gptlite.hardware import machine
from gptlite.measure import synchronize
from gptlite.record import random_model
from gptlite.sampling import SamplingParams

GREEDY = SamplingParams(temperature=0.0)
PEER, OURS = "transformers generate", "gptlite static cache"


def build(name: str, device: str, dtype: torch.dtype, n_tokens: int) -> tuple[gptlite.GPTlite, OPTForCausalLM]:
    """The preset with random weights, and transformers' model with the same ones."""
    torch.manual_seed(0)
    model = random_model(preset(name, context_length=n_tokens), device, dtype)
    peer = OPTForCausalLM(OPTConfig(**opt_config(model))).eval().to(device, dtype)
    peer.load_state_dict(opt_weights(model), strict=True)
    return model, peer


def engines(
    model: gptlite.GPTlite, peer: OPTForCausalLM, prompt: Tensor, n_new: int
) -> dict[str, Callable[[], Tensor]]:
    """Each engine as a call that returns the prompt and n_new greedy tokens [B, n + n_new]."""
    B, n = prompt.shape

    packed = pack(copy.deepcopy(model))

    def ours(
        make_cache: Callable[[], DynamicCache | StaticCache], model: gptlite.GPTlite = model
    ) -> Callable[[], Tensor]:
        return lambda: gptlite.generate(model, prompt, n_new, GREEDY, make_cache())

    def theirs(**options: str | bool) -> Callable[[], Tensor]:
        return lambda: peer.generate(
            prompt, attention_mask=torch.ones_like(prompt), max_new_tokens=n_new, do_sample=False, **options
        )

    return {
        PEER: theirs(),
        "transformers generate, static cache": theirs(cache_implementation="static", disable_compile=True),
        OURS: ours(lambda: StaticCache(model, B, n + n_new)),
        f"{OURS}, packed weights": ours(lambda: StaticCache(model, B, n + n_new), packed),
        "gptlite dynamic cache": ours(lambda: DynamicCache(model)),
    }


Samples = dict[str, list[float]]


def compare(runs: dict[str, Callable[[], Tensor]], rounds: int, device: str) -> tuple[Samples, Samples]:
    """Seconds of each run in each round, by the clock and of the processor. Raises: SystemExit when outputs differ."""
    expected = None
    for name, run in runs.items():  # the warm-up, which also compares
        tokens = run()
        expected = tokens if expected is None else expected
        if not torch.equal(tokens, expected):
            raise SystemExit(f"{name} does not generate the tokens of {next(iter(runs))}: nothing to compare")
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


def over_peer(samples: Samples) -> dict[str, float]:
    """How many times as fast as transformers each run was, the median over rounds."""
    peer = samples[PEER]
    return {name: median(theirs / own for theirs, own in zip(peer, values)) for name, values in samples.items()}


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--preset", default="gpt2")
    parser.add_argument("--device", default="cpu")
    parser.add_argument("--dtype", default="float32")
    parser.add_argument("--batch", type=int, default=1, help="sequences")
    parser.add_argument("--prompt", type=int, default=64, help="tokens of the prompt")
    parser.add_argument("--tokens", type=int, default=64, help="tokens to generate")
    parser.add_argument("--threads", type=int, help="of torch; without it, its own choice")
    parser.add_argument("--rounds", type=int, default=7)
    parser.add_argument("--out", type=Path, help="JSON file; without it the result goes to the standard output")
    args = parser.parse_args()
    if args.threads:
        torch.set_num_threads(args.threads)
    transformers.logging.set_verbosity_error()
    model, peer = build(args.preset, args.device, getattr(torch, args.dtype), args.prompt + args.tokens)
    generator = torch.Generator().manual_seed(1)
    prompt = torch.randint(model.fc_out.out_features, (args.batch, args.prompt), generator=generator).to(args.device)
    with torch.inference_mode():
        samples, processor = compare(engines(model, peer, prompt, args.tokens), args.rounds, args.device)
    result = {
        "benchmark": "generate_vs_transformers",
        "machine": machine(args.device),
        "versions": {"gptlite": gptlite.__version__, "transformers": transformers.__version__},
        "params": {key: value for key, value in vars(args).items() if key != "out"},
        "seconds": samples,
        "processor_seconds": processor,
        "median_seconds": {name: median(values) for name, values in samples.items()},
        # above 1: faster than transformers
        "speed_over_transformers": over_peer(samples),
        "processor_speed_over_transformers": over_peer(processor),
        "outputs_equal": True,
    }
    text = json.dumps(result, indent=1) + "\n"
    if args.out:
        args.out.write_text(text)
    for name, ratio in result["speed_over_transformers"].items():
        by_processor = result["processor_speed_over_transformers"][name]
        seconds = result["median_seconds"][name]
        print(f"{name:40}{seconds:8.3f} s  {ratio:5.2f} x  {by_processor:5.2f} x of processor time", file=sys.stderr)
    if not args.out:
        print(text, end="")


if __name__ == "__main__":
    main()
