"""What a chapter shows beside its prose: explorers (charts that need no kernel), labs (live widgets), helpers."""

from importlib.util import find_spec

_missing = [name for name in ("altair", "ipywidgets", "matplotlib") if find_spec(name) is None]
if _missing:
    raise ImportError(f'gptlite.notebook needs {", ".join(_missing)}: pip install "gptlite[lab]"')
