"""What fewer KV heads or a latent cost and save: losses before and after uptraining, and the time of a decode step."""

from __future__ import annotations

import shlex
import time
from collections.abc import Iterator
from functools import partial
from pathlib import Path
from tempfile import TemporaryDirectory

import torch

from gptlite.arithmetic import ModelShape, decode_costs, kv_bytes, n_params, total
from gptlite.config import GPTConfig, preset
from gptlite.data import Corpus, load_corpus
from gptlite.generate import decode_step
from gptlite.measure import time_call
from gptlite.model import GPTlite
from gptlite.record import Point, Recording, Step, filled_cache, random_model, sweep
from gptlite.train import TrainSettings
from gptlite.variants.convert import Conversion, make_variant
from gptlite.variants.mla import LatentAttention, latent_shape
from gptlite.variants.swap import made_like, shape_of, swap_attention


def read_conversion(text: str) -> Conversion:
    """The conversion of a text such as "grouped 2 mean" or "latent 128 data". Raises: ValueError when it is none."""
    words = text.split()
    if len(words) != 3 or not words[1].isdigit():
        raise ValueError(f"conversion is {text!r}, it must be like 'grouped 2 mean' or 'latent 128 data'")
    return Conversion(words[0], int(words[1]), words[2])


def read_recipe(text: str) -> dict[str, str]:
    """The options of `gptlite convert` in a text such as "lr=0.003 cooldown=0.4 parts=all"; "none" has none.

    Raises: ValueError when it is no such text.
    """
    if text == "none":
        return {}
    allowed = ("optimizer", "lr", "warmup", "cooldown", "parts", "teacher", "tokens")
    pairs = [word.partition("=") for word in text.split()]
    if not pairs or any(name not in allowed or not value for name, _, value in pairs):
        raise ValueError(f"recipe is {text!r}, it must be none or NAME=VALUE with names of {', '.join(allowed)}")
    return {name: value for name, _, value in pairs}


@sweep(
    "kv-uptraining",
    "validation loss of conversions to fewer KV heads or a latent, before and after uptraining; hours on one core",
    model="gptlite",
    conversions=["grouped 2 mean", "latent 128 weights"],
    recipes=["lr=0.001", "lr=0.003", "lr=0.01", "lr=0.01 cooldown=0.4", "optimizer=adamw lr=0.002"],
    tokens=528_384,
    batch=16,
    folder="",
)
def _uptraining(recording: Recording) -> Iterator[Step]:
    params = recording.params
    chosen = [(read_conversion(c), read_recipe(r)) for c in params["conversions"] for r in params["recipes"]]
    folder = params["folder"]
    params["folder"] = Path(folder).name  # a recording keeps no path of a machine
    rows = recording.data.setdefault("runs", [])
    known: dict[Conversion, float] = {}
    corpora: list[Corpus] = []

    def run(conversion: Conversion, recipe: dict[str, str], name: str) -> Point:
        if not corpora:
            corpora.append(load_corpus())
        begin = time.perf_counter()
        with TemporaryDirectory() as scratch:
            out = Path(folder or scratch) / f"{name}.safetensors"
            settings, options = settings_of(recipe, params["tokens"], params["batch"])
            size = f"--kv-heads {conversion.size}" if conversion.kind == "grouped" else f"--latent {conversion.size}"
            command = f"gptlite convert {size} --start {conversion.start} {options} --out {out.name}"
            card = make_variant(
                params["model"],
                conversion,
                corpora[0],
                out,
                settings,
                recipe.get("teacher", "yes") == "yes",
                recipe.get("parts", "all"),
                shlex.join(shlex.split(command)),
                params["device"],
                "bf16",
                known.get(conversion),
            )
        known[conversion] = card["losses"]["converted"]
        keep = ("command", "conversion", "settings", "teacher", "parts", "cache_values_per_token", "tokens_seen")
        rows.append({key: card[key] for key in (*keep, "losses", "recovered", "loss_curve")})
        return Point({"conversion": name, "recipe": recipe_words(recipe)}, [time.perf_counter() - begin])

    for conversion, recipe in chosen:
        name = f"{conversion.kind}-{conversion.size}-{conversion.start}"
        yield {"conversion": name, "recipe": recipe_words(recipe)}, 1e9, partial(run, conversion, recipe, name)


def recipe_words(recipe: dict[str, str]) -> str:
    """A recipe as it was written."""
    return " ".join(f"{name}={value}" for name, value in recipe.items()) or "none"


def settings_of(
    recipe: dict[str, str], tokens: int, batch: int, context: int = 256
) -> tuple[TrainSettings | None, str]:
    """The settings of a recipe, and the options of `gptlite convert` that give the same.

    Args:
        recipe: by `read_recipe`. tokens: of the run, unless the recipe has its own. batch, context: of a step.
    Raises: ValueError when a value is of no use.
    """
    if not recipe:
        return None, "--precision bf16"
    steps = int(recipe.get("tokens", tokens)) // (batch * context)
    optimizer, lr = recipe.get("optimizer", "muon"), float(recipe.get("lr", 0.003))
    warmup, cooldown = int(recipe.get("warmup", 10)), float(recipe.get("cooldown", 1.0))
    settings = TrainSettings(steps, batch, lr, optimizer, "bf16", warmup, cooldown, 0.0, 1, max(1, steps // 6))
    words = [f"--steps {steps} --lr {lr:g} --precision bf16 --save-every {settings.save_every}"]
    defaults = {"batch-size": (batch, 16), "optimizer": (optimizer, "muon"), "warmup": (warmup, 10)}
    defaults |= {"cooldown": (cooldown, 1.0), "parts": (recipe.get("parts", "all"), "all")}
    words += [f"--{name} {value}" for name, (value, default) in defaults.items() if value != default]
    words += ["--no-teacher"] if recipe.get("teacher", "yes") != "yes" else []
    return settings, " ".join(words)


# -- the time of a decode step ------------------------------------------------------------------------------------


@sweep(
    "kv-heads",
    "seconds per decode step, by KV heads and by size of the latent",
    preset="gpt2",
    kv_heads=[12, 6, 4, 2, 1],
    latents=[768, 384, 256, 128],
    batches=[1, 16],
    contexts=[64, 1024],
    repeats=5,
    warmup=2,
)
def _kv_heads(recording: Recording) -> Iterator[Step]:
    params = recording.params
    base = preset(params["preset"], context_length=max(params["contexts"]))
    device, dtype = params["device"], getattr(torch, params["dtype"])
    n_steps = params["warmup"] + params["repeats"]
    if min(params["contexts"]) <= n_steps:
        raise ValueError(f"contexts has {min(params['contexts'])}, it must be above warmup + repeats, {n_steps}")
    made: dict[tuple[str, int], GPTlite] = {}  # the model in use, and no other

    def measure(kind: str, size: int, batch: int, context: int) -> Point:
        if (kind, size) not in made:
            made.clear()
            made[kind, size] = sized_model(base, kind, size, device, dtype)
        model = made[kind, size]
        # the steps end at the context: the last sample attends to exactly that many tokens
        cache = filled_cache(model, batch, context - n_steps, context)
        tokens = torch.zeros(batch, dtype=torch.int64, device=device)
        timing = time_call(lambda: decode_step(model, tokens, cache), device, params["warmup"], params["repeats"])
        shape, width = sized_shape(base, kind, size), dtype.itemsize
        cost = total(decode_costs(shape, batch, context, bytes_per_weight=width, bytes_per_value=width))
        at = {"attention": kind, "size": size, "batch": batch, "context": context}
        return Point.of({**at, "cache_bytes": int(kv_bytes(shape, 1, width))}, timing, cost)

    sizes = [("grouped", G) for G in params["kv_heads"]] + [("latent", r) for r in params["latents"]]
    for kind, size in sizes:
        shape = sized_shape(base, kind, size)
        for context in params["contexts"]:
            for batch in params["batches"]:
                at = {"attention": kind, "size": size, "batch": batch, "context": context}
                values = n_params(shape) + batch * (kv_bytes(shape, context, 1) + 8 * base.d_ff + base.vocab_size)
                yield at, values * dtype.itemsize, partial(measure, kind, size, batch, context)


def sized_shape(base: GPTConfig, kind: str, size: int) -> ModelShape:
    """The shape of a config with G KV heads ("grouped") or latents of size r ("latent").

    Raises: ValueError when G does not divide the heads, or r is below 1.
    """
    if kind == "grouped":
        return ModelShape.of(GPTConfig.from_dict({**base.to_dict(), "n_kv_heads": size}))
    if size < 1:
        raise ValueError(f"a latent of size {size} is asked for, it must be at least 1")
    return latent_shape(base, size)


def sized_model(base: GPTConfig, kind: str, size: int, device: str, dtype: torch.dtype) -> GPTlite:
    """A model with random weights of that shape, made on its device."""
    if kind == "grouped":
        return random_model(GPTConfig.from_dict({**base.to_dict(), "n_kv_heads": size}), device, dtype)
    model = random_model(GPTConfig.from_dict({**base.to_dict(), "n_kv_heads": 1}), device, dtype)
    return swap_attention(model, lambda mha: made_like(mha, lambda: LatentAttention(shape_of(mha), size)))
