"""The two processes of disaggregated serving: one reads prompts, the other goes on with what it sends.

`python -m gptlite.serving.workers ROLE PORT` is one of them; `gptlite.serving.disaggregation` starts both.
"""

from __future__ import annotations

import hmac
import socket
import sys
from collections.abc import Iterator
from operator import index
from typing import Any

import torch
from safetensors.torch import load
from torch import Tensor

from gptlite.cache.dense import StaticCache
from gptlite.config import GPTConfig
from gptlite.model import GPTlite
from gptlite.sampling import SamplingParams
from gptlite.serving.engine import Engine
from gptlite.serving.scheduler import Scheduler
from gptlite.serving.sequence import Request, Sequence
from gptlite.serving.transfer import Channel, Frame, listen, pack_state, state_bytes, unpack_state, until_readable

START_TIMEOUT = 300.0  # seconds that a process may take to import torch and to say who it is, on a busy machine too
LINK_TIMEOUT = 60.0  # seconds that the decode process may take to answer who knocks
WEIGHTS_LIMIT = 2**36  # bytes of weights that a process takes from the front that started it
STRANGERS_LIMIT = 16  # connections at the door that have not shown the key yet; the oldest of more are closed


def knows(frame: Frame, key: str) -> bool:
    """Whether a frame shows the key that only the processes of one front have."""
    return hmac.compare_digest(str(frame.info.get("key")), key)


class HandOver(Scheduler):
    """Keeps the state of each sequence that has got its first token, before its memory is given back."""

    handed: list[tuple[Sequence, dict[str, Tensor]]]

    def remove(self, sequence: Sequence) -> None:
        if sequence.reason == "length":
            self.handed.append((sequence, self.cache.export(sequence.key)))
        super().remove(sequence)


def _request(info: dict[str, Any], n_new: int) -> Request:
    seed = index(info["seed"])
    if not -(2**63) <= seed < 2**63:
        raise ValueError(f"seed is {seed}, it must fit 64 bits")
    return Request([index(token) for token in info["tokens"]], n_new, SamplingParams(**info["params"]), seed)


def serve_prefill(front: Channel, model: GPTlite, settings: dict[str, Any], key: str, frames: list[Frame]) -> None:
    """Reads prompts until the front is gone: a first token to the front, keys and values to the decode process.

    Args:
        frames: what the front has said already.
    """
    cache = StaticCache(model, settings["max_batch"], model.context_length)
    scheduler = HandOver(cache, settings["max_batch"], settings["prefill_tokens"])
    scheduler.handed = []
    engine = Engine(model, cache, scheduler=scheduler)
    link: Channel | None = None
    asked: dict[Sequence, dict[str, Any]] = {}
    while front.open:
        if not frames:
            until_readable([front], 0.0 if engine.busy else None)
        for frame in frames + front.receive():
            if "connect" in frame.info:
                link = _link(frame.info["connect"], key)
                continue
            try:
                asked[engine.add(_request(frame.info, 1))] = frame.info
            except (ValueError, KeyError, TypeError, OverflowError) as error:
                front.send({"id": frame.info.get("id"), "error": f"no request: {error}"})
        frames = []
        if engine.busy:
            engine.step()
        for sequence, state in scheduler.handed:
            info, token = asked.pop(sequence), sequence.tokens[-1]
            front.send({"id": info["id"], "token": token})
            if info["n_new"] > 1 and not (link and link.send({**info, "first": token}, pack_state(state))):
                front.send({"id": info["id"], "error": "there is no decode process to take the sequence over"})
        scheduler.handed.clear()


def serve_decode(front: Channel, model: GPTlite, settings: dict[str, Any], key: str, door: socket.socket) -> None:
    """Goes on with what the prefill process sends, until the front is gone. Strangers at the door are turned away."""
    engine = Engine(model, StaticCache(model, settings["max_batch"], model.context_length), settings["max_batch"])
    limit = state_bytes(model, model.context_length) + 2**20
    strangers: list[Channel] = []  # have not shown the key yet
    links: list[Channel] = []
    numbers: dict[Sequence, int] = {}
    while front.open:
        until_readable([front, door, *strangers, *links], 0.0 if engine.busy else None)
        front.receive()  # has nothing to say but its end
        for channel in _accept(door):
            strangers.append(channel)
            if len(strangers) > STRANGERS_LIMIT:
                strangers.pop(0).close()
        for channel in list(strangers):
            frames = _frames(channel)
            if frames and knows(frames[0], key):
                channel.reader.body_limit = limit  # nothing large is taken from anyone before this
                channel.send({"welcome": True})
                front.send({"link": "open"})
                links.append(channel)
            elif frames:
                channel.close()
            if frames or not channel.open:
                strangers.remove(channel)
        for channel in list(links):
            _take(_frames(channel), engine, numbers, front)
            if not channel.open:
                links.remove(channel)
                front.send({"link": "closed"})
        if engine.busy:
            for output in engine.step():
                for token in output.tokens:
                    front.send({"id": numbers[output.sequence], "token": token})


def _link(port: int, key: str) -> Channel | None:
    """The prefill process's way to the decode process; None when that one does not answer."""
    try:
        link = Channel.connect(port)
    except OSError:
        return None
    link.send({"key": key})
    until_readable([link], LINK_TIMEOUT)
    return link if link.receive() else None


def _accept(door: socket.socket) -> Iterator[Channel]:
    door.settimeout(0)
    try:
        yield Channel(door.accept()[0])
    except OSError:
        return


def _frames(channel: Channel) -> list[Frame]:
    try:
        return channel.receive()
    except ValueError:  # no frames: the channel has closed itself
        return []


def _take(frames: list[Frame], engine: Engine, numbers: dict[Sequence, int], front: Channel) -> None:
    """Begins a sequence from each frame of keys and values, or says why not."""
    for info, body in frames:
        try:  # all of it before the engine knows of the sequence: a bad frame leaves nothing behind
            number, first, n_new = int(info["id"]), int(info["first"]), int(info["n_new"])
            request = _request(info, n_new)
            state = unpack_state(body, engine.model, len(request.tokens))
            if n_new < 2 or not 0 <= first < engine.model.token_embedding.num_embeddings:
                raise ValueError(f"n_new is {n_new} and the first token {first}: one more is needed, and a known token")
            sequence = engine.add(request)
        except (ValueError, KeyError, TypeError, OverflowError) as error:
            front.send({"id": info.get("id"), "error": f"what came from the prefill process is no sequence: {error}"})
            continue
        sequence.append(first, engine.clock.now(), None)
        sequence.state, sequence.n_computed = state, len(request.tokens)
        numbers[sequence] = number
        front.send({"id": number, "took": True})


def main() -> None:
    """A worker process: connects to the front that started it, takes the weights, and serves."""
    role, port = sys.argv[1], int(sys.argv[2])
    key = sys.stdin.readline().strip()
    door = listen()
    front = Channel.connect(port, WEIGHTS_LIMIT)
    front.send({"role": role, "key": key, "port": door.getsockname()[1]})
    frames: list[Frame] = []
    while not frames and front.open:
        until_readable([front], None)
        frames = front.receive()
    if not frames:
        return
    settings, weights = frames[0]
    torch.set_num_threads(settings["threads"])
    model = GPTlite(GPTConfig(**settings["config"])).to(getattr(torch, settings["dtype"])).eval()
    model.load_state_dict(load(weights))
    if role == "decode":
        serve_decode(front, model, settings, key, door)
    else:
        serve_prefill(front, model, settings, key, frames[1:])


if __name__ == "__main__":
    main()
