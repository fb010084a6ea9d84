"""Prefill and decode in two processes of their own, with the keys and values sent from one to the other.

The front starts both, hands each request to the prefill process, and collects the tokens. The prefill process reads
prompts, samples each first token, and sends the sequence on; the decode process goes on from there. Each has its own
engine and so its own batch, and neither waits for the other's steps {cite}`patel2024splitwise,zhong2024distserve`.
"""

from __future__ import annotations

import secrets
import subprocess
import sys
import time
from dataclasses import asdict, dataclass, field
from typing import Any

from safetensors.torch import save

from gptlite.model import GPTlite
from gptlite.serving import workers
from gptlite.serving.sequence import Request
from gptlite.serving.transfer import Channel, listen, until_readable
from gptlite.serving.workers import START_TIMEOUT, knows

ROLES = ("prefill", "decode")
HELLO_TIMEOUT = 30.0  # seconds that who connects may take to say who it is


@dataclass
class Answer:
    """What came back for a request so far.

    Args:
        tokens: generated. times: when each came to the front, seconds of `time.perf_counter`. submitted: the same.
        error: why it ended before its time; empty while all is well. done: whether nothing more comes.
        where: "prefill", "link" (between the two) or "decode": who holds it.
    """

    request: Request
    submitted: float
    tokens: list[int] = field(default_factory=list)
    times: list[float] = field(default_factory=list)
    error: str = ""
    done: bool = False
    where: str = "prefill"


class Disaggregated:
    """A prefill process and a decode process that serve one model; use it in a `with` block, which ends both.

    Args:
        model: its weights are copied to both.
        max_batch: sequences that decode at once. prefill_tokens: prompt tokens that one pass reads at most; None reads
            as many as are waiting. threads: of torch, in each process.
    Raises: RuntimeError when a process does not start.
    """

    def __init__(self, model: GPTlite, max_batch: int = 8, prefill_tokens: int | None = None, threads: int = 1) -> None:
        if max_batch < 1 or threads < 1 or (prefill_tokens is not None and prefill_tokens < max_batch):
            raise ValueError(
                f"max_batch is {max_batch}, threads {threads} and prefill_tokens {prefill_tokens}: they must be at"
                " least 1, 1 and max_batch"
            )
        weight = model.token_embedding.weight
        self.model = model
        self.settings = {
            "config": asdict(model.config),
            "dtype": str(weight.dtype).removeprefix("torch."),
            "max_batch": max_batch,
            "prefill_tokens": prefill_tokens,
            "threads": threads,
        }
        self.answers: dict[int, Answer] = {}
        self.channels: dict[str, Channel] = {}
        self.processes: dict[str, subprocess.Popen[bytes]] = {}
        self.kv_port = 0
        self._links = 0  # ways from the prefill process to this decode process that it has not seen the end of
        self._key = secrets.token_hex(16)
        self._listener = listen()
        try:
            self._start(*ROLES)
        except BaseException:
            self.close()
            raise

    # -- processes ------------------------------------------------------------------------------------------------

    def _start(self, *roles: str) -> None:
        """Starts processes, gives them the weights, and makes prefill know where decode listens."""
        port = self._listener.getsockname()[1]
        for role in roles:
            command = [sys.executable, "-m", workers.__name__, role, str(port)]
            process = subprocess.Popen(command, stdin=subprocess.PIPE, stderr=subprocess.DEVNULL)
            assert process.stdin is not None
            process.stdin.write(self._key.encode() + b"\n")  # a pipe, which no other user can read
            process.stdin.flush()
            self.processes[role] = process
        deadline = time.monotonic() + START_TIMEOUT
        missing = set(roles)
        while missing:
            for role in missing:
                if self.processes[role].poll() is not None or time.monotonic() > deadline:
                    raise RuntimeError(f"the {role} process did not start (exit {self.processes[role].returncode})")
            self._listener.settimeout(0.5)
            try:
                channel = Channel(self._listener.accept()[0])
            except TimeoutError:
                continue
            until_readable([channel], HELLO_TIMEOUT)
            hello = channel.receive()
            name = str(hello[0].info.get("role")) if hello and knows(hello[0], self._key) else ""
            if name not in missing:
                channel.close()  # a stranger
                continue
            missing.discard(name)
            self.channels[name] = channel
            if name == "decode":
                self.kv_port = int(hello[0].info["port"])
        weights = save({name: tensor.contiguous().cpu() for name, tensor in self.model.state_dict().items()})
        for role in roles:
            self.channels[role].send(self.settings, weights)
        self.channels["prefill"].send({"connect": self.kv_port})

    def restart(self, role: str) -> None:
        """Starts a process again that has ended. Raises: ValueError when there is no such role, or it still runs."""
        self.poll()  # what it said before its end, and the end itself, are booked first
        if role not in ROLES or self.alive(role):
            raise ValueError(f"{role!r} cannot be started again: it runs, or is none of {', '.join(ROLES)}")
        if role == "prefill":  # what the last one had sent arrives first, and is not taken for the next one's
            deadline = time.monotonic() + HELLO_TIMEOUT
            while self._links and self.alive("decode") and time.monotonic() < deadline:
                self.poll(0.1)
            self._fail("link", role)
        self._start(role)

    def alive(self, role: str) -> bool:
        """Whether the process of that role runs and listens."""
        return role in self.channels and self.channels[role].open and self.processes[role].poll() is None

    def close(self) -> None:
        """Ends both processes."""
        for channel in self.channels.values():
            channel.close()  # which they take as their end
        for process in self.processes.values():
            if process.stdin:
                process.stdin.close()
            try:
                process.wait(5)
            except subprocess.TimeoutExpired:
                process.kill()
                process.wait()
        self._listener.close()

    def __enter__(self) -> Disaggregated:
        return self

    def __exit__(self, *error: object) -> None:
        self.close()

    # -- requests -------------------------------------------------------------------------------------------------

    def submit(self, request: Request) -> int:
        """Hands a request to the prefill process.

        Returns: its number.
        Raises: ValueError when it can never fit or has stop strings, which need a tokenizer on the other side;
            RuntimeError when there is no prefill process.
        """
        needed = len(request.tokens) + request.n_new - 1
        if needed > self.model.context_length:
            raise ValueError(
                f"a request of {len(request.tokens)} tokens and {request.n_new} new ones needs {needed} positions, the"
                f" context window has {self.model.context_length}"
            )
        if request.stop:
            raise ValueError(f"stop is {request.stop!r}, the processes have no tokenizer: leave it out")
        number = len(self.answers)
        told = {"id": number, "tokens": request.prompt, "n_new": request.n_new, "seed": request.seed}
        if not self.alive("prefill") or not self.channels["prefill"].send({**told, "params": asdict(request.params)}):
            raise RuntimeError("the prefill process has ended: restart it, no prompt can be read")
        self.answers[number] = Answer(request, time.perf_counter())
        return number

    def poll(self, timeout: float = 0.0) -> list[int]:
        """Waits for news, for at most `timeout` seconds, and books it. Returns: the requests that have got some."""
        until_readable([channel for channel in self.channels.values() if channel.open], timeout)
        news: list[int] = []
        for role in ROLES:
            channel = self.channels[role]
            if not channel.open:
                continue
            try:
                frames = channel.receive()
            except ValueError:  # what it says makes no sense: it is as good as gone
                frames = []
            for frame in frames:
                news += self._book(frame.info)
            if not channel.open:
                news += self._bury(role)
        return news

    def _book(self, info: dict[str, Any]) -> list[int]:
        if "link" in info:  # once closed, decode has read all that the prefill process had sent
            self._links += 1 if info["link"] == "open" else -1
            return [] if self._links or self.channels["prefill"].open else self._fail("link", "prefill")
        answer = self.answers.get(info["id"])
        if answer is None or answer.done:
            return []
        if "error" in info:
            answer.error, answer.done = info["error"], True
        if "took" in info:
            answer.where = "decode"
        if "token" in info:
            answer.tokens.append(info["token"])
            answer.times.append(time.perf_counter())
            answer.where = "link" if answer.where == "prefill" else answer.where
            answer.done = len(answer.tokens) == answer.request.n_new
            if answer.where == "link" and not answer.done and not self.channels["decode"].open:
                # a socket may take what nobody will read, so only the front can tell
                answer.error, answer.done = "there is no decode process to take the sequence over", True
        return [info["id"]]

    def _bury(self, role: str) -> list[int]:
        """Books the end of a process: its requests end with an error, the other's go on."""
        try:
            self.processes[role].wait(5)
        except subprocess.TimeoutExpired:
            self.processes[role].kill()
            self.processes[role].wait()
        if role == "prefill":
            # what was on its way may have arrived: decode says so, and when no more can come
            on_the_way = self._links and self.channels["decode"].open
            return self._fail("prefill", role) + ([] if on_the_way else self._fail("link", role))
        self._links = 0
        return self._fail("link", role) + self._fail("decode", role)

    def _fail(self, where: str, role: str) -> list[int]:
        code = self.processes[role].returncode
        ended = f"signal {-code}" if code is not None and code < 0 else f"exit {code}"
        failed = [number for number, answer in self.answers.items() if answer.where == where and not answer.done]
        for number in failed:
            self.answers[number].done = True
            self.answers[number].error = f"the {role} process ended ({ended}) while it held request {number}"
        return failed

    def wait(self, timeout: float = 60.0) -> list[Answer]:
        """Waits until every request has ended. Returns: all answers. Raises: TimeoutError."""
        deadline = time.monotonic() + timeout
        while not all(answer.done for answer in self.answers.values()):
            left = deadline - time.monotonic()
            if left <= 0:
                raise TimeoutError(f"after {timeout} s a request has not ended: {self.answers}")
            self.poll(min(left, 1.0))
        return list(self.answers.values())
