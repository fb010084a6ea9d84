"""Print the requirements of one extra of the package, one a line: `python tools/extra.py book`."""

import sys
import tomllib
from pathlib import Path

project = tomllib.loads((Path(__file__).parent.parent / "pyproject.toml").read_text())["project"]
print(*project["optional-dependencies"][sys.argv[1]], sep="\n")
