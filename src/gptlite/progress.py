"""A progress line on the terminal: bar, what is being measured, time left."""

import sys
import time
from typing import TextIO


class Progress:
    """Shows how far a long run is, on one line of a terminal, or now and then as a line of a log.

    Args:
        total: steps of the whole run.
        done: steps already done by an earlier run, which do not count for the time left.
        stream: where it writes; None means the standard error stream.
        every: seconds between two lines of a log.
    """

    def __init__(self, total: int, done: int = 0, stream: TextIO | None = None, every: float = 30.0) -> None:
        self.total, self.begun = total, done
        self.stream = stream or sys.stderr
        self.start = time.monotonic()
        self.live = self.stream.isatty()
        self.every = 0.1 if self.live else every
        self.shown = float("-inf")

    def update(self, done: int, note: str = "") -> None:
        """Tells that `done` steps are done; the note stands behind the bar."""
        now = time.monotonic()
        if now - self.shown < self.every and done < self.total:
            return
        self.shown = now
        share = done / self.total
        left = (now - self.start) / max(done - self.begun, 1) * (self.total - done)
        bar = "█" * int(20 * share) + "·" * (20 - int(20 * share))
        line = f"{bar} {done}/{self.total}  {note}  {clock(left)} left"
        self.stream.write(f"\r\x1b[K{line}" if self.live else f"{line}\n")
        self.stream.flush()

    def close(self) -> None:
        """Leaves the last line standing."""
        if self.live:
            self.stream.write("\n")


def clock(seconds: float) -> str:
    """Seconds as h:mm:ss or m:ss."""
    minutes, seconds = divmod(round(seconds), 60)
    hours, minutes = divmod(minutes, 60)
    return f"{hours}:{minutes:02}:{seconds:02}" if hours else f"{minutes}:{seconds:02}"
