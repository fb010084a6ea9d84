"""What `gptlite record` measures, a module per topic; importing them registers their sweeps."""

from gptlite.sweeps import (
    batching,
    flash,
    fleets,
    kv_cache,
    kv_heads,
    paged,
    phases,
    prefix_cache,
    scheduling,
    semantic,
)

__all__ = [
    "batching",
    "flash",
    "fleets",
    "kv_cache",
    "kv_heads",
    "paged",
    "phases",
    "prefix_cache",
    "scheduling",
    "semantic",
]
