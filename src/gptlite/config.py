"""The shape of a GPTlite, and the presets that the book uses."""

from dataclasses import asdict, dataclass, fields, replace
from typing import Any


def check_counts(**counts: Any) -> None:
    """Refuses a count that is not a whole number of at least 1.

    Args:
        counts: by the names that the caller knows them by.
    Raises: ValueError that names the first bad one and its value.
    """
    for name, value in counts.items():
        if isinstance(value, bool) or not isinstance(value, int) or value < 1:
            raise ValueError(f"{name} is {value!r}, it must be a whole number of at least 1")


@dataclass(frozen=True)
class GPTConfig:
    """The shape of a GPTlite; the model is built from it, and nothing reads it afterwards.

    Args:
        vocab_size: V, tokens in the vocabulary.
        context_length: n, positions that the model has embeddings for, in tokens.
        n_layers: L, transformer blocks.
        d_model: d, width of the residual stream.
        n_heads: H, query heads.
        d_head: D, size of a head; `n_heads * d_head` need not equal `d_model`.
        n_kv_heads: G, KV heads, a divisor of `n_heads`; None means H (multi-head attention).
        d_ff: hidden size of the feed-forward network; None means 4 d.
        dropout: probability of dropping an activation while training, in [0, 1).
    Raises: ValueError that names the field, its value and what is allowed.
    """

    vocab_size: int
    context_length: int
    n_layers: int
    d_model: int
    n_heads: int
    d_head: int
    n_kv_heads: int = None  # type: ignore[assignment]  # None is given, never kept
    d_ff: int = None  # type: ignore[assignment]
    dropout: float = 0.0

    def __post_init__(self) -> None:
        if self.n_kv_heads is None:
            object.__setattr__(self, "n_kv_heads", self.n_heads)
        if self.d_ff is None:
            object.__setattr__(self, "d_ff", 4 * self.d_model)
        for field in fields(self):
            value = getattr(self, field.name)
            if field.name == "dropout":
                if isinstance(value, bool) or not isinstance(value, int | float) or not 0 <= value < 1:
                    raise ValueError(f"dropout is {value!r}, it must be a number in [0, 1)")
            else:
                check_counts(**{field.name: value})
        if self.n_heads % self.n_kv_heads:
            raise ValueError(f"n_kv_heads is {self.n_kv_heads}, it must divide n_heads, which is {self.n_heads}")

    def to_dict(self) -> dict[str, Any]:
        """Returns: the fields by name, ready for JSON."""
        return asdict(self)

    @classmethod
    def from_dict(cls, values: dict[str, Any]) -> "GPTConfig":
        """Returns: the config of these fields. Raises: ValueError on a missing, unknown or bad field."""
        known = {field.name for field in fields(cls)}
        if unknown := sorted(set(values) - known):
            raise ValueError(f"unknown config field {unknown[0]!r}, known are {', '.join(sorted(known))}")
        try:
            return cls(**values)
        except TypeError as error:
            raise ValueError(f"config is incomplete: {error}") from None


PRESETS = {
    # trained on characters, so the vocabulary is a few dozen; the corpus decides it
    "nano": GPTConfig(vocab_size=68, context_length=64, n_layers=2, d_model=64, n_heads=4, d_head=16),
    "gptlite": GPTConfig(vocab_size=68, context_length=256, n_layers=6, d_model=256, n_heads=8, d_head=32),
    "draft": GPTConfig(vocab_size=68, context_length=256, n_layers=2, d_model=128, n_heads=4, d_head=32),
    # random weights, for measuring at the sizes where effects show
    "gpt2": GPTConfig(vocab_size=50_272, context_length=1024, n_layers=12, d_model=768, n_heads=12, d_head=64),
    "1b": GPTConfig(
        vocab_size=128_256, context_length=8192, n_layers=16, d_model=2048, n_heads=32, d_head=64, n_kv_heads=8
    ),
    "7b": GPTConfig(
        vocab_size=128_256, context_length=8192, n_layers=32, d_model=4096, n_heads=32, d_head=128, n_kv_heads=8
    ),
}


def preset(name: str, **changes: Any) -> GPTConfig:
    """A preset by name, with some fields changed, for example `preset("gpt2", context_length=4096)`.

    Returns: the config. Raises: ValueError when there is no such preset or a change is not allowed.
    """
    if name not in PRESETS:
        raise ValueError(f"no preset {name!r}, there are {', '.join(PRESETS)}")
    base = PRESETS[name]
    # what follows from another field follows from its new value too
    follow = {"n_kv_heads": None} if base.n_kv_heads == base.n_heads else {}
    try:
        return replace(base, **{"d_ff": None, **follow, **changes})
    except TypeError as error:
        raise ValueError(f"preset {name!r} cannot be changed so: {error}") from None
