"""The chapter on PagedAttention: its sweeps, explorers and lab show what the package's own cache did."""

import itertools

import pytest
import torch

from gptlite import hardware
from gptlite.arithmetic import ModelShape, kv_bytes, n_params
from gptlite.cache.paged import PagedCache
from gptlite.config import GPTConfig, preset
from gptlite.model import GPTlite
from gptlite.notebook.explorers_paged import KINDS, block_grid, frame_rows, frame_tables, waste_by_block
from gptlite.notebook.labs_paged import PagedLab
from gptlite.notebook.recordings import recorded
from gptlite.record import Recording, random_model, run_sweep
from gptlite.serving.waste import waste_share
from gptlite.sweeps.paged import CONTIGUOUS, block_trace, scattered_cache

CHARS = "\n !',-:;ABCDEFGHIKLMNOPRSTUWabcdefghiklmnoprstuwy"


@pytest.fixture(scope="module")
def frames() -> list[dict]:
    torch.manual_seed(0)
    model = GPTlite(GPTConfig(len(CHARS), 64, n_layers=1, d_model=8, n_heads=2, d_head=4)).eval()
    cache = PagedCache(model, 16, 4, prefix_caching=True)

    def encode(text):
        return torch.tensor([CHARS.index(char) for char in text])

    return block_trace(model, cache, encode)


def test_a_trace_tells_of_forks_copies_ends_and_hits(frames):
    """What must hold of any model's trace, counted from the frames alone."""
    held = [sum(bool(block["held"]) for block in frame["blocks"]) for frame in frames]
    entries = [sum(len(block["held"]) for block in frame["blocks"]) for frame in frames]
    assert (held[0], entries[0]) == (7, 7)  # 14 and 9 tokens in blocks of 4
    assert (held[1], entries[1]) == (7, 15)  # two forks: eight entries more, no block
    assert [len(frame["copies"]) for frame in frames[:4]] == [0, 0, 2, 0]
    old = {a for a, _ in frames[2]["copies"]}
    assert len(old) == 1 and len({b for _, b in frames[2]["copies"]} | old) == 3
    ended = next(i for i, frame in enumerate(frames) if frame["what"].startswith("B ends"))
    assert not any("B" in block["held"] for block in frames[ended]["blocks"])
    assert any(block["idle"] for block in frames[ended]["blocks"])
    late = next(i for i, frame in enumerate(frames) if frame["what"].startswith("C begins"))
    assert "12 of its tokens" in frames[late]["what"] and held[late] == held[late - 1]
    assert entries[late] == entries[late - 1] + 3
    for frame in frames:
        assert not any(block["held"] and block["idle"] for block in frame["blocks"])
        assert all(len(block["held"]) == 1 for i, block in enumerate(frame["blocks"]) if i in frame["written"])


def as_recording(frames) -> Recording:
    return Recording("paged-trace", {}, data={"chars": CHARS, "frames": frames})


def test_the_rows_of_the_grid_say_what_the_frames_hold(frames):
    rows = frame_rows(as_recording(frames))
    assert len(rows) == len(frames) * 16 and {row["kind"] for row in rows} == set(KINDS)
    third = {row["block"]: row for row in rows if row["frame"] == 3}
    assert (third[0]["tokens"], third[0]["holders"], third[0]["kind"]) == ("ROME", "A1 A2\nA3", "shared")
    assert third[1]["tokens"] == "O:⏎O" and third[2]["tokens"] == ",␣th"
    assert sum(row["kind"] == "copied" for row in third.values()) == 2
    tables = {row["words"] for row in frame_tables(as_recording(frames)) if row["frame"] == 3}
    assert tables == {"A1: 0 1 2 7", "A2: 0 1 2 8", "A3: 0 1 2 3", "B: 4 5 6"}


def test_the_explorer_plays_the_recording_of_the_shipped_model():
    (recording,) = recorded("paged-trace")
    explorer = block_grid(recording)
    text = repr(explorer)
    assert f"1 to {len(recording.data['frames'])}" in text
    assert "frame 2: 7 blocks held by 15 table entries" in text and "frame 3: 9 blocks held by 15" in text
    assert "⏎" in explorer._repr_html_()
    texts = {}  # along every table, tokens are a text that grows
    for frame in recording.data["frames"]:
        pages = {}
        for block in frame["blocks"]:
            for key, page in zip(block["held"], block["pages"], strict=True):
                pages.setdefault(key, {})[page] = block["tokens"]
        for key, found in pages.items():
            own = list(itertools.chain.from_iterable(found[page] for page in sorted(found)))
            assert own[: len(texts.get(key, []))] == texts.get(key, [])
            texts[key] = own


def test_the_waste_explorer_draws_the_formula():
    explorer = waste_by_block(mean=64, longest=1024)
    assert f"blocks of 16: {100 * waste_share(64, 16):.1f} % at a mean of 64 tokens, under 5 % from 143" in repr(
        explorer
    )
    assert explorer.spec["params"][1]["value"] == 64 and explorer.spec["params"][2]["value"] == 1024
    assert len(explorer.still()) > 1000


def test_scattered_sequences_have_no_two_blocks_in_a_row():
    model = random_model(preset("nano"))
    cache = scattered_cache(model, 3, 37, 48, 4)
    assert [cache.next_position(b) for b in range(3)] == [37] * 3
    assert all(b - a == 3 for a, b in itertools.pairwise(cache.table(1)))
    assert cache.fits(dict.fromkeys(range(3), 11))
    cache.check()


def test_the_sweep_measures_every_size_and_the_contiguous_cache():
    sizes = [1, 16]
    *_, recording = run_sweep("paged", preset="nano", batch=2, context=48, block_sizes=sizes, repeats=3, warmup=1)
    assert [point.at["cache"] for point in recording.points] == [CONTIGUOUS, "blocks of 1", "blocks of 16"]
    assert all(len(point.samples) == 3 and point.flops == recording.points[0].flops for point in recording.points)
    with pytest.raises(ValueError, match="context is 4, it must be above warmup"):
        list(run_sweep("paged", preset="nano", context=4, repeats=3, warmup=1))


def lab(**settings) -> PagedLab:
    one = PagedLab("cpu")
    for name, value in {"preset": "nano", "repeats": 2, "context": 64, "batch": 2, **settings}.items():
        one.inputs[name].value = value
    return one


def test_the_lab_measures_and_says_how_many_sequences_fit(monkeypatch):
    monkeypatch.setattr(hardware, "free_bytes", lambda device: 10_000_000)
    one = lab(mean=50).run()
    assert one.state == "done", one.message
    rows = {row["Cache"]: row for row in one.rows(one.recording)}
    assert list(rows) == [CONTIGUOUS, "blocks of 1", "blocks of 4", "blocks of 16", "blocks of 64"]
    shape = ModelShape.of(preset("nano", context_length=64))
    tokens = (10_000_000 - 4 * n_params(shape)) / (kv_bytes(shape, 64, 4) / 64)
    assert rows[CONTIGUOUS]["Sequences that fit"] == int(tokens / 64)
    assert rows["blocks of 1"]["Sequences that fit"] == int(tokens / 32)
    assert rows["blocks of 16"]["Sequences that fit"] == int(tokens / (32 + 7.5))
    assert rows[CONTIGUOUS]["Over contiguous (times)"] == 1
    html = one._repr_html_()
    assert "Time of a decode step (ms) against Tokens of a block" in html and CONTIGUOUS in html


def test_the_lab_names_the_longest_sequence_that_fits():
    needed = [
        PagedLab("cpu").needed_bytes({"preset": "gpt2", "dtype": "float32", "batch": 8, "context": n})
        for n in (64, 1024)
    ]
    assert needed[0] < needed[1]
    shape = ModelShape.of(preset("gpt2"))
    assert needed[1] > 4 * n_params(shape) + 8 * kv_bytes(shape, 1024, 4)
