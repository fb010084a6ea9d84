"""The command does what the package does: same text, same losses, and a card whose command can be run again."""

import argparse
import io
import json
import sys
from dataclasses import MISSING, fields
from pathlib import Path

import pytest
import torch
from safetensors.torch import load_file

import gptlite
import gptlite.progress
from gptlite import cli
from gptlite.cli import choose_device, main, make_parser, saved_step, whole
from gptlite.model import GPTlite
from gptlite.sampling import SamplingParams
from gptlite.train import TrainSettings

TEXT = "ROMEO: be a bad Emo, é.\nJULIET: no cab for me.\n" * 40
TRAIN = ["train", "--preset", "nano", "--steps", "6", "--batch-size", "2", "--save-every", "2", "--text"]


@pytest.fixture(scope="module")
def trained(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """The checkpoint of six steps on a small text, which lies beside it."""
    folder = tmp_path_factory.mktemp("trained")
    (folder / "mine.txt").write_text(TEXT, encoding="utf-8")
    assert main([*TRAIN, str(folder / "mine.txt"), "--out", str(folder / "a.safetensors")]) == 0
    return folder / "a.safetensors"


def card(path: Path) -> dict:
    return json.loads(path.with_suffix(".json").read_text())


# -- train --------------------------------------------------------------------------------------------------------


def test_defaults_are_those_of_the_package() -> None:
    args = make_parser().parse_args(["train", "--steps", "1"])
    for field in fields(TrainSettings):
        if field.default is not MISSING:
            assert getattr(args, field.name) == field.default, field.name


def test_the_card_says_how_it_was_made(trained: Path) -> None:
    said = card(trained)
    assert said["command"] == (
        "gptlite train --preset nano --steps 6 --text mine.txt --batch-size 2 --save-every 2 --out a.safetensors"
    )
    assert str(trained.parent) not in trained.with_suffix(".json").read_text()
    assert said["corpus"]["sha256"] == gptlite.load_corpus(trained.with_name("mine.txt")).sha256
    assert [step for step, _ in said["loss_curve"]] == [2, 4, 6]
    assert said["steps"] == 6 and said["device"] in ("cpu", "cuda", "mps")


def test_the_command_of_the_card_gives_the_same_weights(
    trained: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.chdir(tmp_path)
    (tmp_path / "mine.txt").write_text(TEXT, encoding="utf-8")
    assert main(card(trained)["command"].split()[1:]) == 0
    again, first = load_file(tmp_path / "a.safetensors"), load_file(trained)
    assert all(torch.equal(again[name], first[name]) for name in first)
    assert card(tmp_path / "a.safetensors") == card(trained)


@pytest.mark.parametrize("stop_after", [1, 3, 5])
def test_a_stopped_run_goes_on_to_the_same_end(
    trained: Path,
    tmp_path: Path,
    monkeypatch: pytest.MonkeyPatch,
    capsys: pytest.CaptureFixture[str],
    stop_after: int,
) -> None:
    out = tmp_path / "a.safetensors"
    command = [*TRAIN, str(trained.with_name("mine.txt")), "--out", str(out)]
    update = gptlite.progress.Progress.update

    def stop(self: object, done: int, note: str = "") -> None:
        if done == stop_after:
            raise KeyboardInterrupt

    monkeypatch.setattr(gptlite.progress.Progress, "update", stop)
    assert main(command) == 130
    saved = stop_after // 2 * 2
    assert saved_step(out.with_suffix(".state.safetensors")) == saved
    said = capsys.readouterr().err.splitlines()[-1]
    assert (f"saved at step {saved} of 6" in said) if saved else ("stopped before step 2" in said)
    assert not out.exists()
    monkeypatch.setattr(gptlite.progress.Progress, "update", update)
    assert main(command) == 0
    assert card(out) == card(trained)
    ended, first = load_file(out), load_file(trained)
    assert all(torch.equal(ended[name], first[name]) for name in first)


def test_restart_begins_anew(trained: Path, tmp_path: Path) -> None:
    out = tmp_path / "a.safetensors"
    out.with_suffix(".state.safetensors").write_bytes(b"of another run")
    command = [*TRAIN, str(trained.with_name("mine.txt")), "--out", str(out)]
    assert main(command) == 2
    assert main([*command, "--restart"]) == 0
    assert card(out) == card(trained)


def test_a_student_learns_from_its_teacher(trained: Path, tmp_path: Path) -> None:
    text, out = str(trained.with_name("mine.txt")), tmp_path / "b.safetensors"
    assert main([*TRAIN, text, "--out", str(out), "--teacher", str(trained), "--seed", "5", "--steps", "40"]) == 0
    said = card(out)
    assert "--teacher a.safetensors" in said["command"]
    # the loss is the divergence from the teacher, which falls towards zero; the text alone would leave far more
    assert said["loss_curve"][-1][1] < 0.1 < 1 < card(trained)["loss_curve"][-1][1]


def test_the_default_place_is_named_after_the_preset(
    trained: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.chdir(tmp_path)
    assert main([*TRAIN, str(trained.with_name("mine.txt"))]) == 0
    assert (tmp_path / "nano.safetensors").exists()
    assert card(tmp_path / "nano.safetensors")["command"].endswith("--save-every 2")


# -- generate -----------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("n_new", [0, 1, 30, 90])
@pytest.mark.parametrize("words", [[], ["--temperature", "0"], ["--top-k", "3", "--top-p", "0.9", "--seed", "7"]])
def test_generate_writes_what_the_plain_loop_gives(
    trained: Path, capsys: pytest.CaptureFixture[str], n_new: int, words: list[str]
) -> None:
    """Also past the window of 64, where the plain loop reads the last 64 characters again."""
    command = ["generate", "ROMEO:", "--tokens", str(n_new), "--checkpoint", str(trained), *words]
    assert main(command) == 0
    params = {
        "": SamplingParams(0.8),
        "--temperature": SamplingParams(0.0),
        "--top-k": SamplingParams(0.8, top_k=3, top_p=0.9),
    }[words[0] if words else ""]
    model, tokenizer = gptlite.load(trained)
    tokens = tokenizer.encode("ROMEO:")[None]
    want = gptlite.generate(model, tokens, n_new, params, overflow="slide", seed=7 if "7" in words else 0)
    out, err = capsys.readouterr()
    assert out == tokenizer.decode(want[0]) + "\n"
    assert err == ""


def test_generate_reads_each_new_character_once(trained: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """The cache is really used: six tokens of prompt, then one at a time."""
    counts: list[int] = []
    run = GPTlite.run
    monkeypatch.setattr(
        GPTlite, "run", lambda self, tokens, *rest: counts.append(len(tokens)) or run(self, tokens, *rest)
    )
    assert main(["generate", "ROMEO:", "--tokens", "20", "--checkpoint", str(trained)]) == 0
    assert counts == [6] + [1] * 19


class Terminal(io.StringIO):
    """Remembers what had been written at each flush."""

    encoding = "utf-8"

    def __init__(self) -> None:
        super().__init__()
        self.shown: list[str] = []

    def flush(self) -> None:
        self.shown.append(self.getvalue())


def test_generate_streams(trained: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    terminal = Terminal()
    monkeypatch.setattr(sys, "stdout", terminal)
    assert main(["generate", "RO", "--tokens", "5", "--checkpoint", str(trained)]) == 0
    assert [len(text) for text in terminal.shown[:6]] == [2, 3, 4, 5, 6, 7]


def test_a_terminal_that_lacks_a_character(trained: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    raw = io.BytesIO()
    monkeypatch.setattr(sys, "stdout", io.TextIOWrapper(raw, encoding="ascii"))
    assert main(["generate", "é", "--tokens", "0", "--checkpoint", str(trained)]) == 0
    assert raw.getvalue().split() == [b"?"]


def test_clamp_warns_in_one_line(trained: Path, capsys: pytest.CaptureFixture[str]) -> None:
    command = ["generate", "R", "--tokens", "70", "--overflow", "clamp", "--checkpoint", str(trained)]
    assert main(command) == 0
    out, err = capsys.readouterr()
    assert len(out) == 1 + 70 + 1
    assert err.startswith("gptlite: warning: overflow='clamp'") and err.count("\n") == 1


# -- measure, record, export, data --------------------------------------------------------------------------------


def test_measured_loss_is_the_card_s(trained: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    command = ["measure", "--loss", "--text", str(trained.with_name("mine.txt")), "--checkpoint"]
    assert main([*command, str(trained)]) == 0
    claimed = f"{card(trained)['validation_loss']:.4f}"
    held_out = len(gptlite.load_corpus(trained.with_name("mine.txt")).held_out)
    out = capsys.readouterr().out
    assert f"validation loss {claimed} nats per character" in out and f"the card says   {claimed}" in out
    assert f"mine.txt, {held_out} characters" in out
    copy = tmp_path / "a.safetensors"
    copy.write_bytes(trained.read_bytes())
    said = card(trained)
    copy.with_suffix(".json").write_text(json.dumps(said | {"validation_loss": said["validation_loss"] + 0.002}))
    assert main([*command, str(copy)]) == 1


def test_measured_times(trained: Path, capsys: pytest.CaptureFixture[str]) -> None:
    words = ["--batch", "2", "--prompt-tokens", "8", "--tokens", "8", "--device", "cpu"]
    assert main(["measure", "--checkpoint", str(trained), *words]) == 0
    lines = dict(line.split(None, 1) for line in capsys.readouterr().out.splitlines())
    assert lines["sequences"] == "2, of 8 tokens each and 8 generated"
    assert set(lines) == {"device", "model", "sequences", "time", "throughput"}
    assert float(lines["throughput"].split()[0].replace(",", "")) > 0


def test_record_lists_and_writes(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    assert main(["record"]) == 0
    assert "decode " in capsys.readouterr().out
    out = tmp_path / "r.json"
    changes = ["preset=nano", "batches=1,2", "contexts=16", "repeats=2", "warmup=1"]
    words = [word for change in changes for word in ("--set", change)]
    assert main(["record", "decode", "--out", str(out), "--device", "cpu", *words]) == 0
    recording = json.loads(out.read_text())
    assert [point["at"] for point in recording["points"]] == [{"batch": b, "context": 16} for b in (1, 2)]
    assert all(len(point["samples"]) == 2 for point in recording["points"])
    assert "2 points measured, 0 left out" in capsys.readouterr().out


def test_export_writes_a_folder(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    """d_model 64 of the nano preset is more than the characters of the text."""
    text, out = tmp_path / "mine.txt", tmp_path / "n.safetensors"
    text.write_text(TEXT, encoding="utf-8")
    assert main([*TRAIN, str(text), "--out", str(out)]) == 0
    assert main(["export", "--to", "hf", "--out", str(tmp_path / "opt"), "--checkpoint", str(out)]) == 0
    assert (tmp_path / "opt" / "model.safetensors").exists()
    assert "an OPT model" in capsys.readouterr().out


def test_data_of_any_text(trained: Path, capsys: pytest.CaptureFixture[str]) -> None:
    text = trained.with_name("mine.txt")
    assert main(["data", "--text", str(text)]) == 0
    corpus, out = gptlite.load_corpus(text), capsys.readouterr().out
    for part in (f"{len(corpus.train):,} characters", f"{len(corpus.held_out)} characters", corpus.sha256, "mine.txt"):
        assert part in out


def test_a_file_that_is_called_like_a_corpus(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.chdir(tmp_path)
    Path("shakespeare").write_text("abc" * 20)
    assert main(["data", "--text", "shakespeare"]) == 0
    assert "54 characters" in capsys.readouterr().out


# -- what they share ----------------------------------------------------------------------------------------------


def test_choose_device(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(torch.backends.mps, "is_available", lambda: False)
    monkeypatch.setattr(torch.cuda, "device_count", lambda: 0)
    assert choose_device("auto") == choose_device("cpu") == "cpu"
    with pytest.raises(ValueError, match="device is 'cuda', this machine has auto, cpu"):
        choose_device("cuda")
    monkeypatch.setattr(torch.backends.mps, "is_available", lambda: True)
    assert choose_device("auto") == "mps"
    monkeypatch.setattr(torch.cuda, "device_count", lambda: 2)
    assert choose_device("auto") == "cuda" and choose_device("cuda:1") == "cuda:1"
    with pytest.raises(ValueError, match="device is 'cuda:2', this machine has auto, cuda, cuda:0, cuda:1, mps, cpu"):
        choose_device("cuda:2")


def test_whole_numbers() -> None:
    assert whole(0)("0") == 0 and whole(1, 3)("3") == 3
    for parse, text in ((whole(0), "-1"), (whole(1, 3), "4"), (whole(1, 3), "0"), (whole(0), "1e3"), (whole(0), "")):
        with pytest.raises(argparse.ArgumentTypeError, match="is not a whole number"):
            parse(text)


@pytest.mark.parametrize(
    ("error", "status", "says"),
    [
        (MemoryError(), 2, "gptlite: out of memory\n"),
        (RuntimeError("DefaultCPUAllocator: can't allocate memory: 8 GB\nmore"), 2, "gptlite: not enough memory: "),
        (OSError(28, "No space left on device"), 2, "gptlite: [Errno 28] No space left on device\n"),
        (ValueError("two\nlines\x1b[31m"), 2, "gptlite: two lines [31m\n"),
        (KeyboardInterrupt(), 130, "gptlite: stopped\n"),
    ],
)
def test_errors_become_a_line(
    monkeypatch: pytest.MonkeyPatch,
    capsys: pytest.CaptureFixture[str],
    error: BaseException,
    status: int,
    says: str,
) -> None:
    def fail(args: argparse.Namespace) -> None:
        """Fail."""
        raise error

    fail.__name__ = "run_data"
    monkeypatch.setattr(cli, "run_data", fail)
    assert main(["data"]) == status
    err = capsys.readouterr().err
    assert err.startswith(says) and err.count("\n") == 1


def test_a_fault_of_the_program_is_not_hidden(monkeypatch: pytest.MonkeyPatch) -> None:
    def fail(args: argparse.Namespace) -> None:
        """Fail."""
        raise RuntimeError("a fault")

    fail.__name__ = "run_data"
    monkeypatch.setattr(cli, "run_data", fail)
    with pytest.raises(RuntimeError, match="a fault"):
        main(["data"])
