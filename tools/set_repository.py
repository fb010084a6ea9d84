"""Set the repository's address everywhere it stands: `python tools/set_repository.py OWNER/NAME`.

The one in _config.yml is replaced there, in the badges of the README and the chapters, in the package's metadata and in
what Colab installs.
"""

import argparse
import re
from pathlib import Path

SUFFIXES = {".cff", ".ipynb", ".md", ".py", ".toml", ".yml"}
LEFT_OUT = {".git", ".venv", "_build", "node_modules"}
ADDRESS = re.compile(r"^  url: https://github\.com/([\w.-]+/[\w.-]+)$", re.MULTILINE)


def set_repository(root: Path, new: str) -> list[Path]:
    """Replace the address in every file below root.

    Returns: the files that changed.
    Raises: ValueError when the new address is not of the form OWNER/NAME.
    """
    if not re.fullmatch(r"[A-Za-z0-9](?:[A-Za-z0-9-]*[A-Za-z0-9])?/[\w.-]+", new):
        raise ValueError(f"repository is {new!r}, it must be OWNER/NAME, as in ada/work-per-byte")
    old = ADDRESS.search((root / "_config.yml").read_text(encoding="utf-8"))[1]
    changed = []
    for path in sorted(root.rglob("*")):
        inside = path.relative_to(root).parts
        if path.suffix not in SUFFIXES or not path.is_file() or any(part in LEFT_OUT for part in inside):
            continue
        text = path.read_text(encoding="utf-8")
        replaced = re.sub(rf"(?<![\w.-]){re.escape(old)}(?![\w-])", new, text)
        if replaced != text:
            path.write_text(replaced, encoding="utf-8")
            changed.append(path)
    return changed


def main() -> None:
    """The command line."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("repository", metavar="OWNER/NAME")
    root = Path(__file__).resolve().parent.parent
    try:
        changed = set_repository(root, parser.parse_args().repository)
    except ValueError as error:
        parser.error(str(error))
    for path in changed:
        print(path.relative_to(root))


if __name__ == "__main__":
    main()
