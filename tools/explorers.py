"""Write the explorers of the pages that are no notebooks into book/explorers: `python tools/explorers.py`."""

from pathlib import Path

from gptlite.notebook import explorers

FOLDER = Path(__file__).parent.parent / "book" / "explorers"
PAGES = {"front": explorers.front_page}


def main() -> None:
    """The command line."""
    FOLDER.mkdir(exist_ok=True)
    for name, explorer in PAGES.items():
        path = FOLDER / f"{name}.html"
        path.write_text(explorer()._repr_html_() + "\n", encoding="utf-8")
        print(f"{path.relative_to(FOLDER.parent.parent)}: {path.stat().st_size / 1e3:.0f} kB")


if __name__ == "__main__":
    main()
