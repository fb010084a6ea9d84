"""The progress line: what it says, how often, and how it estimates the time left."""

import io

import pytest

from gptlite import progress
from gptlite.progress import Progress, clock


class Terminal(io.StringIO):
    def isatty(self):
        return True


@pytest.fixture
def now(monkeypatch):
    """A clock that the test moves."""
    time = [100.0]
    monkeypatch.setattr(progress.time, "monotonic", lambda: time[0])
    return time


@pytest.mark.parametrize(
    ("seconds", "text"),
    [
        (0, "0:00"),
        (5.4, "0:05"),
        (59.6, "1:00"),
        (61, "1:01"),
        (3599, "59:59"),
        (3600, "1:00:00"),
        (36_061, "10:01:01"),
    ],
)
def test_the_clock(seconds, text):
    assert clock(seconds) == text


def test_a_log_gets_a_line_now_and_then(now):
    stream = io.StringIO()
    bar = Progress(100, stream=stream, every=30)
    for step in range(1, 101):
        now[0] += 1
        bar.update(step, f"loss {step}")
    bar.close()
    lines = stream.getvalue().splitlines()
    assert [line.split()[1] for line in lines] == ["1/100", "31/100", "61/100", "91/100", "100/100"]
    assert lines[0] == "····················" + " 1/100  loss 1  1:39 left"
    assert lines[-1] == "████████████████████" + " 100/100  loss 100  0:00 left"
    assert "\r" not in stream.getvalue()


def test_a_terminal_gets_one_line_that_is_written_over(now):
    stream = Terminal()
    bar = Progress(10, stream=stream)
    for step in range(1, 11):
        now[0] += 1
        bar.update(step)
    bar.close()
    assert stream.getvalue().count("\r") == 10
    assert stream.getvalue().count("\n") == 1
    assert stream.getvalue().endswith("\n")


def test_steps_of_an_earlier_run_do_not_count_for_the_time_left(now):
    stream = io.StringIO()
    bar = Progress(100, done=50, stream=stream)
    now[0] += 10
    bar.update(60)  # 10 steps in 10 s, 40 to go
    assert "60/100" in stream.getvalue()
    assert "0:40 left" in stream.getvalue()


def test_the_last_step_is_always_shown(now):
    stream = io.StringIO()
    bar = Progress(3, stream=stream, every=1e9)
    for step in (1, 2, 3):
        bar.update(step)
    assert [line.split()[1] for line in stream.getvalue().splitlines()] == ["1/3", "3/3"]
