"""Publishing: where the book lies, what may be copied and whither, and links that lead nowhere."""

import datetime
import json
import os
import struct
import subprocess
import threading
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from xml.etree import ElementTree

import pytest
from built_book import ROOT, load_script
from docutils import nodes
from docutils.utils import new_document

publishing = load_script(ROOT / "book" / "_ext" / "publishing.py")
status = load_script(ROOT / "book" / "_ext" / "status.py")
publish = load_script(ROOT / "tools" / "publish.py")
links = load_script(ROOT / "tools" / "links.py")
execute = load_script(ROOT / "tools" / "execute.py")
ENTRY = {
    "seconds": 12.3,
    "peak_bytes": 700_000_000,
    "machine": {"name": "A processor", "cores": 2, "memory_bytes": 8_000_000_000, "system": "Linux"},
    "versions": {"gptlite": "0.1.0", "torch": "2.13.0"},
    "date": "2026-11-30",
}


# Addresses, descriptions, dates


@pytest.mark.parametrize(
    ("repository", "named", "url"),
    [
        ("https://github.com/Ada/work-per-byte", "", "https://ada.github.io/work-per-byte/"),
        ("https://github.com/ada/x.y", "https://example.org/a/book", "https://example.org/a/book/"),
        ("https://github.com/ada/x", "http://127.0.0.1:8000/", "http://127.0.0.1:8000/"),
    ],
)
def test_where_the_book_lies(repository: str, named: str, url: str) -> None:
    assert publishing.book_url(repository, {"BOOK_URL": named}) == url


@pytest.mark.parametrize(
    ("repository", "named", "message"),
    [
        ("https://example.org/ada/x", "", "must be https://github.com/OWNER/NAME"),
        ("https://github.com/ada", "", "must be https://github.com/OWNER/NAME"),
        ("https://github.com/ada/x", "example.org", "BOOK_URL is 'example.org'"),
        ("https://github.com/ada/x", 'https://example.org/"><b', "BOOK_URL is"),
    ],
)
def test_a_wrong_address_of_the_book_is_refused(repository: str, named: str, message: str) -> None:
    with pytest.raises(ValueError, match=message):
        publishing.book_url(repository, {"BOOK_URL": named})


def page_of(*paragraphs: str) -> nodes.document:
    page = new_document("page")
    for text in paragraphs:
        page += nodes.paragraph("", text)
    return page


def test_a_description_is_the_first_sentence_that_says_something() -> None:
    long = "Words that go on. " * 20
    assert publishing.described(page_of("Open in Colab", "A cache keeps the keys and values of tokens. So it is."))
    assert publishing.described(page_of("Short.", "A cache keeps what was computed for the earlier tokens."))[0] == "A"
    cut = publishing.described(page_of(long.strip()))
    assert len(cut) <= publishing.LONGEST
    assert cut.endswith("…")
    for nothing in (None, page_of(), page_of("no sentence at all, however long it may be made to be")):
        assert publishing.described(nothing) == publishing.DESCRIPTION
    boxed = new_document("page")
    boxed += nodes.sidebar("", nodes.paragraph("", "What stands in the margin does not describe the page."))
    assert publishing.described(boxed) == publishing.DESCRIPTION


def test_the_date_is_that_of_the_last_commit_or_a_named_one(tmp_path, monkeypatch) -> None:
    monkeypatch.setattr(publishing, "ROOT", tmp_path)
    monkeypatch.setenv("GIT_CEILING_DIRECTORIES", str(tmp_path.parent))
    monkeypatch.setenv("SOURCE_DATE_EPOCH", "86400")
    assert publishing.date() == datetime.date(1970, 1, 2)
    git = ["git", "-C", tmp_path, "-c", "user.name=a", "-c", "user.email=a@example.org"]
    subprocess.run([*git, "init", "--quiet"], check=True)
    dated = {**os.environ, "GIT_COMMITTER_DATE": "2026-03-04T12:00:00", "GIT_AUTHOR_DATE": "2025-01-01T12:00:00"}
    subprocess.run([*git, "commit", "--quiet", "--allow-empty", "-m", "x"], check=True, env=dated)
    assert publishing.date() == datetime.date(2026, 3, 4)


@pytest.mark.parametrize("path", sorted((ROOT / "book" / "_static" / "art").glob("*.svg")), ids=lambda path: path.stem)
def test_a_drawing_for_elsewhere_is_dark_on_white(path) -> None:
    root = ElementTree.fromstring(publishing.standalone(path.read_text(encoding="utf-8")))
    assert root.get("style").startswith("background: #ffffff; color: #1b2733")
    own = ElementTree.parse(path).getroot().get("style", "")
    assert root.get("style").endswith(own or "#1b2733;")


def test_the_card_has_the_size_that_its_tags_say() -> None:
    head = (ROOT / "book" / publishing.CARD).read_bytes()[:24]
    assert head[:8] == b"\x89PNG\r\n\x1a\n"
    assert struct.unpack(">II", head[16:24]) == publishing.CARD_SIZE
    assert (ROOT / "book" / publishing.CARD).stat().st_size < 100_000


# The status of the chapters


def test_every_chapter_has_a_status() -> None:
    entries = status.load(ROOT / "book" / "status.json")
    assert set(entries) == {path.stem for path in (ROOT / "chapters").glob("*.ipynb")}, "`make execute` writes them"


def test_a_row_for_each_chapter() -> None:
    rows = status.rows({"01_a": ENTRY}, ["01_a", "02_b"])
    assert rows[0][:3] == ["{doc}`/chapters/01_a`", "12 s", "0.7 GB"]
    assert rows[0][3] == "A processor, 2 cores, 8 GB, Linux"
    assert rows[0][4] == "gptlite 0.1.0, torch 2.13.0"
    assert rows[1] == ["{doc}`/chapters/02_b`", "not recorded", "", "", "", ""]


@pytest.mark.parametrize(
    ("change", "message"),
    [
        ({"seconds": "12"}, "seconds is '12', it must be a float"),
        ({"colour": "blue"}, r"missing or unknown fields \['colour'\]"),
        ({"machine": {"name": "x"}}, "missing or unknown fields"),
    ],
)
def test_a_wrong_status_is_refused(change: dict, message: str, tmp_path) -> None:
    path = tmp_path / "status.json"
    path.write_text(json.dumps({"01_a": ENTRY | change}), encoding="utf-8")
    with pytest.raises(ValueError, match=f"status of 01_a: {message}"):
        status.load(path)


def test_a_run_is_kept_with_the_others_and_lost_chapters_go(tmp_path) -> None:
    (tmp_path / "chapters").mkdir()
    (tmp_path / "book").mkdir()
    for name in ("01_a", "02_b"):
        (tmp_path / "chapters" / f"{name}.ipynb").touch()
    path = tmp_path / "book" / "status.json"
    execute.keep("02_b", ENTRY, path)
    path.write_text(json.dumps(json.loads(path.read_text()) | {"03_gone": ENTRY}), encoding="utf-8")
    execute.keep("01_a", ENTRY, path)
    assert list(status.load(path)) == ["01_a", "02_b"]


# Publishing


@pytest.fixture
def built(tmp_path):
    """Something that looks built, and the sources that it was built from."""
    root = tmp_path / "root"
    for name in publish.NEEDED:
        (root / "html" / name).parent.mkdir(parents=True, exist_ok=True)
        (root / "html" / name).write_text(name, encoding="utf-8")
    (root / "chapters").mkdir()
    (root / "chapters" / "01_a.ipynb").write_text("{}", encoding="utf-8")
    os.utime(root / "chapters" / "01_a.ipynb", (1, 1))
    return root / "html"


def test_what_is_built_is_fit(built) -> None:
    assert publish.unfit(built, built.parent) == ""


def test_what_is_not_built_is_refused(built) -> None:
    (built / "404.html").unlink()
    assert publish.unfit(built, built.parent) == "the book is not built, 404.html is missing: run `make book` first"


def test_what_is_older_than_a_chapter_is_refused(built) -> None:
    os.utime(built / "sitemap.xml", (0, 0))
    assert publish.unfit(built, built.parent) == "the book is older than chapters/01_a.ipynb: run `make book` again"


def test_a_folder_gets_the_book_and_loses_what_the_book_lost(built, tmp_path) -> None:
    folder = tmp_path / "served" / "book"
    assert publish.to_folder(built, folder) == len(publish.NEEDED)
    (folder / "old").mkdir()
    (folder / "old" / "page.html").touch()
    publish.to_folder(built, folder)
    assert {path.relative_to(folder).as_posix() for path in folder.rglob("*") if path.is_file()} == set(publish.NEEDED)
    assert not (folder / "old").exists()


def test_a_folder_of_something_else_is_left_alone(built, tmp_path) -> None:
    (tmp_path / "thesis.txt").touch()
    with pytest.raises(ValueError, match="holds something else"):
        publish.to_folder(built, tmp_path)
    with pytest.raises(ValueError, match="is a file"):
        publish.to_folder(built, tmp_path / "thesis.txt")
    with pytest.raises(ValueError, match="where the book is built"):
        publish.to_folder(built, built / "inside")
    assert (tmp_path / "thesis.txt").exists()


@pytest.mark.parametrize("target", ["ada@example.org:/srv/book", "example.org:book"])
def test_a_host_is_told_from_a_folder(target: str) -> None:
    assert publish.HOST.fullmatch(target)
    assert not publish.HOST.fullmatch("C:\\book")
    assert not publish.HOST.fullmatch("served/book")


# Links


@pytest.fixture
def site(tmp_path):
    """A small site. Called with the text of a page, it gives the pages read and their folder."""

    def make(text: str, name: str = "a.html"):
        (tmp_path / name).parent.mkdir(parents=True, exist_ok=True)
        (tmp_path / name).write_text(text, encoding="utf-8")
        (tmp_path / "b.html").write_text('<h1 id="top">B</h1>', encoding="utf-8")
        return links.read(tmp_path), tmp_path

    return make


@pytest.mark.parametrize(
    ("link", "is_broken"),
    [
        ("b.html", False),
        ("b.html#top", False),
        ("b.html#nowhere", True),
        ("c.html", True),
        ("#here", False),
        ("#there", True),
        ("b.html?q=1#top", False),
        ("https://ada.github.io/book/b.html#top", False),
        ("https://ada.github.io/book/c.html", True),
        ("https://example.org/c.html", False),
        ("mailto:ada@example.org", False),
        ("data:,", False),
    ],
)
def test_a_link_inside_leads_somewhere(link: str, is_broken: bool, site) -> None:
    pages, folder = site(f'<p id="here"><a href="{link}">x</a></p>', "deep/a.html" if link == "" else "a.html")
    found = links.broken_inside(pages, folder, "https://ada.github.io/book/")
    assert found == ([f"a.html -> {link}"] if is_broken else [])


def test_only_addresses_elsewhere_are_asked(site) -> None:
    pages, folder = site(
        '<a href="https://example.org/x#y">x</a> <a href="https://github.com/OWNER/book">x</a>'
        '<a href="https://ada.github.io/book/b.html">x</a> <a href="b.html">x</a><img src="https://example.org/y.png">'
    )
    asked = links.outside(pages, folder, "https://ada.github.io/book/")
    assert asked == {"https://example.org/x": "a.html", "https://example.org/y.png": "a.html"}


class Answers(BaseHTTPRequestHandler):
    """Answers with the status that its path names; 405 to the short way of asking, at /get."""

    asked: list[str] = []

    def do_GET(self) -> None:
        self.asked.append(f"{self.command} {self.path}")
        code = self.path.strip("/")
        self.send_response((405 if self.command == "HEAD" else 200) if code == "get" else int(code))
        self.end_headers()

    do_HEAD = do_GET

    def log_message(self, *args: object) -> None:
        pass


def test_a_page_elsewhere_answers_or_does_not() -> None:
    server = ThreadingHTTPServer(("127.0.0.1", 0), Answers)
    threading.Thread(target=server.serve_forever, daemon=True).start()
    address = f"http://127.0.0.1:{server.server_port}"
    try:
        assert links.ask(f"{address}/200") == ""
        assert links.ask(f"{address}/get") == ""
        assert links.ask(f"{address}/404") == "status 404"
        assert links.ask(f"{address}/403") == "unwelcome (status 403)"
        Answers.asked.clear()
        assert links.ask(f"{address}/500", tries=2, pause=0) == "status 500"
        assert Answers.asked == ["HEAD /500", "GET /500"] * 2, "a host that stumbles is asked again"
    finally:
        server.shutdown()
        server.server_close()
    assert links.ask(f"{address}/200", tries=1, timeout=2)
