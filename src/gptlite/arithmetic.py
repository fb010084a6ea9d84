"""What a step costs, by arithmetic: parameters, FLOPs, bytes, and the time and memory that follow from them.

Everything is a pure function of a `ModelShape`, which `ModelShape.of` reads from a GPTConfig or from a `config.json`.
One multiply-add is 2 FLOPs. Only matrix products are counted: the linear layers and attention's two products. Norms,
activation functions, residual additions and the embedding look-up are left out of FLOPs and of bytes.
"""

import json
import struct
from collections.abc import Mapping
from dataclasses import dataclass, fields
from functools import cache
from math import prod
from pathlib import Path
from typing import Any

from gptlite.config import GPTConfig

PARTS = ("projections", "scores", "mix", "feed-forward", "head")
FACTS = Path(__file__).parent / "facts" / "configs"
HEADER_LIMIT = 100_000_000  # bytes; the format's own limit
BITS = {  # of the safetensors dtypes that hold whole bytes
    "BOOL": 8, "U8": 8, "I8": 8, "F8_E4M3": 8, "F8_E5M2": 8, "F8_E8M0": 8,
    "U16": 16, "I16": 16, "F16": 16, "BF16": 16, "U32": 32, "I32": 32, "F32": 32, "U64": 64, "I64": 64, "F64": 64,
}  # fmt: skip


@dataclass(frozen=True)
class ModelShape:
    """The sizes of a decoder-only transformer, as far as its cost depends on them.

    Args:
        vocab_size: V. n_layers: L. d_model: d. n_heads: H. n_kv_heads: G. d_head: D, size of a query and key head.
        d_ff: hidden size of the (dense) feed-forward network.
        gated: the feed-forward network has three matrices (SwiGLU, GeGLU) instead of two.
        tied: the head shares the token embedding's matrix.
        n_positions: rows of a learned position embedding; 0 with rotary positions.
        qkv_bias, out_bias, ffn_bias, head_bias: whether those linear layers have a bias.
        norm_params: parameters of one block's norms; final_norm_params: those of the last norm.
        window: keys that a sliding layer sees at most; n_sliding: number of sliding layers, of the L.
        d_latent: size of MLA's cached latent, `kv_lora_rank` {cite}`deepseek2024v2`; 0 without MLA.
        d_rope: size of MLA's cached rotary key. d_nope, d_value: sizes of MLA's expanded key and value head.
        d_query_latent: size of MLA's query latent; 0 when queries are projected directly.
        n_experts, n_active, n_shared: routed experts of a mixture, those that a token uses, those that all use.
        d_expert: hidden size of one expert. n_dense: first layers that keep the dense network.
    """

    vocab_size: int
    n_layers: int
    d_model: int
    n_heads: int
    n_kv_heads: int
    d_head: int
    d_ff: int
    gated: bool = True
    tied: bool = False
    n_positions: int = 0
    qkv_bias: bool = False
    out_bias: bool = False
    ffn_bias: bool = False
    head_bias: bool = False
    norm_params: int = 0
    final_norm_params: int = 0
    window: int = 0
    n_sliding: int = 0
    d_latent: int = 0
    d_rope: int = 0
    d_nope: int = 0
    d_value: int = 0
    d_query_latent: int = 0
    n_experts: int = 0
    n_active: int = 0
    n_shared: int = 0
    d_expert: int = 0
    n_dense: int = 0

    def __post_init__(self) -> None:
        required = {"vocab_size", "n_layers", "d_model", "n_heads", "n_kv_heads", "d_head", "d_ff"}
        for field in fields(self):
            if field.type is bool:
                continue
            value, least = getattr(self, field.name), int(field.name in required)
            if isinstance(value, bool) or not isinstance(value, int) or value < least:
                raise ValueError(f"{field.name} is {value!r}, it must be a whole number of at least {least}")
        if self.n_heads % self.n_kv_heads:
            raise ValueError(f"n_kv_heads is {self.n_kv_heads}, it must divide the {self.n_heads} query heads")

    @classmethod
    def of(cls, config: "ModelShape | GPTConfig | Mapping[str, Any]") -> "ModelShape":
        """The shape of a GPTConfig or of a Hugging Face `config.json`.

        Args:
            config: a GPTConfig, the dictionary of a `config.json`, or a shape, which is returned as it is.
        Raises: ValueError that names the field that is missing or wrong.
        """
        if isinstance(config, ModelShape):
            return config
        if isinstance(config, Mapping):
            return _from_hf(config)
        if not isinstance(config, GPTConfig):
            raise ValueError(
                f"config is a {type(config).__name__}, it must be a GPTConfig or a config.json's dictionary"
            )
        return cls(
            config.vocab_size, config.n_layers, config.d_model, config.n_heads, config.n_kv_heads or config.n_heads,
            config.d_head, config.d_ff or 4 * config.d_model, gated=False, n_positions=config.context_length,
            qkv_bias=True, out_bias=True, ffn_bias=True, head_bias=True,
            norm_params=4 * config.d_model, final_norm_params=2 * config.d_model,
        )  # fmt: skip

    @property
    def kind(self) -> str:
        """MHA, GQA, MQA or MLA: how keys and values are shared."""
        if self.d_latent:
            return "MLA"
        return {self.n_heads: "MHA", 1: "MQA"}.get(self.n_kv_heads, "GQA")

    @property
    def d_attn(self) -> int:
        """Width of all query heads together, H D."""
        return self.n_heads * self.d_head

    def linears(self, part: str, dense: bool = True) -> list[tuple[int, int, bool]]:
        """The linear layers that a token passes in one block (or in the head), as (inputs, outputs, has a bias).

        Args:
            part: projections, feed-forward or head.
            dense: the feed-forward network of a dense layer, or that of one expert.
        """
        d = self.d_model
        if part == "head":
            return [(d, self.vocab_size, self.head_bias)]
        if part == "feed-forward":
            d_ff = self.d_ff if dense else self.d_expert
            return [(d, d_ff, self.ffn_bias)] * (2 if self.gated else 1) + [(d_ff, d, self.ffn_bias)]
        if not self.d_latent:
            d_kv = self.n_kv_heads * self.d_head
            projections = [(d, d_out, self.qkv_bias) for d_out in (self.d_attn, d_kv, d_kv)]
            return [*projections, (self.d_attn, d, self.out_bias)]
        d_query = self.n_heads * (self.d_nope + self.d_rope)
        rank = self.d_query_latent
        query = [(d, rank, False), (rank, d_query, False)] if rank else [(d, d_query, False)]
        expand = (self.d_latent, self.n_heads * (self.d_nope + self.d_value), False)
        return [
            *query,
            (d, self.d_latent + self.d_rope, False),
            expand,
            (self.n_heads * self.d_value, d, self.out_bias),
        ]


@cache
def shipped_models() -> dict[str, ModelShape]:
    """Shapes of well-known models by name; `facts/configs` holds their configs and where each comes from."""
    models = [json.loads(path.read_text(encoding="utf-8")) for path in sorted(FACTS.glob("*.json"))]
    return {model["name"]: ModelShape.of(model["config"]) for model in models}


# How the families differ where their config.json does not say.
NOT_GATED = ("gpt2", "opt", "gpt_neox", "gptj", "phi", "falcon", "bloom", "starcoder2", "mpt")
FULL_BIAS = ("gpt2", "opt")
SLIDES = ("mistral", "gemma2", "gemma3_text", "phi3", "mixtral", "starcoder2", "gpt_oss", "cohere2")


def _from_hf(config: Mapping[str, Any]) -> ModelShape:
    config = {**config, **config.get("text_config", {})}  # the language part of a multimodal model
    kind = config.get("model_type", "")

    def get(*names: str, default: Any = None) -> Any:
        for name in names:
            if config.get(name) is not None:
                return config[name]
        if default is None:
            raise ValueError(f"config.json has no {names[0]!r}")
        return default

    L, d, H = (
        get(*names)
        for names in (
            ("num_hidden_layers", "n_layer"),
            ("hidden_size", "n_embd"),
            ("num_attention_heads", "n_head"),
        )
    )
    for name, value in (("num_hidden_layers", L), ("hidden_size", d), ("num_attention_heads", H)):
        if isinstance(value, bool) or not isinstance(value, int) or value < 1:
            raise ValueError(f"{name} is {value!r}, it must be a whole number of at least 1")
    full_bias, norm = kind in FULL_BIAS, (2 if kind in NOT_GATED else 1) * d
    d_head = get("head_dim", default=d // H)
    qk_norm = 2 * d_head if kind in ("qwen3", "qwen3_moe", "gemma3_text") else 0
    d_latent = get("kv_lora_rank", default=0)
    q_rank = get("q_lora_rank", default=0) if d_latent else 0
    window, n_sliding = _sliding(config, kind, L)
    n_experts = get("n_routed_experts", "num_local_experts", "num_experts", default=0)
    d_ff = get("intermediate_size", "ffn_dim", "n_inner", default=4 * d)
    return ModelShape(
        vocab_size=get("vocab_size"),
        n_layers=L,
        d_model=d,
        n_heads=H,
        n_kv_heads=get("num_key_value_heads", default=H),
        d_head=d_head,
        d_ff=d_ff,
        gated=kind not in NOT_GATED,
        tied=bool(config.get("tie_word_embeddings", kind in (*FULL_BIAS, "gemma2", "gemma3_text"))),
        n_positions={"gpt2": get("n_positions", default=0), "opt": get("max_position_embeddings", default=0) + 2}.get(
            kind, 0
        ),
        qkv_bias=bool(config.get("attention_bias", full_bias or kind == "qwen2")),
        out_bias=bool(config.get("attention_bias", full_bias)),
        ffn_bias=bool(config.get("mlp_bias", full_bias)),
        norm_params=(4 if kind in ("gemma2", "gemma3_text") else 2) * norm + qk_norm + d_latent + q_rank,
        final_norm_params=norm,
        window=window,
        n_sliding=n_sliding,
        d_latent=d_latent,
        d_rope=get("qk_rope_head_dim") if d_latent else 0,
        d_nope=get("qk_nope_head_dim") if d_latent else 0,
        d_value=get("v_head_dim") if d_latent else 0,
        d_query_latent=q_rank,
        n_experts=n_experts,
        n_active=get("num_experts_per_tok") if n_experts else 0,
        n_shared=get("n_shared_experts", default=0),
        d_expert=get("moe_intermediate_size", default=d_ff) if n_experts else 0,
        n_dense=get("first_k_dense_replace", default=0) if n_experts else L,
    )


def _sliding(config: Mapping[str, Any], kind: str, n_layers: int) -> tuple[int, int]:
    """(window, number of sliding layers), by `layer_types` where the config has it, else by the family's rule."""
    window = config.get("sliding_window") or 0
    if not window or not config.get("use_sliding_window", kind in SLIDES):
        return 0, 0
    if "layer_types" in config:
        return window, sum(layer == "sliding_attention" for layer in config["layer_types"])
    every = config.get("sliding_window_pattern", {"gemma2": 2, "gemma3_text": 6}.get(kind, 0))  # every nth is global
    return window, n_layers - (n_layers // every if every else 0)


# -- parameters ---------------------------------------------------------------------------------------------------


def _size(linears: list[tuple[int, int, bool]]) -> int:
    return sum(d_in * d_out + bias * d_out for d_in, d_out, bias in linears)


def _ffn_params(shape: ModelShape, n_experts: float) -> float:
    """Parameters of all feed-forward networks, with so many routed experts in each mixture."""
    dense = shape.n_dense if shape.n_experts else shape.n_layers
    expert, router = _size(shape.linears("feed-forward", dense=False)), shape.d_model * shape.n_experts
    mixture = (n_experts + shape.n_shared) * expert + router
    return dense * _size(shape.linears("feed-forward")) + (shape.n_layers - dense) * mixture


def n_params(shape: ModelShape, embeddings: bool = True) -> int:
    """N, the number of parameters: matrices, biases and norms.

    Args:
        embeddings: count the token and position embeddings and the head; without them it is the N of Kaplan's counts
            {cite}`kaplan2020scaling`.
    """
    blocks = shape.n_layers * (_size(shape.linears("projections")) + shape.norm_params)
    total = int(blocks + _ffn_params(shape, shape.n_experts)) + shape.final_norm_params
    if embeddings:
        head = shape.head_bias * shape.vocab_size if shape.tied else _size(shape.linears("head"))
        total += (shape.vocab_size + shape.n_positions) * shape.d_model + head
    return total


def params_from_safetensors_header(path: str | Path) -> dict[str, int]:
    """Counts parameters from a safetensors file's header alone; no weight is read.

    The file begins with the header's length (8 bytes, little-endian) and the header (JSON: dtype, shape and byte range
    of each tensor). The file is not trusted: every size is checked against the file's before it is used.

    Args:
        path: a `.safetensors` file.
    Returns: the number of parameters by dtype, for example {"BF16": 8030261248}.
    Raises: ValueError when the file isn't safetensors, is truncated, or its header contradicts itself.
    """
    path = Path(path)
    if not path.is_file():
        raise ValueError(f"no file {path.name!r}")
    size = path.stat().st_size
    with path.open("rb") as file:
        start = file.read(8)
        length = struct.unpack("<Q", start)[0] if len(start) == 8 else 0
        if not 2 <= length <= min(HEADER_LIMIT, size - 8):
            raise ValueError(f"{path.name} is no safetensors file: header of {length} bytes in a file of {size}")
        try:
            header = json.loads(file.read(length))
        except (UnicodeDecodeError, json.JSONDecodeError, RecursionError):
            raise ValueError(f"{path.name} is no safetensors file: its header is not JSON") from None
    if not isinstance(header, dict):
        raise ValueError(f"{path.name} is no safetensors file: its header is not a table of tensors")
    counts: dict[str, int] = {}
    end = 0
    tensors = {name: entry for name, entry in header.items() if name != "__metadata__"}
    for name, entry in tensors.items():
        if not isinstance(entry, dict) or not isinstance(entry.get("shape"), list):
            raise ValueError(f"{path.name}: tensor {name!r} has no shape")
        shape, offsets, dtype = entry["shape"], entry.get("data_offsets"), entry.get("dtype")
        if not isinstance(dtype, str) or dtype not in BITS:
            raise ValueError(f"{path.name}: tensor {name!r} has dtype {dtype!r}, known are {', '.join(BITS)}")
        if not all(type(n) is int and 0 <= n < 2**63 for n in shape):
            raise ValueError(f"{path.name}: tensor {name!r} has shape {shape}")
        if not (isinstance(offsets, list) and len(offsets) == 2 and all(type(n) is int and n >= 0 for n in offsets)):
            raise ValueError(f"{path.name}: tensor {name!r} has byte range {offsets!r}")
        n_values = prod(shape)
        if offsets[1] - offsets[0] != n_values * BITS[dtype] // 8:
            raise ValueError(f"{path.name}: tensor {name!r} of shape {shape} does not fill its byte range {offsets}")
        counts[dtype] = counts.get(dtype, 0) + n_values
        end = max(end, offsets[1])
    if not end == sum(counts[dtype] * BITS[dtype] // 8 for dtype in counts) == size - 8 - length:
        raise ValueError(f"{path.name} is truncated or its tensors overlap: {size - 8 - length} bytes of data")
    return counts


# -- bytes of keys and values -------------------------------------------------------------------------------------


def _kv_values(shape: ModelShape) -> tuple[int, int]:
    """Values that one token adds to one layer's cache: (keys, values). MLA's latent is both; it counts as keys."""
    if shape.d_latent:
        return shape.d_latent + shape.d_rope, 0
    return shape.n_kv_heads * shape.d_head, shape.n_kv_heads * shape.d_head


def kv_bytes_per_token(shape: ModelShape, bytes_per_value: float = 2) -> float:
    """Bytes that one token adds to the cache of all layers, while no window is full.

    2 L G D values (keys and values) for MHA, GQA and MQA {cite}`shazeer2019mqa,ainslie2023gqa`; L (d_latent + d_rope)
    for MLA {cite}`deepseek2024v2`.

    Args:
        bytes_per_value: 2 in fp16 and bf16, 4 in fp32, 1 in fp8.
    """
    return shape.n_layers * sum(_kv_values(shape)) * bytes_per_value


def kv_bytes(shape: ModelShape, n_tokens: int, bytes_per_value: float = 2) -> float:
    """Bytes of one sequence's cache of n_tokens; a sliding layer keeps no more than its window of them."""
    kept = (shape.n_layers - shape.n_sliding) * n_tokens + shape.n_sliding * min(n_tokens, shape.window)
    return kept * sum(_kv_values(shape)) * bytes_per_value


# -- cost of a step -----------------------------------------------------------------------------------------------


@dataclass(frozen=True)
class Cost:
    """FLOPs and bytes of a part of a step.

    Args:
        flops: 2 per multiply-add.
        weight_bytes: weights and biases, each read once for the whole batch.
        kv_bytes: keys and values that attention reads, each once per sequence.
        activation_bytes: what enters and leaves each matrix product besides those. Attention counts as fused: its
            queries are read and its outputs written, its scores and its mask never leave the chip.
    """

    flops: float = 0
    weight_bytes: float = 0
    kv_bytes: float = 0
    activation_bytes: float = 0

    def __add__(self, other: "Cost") -> "Cost":
        return Cost(*(getattr(self, field.name) + getattr(other, field.name) for field in fields(Cost)))

    @property
    def bytes(self) -> float:
        """Weights, keys and values: what has to come from memory, however well activations stay on the chip."""
        return self.weight_bytes + self.kv_bytes

    @property
    def operand_bytes(self) -> float:
        """Every operand and result of every matrix product: what kernels that run one by one move."""
        return self.bytes + self.activation_bytes

    @property
    def intensity(self) -> float:
        """FLOPs per byte of weights, keys and values {cite}`williams2009roofline`."""
        return self.flops / self.bytes


def _pairs(n_new: int, n_past: int, window: int, computed: bool) -> int:
    """(query, key) pairs of one sequence in one layer: those that are visible, or the whole rectangle."""
    T = n_past + n_new
    if computed:
        return n_new * T
    rising = min(n_new, max(0, window - n_past)) if window else n_new  # queries that see everything before them
    return rising * n_past + rising * (rising + 1) // 2 + (n_new - rising) * window


def step_costs(
    shape: ModelShape,
    batch: int,
    n_new: int,
    n_past: int = 0,
    bytes_per_weight: float = 2,
    bytes_per_value: float = 2,
    n_logits: int = 1,
    computed: bool = False,
) -> dict[str, Cost]:
    """FLOPs and bytes of one forward pass, by part of the model.

    A linear layer costs 2 d_in d_out FLOPs per token; scores and mix cost 2 H D each per visible pair of query and key.
    A step of one new token runs MLA absorbed (queries meet the latent itself), a longer one expanded. Of a mixture of
    experts, a step reads those that at least one token is expected to choose under uniform routing.

    Args:
        batch: B, sequences. n_new: S, new tokens of each. n_past: tokens of each in the cache already.
        bytes_per_weight: 2 in fp16 and bf16, 4 in fp32; also the size of an activation.
        bytes_per_value: the same of a cached key or value.
        n_logits: new tokens of each sequence that need logits: 1 to generate, S to score a text.
        computed: count the pairs that a kernel computes which doesn't skip the masked ones, the whole S x T rectangle.
    Returns: a Cost for each of PARTS; `total` adds them.
    Raises: ValueError on a count that is not positive, or more logits than new tokens.
    """
    for name, value, least in (
        ("batch", batch, 1),
        ("n_new", n_new, 1),
        ("n_past", n_past, 0),
        ("n_logits", n_logits, 0),
    ):
        if value < least:
            raise ValueError(f"{name} is {value}, it must be at least {least}")
    if n_logits > n_new:
        raise ValueError(f"n_logits is {n_logits}, a step of {n_new} new tokens has no more")
    tokens = batch * n_new

    def linear(layers: list[tuple[int, int, bool]], repeats: float, rows: float, read: float | None = None) -> Cost:
        return Cost(
            2 * rows * repeats * sum(d_in * d_out for d_in, d_out, _ in layers),
            (repeats if read is None else read) * _size(layers) * bytes_per_weight,
            0,
            rows * repeats * sum(d_in + d_out for d_in, d_out, _ in layers) * bytes_per_weight,
        )

    n_dense = shape.n_dense if shape.n_experts else shape.n_layers
    ffn = linear(shape.linears("feed-forward"), n_dense, tokens)
    if shape.n_experts:
        mixtures, chosen = shape.n_layers - n_dense, shape.n_active + shape.n_shared
        touched = shape.n_experts * (1 - (1 - shape.n_active / shape.n_experts) ** tokens) + shape.n_shared
        ffn += linear(shape.linears("feed-forward", dense=False), mixtures * chosen, tokens, mixtures * touched)
        ffn += linear([(shape.d_model, shape.n_experts, False)], mixtures, tokens)

    # widths of a query, and of what it mixes: MLA's depend on whether the keys are expanded
    if shape.d_latent and n_new == 1:
        d_key, d_mix, kv = shape.d_latent + shape.d_rope, shape.d_latent, _kv_values(shape)
    elif shape.d_latent:
        d_key, d_mix = shape.d_nope + shape.d_rope, shape.d_value
        kv = shape.n_heads * d_key, shape.n_heads * d_mix
    else:
        d_key, d_mix, kv = shape.d_head, shape.d_head, _kv_values(shape)
    attention = []
    for width, cached in zip((d_key, d_mix), kv, strict=True):
        cost = Cost()
        for layers, window in ((shape.n_layers - shape.n_sliding, 0), (shape.n_sliding, shape.window)):
            pairs = _pairs(n_new, n_past, window, computed)
            T = n_past + n_new if computed or not window else min(n_past + n_new, window + n_new - 1)
            cost += Cost(
                2 * layers * batch * pairs * shape.n_heads * width,
                0,
                layers * batch * T * cached * bytes_per_value,
                layers * tokens * shape.n_heads * width * bytes_per_weight,
            )
        attention.append(cost)

    projections = linear(shape.linears("projections"), shape.n_layers, tokens)
    head = linear(shape.linears("head"), 1, batch * n_logits, 1)
    return dict(zip(PARTS, (projections, *attention, ffn, head), strict=True))


def prefill_costs(shape: ModelShape, batch: int, n_tokens: int, **options: Any) -> dict[str, Cost]:
    """`step_costs` of a prompt of n_tokens, read in one pass, which gives the logits of its last token."""
    return step_costs(shape, batch, n_tokens, 0, **options)


def decode_costs(shape: ModelShape, batch: int, n_context: int, **options: Any) -> dict[str, Cost]:
    """`step_costs` of one new token for each sequence, which attends to n_context tokens, itself included."""
    return step_costs(shape, batch, 1, n_context - 1, **options)


def total(costs: Mapping[str, Cost]) -> Cost:
    """The sum over the parts."""
    return sum(costs.values(), Cost())


# -- roofline -----------------------------------------------------------------------------------------------------


def ridge_point(peak_flops: float, bandwidth: float) -> float:
    """FLOPs per byte above which a machine is limited by its arithmetic {cite}`williams2009roofline`.

    Args:
        peak_flops: FLOP/s. bandwidth: bytes/s.
    """
    if not (peak_flops > 0 and bandwidth > 0):
        raise ValueError(f"peak_flops is {peak_flops} and bandwidth {bandwidth}, both must be positive")
    return peak_flops / bandwidth


def step_bound(cost: Cost, peak_flops: float, bandwidth: float) -> tuple[float, str]:
    """The least time of a step, max(FLOPs / peak, bytes / bandwidth) {cite}`williams2009roofline`.

    Args:
        cost: the step's, for example `total(decode_costs(...))`.
        peak_flops: FLOP/s. bandwidth: bytes/s.
    Returns: seconds, and what sets them: "compute" or "memory".
    """
    compute = cost.intensity > ridge_point(peak_flops, bandwidth)
    return (cost.flops / peak_flops, "compute") if compute else (cost.bytes / bandwidth, "memory")


# -- memory budget ------------------------------------------------------------------------------------------------


def kv_budget(shape: ModelShape, memory_bytes: float, reserve: float = 0.1, bytes_per_weight: float = 2) -> float:
    """Bytes left for keys and values: the memory, less a share for activations and buffers, less the weights.

    Args:
        memory_bytes: of the GPU. reserve: the share of it that is kept free, in [0, 1).
    Returns: bytes; negative when the weights don't fit.
    """
    if not 0 <= reserve < 1:
        raise ValueError(f"reserve is {reserve}, it must be in [0, 1)")
    return memory_bytes * (1 - reserve) - n_params(shape) * bytes_per_weight


def largest_batch(
    shape: ModelShape,
    n_context: int,
    memory_bytes: float,
    reserve: float = 0.1,
    bytes_per_weight: float = 2,
    bytes_per_value: float = 2,
) -> int:
    """Sequences of n_context tokens whose keys and values fit beside the weights; 0 when none does."""
    if n_context < 1:
        raise ValueError(f"n_context is {n_context}, it must be at least 1")
    budget = kv_budget(shape, memory_bytes, reserve, bytes_per_weight)
    return max(0, int(budget // kv_bytes(shape, n_context, bytes_per_value)))


# -- where attention overtakes the matrices -----------------------------------------------------------------------


def kaplan_flops(shape: ModelShape, n_tokens: int) -> tuple[float, float]:
    """FLOPs of a prompt's forward pass by 2 N + 2 L n d_attn per token {cite}`kaplan2020scaling`.

    N leaves the embeddings and the head out. The second term counts the visible half of all pairs: a token sees n / 2
    others on average, and each pair costs 4 d_attn FLOPs in a layer.

    Returns: (2 N n, 2 L n^2 d_attn): matrices and attention.
    """
    return 2 * n_params(shape, embeddings=False) * n_tokens, 2 * shape.n_layers * n_tokens**2 * shape.d_attn


def attention_share(shape: ModelShape, n_tokens: int) -> float:
    """Attention's share of a prompt's FLOPs, in [0, 1], by `kaplan_flops`."""
    matrices, attention = kaplan_flops(shape, n_tokens)
    return attention / (matrices + attention)


def crossover_prefill(shape: ModelShape) -> float:
    """Prompt length whose attention costs as much as its matrices: N / (L d_attn) tokens, by `kaplan_flops`."""
    return n_params(shape, embeddings=False) / (shape.n_layers * shape.d_attn)


def crossover_last_token(shape: ModelShape) -> float:
    """Context whose last token spends as much on attention as on matrices: N / (2 L d_attn) tokens.

    The last token sees all n, not n / 2 on average, so this is half of `crossover_prefill`.
    """
    return crossover_prefill(shape) / 2


def crossover_6d(shape: ModelShape) -> int:
    """The rule of thumb 6 d: `crossover_last_token` of a model with MHA of width d and d_ff = 4 d (N = 12 L d^2)."""
    return 6 * shape.d_model
