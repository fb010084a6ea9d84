"""gptlite: a small GPT and every technique that makes its inference cheaper, for the book Work per Byte."""

from gptlite.checkpoint import load
from gptlite.config import GPTConfig
from gptlite.data import load_corpus
from gptlite.generate import generate
from gptlite.model import GPTlite

__version__ = "0.1.0"
__all__ = ["GPTConfig", "GPTlite", "generate", "load", "load_corpus"]
