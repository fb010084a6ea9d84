"""The built book and a real browser that can reach nothing else."""

import threading
from collections.abc import Iterator

import pytest
from built_book import BUILT, CHAPTER, PREFACE, ROOT, Site, Visit, load_script, settle, visiting
from playwright.sync_api import Browser, sync_playwright

# A second list of features replaces Playwright's own, so what matters here of that one is named again. With the first
# two on, Chromium starts one more process for every window: its address bar's suggestions, which no test opens.
FEATURES_OFF = [
    "WebUIOmniboxPopup",
    "WebUIOmniboxAimPopup",
    "HttpsUpgrades",
    "MediaRouter",
    "NetworkTimeServiceQuerying",
    "OptimizationHints",
    "PaintHolding",
]
# the last flag closes the network; Playwright's routing would do so too, and switch the cache off with it
FLAGS = [
    "--no-sandbox",
    "--disable-gpu",
    "--disable-background-networking",
    f"--disable-features={','.join(FEATURES_OFF)}",
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
    """A fresh window, its cache empty."""
    with visiting(site, browser) as it:
        yield it


@pytest.fixture(scope="session")
def held(site: Site, browser: Browser) -> dict[str, set[str]]:
    """What a reader's browser has after the first visit to a page, by page: the names of what was sent."""
    names = {}
    for name in (PREFACE, CHAPTER):
        with visiting(site, browser) as it:
            it.page.goto(site.url(name))
            settle(it.page)
            it.page.wait_for_load_state("networkidle")
            names[name] = {sent for sent, _ in site.sent}
    return names
