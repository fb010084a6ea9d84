"""The built book behind a server of its own, and what the tests see of a page in a browser."""

import contextlib
import gzip
import importlib.util
import mimetypes
import os
from dataclasses import dataclass, field
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from pathlib import Path
from types import ModuleType
from urllib.parse import unquote, urlsplit

from playwright.sync_api import BrowserContext, Page

ROOT = Path(__file__).resolve().parents[2]
BUILT = Path(os.environ.get("BUILT_BOOK", ROOT / "_build" / "html")).resolve()  # BUILT_BOOK=FOLDER tests a copy
COMPRESSED = {".html", ".js", ".css", ".svg", ".json", ".txt"}


def load_script(path: Path) -> ModuleType:
    """Returns: a script of the project as a module."""
    spec = importlib.util.spec_from_file_location(path.stem, path)
    module = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(module)
    return module


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
        body = path.read_bytes()
        self.send_response(200)
        if path.suffix in COMPRESSED:
            body = gzip.compress(body, 6)
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

    def weight(self) -> int:
        """Returns: bytes sent since the last call."""
        total = sum(size for _, size in self.sent)
        self.sent.clear()
        return total


@dataclass
class Visit:
    """A page in a browser's window, and what it complained about and asked for."""

    page: Page
    context: BrowserContext
    complaints: list[str] = field(default_factory=list)
    elsewhere: list[str] = field(default_factory=list)


def settle(page: Page) -> None:
    """Wait until the page has loaded, its formulas are set and its explorers are drawn."""
    page.wait_for_load_state("load")
    page.evaluate("async () => { if (window.MathJax?.startup?.promise) await MathJax.startup.promise }")
    page.wait_for_function(
        "() => [...document.querySelectorAll('figure.gptlite-explorer')].every(f => f.classList.contains('is-live'))"
    )
    page.wait_for_load_state("networkidle")
