"""Checkpoints come back as they were written, are whole or not there, and run nothing that they hold."""

import json
import os
import pickle
import struct

import pytest
import torch
from safetensors.torch import load as load_bytes
from safetensors.torch import save_file

from gptlite import checkpoint
from gptlite.checkpoint import (
    FORMAT,
    SHIPPED,
    checkpoint_path,
    from_original,
    load,
    load_checkpoint,
    read_card,
    save_checkpoint,
    write_atomically,
)
from gptlite.config import GPTConfig
from gptlite.data import CharTokenizer
from gptlite.model import GPTlite

CHARS = 'ab\n "\\é»'
CONFIG = GPTConfig(
    vocab_size=len(CHARS), context_length=9, n_layers=2, d_model=12, n_heads=4, d_head=5, n_kv_heads=2, d_ff=20
)


@pytest.fixture
def model():
    torch.manual_seed(0)
    return GPTlite(CONFIG)


@pytest.fixture
def tokenizer():
    return CharTokenizer(CHARS)


@pytest.mark.parametrize("dtype", [torch.float16, torch.float32, torch.bfloat16])
def test_there_and_back(tmp_path, model, tokenizer, dtype):
    path = tmp_path / "deep" / "model.safetensors"
    save_checkpoint(path, model, tokenizer, {"steps": 3}, dtype)
    found, found_tokenizer = load_checkpoint(path)
    assert not found.training
    assert found.config == CONFIG
    assert found_tokenizer.chars == CHARS
    assert list(found.state_dict()) == list(model.state_dict())
    for name, weight in found.state_dict().items():
        assert weight.dtype == torch.float32
        assert torch.equal(weight, model.state_dict()[name].to(dtype).float())
    assert read_card(path) == {"steps": 3}
    tokens = torch.arange(8)[None]
    expected = model.eval()(tokens)
    torch.testing.assert_close(found(tokens), expected, atol=0 if dtype == torch.float32 else 2e-2, rtol=0)
    assert {t.dtype for t in load_bytes(path.read_bytes()).values()} == {dtype}


def test_the_dtype_that_is_asked_for(tmp_path, model, tokenizer):
    save_checkpoint(tmp_path / "m.safetensors", model, tokenizer)
    for dtype in (torch.float64, torch.bfloat16):
        found, _ = load_checkpoint(tmp_path / "m.safetensors", dtype=dtype)
        assert {p.dtype for p in found.parameters()} == {dtype}
        assert found(torch.zeros(1, 3, dtype=torch.int64)).dtype == dtype


def test_a_loaded_model_no_longer_needs_its_file(tmp_path, model, tokenizer):
    path = tmp_path / "m.safetensors"
    save_checkpoint(path, model, tokenizer, dtype=torch.float32)
    found, _ = load_checkpoint(path)
    with open(path, "r+b") as file:  # in place, as cp does
        file.write(bytes(path.stat().st_size))
    for name, weight in found.state_dict().items():
        assert torch.equal(weight, model.state_dict()[name])


def test_a_loaded_model_can_be_trained(tmp_path, model, tokenizer):
    save_checkpoint(tmp_path / "m.safetensors", model, tokenizer)
    found, _ = load_checkpoint(tmp_path / "m.safetensors")
    found(torch.arange(8)[None]).sum().backward()
    assert all(p.grad is not None for p in found.parameters())


@pytest.mark.parametrize("moment", ["write", "fsync", "replace"])
@pytest.mark.parametrize("kind", [OSError, KeyboardInterrupt])
def test_a_crash_in_the_middle_leaves_the_old_file(tmp_path, monkeypatch, moment, kind):
    path = tmp_path / "file"
    write_atomically(path, b"old")

    def crash(*_args, **_kwargs):
        raise kind(28, "No space left on device")

    if moment == "write":
        monkeypatch.setattr(checkpoint, "open", crash, raising=False)
    elif moment == "fsync":
        monkeypatch.setattr(os, "fsync", crash)
    else:
        monkeypatch.setattr(checkpoint.Path, "replace", crash)
    with pytest.raises(ValueError if kind is OSError else kind) as error:
        write_atomically(path, b"new and longer")
    if kind is OSError:
        assert str(error.value) == f"cannot write {path}: No space left on device"
        assert [p.name for p in tmp_path.iterdir()] == ["file"]
    assert path.read_bytes() == b"old"
    monkeypatch.undo()
    write_atomically(path, b"new and longer")
    assert path.read_bytes() == b"new and longer"
    assert [p.name for p in tmp_path.iterdir()] == ["file"]


def test_the_content_is_on_the_disk_before_the_name_points_to_it(tmp_path, monkeypatch):
    order = []
    fsync, replace = os.fsync, checkpoint.Path.replace
    monkeypatch.setattr(os, "fsync", lambda fd: (order.append(("fsync", os.fstat(fd).st_size)), fsync(fd))[1])
    monkeypatch.setattr(checkpoint.Path, "replace", lambda a, b: (order.append("replace"), replace(a, b))[1])
    write_atomically(tmp_path / "file", b"12345")
    assert order == [("fsync", 5), "replace"]


def test_the_name_must_say_what_it_is(tmp_path, model, tokenizer):
    with pytest.raises(ValueError, match=r"must end in \.safetensors"):
        save_checkpoint(tmp_path / "model.pt", model, tokenizer)


def damaged(path, kind):
    """Writes a file that is no checkpoint, from one that is."""
    content = path.read_bytes()
    header_size = struct.unpack("<Q", content[:8])[0]
    header = json.loads(content[8 : 8 + header_size])
    weights = load_bytes(content)
    meta = header["__metadata__"]
    if kind == "empty":
        path.write_bytes(b"")
    elif kind == "truncated":
        path.write_bytes(content[: len(content) // 2])
    elif kind == "truncated header":
        path.write_bytes(content[:100])
    elif kind == "text":
        path.write_text("This is no checkpoint, it is a letter.")
    elif kind == "pickle":
        torch.save(weights, path)
    elif kind == "huge header":
        path.write_bytes(struct.pack("<Q", 2**60) + content[8:])
    elif kind == "foreign":
        save_file(weights, path)
    elif kind == "other format":
        save_file(weights, path, {**meta, "format": "gptlite-99"})
    elif kind == "no config":
        save_file(weights, path, {"format": FORMAT, "chars": meta["chars"]})
    elif kind == "config is a list":
        save_file(weights, path, {**meta, "config": "[1]"})
    elif kind == "config is no JSON":
        save_file(weights, path, {**meta, "config": "{"})
    elif kind == "chars is a number":
        save_file(weights, path, {**meta, "chars": "3"})
    elif kind == "another vocabulary":
        save_file(weights, path, {**meta, "chars": '"ab"'})
    elif kind == "missing weight":
        del weights["ln.bias"]
        save_file(weights, path, meta)
    elif kind == "unknown weight":
        save_file({**weights, "rope": torch.zeros(2)}, path, meta)
    elif kind == "wrong shape":
        save_file({**weights, "ln.bias": torch.zeros(3)}, path, meta)
    elif kind == "not finite":
        save_file({**weights, "ln.bias": torch.full((12,), float("nan"))}, path, meta)
    elif kind == "too large":
        config = {**json.loads(meta["config"]), "d_model": 10**6, "d_ff": 10**7}
        save_file(weights, path, {**meta, "config": json.dumps(config)})
    elif kind == "too deep":
        config = {**json.loads(meta["config"]), "n_layers": 10**9}
        save_file(weights, path, {**meta, "config": json.dumps(config)})
    return path


@pytest.mark.parametrize(
    ("kind", "message"),
    [
        ("empty", "no checkpoint of gptlite, or is damaged"),
        ("truncated", "no checkpoint of gptlite, or is damaged"),
        ("truncated header", "no checkpoint of gptlite, or is damaged"),
        ("text", "no checkpoint of gptlite, or is damaged"),
        ("pickle", "no checkpoint of gptlite, or is damaged"),
        ("huge header", "no checkpoint of gptlite, or is damaged"),
        ("foreign", f"does not say {FORMAT}"),
        ("other format", f"does not say {FORMAT}"),
        ("no config", "is damaged: 'config'"),
        ("config is a list", "is damaged"),
        ("config is no JSON", "no checkpoint of gptlite, or is damaged"),
        ("chars is a number", "its vocabulary is no text"),
        ("another vocabulary", "it has 2 characters, its config a vocabulary of 8"),
        ("missing weight", "weight ln.bias is missing or unknown"),
        ("unknown weight", "weight rope is missing or unknown"),
        ("wrong shape", r"weight ln.bias has shape \(3,\), its config says \(12,\)"),
        ("not finite", "weight ln.bias holds values that are not finite"),
        ("too large", "too small for the model that its header describes"),
        ("too deep", "too small for the model that its header describes"),
    ],
)
def test_what_is_no_checkpoint_is_refused_in_one_line(tmp_path, model, tokenizer, kind, message):
    path = tmp_path / "m.safetensors"
    save_checkpoint(path, model, tokenizer)
    with pytest.raises(ValueError, match=message) as error:
        load_checkpoint(damaged(path, kind))
    assert "\n" not in str(error.value)


def test_a_missing_checkpoint_is_named(tmp_path):
    for path in (tmp_path / "none.safetensors", tmp_path):
        with pytest.raises(ValueError, match="there is no checkpoint"):
            load(path)


def test_names_of_shipped_checkpoints_and_paths(tmp_path):
    assert set(SHIPPED) == {"gptlite", "draft"}
    for name in SHIPPED:
        path = checkpoint_path(name)
        assert path.name == f"{name}.safetensors"
        assert path.parent.parent == checkpoint.Path(checkpoint.__file__).parent
    assert checkpoint_path(tmp_path / "gptlite") == tmp_path / "gptlite"
    assert checkpoint_path("other.safetensors") == checkpoint.Path("other.safetensors")


def test_the_card_that_is_missing_or_no_json(tmp_path):
    with pytest.raises(ValueError, match=r"cannot read the card .*m\.json"):
        read_card(tmp_path / "m.safetensors")
    (tmp_path / "m.json").write_text("{")
    with pytest.raises(ValueError, match="cannot read the card"):
        read_card(tmp_path / "m.safetensors")


def test_a_checkpoint_of_the_original_code(tmp_path, model, tokenizer):
    """torch.save of a state dict with the same names, and the causal mask that the original keeps in its buffers."""
    state = {name: weight.clone() for name, weight in model.state_dict().items()}
    state["blocks.0.mha.mask"] = torch.ones(9, 9).tril()
    torch.save(state, tmp_path / "original.pt")
    found = from_original(tmp_path / "original.pt", tokenizer, d_head=5)
    assert found.config == CONFIG
    assert not found.training
    tokens = torch.arange(8)[None]
    torch.testing.assert_close(found(tokens), model.eval()(tokens))


class Attack:
    def __init__(self, path):
        self.path = path

    def __reduce__(self):
        return open, (str(self.path), "w")


@pytest.mark.filterwarnings("ignore:Detected pickle protocol")
@pytest.mark.parametrize("how", ["torch.save", "pickle"])
def test_a_file_that_would_run_code_is_refused_and_runs_nothing(tmp_path, model, tokenizer, how):
    trace, path = tmp_path / "trace", tmp_path / "evil.pt"
    state = {**model.state_dict(), "evil": Attack(trace)}
    if how == "pickle":
        path.write_bytes(pickle.dumps(state))
    else:
        torch.save(state, path)
    with pytest.raises(ValueError, match="is no state dict of the original GPTlite") as error:
        from_original(path, tokenizer, d_head=5)
    assert "\n" not in str(error.value)
    assert not trace.exists()
    pickle.loads(pickle.dumps(Attack(trace))).close()  # the file does what it threatens when it's trusted
    assert trace.exists()


def test_what_is_no_state_of_the_original_is_named(tmp_path, model, tokenizer):
    path = tmp_path / "original.pt"
    with pytest.raises(ValueError, match="is no state dict"):
        from_original(path, tokenizer, d_head=5)
    cases = [
        {"weight": torch.zeros(3)},
        [torch.zeros(3)],
        {**model.state_dict(), "rope": torch.zeros(2)},
        {name: t for name, t in model.state_dict().items() if name != "ln.bias"},
        {**model.state_dict(), "blocks.1000000000.ln1.bias": torch.zeros(12)},
    ]
    for state in cases:
        torch.save(state, path)
        with pytest.raises(ValueError, match="is no state dict of the original GPTlite") as error:
            from_original(path, tokenizer, d_head=5)
        assert "\n" not in str(error.value)
    torch.save(model.state_dict(), path)
    with pytest.raises(ValueError, match="vocabulary of 8, the tokenizer 2 characters"):
        from_original(path, CharTokenizer("ab"), d_head=5)
    with pytest.raises(ValueError, match="is no state dict"):
        from_original(path, tokenizer, d_head=3)
