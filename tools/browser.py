"""The browser of the site tests: print its path, and see to it when there is none.

In this order: the one that CHROME names, a Chromium or Chrome that is there, Debian's package when this user may
install one, Playwright's own download.
"""

import os
import shutil
import subprocess
import sys
from pathlib import Path

NAMES = ("chromium", "chromium-browser", "google-chrome-stable", "google-chrome", "chrome")
MACOS = ("Google Chrome.app/Contents/MacOS/Google Chrome", "Chromium.app/Contents/MacOS/Chromium")
ADVICE = (
    "No Chromium or Chrome for the site tests. Install one, for example with `apt-get install chromium` or "
    "`python -m playwright install chromium`, or name one: CHROME=/path/to/chrome make test"
)


def installed() -> str | None:
    """Returns: the path of a browser that is there, or None."""
    if named := os.environ.get("CHROME"):
        return shutil.which(named)
    found = [shutil.which(name) for name in NAMES] + [f"/Applications/{name}" for name in MACOS]
    return next((path for path in found if path and Path(path).exists()), None)


def from_debian() -> str | None:
    """Install Debian's package, when this is root on a machine that has apt-get. Returns: its path, or None."""
    if not shutil.which("apt-get") or os.geteuid() != 0:
        return None
    for command in (["apt-get", "update"], ["apt-get", "install", "-y", "--no-install-recommends", "chromium"]):
        subprocess.run(command, stdout=sys.stderr, env={**os.environ, "DEBIAN_FRONTEND": "noninteractive"})
    return installed()


def from_playwright() -> str | None:
    """Playwright's Chromium, downloaded when it is not there. Returns: its path, or None when the download fails."""
    from playwright.sync_api import sync_playwright

    subprocess.run([sys.executable, "-m", "playwright", "install", "chromium"], stdout=sys.stderr)
    with sync_playwright() as playwright:
        path = playwright.chromium.executable_path
    return path if Path(path).exists() else None


def browser() -> str:
    """Returns: the path of a Chromium. Raises: RuntimeError that names the command when there is none."""
    if os.environ.get("CHROME") and not installed():
        raise RuntimeError(f"CHROME is {os.environ['CHROME']!r}, and there is no such program")
    path = installed() or from_debian() or from_playwright()
    if not path:
        raise RuntimeError(ADVICE)
    return path


if __name__ == "__main__":
    try:
        print(browser())
    except RuntimeError as error:
        sys.exit(str(error))
