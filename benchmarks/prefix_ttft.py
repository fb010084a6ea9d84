"""A prefix hit beside a miss on the shipped model, and the lookup of a long prompt in a large store.

    python benchmarks/prefix_ttft.py --out prefix_ttft.json

Time to first token: the same prompts, cache and threads with 200 of 204 tokens in the store and with none, in turns, so
that a change in the machine's load meets both; the logits are compared in the same run, and the number of tokens that
each side read is checked. Lookup: 10,000 tokens in an index of 100,000 blocks. Ends with 1 when a bound is missed.
"""

import argparse
import json
import sys
import time
from pathlib import Path
from statistics import median

import torch

import gptlite
from gptlite.cache.block_store import BlockStore
from gptlite.cache.prefix import PrefixIndex, PrefixStore
from gptlite.cache.radix import RadixStore
from gptlite.cache.reuse import PrefixCache
from gptlite.generate import prefill
from gptlite.hardware import machine
from gptlite.measure import synchronize

LEAST_RATIO, MOST_SECONDS = 3.0, 0.010  # what is asked of the two


def ttft(model: gptlite.GPTlite, store: PrefixStore, rounds: int, n_prefix: int, n_own: int) -> dict[str, list[float]]:
    """Seconds to the first token of each round, a hit and a miss in turns.

    Raises: SystemExit when a hit or a miss reads other tokens than it should, or their logits differ.
    """
    device = model.token_embedding.weight.device
    generator = torch.Generator().manual_seed(0)
    cache = PrefixCache(model, 1, model.context_length, store)
    vocabulary = model.fc_out.out_features

    def tokens(n: int) -> torch.Tensor:
        return torch.randint(vocabulary, (n,), generator=generator)

    def first(prompt: torch.Tensor, expected: int) -> tuple[float, torch.Tensor]:
        synchronize(device)
        start = time.perf_counter()
        n_cached = cache.begin(0, prompt)
        logits = prefill(model, prompt[None, n_cached:], cache)
        logits.argmax(-1).tolist()
        seconds = time.perf_counter() - start
        if n_cached != expected:
            raise SystemExit(f"{n_cached} tokens were cached, {expected} should be")
        cache.free(0)
        return seconds, logits

    prefix = tokens(n_prefix)
    first(torch.cat([prefix, torch.tensor([0])]).to(device), 0)  # leaves the prefix behind
    samples: dict[str, list[float]] = {"hit": [], "miss": []}
    for i in range(rounds + 1):  # the first round warms up
        own = torch.cat([torch.tensor([(i + 1) % vocabulary]), tokens(n_own - 1)])  # none begins as another did
        hit, logits = first(torch.cat([prefix, own]).to(device), n_prefix)
        whole = torch.cat([prefix, own])
        if (logits - model(whole[None].to(device))[:, -1]).abs().max() > 1e-4:
            raise SystemExit("a hit gives other logits than the model without a cache")
        miss, _ = first(torch.cat([(prefix[:1] + 1 + i) % vocabulary, whole[1:]]).to(device), 0)
        if i:
            samples["hit"].append(hit)
            samples["miss"].append(miss)
    return samples


def lookup(n_tokens: int, n_blocks: int, block_size: int = 16, rounds: int = 9) -> list[float]:
    """Seconds to find all blocks of a prompt in an index."""
    generator = torch.Generator().manual_seed(0)
    index: PrefixIndex[int] = PrefixIndex(block_size)

    def fill(text: torch.Tensor) -> None:
        for key, parent, tokens in index.chain(text):
            index.insert(key, parent, tokens, len(index))

    prompt = torch.randint(50_000, (n_tokens,), generator=generator)
    fill(prompt)
    while len(index) < n_blocks:
        fill(torch.randint(50_000, ((n_blocks - len(index)) * block_size,), generator=generator))
    samples = []
    asked = prompt.tolist()
    for _ in range(rounds):
        start = time.perf_counter()
        found = index.match(asked)
        samples.append(time.perf_counter() - start)
        if len(found) != n_tokens // block_size:
            raise SystemExit(f"{len(found)} blocks were found, {n_tokens // block_size} are there")
    return samples


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--device", default="cpu")
    parser.add_argument("--threads", type=int, help="of torch; without it, its own choice")
    parser.add_argument("--rounds", type=int, default=15, help="at most 60")
    parser.add_argument("--out", type=Path, help="JSON file; without it the result goes to the standard output")
    args = parser.parse_args()
    if args.threads:
        torch.set_num_threads(args.threads)
    model, _ = gptlite.load("gptlite", args.device)
    # blocks of 8 hold 200 tokens whole
    stores = {"chain of blocks": BlockStore(2000, 8), "radix tree": RadixStore(16_000)}
    with torch.inference_mode():
        seconds = {name: ttft(model, store, args.rounds, 200, 4) for name, store in stores.items()}
    ratios = {name: median(miss / hit for hit, miss in zip(one["hit"], one["miss"])) for name, one in seconds.items()}
    found = lookup(10_000, 100_000)
    result = {
        "benchmark": "prefix_ttft",
        "machine": machine(args.device),
        "versions": {"gptlite": gptlite.__version__},
        "params": {key: value for key, value in vars(args).items() if key != "out"},
        "seconds": seconds,
        "median_seconds": {name: {k: median(v) for k, v in one.items()} for name, one in seconds.items()},
        "miss_over_hit": ratios,
        "lookup_seconds": found,
        "median_lookup_seconds": median(found),
        "outputs_equal": True,
    }
    text = json.dumps(result, indent=1) + "\n"
    if args.out:
        args.out.write_text(text)
    for name, ratio in ratios.items():
        one = result["median_seconds"][name]
        print(
            f"{name:18} miss {1e3 * one['miss']:7.2f} ms, hit {1e3 * one['hit']:6.2f} ms, {ratio:5.2f} times shorter",
            file=sys.stderr,
        )
    print(f"lookup of 10,000 tokens in 100,000 blocks: {1e3 * median(found):.2f} ms", file=sys.stderr)
    if not args.out:
        print(text, end="")
    if min(ratios.values()) < LEAST_RATIO or median(found) >= MOST_SECONDS:
        raise SystemExit(f"a bound is missed: {LEAST_RATIO:g} times, {1e3 * MOST_SECONDS:g} ms")


if __name__ == "__main__":
    main()
