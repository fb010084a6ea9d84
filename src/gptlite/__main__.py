"""`python -m gptlite` is the `gptlite` command."""

import sys

from gptlite.cli import main

sys.exit(main())
