"""Write the page of machines and models, book/hardware.md, from the package's facts: `python tools/hardware.py`."""

import json
from pathlib import Path

from gptlite.arithmetic import FACTS, ModelShape, kv_bytes_per_token, n_params
from gptlite.hardware import gpus

PAGE = Path(__file__).parent.parent / "book" / "hardware.md"
TEXT = """\
(hardware)=
# Machines and models

The explorers compute with the figures of this page, and `gptlite.hardware` and `gptlite.arithmetic` hold the same ones.
They are what makers and authors state; what your own machine reaches, `gptlite record roof` measures.

## GPUs

{{numref}}`tab-gpus` gives the rate of a dense 16-bit matrix product, without the sparsity that many data sheets count
in. The ridge point is that rate over the bandwidth of the memory: a step that does fewer FLOPs per byte than that waits
for memory {{cite}}`williams2009roofline`. A few consumer cards are faster when they accumulate in 16 bits, which costs
accuracy and which PyTorch does not do by default; the table names the rate with 32-bit accumulation.

```{{table}} Peak rates of GPUs. GB is 10^9 bytes, TFLOP/s is 10^12 FLOP/s.
:name: tab-gpus

{gpus}
```

## Models

{{numref}}`tab-models` counts from each model's published `config.json`. MHA, GQA and MQA are multi-head, grouped-query
and multi-query attention {{cite}}`shazeer2019mqa,ainslie2023gqa`, MLA is latent attention {{cite}}`deepseek2024v2`. The
bytes of keys and values are in 16 bits and for a context that fits into every layer's window.

```{{table}} Shapes of published models, and the bytes that one token adds to their cache. KiB is 2^10 bytes.
:name: tab-models

{models}
```
"""


def table(head: list[str], rows: list[list[str]]) -> str:
    """A Markdown table; the first and the last column hold words, the others numbers."""
    rule = [":--", *["--:"] * (len(head) - 2), ":--"]
    return "\n".join(f"| {' | '.join(row)} |" for row in [head, rule, *rows])


def gpu_table() -> str:
    """The GPUs, from the lowest ridge point to the highest."""
    rows = [
        [
            gpu.name,
            f"{gpu.peak_flops / 1e12:g}",
            f"{gpu.bandwidth / 1e9:,g}",
            f"{gpu.memory_bytes / 1e9:g}",
            f"{gpu.ridge_point:.0f}",
            gpu.source,
        ]
        for gpu in sorted(gpus().values(), key=lambda gpu: gpu.ridge_point)
    ]
    head = [
        "GPU",
        "16-bit matrix product, TFLOP/s",
        "bandwidth, GB/s",
        "memory, GB",
        "ridge point, FLOPs per byte",
        "source",
    ]
    return table(head, rows)


def model_table() -> str:
    """The models whose configs ship, from the fewest bytes per token to the most."""
    models = [json.loads(path.read_text(encoding="utf-8")) for path in sorted(FACTS.glob("*.json"))]
    shapes = [(model["name"], ModelShape.of(model["config"]), model["source"]) for model in models]
    rows = [
        [
            name,
            f"{n_params(shape) / 1e9:.2f}",
            str(shape.n_layers),
            shape.kind,
            f"{shape.n_heads} / {shape.n_kv_heads}",
            f"{shape.d_latent} + {shape.d_rope} latent" if shape.d_latent else str(shape.d_head),
            f"{shape.n_sliding} of {shape.window:,}" if shape.n_sliding else "none",
            f"{kv_bytes_per_token(shape) / 2**10:.1f}",
            source,
        ]
        for name, shape, source in sorted(shapes, key=lambda row: kv_bytes_per_token(row[1]))
    ]
    head = ["model", "parameters, 10^9", "layers", "attention", "query / KV heads", "head size"]
    return table([*head, "sliding layers, window in tokens", "KiB per token", "source"], rows)


def page() -> str:
    """The text of the page."""
    return TEXT.format(gpus=gpu_table(), models=model_table())


if __name__ == "__main__":
    PAGE.write_text(page(), encoding="utf-8")
    print(f"book/{PAGE.name} is written")
