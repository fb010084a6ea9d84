"""Blocks on disk survive a restart and a kill at any moment; what is damaged or another's is a miss and is reported."""

import logging
import os
import signal
import subprocess
import sys
import time
from pathlib import Path

import pytest
import torch
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st
from safetensors.torch import load_file, save_file

from gptlite.cache.block_store import Block, BlockStore
from gptlite.cache.offload import FORMAT, DiskTier, MemoryTier, fingerprint
from gptlite.cache.prefix import block_keys
from gptlite.cache.reuse import PrefixCache
from gptlite.config import GPTConfig
from gptlite.generate import prefill
from gptlite.model import GPTlite

CONFIG = GPTConfig(7, 32, n_layers=2, d_model=20, n_heads=6, d_head=4, n_kv_heads=3)
TEXT = [3, 1, 4, 1, 0, 2, 2, 3, 3, 1, 6, 5]  # three blocks of 4
BLOCK = 4 * 2 * 2 * 3 * 4 * 4  # bytes: tokens, k and v, layers, heads, sizes, fp32


def make_model(seed=1, config=CONFIG, dtype=torch.float32):
    torch.manual_seed(seed)
    return GPTlite(config).eval().to(dtype)


MODEL = make_model()


def serve(store, prompt, model=MODEL):
    """Reads a prompt. Returns: cached tokens, and the logits [V]."""
    cache = PrefixCache(model, 1, 32, store, bucket=8)
    n = cache.begin(0, torch.tensor(prompt))
    logits = prefill(model, torch.tensor([prompt[n:]]), cache)[0]
    cache.free(0)
    return n, logits


def filled(folder, **options):
    """A folder that holds the three blocks, and is closed."""
    store = BlockStore(10, 4, DiskTier(folder, MODEL, 4, **options))
    serve(store, TEXT)
    store.flush()
    return folder


def check_serves(folder, cached, model=MODEL):
    """A new process's store finds so many tokens there, and gives the plain model's logits."""
    disk = DiskTier(folder, model, 4)
    n, logits = serve(BlockStore(10, 4, disk), [*TEXT, 2], model)
    with torch.inference_mode():
        torch.testing.assert_close(logits, model(torch.tensor([[*TEXT, 2]]))[0, -1], rtol=0, atol=1e-5)
    assert n == cached
    return disk


def files(folder):
    """The files of the three blocks, in the order of the text."""
    return [Path(folder) / f"{key.hex()}.safetensors" for key in block_keys(TEXT, 4)]


# -- tiers --------------------------------------------------------------------------------------------------------


def test_evicted_blocks_go_down_and_come_back_up(tmp_path):
    disk = DiskTier(tmp_path, MODEL, 4)
    memory = MemoryTier(1 * BLOCK, disk)
    store = BlockStore(1, 4, memory)
    serve(store, TEXT[:4])
    serve(store, [5] * 4)
    assert (len(store), len(memory), len(disk), memory.nbytes) == (1, 1, 0, BLOCK)
    serve(store, [6] * 4)
    assert (len(store), len(memory), len(disk), memory.nbytes) == (1, 1, 1, BLOCK)
    for text in (TEXT[:4], [5] * 4, [6] * 4) * 2:  # each comes back, and pushes another down
        n, logits = serve(store, [*text, 0])
        with torch.inference_mode():
            torch.testing.assert_close(logits, MODEL(torch.tensor([[*text, 0]]))[0, -1], rtol=0, atol=1e-5)
        assert n == 4 and (len(store), len(memory), memory.nbytes) == (1, 1, BLOCK)
    assert len(disk) == 3 and store.match([*TEXT[:4], 9]) == 4  # the disk keeps what has gone up


def test_a_memory_tier_without_a_disk_forgets_its_oldest():
    memory = MemoryTier(2 * BLOCK)
    store = BlockStore(1, 4, memory)
    for i in range(4):
        serve(store, [i] * 4)
    assert [store.match([i] * 4) for i in range(4)] == [0, 4, 4, 4] and memory.nbytes == 2 * BLOCK
    store.flush()
    nothing = MemoryTier(0)
    serve(BlockStore(1, 4, nothing), TEXT)
    assert (len(nothing), nothing.nbytes) == (0, 0)
    with pytest.raises(ValueError, match="max_bytes is -1"):
        MemoryTier(-1)


def test_a_memory_tier_compares_parent_and_tokens():
    memory = MemoryTier(2 * BLOCK)
    memory.put(Block(b"name", b"parent", b"tokens", {"k.0": torch.zeros(1, 4, 1)}))
    assert memory.get(b"name", b"other", b"tokens") is None
    assert memory.get(b"name", b"parent", b"others") is None
    assert memory.get(b"name", b"parent", b"tokens") is not None and b"name" not in memory


def test_a_restart_finds_what_the_process_before_has_left(tmp_path):
    filled(tmp_path)
    assert sorted(tmp_path.iterdir()) == sorted(files(tmp_path))
    assert not check_serves(tmp_path, 12).refused


def test_memory_is_flushed_through_to_the_disk(tmp_path):
    store = BlockStore(1, 4, MemoryTier(1 * BLOCK, DiskTier(tmp_path, MODEL, 4)))
    for text in ([5] * 4, [6] * 4, TEXT[:4]):
        serve(store, text)
    store.flush()
    assert len(list(tmp_path.iterdir())) == 3


def test_a_full_store_reads_from_below_without_taking_in(tmp_path):
    filled(tmp_path)
    store = BlockStore(1, 4, DiskTier(tmp_path, MODEL, 4))
    serve(store, [6] * 4)
    hit = store.acquire([6] * 4)  # all of the room is held
    assert serve(store, [*TEXT, 2])[0] == 12 and len(store) == 1
    store.release(hit)
    assert store.match([6] * 4) == 4


def test_what_is_read_from_memory_into_a_full_store_is_not_lost():
    memory = MemoryTier(10 * BLOCK)
    store = BlockStore(1, 4, memory)
    serve(store, TEXT)
    serve(store, [6] * 4)
    assert (len(store), len(memory)) == (1, 3)
    hit = store.acquire([6] * 4)
    other = store.acquire(TEXT)
    assert other.n_tokens == 12 and store.match(TEXT) == 12
    store.release(other)
    assert store.match(TEXT) == 12 and (len(memory), memory.nbytes) == (3, 3 * BLOCK)
    store.release(hit)


def test_the_disk_keeps_to_its_size_and_deletes_the_least_recently_used(tmp_path):
    filled(tmp_path)
    size = files(tmp_path)[0].stat().st_size
    disk = DiskTier(tmp_path, MODEL, 4)
    store = BlockStore(10, 4, disk)
    serve(store, [*TEXT[:4], 6])  # reads the first block
    disk.max_bytes = 3 * size
    for i in (5, 6):
        serve(store, [i] * 4)
    store.flush()
    assert disk.nbytes <= 3 * size and len(list(tmp_path.iterdir())) == 3
    smaller = DiskTier(tmp_path, MODEL, 4, max_bytes=size)  # the limit holds for what was there before too
    assert len(smaller) == len(list(tmp_path.iterdir())) == 1
    with pytest.raises(ValueError, match="max_bytes is -1"):
        DiskTier(tmp_path, MODEL, 4, max_bytes=-1)


# -- damaged, cut, or another's -----------------------------------------------------------------------------------


def damage(path, how):
    content = path.read_bytes()
    if how == "cut":
        path.write_bytes(content[: len(content) // 2])
    elif how == "empty":
        path.write_bytes(b"")
    elif how == "one bit of a value":
        path.write_bytes(content[:-3] + bytes([content[-3] ^ 1]) + content[-2:])
    elif how == "no safetensors":
        path.write_bytes(b"hello " * 100)
    elif how == "an endless header":
        path.write_bytes(b"\xff" * 7 + b"\x7f" + content[8:])
    elif how == "too large":
        path.write_bytes(content + bytes(2**20))
    elif how == "no checksum":
        save_file(load_file(path), path, {"format": FORMAT})
    elif how == "deep JSON":
        text = b'{"__metadata__":' + b"[" * 5000
        path.write_bytes(len(text).to_bytes(8, "little") + text)
    elif how == "a pipe":
        path.unlink()
        os.mkfifo(path)
    elif how == "a folder":
        path.unlink()
        path.mkdir()
    elif how == "a link":
        path.rename(path.with_suffix(".old"))
        path.symlink_to(path.with_suffix(".old"))
    elif how == "gone":
        path.unlink()


KINDS = ["cut", "empty", "one bit of a value", "no safetensors", "an endless header", "too large", "no checksum"]
KINDS += ["deep JSON", "a pipe", "a folder", "a link", "gone"]


@pytest.mark.parametrize("open_before", [True, False])
@pytest.mark.parametrize("how", KINDS)
def test_a_damaged_file_is_a_miss_and_is_reported(tmp_path, caplog, how, open_before):
    disk = DiskTier(filled(tmp_path), MODEL, 4)  # one that opened before the damage, and knows the file
    damage(files(tmp_path)[1], how)
    disk = disk if open_before else DiskTier(tmp_path, MODEL, 4)
    store = BlockStore(10, 4, disk)
    with caplog.at_level(logging.WARNING):
        n, logits = serve(store, [*TEXT, 2])
    with torch.inference_mode():
        torch.testing.assert_close(logits, MODEL(torch.tensor([[*TEXT, 2]]))[0, -1], rtol=0, atol=1e-5)
    assert n == 4  # the first block, and what follows the damaged one is of no use
    if open_before or how not in ("a pipe", "a folder", "a link", "gone"):  # what is no plain file is not even listed
        assert disk.refused == {"damaged": 1}
        assert "damaged" in caplog.text and files(tmp_path)[1].name in caplog.text
    store.flush()  # writes it again, or can't and says so
    if how != "a folder":
        check_serves(tmp_path, 12)


@settings(max_examples=60, deadline=None, suppress_health_check=[HealthCheck.function_scoped_fixture])
@given(place=st.floats(0, 1, exclude_max=True), value=st.integers(1, 255))
def test_any_changed_byte_is_seen(tmp_path, place, value):
    path = files(filled(tmp_path))[0]
    content = bytearray(path.read_bytes())
    content[int(place * len(content))] ^= value
    path.write_bytes(content)
    disk = DiskTier(tmp_path, MODEL, 4)
    n, _ = serve(BlockStore(10, 4, disk), [*TEXT, 2])
    # a blank of the header's end may become another blank: then the content is the same
    assert (n, sum(disk.refused.values())) in ((0, 1), (12, 0))
    if n:
        assert place < 0.5
    for left in tmp_path.iterdir():
        left.unlink()


def test_another_models_file_is_refused_and_left_where_it_is(tmp_path, caplog):
    filled(tmp_path)
    before = {path: path.read_bytes() for path in files(tmp_path)}
    with caplog.at_level(logging.WARNING):
        disk = check_serves(tmp_path, 0, make_model(seed=2))
    assert disk.refused == {"another model": 1} and "those of other weights" in caplog.text
    assert {path: path.read_bytes() for path in files(tmp_path)} == before
    check_serves(tmp_path, 12)


def test_a_file_of_another_block_size_or_name_or_parent_is_a_miss(tmp_path):
    filled(tmp_path)
    disk = DiskTier(tmp_path, MODEL, 3)
    key, parent = block_keys(TEXT, 4)[1], block_keys(TEXT, 4)[0]
    raw = torch.tensor(TEXT[4:8]).numpy().tobytes()
    assert disk.get(key, parent, raw) is None and disk.refused == {"another shape": 1}
    disk = DiskTier(tmp_path, MODEL, 4)
    assert disk.get(key, parent, raw) is not None
    assert disk.get(key, b"other", raw) is None
    assert disk.get(key, parent, torch.tensor([0, 2, 2, 4]).numpy().tobytes()) is None
    first, second, _ = files(tmp_path)
    second.write_bytes(first.read_bytes())  # a whole block, under another's name
    assert disk.get(key, parent, raw) is None
    assert not disk.refused


def test_files_of_others_in_the_folder_are_not_touched(tmp_path):
    (tmp_path / "notes.txt").write_text("mine")
    (tmp_path / "model.safetensors").write_text("mine")
    filled(tmp_path, max_bytes=0)
    assert sorted(path.name for path in tmp_path.iterdir()) == ["model.safetensors", "notes.txt"]


def test_the_fingerprint_tells_weights_shapes_dtypes_and_windows_apart():
    wider = GPTConfig(7, 32, n_layers=2, d_model=20, n_heads=6, d_head=4, n_kv_heads=6)
    windowed = make_model()
    windowed.blocks[0].mha.window = 4
    others = [make_model(2), make_model(config=wider), make_model(dtype=torch.bfloat16), windowed]
    prints = [fingerprint(model) for model in (MODEL, *others)]
    assert len(set(prints)) == 5 and prints[0] == fingerprint(make_model())


def test_blocks_in_bf16_come_back_as_they_were(tmp_path):
    model = make_model(dtype=torch.bfloat16)
    store = BlockStore(10, 4, DiskTier(tmp_path, model, 4))
    serve(store, TEXT, model)
    store.flush()
    before = store.index.match(TEXT)
    disk = DiskTier(tmp_path, model, 4)
    for block in before:
        again = disk.get(block.key, block.parent, block.tokens)
        assert all(torch.equal(again.state[name], part) for name, part in block.state.items())


# -- a full disk, no permission, a kill ---------------------------------------------------------------------------


@pytest.mark.parametrize("call", ["open", "os.fsync", "pathlib.Path.replace"])
def test_a_write_that_fails_is_reported_and_leaves_nothing(tmp_path, monkeypatch, caplog, call):
    """Before the write, after it, and at the rename."""
    disk = DiskTier(tmp_path, MODEL, 4)

    def fails(*args, **kwargs):
        raise OSError(28, "No space left on device")

    monkeypatch.setattr(f"gptlite.checkpoint.{call}" if call == "open" else call, fails, raising=False)
    store = BlockStore(10, 4, disk)
    serve(store, TEXT)
    with caplog.at_level(logging.WARNING):
        store.flush()
    monkeypatch.undo()
    assert disk.refused == {"not written": 3} and "No space left" in caplog.text
    assert list(tmp_path.iterdir()) == [] and serve(store, TEXT)[0] == 11
    check_serves(tmp_path, 0)


def test_a_folder_that_cannot_be_made_is_named(tmp_path):
    (tmp_path / "file").write_text("")
    with pytest.raises(ValueError, match=r"cannot use the folder .*file"):
        DiskTier(tmp_path / "file", MODEL, 4)


# the process dies at the given moment of its second write
DIES = """
import builtins, os, pathlib, sys
import gptlite.checkpoint as checkpoint
sys.path.insert(0, {tests!r})
from test_offload import *

moment, calls = sys.argv[2], 0

def die(*args, **kwargs):
    os.kill(os.getpid(), signal.SIGKILL)

def second(real):
    def call(*args, **kwargs):
        global calls
        calls += 1
        return real(*args, **kwargs) if calls == 1 else die()
    return call

class HalfFile:
    def __init__(self, file): self.file = file
    def __enter__(self): return self
    def __exit__(self, *args): self.file.close()
    def __getattr__(self, name): return getattr(self.file, name)
    def write(self, content):
        global calls
        calls += 1
        if calls == 1:
            return self.file.write(content)
        self.file.write(content[: len(content) // 2]); self.file.flush(); die()

if moment == "before the write":
    checkpoint.open = second(builtins.open)
elif moment == "in the middle":
    checkpoint.open = lambda *args: HalfFile(builtins.open(*args))
elif moment == "before the disk has it":
    os.fsync = second(os.fsync)
elif moment == "before the rename":
    pathlib.Path.replace = second(pathlib.Path.replace)
elif moment == "after the rename":
    real = pathlib.Path.replace
    def replace(*args):
        global calls
        calls += 1
        done = real(*args)
        return done if calls == 1 else die()
    pathlib.Path.replace = replace
filled(sys.argv[1])
"""
MOMENTS = {
    "before the write": 4,  # tokens that are there afterwards: the first block, or the first two
    "in the middle": 4,
    "before the disk has it": 4,
    "before the rename": 4,
    "after the rename": 8,
}


@pytest.mark.parametrize("moment", MOMENTS)
def test_a_process_killed_during_a_write_leaves_a_store_that_opens(tmp_path, moment):
    code = DIES.format(tests=str(Path(__file__).parent))
    # flush writes the end of a chain first: what comes first is chosen by turning the order round
    code = code.replace("filled(sys.argv[1])", "TURNED = DiskTier(sys.argv[1], MODEL, 4)\nfill_in_order(TURNED)")
    done = subprocess.run([sys.executable, "-c", code, str(tmp_path), moment], capture_output=True, text=True)
    assert done.returncode == -signal.SIGKILL, done.stderr
    disk = check_serves(tmp_path, MOMENTS[moment])
    assert not disk.refused and not list(tmp_path.glob(".*"))  # what was not finished is cleared


def fill_in_order(disk):
    """Writes the three blocks, the first of the text first."""
    store = BlockStore(10, 4)
    serve(store, TEXT)
    for block in store.index.match(TEXT):
        disk.put(block)


@pytest.mark.slow
def test_a_process_killed_at_random_leaves_a_store_that_opens(tmp_path):
    """Writes as fast as it can, and is killed wherever it happens to be."""
    here = str(Path(__file__).parent)
    code = f"import sys; sys.path.insert(0, {here!r})\nfrom test_offload import *\nwrite_for_ever(sys.argv[1])"
    for i in range(3):
        folder = tmp_path / str(i)
        process = subprocess.Popen([sys.executable, "-c", code, str(folder)], stdout=subprocess.PIPE)
        assert process.stdout.read(1) == b"x"  # it has begun
        time.sleep(0.05 * (i + 1))
        process.kill()
        process.wait()
        disk = DiskTier(folder, MODEL, 4)
        assert len(disk) > 0 and not list(folder.glob(".*"))
        for name in list(disk._sizes):
            state = load_file(disk.path(name))
            assert disk.get(name, b"root:", state["tokens"].numpy().tobytes()) is not None
        assert not disk.refused


def write_for_ever(folder):
    """Writes blocks until it is killed."""
    disk, i = DiskTier(folder, MODEL, 4), 0
    state = {name: torch.randn(shape) for name, shape in disk.shapes.items()}
    while True:
        tokens = torch.tensor([i, i, i, i])
        disk.put(Block(block_keys(tokens, 4)[0], b"root:", tokens.numpy().tobytes(), state))
        i += 1
        if i == 3:
            os.write(1, b"x")
