"""A checkpoint is not trusted: whatever is in the file, loading it works or raises one clear ValueError."""

import json
import pickle
import re
import struct
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest
import torch
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st
from safetensors.torch import load_file, save, save_file

from gptlite.checkpoint import FORMAT, from_original, load_checkpoint, read_card
from gptlite.data import CharTokenizer

GPT_FIELDS = (
    "vocab_size",
    "context_length",
    "n_layers",
    "d_model",
    "n_heads",
    "d_head",
    "n_kv_heads",
    "d_ff",
    "dropout",
)
FUZZ = settings(max_examples=150, deadline=None, suppress_health_check=[HealthCheck.function_scoped_fixture])
json_values = st.recursive(
    st.none()
    | st.booleans()
    | st.integers()
    | st.floats()
    | st.text(max_size=5)
    | st.sampled_from([10**9, 2**63, 10**40]),
    lambda inner: st.lists(inner, max_size=3) | st.dictionaries(st.text(max_size=5), inner, max_size=3),
    max_leaves=6,
)


def parts(path: Path) -> tuple[dict[str, Any], bytes]:
    """The header and the data of a safetensors file."""
    content = path.read_bytes()
    (length,) = struct.unpack("<Q", content[:8])
    return json.loads(content[8 : 8 + length]), content[8 + length :]


def write(path: Path, header: dict[str, Any] | bytes, data: bytes) -> Path:
    raw = header if isinstance(header, bytes) else json.dumps(header).encode()
    path.write_bytes(struct.pack("<Q", len(raw)) + raw + data)
    return path


def refusal(path: Path) -> str:
    """The message of the ValueError that loading raises; anything else fails the test."""
    with pytest.raises(ValueError) as caught:
        load_checkpoint(path)
    assert type(caught.value) is ValueError, "a subclass, such as a JSON error, does not name the file"
    assert str(path) in str(caught.value)
    return str(caught.value)


def changed(checkpoint: Path, path: Path, **metadata: str) -> Path:
    """The checkpoint with some entries of its metadata replaced."""
    header, data = parts(checkpoint)
    header["__metadata__"] |= metadata
    return write(path, header, data)


def config_of(checkpoint: Path) -> dict[str, Any]:
    return json.loads(parts(checkpoint)[0]["__metadata__"]["config"])


def test_the_untouched_file_loads(checkpoint: Path, tmp_path: Path) -> None:
    header, data = parts(checkpoint)
    model, _ = load_checkpoint(write(tmp_path / "same.safetensors", header, data))
    assert model.n_params == sum(t.numel() for t in load_file(checkpoint).values())


def test_missing(tmp_path: Path) -> None:
    assert "there is no checkpoint" in refusal(tmp_path / "none.safetensors")
    assert "there is no checkpoint" in refusal(tmp_path)  # a folder
    with pytest.raises(ValueError, match="there is no checkpoint"):
        load_checkpoint(tmp_path / ("x" * 5000))


def test_truncated_anywhere(checkpoint: Path, tmp_path: Path) -> None:
    content = checkpoint.read_bytes()
    header_end = 8 + struct.unpack("<Q", content[:8])[0]
    path = tmp_path / "cut.safetensors"
    offsets = {*range(12), *range(12, header_end, 97), header_end - 1, header_end, header_end + 1}
    for offset in sorted(offsets | {*range(header_end, len(content), 1009), len(content) - 1}):
        path.write_bytes(content[:offset])
        assert "is no checkpoint of gptlite, or is damaged" in refusal(path)


def test_bytes_after_the_end(checkpoint: Path, tmp_path: Path) -> None:
    path = tmp_path / "long.safetensors"
    path.write_bytes(checkpoint.read_bytes() + b"\0" * 8)
    refusal(path)


@pytest.mark.parametrize(
    "content",
    [b"", b"hello", b"\0" * 100, b"\xff" * 100, pickle.dumps({"a": 1}), b"PK\x03\x04" + b"\0" * 60, b"{}" * 50],
    ids=["empty", "text", "zeros", "ones", "pickle", "zip", "json"],
)
def test_other_files(content: bytes, tmp_path: Path) -> None:
    path = tmp_path / "other.safetensors"
    path.write_bytes(content)
    assert "is no checkpoint of gptlite, or is damaged" in refusal(path)


def test_a_pickle_is_not_executed(tmp_path: Path) -> None:
    class Bomb:
        def __reduce__(self) -> Any:
            return Path.touch, (tmp_path / "exploded",)

    path = tmp_path / "bomb.pt"
    torch.save({"token_embedding.weight": Bomb()}, path)
    refusal(path)
    with pytest.raises(ValueError, match="is no state dict of the original GPTlite"):
        from_original(path, CharTokenizer("ab"), d_head=2)
    assert not (tmp_path / "exploded").exists()


def test_safetensors_of_another_program(tmp_path: Path) -> None:
    path = tmp_path / "foreign.safetensors"
    save_file({"model.embed_tokens.weight": torch.zeros(4, 4)}, path)
    assert "its header does not say gptlite-1" in refusal(path)
    path.write_bytes(save({"w": torch.zeros(2)}, metadata={"format": "pt"}))
    assert "its header does not say gptlite-1" in refusal(path)
    path.write_bytes(save({"w": torch.zeros(2)}, metadata={"format": FORMAT}))
    assert "config" in refusal(path)


def test_a_weight_that_is_missing_extra_or_misshapen(checkpoint: Path, tmp_path: Path) -> None:
    metadata = parts(checkpoint)[0]["__metadata__"]
    weights = load_file(checkpoint)
    path = tmp_path / "odd.safetensors"
    save_file({name: t for name, t in weights.items() if name != "ln.bias"}, path, metadata)
    assert "weight ln.bias is missing or unknown" in refusal(path)
    save_file(weights | {"blocks.0.mha.tril": torch.zeros(3)}, path, metadata)
    assert "weight blocks.0.mha.tril is missing or unknown" in refusal(path)
    save_file(weights | {"ln.bias": torch.zeros(21)}, path, metadata)
    assert "weight ln.bias has shape (21,), its config says (20,)" in refusal(path)
    save_file(weights | {"ln.bias": torch.zeros(20, 1)}, path, metadata)
    assert "weight ln.bias has shape (20, 1), its config says (20,)" in refusal(path)


@pytest.mark.parametrize("value", [float("nan"), float("inf"), float("-inf")])
def test_a_weight_that_is_no_number(checkpoint: Path, tmp_path: Path, value: float) -> None:
    weights = load_file(checkpoint)
    weights["fc_out.bias"][3] = value
    path = tmp_path / "nan.safetensors"
    save_file(weights, path, parts(checkpoint)[0]["__metadata__"])
    assert "weight fc_out.bias holds values that are not finite" in refusal(path)


@pytest.mark.parametrize(
    ("chars", "says"),
    [
        ('["a", "b"]', "vocabulary"),
        ('{"a": 1}', "vocabulary"),
        ("5", "vocabulary"),
        ('"aa"', "distinct"),
        ('""', "distinct"),
        ('"ab"', "has 2 characters, its config a vocabulary of 13"),
        ("not json", "damaged"),
        ("[" * 100_000, "damaged"),
    ],
)
def test_vocabularies(checkpoint: Path, tmp_path: Path, chars: str, says: str) -> None:
    assert says in refusal(changed(checkpoint, tmp_path / "chars.safetensors", chars=chars))


@pytest.mark.parametrize(
    "config",
    ["", "null", "[]", "3", '"x"', "{}", "{", "[" * 100_000, '{"a":' * 100_000, "9" * 10_000, '{"vocab_size": NaN}'],
)
def test_configs_that_are_none(checkpoint: Path, tmp_path: Path, config: str) -> None:
    refusal(changed(checkpoint, tmp_path / "config.safetensors", config=config))


@pytest.mark.parametrize("field", GPT_FIELDS)
@pytest.mark.parametrize("value", [0, -1, 7.5, True, "8", [], {}, 10**9, 2**31, 2**63, 10**40])
def test_config_fields(checkpoint: Path, tmp_path: Path, field: str, value: Any) -> None:
    if field == "dropout" and value == 0 and value is not False:
        return
    config = json.dumps(config_of(checkpoint) | {field: value})
    refusal(changed(checkpoint, tmp_path / "field.safetensors", config=config))


def test_a_config_with_an_unknown_field_or_without_one(checkpoint: Path, tmp_path: Path) -> None:
    config = config_of(checkpoint)
    path = tmp_path / "fields.safetensors"
    assert "unknown config field 'n_experts'" in refusal(
        changed(checkpoint, path, config=json.dumps(config | {"n_experts": 2}))
    )
    del config["d_model"]
    assert "d_model" in refusal(changed(checkpoint, path, config=json.dumps(config)))


ABSURD = """
import sys
from gptlite.checkpoint import load_checkpoint
if sys.platform == "linux":
    import resource
    in_use = int(open("/proc/self/statm").read().split()[0]) * resource.getpagesize()
    resource.setrlimit(resource.RLIMIT_AS, (in_use + 300_000_000,) * 2)
for path in sys.argv[1:]:
    try:
        load_checkpoint(path)
    except ValueError as error:
        print(error)
"""


def test_absurd_sizes_allocate_nothing(checkpoint: Path, tmp_path: Path) -> None:
    """Each file claims gigabytes or more; a process that may take 300 MB refuses them all within seconds."""
    header, data = parts(checkpoint)
    config = config_of(checkpoint)
    files = []

    def add(header: dict[str, Any] | bytes, data: bytes = data) -> None:
        files.append(write(tmp_path / f"{len(files)}.safetensors", header, data))

    for claim in (
        {"d_model": 2**20, "d_ff": 2**20},
        {"n_layers": 4000},
        {"n_layers": 10**9},
        {"n_heads": 2**30, "d_head": 2**30},
        {"d_head": 2**62},
        {"context_length": 2**40},
        {"d_ff": 2**31},
    ):
        add(header | {"__metadata__": header["__metadata__"] | {"config": json.dumps(config | claim)}})
    for shape in ([2**40, 2**40], [2**63 - 1], [2**32, 2**31]):
        add(header | {"ln.bias": {"dtype": "F16", "shape": shape, "data_offsets": [0, 40]}})
    add(header | {"ln.bias": header["ln.bias"] | {"data_offsets": [0, 2**62]}})
    add(header | {"ln.bias": header["ln.bias"] | {"dtype": "F1024"}})
    add(b'{"a":' * 200_000 + b"1" + b"}" * 200_000)
    for length in (0, 10, 2**27, 2**40, 2**63, 2**64 - 1):
        files.append(tmp_path / f"{len(files)}.safetensors")
        files[-1].write_bytes(struct.pack("<Q", length) + checkpoint.read_bytes()[8:])
    done = subprocess.run(
        [sys.executable, "-c", ABSURD, *map(str, files)], capture_output=True, text=True, timeout=120, check=False
    )
    assert done.returncode == 0, done.stderr
    assert len(done.stdout.splitlines()) == len(files), done.stdout
    for path, line in zip(files, done.stdout.splitlines(), strict=True):
        assert str(path) in line


@FUZZ
@given(config=json_values, chars=json_values)
def test_any_json_in_the_metadata(checkpoint: Path, tmp_path: Path, config: Any, chars: Any) -> None:
    path = changed(checkpoint, tmp_path / "fuzz.safetensors", config=json.dumps(config))
    refusal(path)
    if not (isinstance(chars, str) and len(set(chars)) == len(chars) == 13):
        refusal(changed(checkpoint, path, chars=json.dumps(chars)))


@FUZZ
@given(data=st.data())
def test_any_value_of_any_config_field(checkpoint: Path, tmp_path: Path, data: st.DataObject) -> None:
    field = data.draw(st.sampled_from(GPT_FIELDS))
    value = data.draw(json_values | st.integers(1, 64))
    path = changed(checkpoint, tmp_path / "fuzz.safetensors", config=json.dumps(config_of(checkpoint) | {field: value}))
    loads_or_refuses(path)


@FUZZ
@given(data=st.data())
def test_any_bytes_of_the_header_changed(checkpoint: Path, tmp_path: Path, data: st.DataObject) -> None:
    content = bytearray(checkpoint.read_bytes())
    end = 8 + struct.unpack("<Q", content[:8])[0]
    for _ in range(data.draw(st.integers(1, 4))):
        content[data.draw(st.integers(0, end - 1))] = data.draw(st.integers(0, 255))
    path = tmp_path / "fuzz.safetensors"
    path.write_bytes(content)
    loads_or_refuses(path)


@FUZZ
@given(name=st.sampled_from(["ln.bias", "fc_out.weight", "blocks.0.ffwd.net.0.weight"]), entry=json_values)
def test_any_entry_for_a_weight(checkpoint: Path, tmp_path: Path, name: str, entry: Any) -> None:
    header, data = parts(checkpoint)
    refusal(write(tmp_path / "fuzz.safetensors", header | {name: entry}, data))


def loads_or_refuses(path: Path) -> None:
    try:
        load_checkpoint(path)
    except ValueError as error:
        assert type(error) is ValueError and re.search("fuzz.safetensors", str(error))


@pytest.mark.parametrize("content", [None, b"", b"{", b"\xff\xfe", b"[" * 100_000])
def test_cards(tmp_path: Path, content: bytes | None) -> None:
    if content is not None:
        (tmp_path / "a.json").write_bytes(content)
    with pytest.raises(ValueError, match="cannot read the card"):
        read_card(tmp_path / "a.safetensors")
