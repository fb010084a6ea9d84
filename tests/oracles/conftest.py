"""What the oracles share: random models, whole distributions of weights, exported folders."""

from collections.abc import Callable
from pathlib import Path

import pytest
import torch
from transformers import OPTForCausalLM
from transformers.utils import logging

import gptlite
from gptlite.config import GPTConfig
from gptlite.data import CharTokenizer
from gptlite.export import export_hf
from gptlite.model import GPTlite

CHARS = "\t\n !',-.:;?ABCDEFGHIJabcdefghijé—😀"

logging.set_verbosity_error()
logging.disable_progress_bar()


@pytest.fixture(autouse=True)
def one_thread() -> None:
    """More threads than cores make small products slow."""
    torch.set_num_threads(1)


@pytest.fixture(scope="session")
def random_model() -> Callable[..., GPTlite]:
    """Makes a model none of whose weights, biases and norms is zero or one, so that a swapped pair shows."""

    def make(**changes: int) -> GPTlite:
        torch.manual_seed(0)
        sizes = {"context_length": 48, "n_layers": 3, "d_model": 64, "n_heads": 4, "d_head": 16, "d_ff": 96}
        model = GPTlite(GPTConfig(**{"vocab_size": len(CHARS), **sizes, **changes})).eval()
        with torch.no_grad():
            for parameter in model.parameters():
                parameter.add_(torch.randn_like(parameter) * 0.1)
        return model

    return make


@pytest.fixture(scope="session")
def exported(
    random_model: Callable[..., GPTlite], tmp_path_factory: pytest.TempPathFactory
) -> tuple[GPTlite, CharTokenizer, Path]:
    """A random model, its tokenizer and the folder it was exported to."""
    folder = tmp_path_factory.mktemp("export") / "opt"
    model, tokenizer = random_model(), CharTokenizer(CHARS)
    export_hf(model, tokenizer, folder)
    return model, tokenizer, folder


@pytest.fixture(scope="session")
def exported_trained(tmp_path_factory: pytest.TempPathFactory) -> tuple[GPTlite, CharTokenizer, Path]:
    """The trained model that comes with the package, its tokenizer and the folder it was exported to."""
    folder = tmp_path_factory.mktemp("export") / "trained"
    model, tokenizer = gptlite.load("gptlite")
    export_hf(model, tokenizer, folder)
    return model, tokenizer, folder


@pytest.fixture(scope="session")
def as_opt() -> Callable[..., OPTForCausalLM]:
    """Loads an exported folder with transformers."""

    def load(folder: Path, dtype: torch.dtype = torch.float32) -> OPTForCausalLM:
        return OPTForCausalLM.from_pretrained(folder, dtype=dtype).eval()

    return load
