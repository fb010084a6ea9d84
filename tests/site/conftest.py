"""The built book and a real browser that can reach nothing else."""

import threading
from collections.abc import Iterator

import pytest
from built_book import BUILT, ROOT, Site, Visit, load_script
from playwright.sync_api import Browser, sync_playwright

# the last flag closes the network; Playwright's routing would do so too, and switch the cache off with it
FLAGS = [
    "--no-sandbox",
    "--disable-gpu",
    "--disable-background-networking",
    "--host-resolver-rules=MAP * ~NOTFOUND, EXCLUDE 127.0.0.1",
]


@pytest.fixture(scope="session")
def site() -> Iterator[Site]:
    if not (BUILT / "index.html").exists():
        pytest.fail("the book is not built: run `make book` first", pytrace=False)
    server = Site()
    thread = threading.Thread(target=server.serve_forever, daemon=True)
    thread.start()
    yield server
    server.shutdown()
    server.server_close()


@pytest.fixture(scope="session")
def browser() -> Iterator[Browser]:
    path = load_script(ROOT / "tools" / "browser.py").browser()
    with sync_playwright() as playwright:
        chromium = playwright.chromium.launch(executable_path=path, args=FLAGS)
        yield chromium
        chromium.close()


@pytest.fixture
def visit(site: Site, browser: Browser) -> Iterator[Visit]:
    """A fresh window at a laptop's size, its cache empty, its mode light."""
    context = browser.new_context(viewport={"width": 1280, "height": 900}, color_scheme="light")
    page = context.new_page()
    page.set_default_timeout(15_000)
    it = Visit(page, context)

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
    yield it
    context.close()
