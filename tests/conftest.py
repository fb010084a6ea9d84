"""`--brief`: one case of each test and none that takes seconds, for the inner loop; `make test` runs them all."""

import pytest


def pytest_addoption(parser: pytest.Parser) -> None:
    parser.addoption("--brief", action="store_true", help="the first case of each test, and none that is marked slow")


def pytest_collection_modifyitems(config: pytest.Config, items: list[pytest.Item]) -> None:
    if not config.getoption("brief"):
        return
    seen: set[str] = set()
    kept, left_out = [], []
    for item in items:
        name = item.nodeid.partition("[")[0]
        is_first = name not in seen and item.get_closest_marker("slow") is None
        (kept if is_first else left_out).append(item)
        seen.add(name)
    config.hook.pytest_deselected(items=left_out)
    items[:] = kept
