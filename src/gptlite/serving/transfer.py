"""Frames over a socket, and keys and values as a frame: what two processes need to hand a sequence over.

A frame is a header (a mark and two lengths), a JSON object and a body of bytes. Nothing of it is trusted: every length
is checked before memory is taken for it, and a body is safetensors, which holds numbers and no code.
"""

from __future__ import annotations

import json
import select
import socket
import struct
from collections.abc import Sequence
from typing import Any, NamedTuple

import safetensors
import torch
from safetensors.torch import load, save
from torch import Tensor

from gptlite.model import GPTlite

MARK = b"WpB1"
HEADER = struct.Struct("!4sIQ")  # mark, bytes of the JSON, bytes of the body
INFO_LIMIT = 1_000_000  # bytes of JSON at most
SEND_TIMEOUT = 60.0  # seconds that the other side may take to read what is sent


class Frame(NamedTuple):
    """What one side says to the other."""

    info: dict[str, Any]
    body: bytes


def encode(info: dict[str, Any], body: bytes = b"") -> bytes:
    """A frame as bytes."""
    text = json.dumps(info).encode()
    return HEADER.pack(MARK, len(text), len(body)) + text + body


class FrameReader:
    """Cuts a stream of bytes into frames.

    Args:
        body_limit: bytes of a body at most.
    """

    def __init__(self, body_limit: int) -> None:
        self.body_limit = body_limit
        self.buffer = bytearray()

    def feed(self, data: bytes) -> list[Frame]:
        """Takes bytes in. Returns: the frames that are whole now. Raises: ValueError on what is no frame."""
        self.buffer += data
        frames = []
        while len(self.buffer) >= HEADER.size:
            mark, n_info, n_body = HEADER.unpack_from(self.buffer)
            if mark != MARK:
                raise ValueError(f"a frame begins with {mark!r}, it must be {MARK!r}")
            if n_info > INFO_LIMIT or n_body > self.body_limit:
                raise ValueError(
                    f"a frame of {n_info} and {n_body} bytes, {INFO_LIMIT} and {self.body_limit} are allowed"
                )
            end = HEADER.size + n_info + n_body
            if len(self.buffer) < end:
                break
            try:
                info = json.loads(self.buffer[HEADER.size : HEADER.size + n_info])
            except (ValueError, RecursionError):
                raise ValueError("a frame's first part is not JSON") from None
            if not isinstance(info, dict):
                raise ValueError(f"a frame says {info!r}, it must be an object")
            frames.append(Frame(info, bytes(self.buffer[HEADER.size + n_info : end])))
            del self.buffer[:end]
        return frames


class Channel:
    """Frames to and from one other process.

    Args:
        connection: a connected socket. body_limit: bytes of a body that it takes at most.
    """

    def __init__(self, connection: socket.socket, body_limit: int = 0) -> None:
        connection.settimeout(SEND_TIMEOUT)
        if connection.family in (socket.AF_INET, socket.AF_INET6):
            connection.setsockopt(socket.IPPROTO_TCP, socket.TCP_NODELAY, 1)  # a token should not wait for the next
        self.socket, self.reader = connection, FrameReader(body_limit)
        self.open = True
        self.sent_bytes = 0  # of all frames

    @classmethod
    def connect(cls, port: int, body_limit: int = 0, timeout: float = 10.0) -> Channel:
        """To a process on this machine that listens at the port. Raises: OSError when none does."""
        return cls(socket.create_connection(("127.0.0.1", port), timeout), body_limit)

    def fileno(self) -> int:
        """For `select`."""
        return self.socket.fileno()

    def send(self, info: dict[str, Any], body: bytes = b"") -> bool:
        """Sends a frame. Returns: whether the other side still takes any."""
        if self.open:
            try:
                data = encode(info, body)
                self.socket.sendall(data)
                self.sent_bytes += len(data)
            except OSError:
                self.close()
        return self.open

    def receive(self) -> list[Frame]:
        """The frames that are there, without waiting. Raises: ValueError on what is no frame; then it is closed."""
        frames: list[Frame] = []
        while self.open and select.select([self.socket], [], [], 0)[0]:
            try:
                data = self.socket.recv(1 << 20)
            except OSError:
                data = b""
            if not data:
                self.close()
                break
            try:
                frames += self.reader.feed(data)
            except ValueError:
                self.close()
                raise
        return frames

    def close(self) -> None:
        """Ends it, on both sides."""
        self.open = False
        self.socket.close()


def listen() -> socket.socket:
    """A socket on this machine alone, at a free port."""
    return socket.create_server(("127.0.0.1", 0))


def until_readable(channels: Sequence[Channel | socket.socket], timeout: float | None) -> None:
    """Waits until one of them has something to say, or for `timeout` seconds."""
    select.select([c for c in channels if c.fileno() >= 0], [], [], timeout)


# -- keys and values ----------------------------------------------------------------------------------------------


def pack_state(state: dict[str, Tensor]) -> bytes:
    """A sequence's exported state as safetensors; see `Cache.export` for its tensors."""
    return save({name: tensor.contiguous().cpu() for name, tensor in state.items()})


def unpack_state(body: bytes, model: GPTlite, n_tokens: int) -> dict[str, Tensor]:
    """A state that came from elsewhere, checked against the model that is to go on from it.

    Args:
        body: as `pack_state` made it. n_tokens: that the state must hold, at positions 0 to n_tokens - 1.
    Returns: the state, as `Cache.load` takes it.
    Raises: ValueError that says what does not fit.
    """
    try:
        state = load(body)
    except (safetensors.SafetensorError, ValueError, KeyError) as error:
        raise ValueError(f"a state of {len(body)} bytes is not safetensors: {error}") from None
    dtype = model.token_embedding.weight.dtype
    expected = {"k_pos": ((n_tokens,), torch.int64)}
    for layer, block in enumerate(model.blocks):
        G, Dk, Dv = block.mha.kv_shape
        expected[f"k.{layer}"] = ((G, n_tokens, Dk), dtype)  # type: ignore[assignment]
        expected[f"v.{layer}"] = ((G, n_tokens, Dv), dtype)  # type: ignore[assignment]
    found = {name: (tuple(tensor.shape), tensor.dtype) for name, tensor in state.items()}
    for name in {**expected, **found}:
        if found.get(name) != expected.get(name):
            raise ValueError(f"the state's {name} is {found.get(name)}, it must be {expected.get(name)}")
    if not torch.equal(state["k_pos"], torch.arange(n_tokens)):
        raise ValueError("the state's positions are not those of a text from its beginning")
    return state


def state_bytes(model: GPTlite, n_tokens: int) -> int:
    """Bytes of the tensors that one sequence hands over: its keys and values, and 8 for each token's position.

    On the wire come the names and shapes too, a few kB whatever the length.
    """
    width = model.token_embedding.weight.element_size()
    per_token = sum(G * (Dk + Dv) for G, Dk, Dv in (block.mha.kv_shape for block in model.blocks))
    return n_tokens * (per_token * width + 8)
