"""What `gptlite record` measures, a module per topic; importing them registers their sweeps."""

from gptlite.sweeps import phases

__all__ = ["phases"]
