"""Check the links of the built book: `python tools/links.py` those inside it, `--outside` also those to elsewhere.

Inside, a link's page must exist and its anchor too. Outside, a page must answer; what answers that robots are not
welcome, or that they ask too often, counts as there and is listed.
"""

import argparse
import html
import re
import sys
import time
import urllib.error
import urllib.request
from collections import defaultdict
from concurrent.futures import ThreadPoolExecutor
from html.parser import HTMLParser
from pathlib import Path
from urllib.parse import unquote, urldefrag

ROOT = Path(__file__).resolve().parent.parent
BUILT = ROOT / "_build" / "html"
UNWELCOME = {401, 403, 405, 406, 418, 429, 999}  # the page is there, and not for robots
AGENT = "Mozilla/5.0 (compatible; links of a textbook)"
NOT_ASKED = re.compile(r"https://github\.com/OWNER/|https://(?:mybinder\.org|colab\.research\.google\.com)/")


class Links(HTMLParser):
    """The links and the anchors of one page."""

    def __init__(self) -> None:
        super().__init__()
        self.links: set[str] = set()
        self.anchors: set[str] = set()

    def handle_starttag(self, tag: str, attrs: list[tuple[str, str | None]]) -> None:
        """Note an element's link and its name."""
        named = dict(attrs)
        self.anchors.update(value for key in ("id", "name") if (value := named.get(key)))
        link = named.get("href") if tag == "a" else named.get("src") if tag in ("img", "script") else None
        if link:
            self.links.add(html.unescape(link))


def read(built: Path) -> dict[Path, Links]:
    """Returns: the links and anchors of every page."""
    pages = {}
    for path in sorted(built.rglob("*.html")):
        if "_static" not in path.relative_to(built).parts:
            pages[path.resolve()] = Links()
            pages[path.resolve()].feed(path.read_text(encoding="utf-8"))
    return pages


def broken_inside(pages: dict[Path, Links], built: Path, url: str = "") -> list[str]:
    """Links within the book that lead nowhere.

    Args:
        pages: of `read`. built: the folder. url: the book's published address, links to which are links within it.
    Returns: a line each, PAGE -> LINK.
    """
    broken = []
    for path, page in pages.items():
        for link in sorted(page.links):
            inside = link.removeprefix(url) if url and link.startswith(url) else link
            if re.match(r"[a-z][a-z0-9+.-]*:|//", inside):
                continue
            name, anchor = urldefrag(inside)
            name = unquote(name.partition("?")[0])
            start = built if inside != link else path.parent
            target = (start / name).resolve() if name else path
            found = pages.get(target)
            if not target.exists() or (anchor and found and unquote(anchor) not in found.anchors):
                broken.append(f"{path.relative_to(built.resolve())} -> {link}")
    return broken


def outside(pages: dict[Path, Links], built: Path, url: str = "") -> dict[str, str]:
    """Returns: the addresses elsewhere that are to be asked, each with a page that names it."""
    found = {}
    for path, page in pages.items():
        for link in page.links:
            address = urldefrag(link)[0]
            if (
                re.match(r"https?://", address)
                and not (url and address.startswith(url))
                and not NOT_ASKED.match(address)
            ):
                found.setdefault(address, str(path.relative_to(built.resolve())))
    return found


def ask(address: str, tries: int = 3, timeout: float = 20, pause: float = 2) -> str:
    """Ask for a page.

    Returns: empty when it answers; `unwelcome ...` when it is there and not for robots; else what went wrong.
    """
    fault = ""
    for attempt in range(tries):
        for method in ("HEAD", "GET"):  # some hosts answer only the second
            request = urllib.request.Request(address, method=method, headers={"User-Agent": AGENT})
            try:
                with urllib.request.urlopen(request, timeout=timeout):
                    return ""
            except urllib.error.HTTPError as error:
                fault = f"status {error.code}"
                if error.code in UNWELCOME and method == "GET":
                    return f"unwelcome ({fault})"
            except (OSError, ValueError) as error:
                fault = str(getattr(error, "reason", error)) or type(error).__name__
        if fault in ("status 404", "status 410"):
            return fault
        if attempt + 1 < tries:
            time.sleep(pause * 2**attempt)
    return fault


def published(built: Path) -> str:
    """Returns: the address at which the book says that it is published."""
    return re.search(r"^Sitemap: (.*)sitemap\.xml$", (built / "robots.txt").read_text(encoding="utf-8"), re.M)[1]


def main() -> int:
    """The command line. Returns: 0 when no link is broken."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--outside", action="store_true", help="ask the pages elsewhere too")
    chosen = parser.parse_args()
    if not (BUILT / "index.html").exists():
        sys.exit("the book is not built: run `make book` first")
    pages, url = read(BUILT), published(BUILT)
    broken = broken_inside(pages, BUILT, url)
    print(*broken, sep="\n" if broken else "")
    print(f"{len(pages)} pages, {len(broken)} broken links inside")
    if chosen.outside:
        named = outside(pages, BUILT, url)
        with ThreadPoolExecutor(8) as pool:
            answers = dict(zip(named, pool.map(ask, named)))
        by_kind = defaultdict(list)
        for address, answer in answers.items():
            if answer:
                by_kind[answer.startswith("unwelcome")].append(f"{named[address]} -> {address}: {answer}")
        print(*by_kind[True], *by_kind[False], sep="\n")
        print(f"{len(named)} addresses elsewhere, {len(by_kind[False])} broken, {len(by_kind[True])} not for robots")
        broken += by_kind[False]
    return int(bool(broken))


if __name__ == "__main__":
    sys.exit(main())
