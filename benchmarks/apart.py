"""A function in a process of its own, so that the threads of one engine do not slow another."""

import multiprocessing
import sys
from collections.abc import Callable
from multiprocessing.connection import Connection
from typing import Any


class Apart:
    """Makes a function in another process, and calls it there.

    Libraries with OpenMP in one process may share its runtime. It counts the threads that all of them keep, and once
    those are more than the cores, an idle thread sleeps at once instead of waiting for work for a while. Waking it can
    take longer than a product of a small model, and then each engine is slower for the mere presence of another.

    Args:
        name: for messages.
        make: called with the arguments in the other process; returns the function. Both it and the arguments are
            sent there, so it is one of a module's own.
    Raises: SystemExit when the other process ends before the function is made.
    """

    def __init__(self, name: str, make: Callable[..., Callable[..., Any]], *args: Any) -> None:
        context = multiprocessing.get_context("spawn")
        self.name = name
        self.connection, other = context.Pipe()
        self.process = context.Process(target=_serve, args=(other, make, args))
        self.process.start()
        other.close()
        self._answer()

    def __call__(self, *args: Any) -> Any:
        """What the function returns for these arguments. Raises: SystemExit when its process ends instead."""
        self.connection.send(args)
        return self._answer()

    def _answer(self) -> Any:
        try:
            return self.connection.recv()
        except EOFError:
            self.process.join()
            raise SystemExit(f"{self.name} ended with status {self.process.exitcode}, see above") from None

    def close(self) -> None:
        """Ends the process."""
        self.connection.close()
        self.process.join()


def _serve(connection: Connection, make: Callable[..., Callable[..., Any]], args: tuple[Any, ...]) -> None:
    """What the other process does until its caller closes the connection."""
    function = make(*args)
    connection.send(None)
    while True:
        try:
            args = connection.recv()
        except (EOFError, KeyboardInterrupt):
            sys.exit()
        connection.send(function(*args))
