"""Take the README's picture of a page from the built book: `python tools/page_picture.py`."""

from pathlib import Path

from browser import browser
from playwright.sync_api import sync_playwright

ROOT = Path(__file__).resolve().parent.parent
PAGE = ROOT / "_build" / "html" / "chapters" / "01_gptlite.html"
PICTURE = ROOT / "book" / "_static" / "art" / "page.png"


def main() -> None:
    """The command line."""
    with sync_playwright() as playwright:
        chromium = playwright.chromium.launch(executable_path=browser(), args=["--no-sandbox", "--disable-gpu"])
        page = chromium.new_page(viewport={"width": 1280, "height": 860}, color_scheme="light")
        page.goto(PAGE.as_uri(), wait_until="networkidle")
        page.screenshot(path=PICTURE)
        chromium.close()
    print(f"{PICTURE.relative_to(ROOT)}: {PICTURE.stat().st_size / 1e3:.0f} kB")


if __name__ == "__main__":
    main()
