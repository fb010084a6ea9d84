"""What the published book needs beyond its pages, as it was built."""

import json
import re
from html.parser import HTMLParser
from pathlib import Path
from urllib.parse import urldefrag
from xml.etree import ElementTree

import pytest
import yaml
from built_book import BUILT, ROOT, Site, Visit, load_script

colab = load_script(ROOT / "tools" / "colab.py")
links = load_script(ROOT / "tools" / "links.py")
publishing = load_script(ROOT / "book" / "_ext" / "publishing.py")
CONFIG = yaml.safe_load((ROOT / "_config.yml").read_text(encoding="utf-8"))
CHAPTERS = sorted(path.stem for path in (BUILT / "chapters").glob("*.html"))
LOCATION = "{http://www.sitemaps.org/schemas/sitemap/0.9}"


class Head(HTMLParser):
    """The tags in a page's head."""

    def __init__(self, path: Path) -> None:
        super().__init__()
        self.meta: dict[str, str] = {}
        self.canonical = ""
        self.feed(path.read_text(encoding="utf-8"))

    def handle_starttag(self, tag: str, attrs: list) -> None:
        named = dict(attrs)
        if tag == "meta" and (key := named.get("property") or named.get("name")):
            self.meta.setdefault(key, named.get("content", ""))
        if tag == "link" and named.get("rel") == "canonical":
            self.canonical = named["href"]


@pytest.fixture(scope="module")
def book():
    return colab.load_book()


@pytest.fixture(scope="module")
def pages() -> dict:
    return links.read(BUILT)


def test_every_page_says_what_it_is(book) -> None:
    described = {}
    for name in ["book/preface", "book/map", "book/status", *(f"chapters/{name}" for name in CHAPTERS)]:
        head = Head(BUILT / f"{name}.html")
        assert head.canonical == head.meta["og:url"] == f"{book.url}{name}.html"
        assert head.meta["og:title"]
        assert head.meta["og:image"] == f"{book.url}_static/art/card.png"
        assert head.meta["og:description"] == head.meta["description"]
        assert 20 <= len(head.meta["description"]) <= publishing.LONGEST
        assert head.meta["twitter:card"] == "summary_large_image"
        described[name] = head.meta["description"]
    chapters = [described[f"chapters/{name}"] for name in CHAPTERS]
    assert len(set(chapters)) == len(chapters), "no two chapters are described alike"
    assert (BUILT / "_static" / "art" / "card.png").exists()


def test_the_sitemap_names_every_page_of_the_book(book) -> None:
    urls = [each.text for each in ElementTree.parse(BUILT / "sitemap.xml").iter(f"{LOCATION}loc")]
    assert len(set(urls)) == len(urls)
    for url in urls:
        assert (BUILT / url.removeprefix(book.url)).exists(), url
    for name in CHAPTERS:
        assert f"{book.url}chapters/{name}.html" in urls
    assert links.published(BUILT) == book.url
    assert (BUILT / ".nojekyll").exists()


def test_a_lost_reader_finds_the_way_from_any_address(site: Site, visit: Visit, book) -> None:
    page = visit.page
    page.goto(site.url("404.html"))
    addresses = page.eval_on_selector_all("a", "links => links.map(link => link.href)")
    assert addresses == [f"{book.url}book/preface.html"]
    assert page.locator("form").get_attribute("action") == f"{book.url}search.html"
    assert page.get_by_label("Words to look for").count() == 1
    assert not re.findall(r'(?:src|href)="(?!https://|data:)', (BUILT / "404.html").read_text(encoding="utf-8"))
    assert not visit.complaints


def test_every_page_has_its_version_and_date() -> None:
    for name in ("book/preface", "book/status", f"chapters/{CHAPTERS[0]}", "search"):
        text = (BUILT / f"{name}.html").read_text(encoding="utf-8")
        found = re.search(r'Version <a href="([^"]+)">([\d.]+)</a>, <time datetime="(\d{4}-\d\d-\d\d)">', text)
        assert found, name
        assert found[1].endswith("book/changelog.html")
        assert found[2] == publishing.version()
    assert (BUILT / "book" / "changelog.html").exists()


def test_the_buttons_lead_to_the_editions(book) -> None:
    repository = book.repository.removeprefix("https://github.com/")
    for name in CHAPTERS:
        text = (BUILT / "chapters" / f"{name}.html").read_text(encoding="utf-8")
        edition = (
            f"https://colab.research.google.com/github/{repository}/blob/{book.colab_branch}/chapters/{name}.ipynb"
        )
        assert edition in text
        assert f"/{book.colab_branch}/?urlpath" not in text, "Binder builds the main branch"


def test_the_status_page_has_a_row_for_each_chapter() -> None:
    text = (BUILT / "book" / "status.html").read_text(encoding="utf-8")
    for name in CHAPTERS:
        assert f"chapters/{name}.html" in text


def test_no_link_inside_the_book_is_broken(pages: dict, book) -> None:
    assert links.broken_inside(pages, BUILT, book.url) == []


def test_the_drawings_stand_alone() -> None:
    drawn = {path.name for path in (ROOT / "book" / "_static" / "art").glob("*.svg")}
    assert {path.name for path in (BUILT / "_static" / "diagrams").glob("*.svg")} == drawn
    for name in drawn:
        ElementTree.parse(BUILT / "_static" / "diagrams" / name)


@pytest.mark.parametrize("name", CHAPTERS)
def test_an_editions_links_lead_into_the_published_book(name: str, pages: dict, book) -> None:
    edition = colab.edition(book, f"chapters/{name}")
    text = "\n\n".join("".join(cell["source"]) for cell in edition["cells"] if cell["cell_type"] == "markdown")
    inside = [address for address in re.findall(r"\]\(([^()\s]+)\)", text) if address.startswith(book.url)]
    assert len(inside) > 5
    for address in inside:
        target, anchor = urldefrag(address.removeprefix(book.url))
        assert (BUILT / target).is_file(), address
        assert not anchor or anchor in pages[(BUILT / target).resolve()].anchors, address


def test_the_editions_count_as_the_book_does(book) -> None:
    """Figures, tables and equations have the numbers that the pages show."""
    shown = {}
    for name in CHAPTERS:
        text = (BUILT / "chapters" / f"{name}.html").read_text(encoding="utf-8")
        for anchor, number in re.findall(r'href="[^"#]*#([\w-]+)"><span class="std std-numref">([^<]+)</span>', text):
            shown[anchor] = number
        for anchor, number in re.findall(r'href="[^"#]*#(equation-[\w-]+)">(\([\d.]+\))</a>', text):
            shown[anchor] = number
    counted = {target.address.partition("#")[2]: target.number for target in book.targets.values()}
    assert len(shown) > 5 * len(CHAPTERS)
    assert {anchor: counted.get(anchor) for anchor in shown} == shown


def test_one_branch_is_named_in_one_place(book) -> None:
    assert book.colab_branch == CONFIG["sphinx"]["config"]["colab_branch"]
    badges = [
        json.loads(path.read_text(encoding="utf-8"))["cells"][0]["source"]
        for path in (ROOT / "chapters").glob("*.ipynb")
    ]
    assert all(f"/blob/{book.colab_branch}/chapters/" in "".join(badge) for badge in badges)
