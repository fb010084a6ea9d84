"""`gptlite record` of the sweeps on number formats: bad settings end with one line and exit status 2."""

from collections.abc import Callable

import pytest

Refused = Callable[..., str]


@pytest.mark.parametrize(
    ("words", "says"),
    [
        (["formats", "--set", "formats=fp9"], ["formats has 'fp9'", "nvfp4"]),
        (["formats", "--set", "tensor=noise"], ["tensor is 'noise'", "heavy-tailed"]),
        (["formats", "--set", "group=-1"], ["group is '-1'", "own"]),
        (["formats", "--set", "n_values=100"], ["n_values is 100", "256"]),
        (["formats", "--set", "repeats=0"], ["repeats is 0", "at least 1"]),
        (["format-losses", "--set", "n_chars=100"], ["n_chars is 100", "multiple of 256"]),
        (["format-losses", "--set", "formats=int5"], ["formats has 'int5'"]),
        (["format-losses", "--set", "model=nobody"], ["nobody"]),
        (["format-references", "--set", "n_random=many"], ["n_random", "whole number"]),
    ],
)
def test_bad_settings(refused: Refused, tmp_path, words: list[str], says: list[str]) -> None:
    line = refused("record", *words, "--out", tmp_path / "out.json")
    for part in says:
        assert part in line
