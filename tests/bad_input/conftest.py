"""What the tests of bad input share: a small checkpoint, and the command run inside this process."""

from collections.abc import Callable
from pathlib import Path

import pytest
import torch

from gptlite.checkpoint import save_checkpoint
from gptlite.cli import main
from gptlite.config import GPTConfig
from gptlite.data import CharTokenizer
from gptlite.model import GPTlite

CHARS = "\n :EMORabcdef"


@pytest.fixture(scope="session")
def checkpoint(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A checkpoint of about 20 kB, with d_model other than n_heads * d_head and fewer KV heads than heads."""
    torch.manual_seed(0)
    config = GPTConfig(len(CHARS), context_length=16, n_layers=1, d_model=20, n_heads=4, d_head=4, n_kv_heads=2)
    path = tmp_path_factory.mktemp("checkpoint") / "small.safetensors"
    save_checkpoint(path, GPTlite(config), CharTokenizer(CHARS), card={"validation_loss": 2.0})
    return path


@pytest.fixture
def refused(capsys: pytest.CaptureFixture[str]) -> Callable[..., str]:
    """Runs the command, checks that it refuses as it must, and gives its one line."""

    def run(*argv: str | Path) -> str:
        status = main([str(word) for word in argv])
        out, err = capsys.readouterr()
        assert status == 2, f"status {status}: {err}"
        assert out == "", "nothing may be written before the input is checked"
        assert err.startswith("gptlite: ") and err.endswith("\n") and err.count("\n") == 1, err
        assert "Traceback" not in err
        return err

    return run
