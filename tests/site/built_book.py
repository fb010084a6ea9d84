"""The built book behind a server of its own, and what the tests see of a page in a browser."""

import contextlib
import functools
import gzip
import importlib.util
import mimetypes
import os
from collections.abc import Iterator
from dataclasses import dataclass, field
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from pathlib import Path
from types import ModuleType
from urllib.parse import unquote, urlsplit

from playwright.sync_api import Browser, Page

ROOT = Path(__file__).resolve().parents[2]
BUILT = Path(os.environ.get("BUILT_BOOK", ROOT / "_build" / "html")).resolve()  # BUILT_BOOK=FOLDER tests a copy
PREFACE, CHAPTER = "book/preface.html", "chapters/01_gptlite.html"
COMPRESSED = {".html", ".js", ".css", ".svg", ".json", ".txt"}


def load_script(path: Path) -> ModuleType:
    """Returns: a script of the project as a module."""
    spec = importlib.util.spec_from_file_location(path.stem, path)
    module = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(module)
    return module


@functools.cache
def on_the_wire(path: Path) -> bytes:
    """Returns: a file as it is sent. It is compressed once: every page asks for the same index of words."""
    body = path.read_bytes()
    return gzip.compress(body, 6) if path.suffix in COMPRESSED else body


class Handler(BaseHTTPRequestHandler):
    """Serves the book as a static host does: compressed text, ten minutes in the browser's cache."""

    protocol_version = "HTTP/1.1"

    def do_GET(self) -> None:
        name = unquote(urlsplit(self.path).path)
        path = (BUILT / name.lstrip("/")).resolve()
        if not path.is_relative_to(BUILT) or not path.is_file():
            self.server.missing.append(name)
            self.send_error(404)
            return
        body = on_the_wire(path)
        self.send_response(200)
        if path.suffix in COMPRESSED:
            self.send_header("Content-Encoding", "gzip")
        self.send_header("Content-Type", mimetypes.guess_type(path.name)[0] or "application/octet-stream")
        self.send_header("Content-Length", str(len(body)))
        self.send_header("Cache-Control", "max-age=600")
        self.end_headers()
        with contextlib.suppress(BrokenPipeError):  # the browser went on to another page
            self.wfile.write(body)
            self.server.sent.append((name, len(body)))

    def log_message(self, *args: object) -> None:
        pass


class Site(ThreadingHTTPServer):
    """Knows what it sent: `sent` holds names and bytes on the wire, `missing` the names that it did not have."""

    def __init__(self) -> None:
        super().__init__(("127.0.0.1", 0), Handler)
        self.sent: list[tuple[str, int]] = []
        self.missing: list[str] = []

    def url(self, name: str) -> str:
        """Returns: the address of a page."""
        return f"http://127.0.0.1:{self.server_port}/{name}"


@dataclass
class Visit:
    """A page in a browser's window, and what it complained about and asked for."""

    page: Page
    complaints: list[str] = field(default_factory=list)
    elsewhere: list[str] = field(default_factory=list)


def settle(page: Page) -> None:
    """Wait until the page has loaded, its formulas are set, its explorers are drawn and its fonts are there."""
    page.wait_for_load_state("load")
    page.evaluate("async () => { if (window.MathJax?.startup?.promise) await MathJax.startup.promise }")
    page.wait_for_function(
        "() => [...document.querySelectorAll('figure.gptlite-explorer')].every(f => f.classList.contains('is-live'))"
    )
    page.evaluate("document.fonts.ready.then(() => null)")


@contextlib.contextmanager
def visiting(site: Site, browser: Browser) -> Iterator[Visit]:
    """A fresh window at a laptop's size, its cache empty, its mode light."""
    context = browser.new_context(viewport={"width": 1280, "height": 900}, color_scheme="light")
    page = context.new_page()
    page.set_default_timeout(15_000)
    it = Visit(page)

    def on_console(message) -> None:
        if message.type in ("error", "warning"):
            it.complaints.append(f"{message.type}: {message.text} {message.location}")

    def on_request(request) -> None:
        if not request.url.startswith((site.url(""), "data:", "blob:")):
            it.elsewhere.append(request.url)

    page.on("console", on_console)
    page.on("pageerror", lambda error: it.complaints.append(f"exception: {error}"))
    page.on("request", on_request)
    site.sent.clear()
    site.missing.clear()
    try:
        yield it
    finally:
        context.close()
