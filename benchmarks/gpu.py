"""Decode steps on a GPU: launched one operation at a time, and replayed as one CUDA graph, against the device's roof.

    python benchmarks/gpu.py --out benchmarks/results/gpu.json        gpt2, 1b and 7b in bf16, batch 1 to 256
    python benchmarks/gpu.py --device cpu --dtype float32 --presets nano --batches 1 2 --context 16    to try it

Random weights, made on the device: no network and no file. Each preset and batch is measured in both ways, one after
the other, the logits of both are compared, and the device's own bandwidth and FLOP rate are measured in the same run.
What does not fit the memory is left out and said so; --seconds ends the run in time.
"""

import argparse
import json
import time
from collections.abc import Callable
from pathlib import Path
from statistics import median
from typing import Any

import torch
from torch import Tensor

import gptlite
from gptlite.arithmetic import ModelShape, decode_costs, kv_bytes_per_token, n_params, total
from gptlite.cache.dense import StaticCache
from gptlite.config import preset
from gptlite.hardware import free_bytes, machine
from gptlite.measure import machine_roof, synchronize
from gptlite.record import filled_cache, random_model

Step = Callable[[Tensor], Tensor]  # tokens [B] -> logits [B, V], which may be written over by the next step


class GraphStep:
    """A decode step captured once and replayed: the host starts one graph where it started hundreds of kernels.

    A graph reads and writes fixed addresses, so the cache reads all its slots (its bucket is their number), and what
    `prepare` says of a new step is copied to where the captured one looks for it.
    """

    def __init__(self, model: gptlite.GPTlite, cache: StaticCache, batch: int) -> None:
        self.model, self.cache, self.batch = model, cache, batch
        self.tokens = torch.zeros(batch, dtype=torch.int64, device=cache.device)
        side = torch.cuda.Stream()
        side.wait_stream(torch.cuda.current_stream())
        with torch.cuda.stream(side):  # kernels are chosen and memory is taken before anything is captured
            for _ in range(3):
                self.segment = self._prepare()
                self.model.head(self.model.run(self.tokens, [self.segment], self.cache))
        torch.cuda.current_stream().wait_stream(side)
        self.segment = self._prepare()
        self.graph = torch.cuda.CUDAGraph()
        with torch.cuda.graph(self.graph):
            self.logits = self.model.head(self.model.run(self.tokens, [self.segment], self.cache))
        self.graph.replay()  # capturing runs nothing: this is the step that was prepared for it

    def _prepare(self) -> Any:
        positions = self.model.next_positions(self.batch, 1, self.cache)
        return self.cache.prepare(range(self.batch), positions)[0]

    def __call__(self, tokens: Tensor) -> Tensor:
        """tokens [B] -> logits [B, V], in memory that the next step uses again."""
        new = self._prepare()
        self.tokens.copy_(tokens)
        for name in ("positions", "slots", "k_pos"):
            getattr(self.segment, name).copy_(getattr(new, name))
        self.graph.replay()
        return self.logits


def plain_step(model: gptlite.GPTlite, cache: StaticCache, batch: int) -> Step:
    """The same step, launched operation by operation, without the plain loop's checks."""

    def step(tokens: Tensor) -> Tensor:
        segments = cache.prepare(range(batch), model.next_positions(batch, 1, cache))
        return model.head(model.run(tokens, segments, cache))

    return step


def timed(step: Step, tokens: Tensor, n_steps: int) -> tuple[list[float], Tensor]:
    """Seconds of each step, the device waited for, and the last logits."""
    seconds = []
    for _ in range(n_steps):
        synchronize(tokens.device)
        start = time.perf_counter()
        logits = step(tokens)
        synchronize(tokens.device)
        seconds.append(time.perf_counter() - start)
    return seconds, logits.clone()


@torch.inference_mode()
def measure(model: gptlite.GPTlite, batch: int, n_context: int, n_steps: int, graphs: bool) -> dict[str, Any]:
    """Medians of both ways, and how far their logits are apart on the same cache."""
    room = n_context + n_steps + 8
    ways: dict[str, Any] = {"plain": plain_step} | ({"graph": GraphStep} if graphs else {})
    result: dict[str, Any] = {}
    tokens, last = None, {}
    for name, make in ways.items():
        torch.manual_seed(0)
        cache = filled_cache(model, batch, n_context, room)
        cache.bucket = room if name == "graph" else 1
        tokens = torch.zeros(batch, dtype=torch.int64, device=cache.device)
        step = make(model, cache, batch)
        if name == "plain":  # as many steps as the capture takes, so that both have read the same
            timed(step, tokens, 4)
        result[name], last[name] = timed(step, tokens, n_steps)
    row = {name: median(seconds) for name, seconds in result.items()}
    if graphs:
        row["largest_difference"] = float((last["graph"].float() - last["plain"].float()).abs().max())
    return row


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--device", default="cuda")
    parser.add_argument("--dtype", choices=("bfloat16", "float16", "float32"), default="bfloat16")
    parser.add_argument("--presets", nargs="+", default=["gpt2", "1b", "7b"])
    parser.add_argument("--batches", type=int, nargs="+", default=[1, 4, 16, 64, 256])
    parser.add_argument("--context", type=int, default=512, help="tokens that each sequence has")
    parser.add_argument("--steps", type=int, default=30)
    parser.add_argument("--seconds", type=float, default=330, help="begin nothing new after so many")
    parser.add_argument("--out", type=Path, help="JSON file; a table in Markdown goes to the standard output anyway")
    args = parser.parse_args()
    dtype, start = getattr(torch, args.dtype), time.perf_counter()
    graphs = torch.device(args.device).type == "cuda"
    roof = machine_roof(args.device, dtype)
    rows: list[dict[str, Any]] = []
    left_out: list[str] = []
    for name in args.presets:
        config = preset(name, context_length=args.context + args.steps + 8)
        shape = ModelShape.of(config)
        weights = n_params(shape) * dtype.itemsize
        if weights > 0.8 * free_bytes(torch.device(args.device)):
            left_out.append(f"{name}: the weights need {weights / 1e9:.1f} GB")
            continue
        model = random_model(config, args.device, dtype)
        for batch in args.batches:
            # the cache of one way is still there while that of the next is filled
            needed = 2 * batch * config.context_length * kv_bytes_per_token(shape, dtype.itemsize)
            if needed > 0.8 * free_bytes(torch.device(args.device)):
                left_out.append(f"{name}, batch {batch}: the keys and values need {needed / 1e9:.1f} GB")
            elif time.perf_counter() - start > args.seconds:
                left_out.append(f"{name}, batch {batch}: no time left")
            else:
                row = measure(model, batch, args.context, args.steps, graphs)
                cost = total(
                    decode_costs(
                        shape, batch, args.context, bytes_per_value=dtype.itemsize, bytes_per_weight=dtype.itemsize
                    )
                )
                best = min(row[way] for way in ("plain", "graph") if way in row)
                row |= {"preset": name, "batch": batch, "context": args.context, "weight_bytes": weights}
                row |= {"bytes": cost.bytes, "flops": cost.flops}
                row["of_bandwidth"] = cost.bytes / best / roof.peak_bandwidth
                row["of_flops"] = cost.flops / best / roof.peak_flops
                rows.append(row)
        del model
    result = {
        "benchmark": "gpu",
        "machine": machine(args.device),
        "versions": {"gptlite": gptlite.__version__, "torch": torch.__version__},
        "params": {key: value for key, value in vars(args).items() if key != "out"},
        "roof": {"bytes_per_second": roof.peak_bandwidth, "flop_per_second": roof.peak_flops},
        "rows": rows,
        "left_out": left_out,
        "seconds": time.perf_counter() - start,
    }
    if args.out:
        args.out.write_text(json.dumps(result, indent=1) + "\n")
    print(f"{machine(args.device)['name']}, {args.dtype}, {args.context} tokens of context; measured ", end="")
    print(f"{roof.peak_bandwidth / 1e9:,.0f} GB/s and {roof.peak_flops / 1e12:,.1f} TFLOP/s\n")
    print("| preset | batch | one by one | as a graph | token/s | of the bandwidth | of the FLOP rate | logits apart |")
    print("|---|---|---|---|---|---|---|---|")
    for row in rows:
        times = [f"{1e3 * row[way]:.2f} ms" if way in row else "" for way in ("plain", "graph")]
        best = min(row[way] for way in ("plain", "graph") if way in row)
        apart = f"{row['largest_difference']:.1e}" if "largest_difference" in row else ""
        print(
            f"| {row['preset']} | {row['batch']} | {times[0]} | {times[1]} | {row['batch'] / best:,.0f} | "
            f"{100 * row['of_bandwidth']:.0f} % | {100 * row['of_flops']:.0f} % | {apart} |"
        )
    for line in left_out:
        print(f"\nleft out: {line}")


if __name__ == "__main__":
    main()
