"""Draw the picture that social networks show beside a link to the book: `python tools/card.py`."""

from pathlib import Path

from browser import browser
from playwright.sync_api import sync_playwright

ROOT = Path(__file__).resolve().parent.parent
PICTURE = ROOT / "book" / "_static" / "art" / "card.png"
WIDTH, HEIGHT = 1200, 630  # pixels
BARS = ("#0064a0", "#00664a", "#a34700", "#8a3d6d")  # the accents of the first parts, as in book.css
LOGO = ROOT / "book" / "_static" / "logo.svg"
PAGE = """<!DOCTYPE html>
<html lang="en"><head><meta charset="utf-8"><style>
  body {{ margin: 0; width: {width}px; height: {height}px; background: #ffffff; position: relative; }}
  .logo {{ position: absolute; left: 76px; top: 84px; width: 960px; }}
  .bars {{ position: absolute; left: 0; bottom: 0; }}
</style></head><body>
  <div class="logo">{logo}</div>
  <svg class="bars" width="{width}" height="190" aria-hidden="true">{bars}</svg>
</body></html>
"""


def page() -> str:
    """Returns: the page that the picture is taken of: columns that rise, in the accents of the parts."""
    heights = [190 * 1.4 ** (i - 11) for i in range(12)]
    bars = "".join(
        f'<rect x="{90 + 86 * i}" y="{190 - height:.1f}" width="74" height="{height:.1f}" fill="{BARS[i * 4 // 12]}"/>'
        for i, height in enumerate(heights)
    )
    return PAGE.format(width=WIDTH, height=HEIGHT, bars=bars, logo=LOGO.read_text(encoding="utf-8"))


def main() -> None:
    """The command line."""
    with sync_playwright() as playwright:
        chromium = playwright.chromium.launch(executable_path=browser(), args=["--no-sandbox", "--disable-gpu"])
        shot = chromium.new_page(viewport={"width": WIDTH, "height": HEIGHT}, color_scheme="light")
        shot.set_content(page())
        shot.screenshot(path=PICTURE)
        chromium.close()
    print(f"{PICTURE.relative_to(ROOT)}: {PICTURE.stat().st_size / 1e3:.0f} kB")


if __name__ == "__main__":
    main()
