"""Frames between processes: what is whole comes through, what is cut, too large or no frame at all is refused."""

import json
import socket
import threading

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from safetensors.torch import save

from gptlite.arithmetic import ModelShape, kv_bytes
from gptlite.cache.dense import DynamicCache, StaticCache
from gptlite.config import GPTConfig
from gptlite.generate import prefill
from gptlite.model import GPTlite
from gptlite.serving.transfer import (
    HEADER,
    INFO_LIMIT,
    MARK,
    Channel,
    FrameReader,
    encode,
    listen,
    pack_state,
    state_bytes,
    unpack_state,
    until_readable,
)


@pytest.fixture(scope="module")
def model():
    torch.manual_seed(0)
    # d_model is not n_heads * d_head, and n_kv_heads not n_heads
    return GPTlite(GPTConfig(30, 32, 2, d_model=24, n_heads=4, d_head=8, n_kv_heads=2)).eval()


@pytest.fixture
def pair():
    one, two = socket.socketpair()
    channels = Channel(one, 1000), Channel(two, 1000)
    yield channels
    for channel in channels:
        channel.close()


@settings(max_examples=60, deadline=None)
@given(
    st.lists(st.tuples(st.dictionaries(st.text(max_size=5), st.integers(-9, 9)), st.binary(max_size=50)), max_size=5),
    st.lists(st.integers(1, 40), min_size=1),
)
def test_frames_survive_any_cut_of_the_stream(frames, cuts):
    stream, reader, found = b"".join(encode(*frame) for frame in frames), FrameReader(50), []
    while stream:
        n = cuts[len(found) % len(cuts)]
        found += reader.feed(stream[:n])
        stream = stream[n:]
    assert [tuple(frame) for frame in found] == frames and not reader.buffer


@pytest.mark.parametrize(
    ("data", "said"),
    [
        (b"GET / HTTP/1.1\r\n\r\n", "a frame begins with b'GET '"),
        (HEADER.pack(MARK, 2, 2**60), "a frame of 2 and 1152921504606846976 bytes"),
        (HEADER.pack(MARK, INFO_LIMIT + 1, 0), f"a frame of {INFO_LIMIT + 1} and 0 bytes"),
        (HEADER.pack(MARK, 3, 0) + b"{{{", "is not JSON"),
        (HEADER.pack(MARK, 2, 0) + b"\xff\xff", "is not JSON"),
        (HEADER.pack(MARK, 2, 0) + b"[]", "it must be an object"),
        (HEADER.pack(MARK, 20_000, 0) + b"[" * 20_000, "is not JSON"),
    ],
)
def test_what_is_no_frame_is_refused_before_memory_is_taken(data, said):
    with pytest.raises(ValueError) as error:
        FrameReader(100).feed(data)
    assert said in str(error.value)


def test_a_short_frame_is_waited_for_and_its_end_is_noticed(pair):
    one, two = pair
    frame = encode({"id": 1}, b"keys")
    one.socket.sendall(frame[:-1])
    until_readable([two], 5)
    assert two.receive() == [] and two.open
    one.socket.sendall(frame[-1:])
    until_readable([two], 5)
    assert two.receive() == [({"id": 1}, b"keys")]
    one.socket.sendall(frame[:-1])
    one.close()
    until_readable([two], 5)
    assert two.receive() == [] and not two.open
    assert two.send({}) is False


def test_rubbish_closes_the_channel(pair):
    one, two = pair
    one.socket.sendall(b"x" * 100)
    until_readable([two], 5)
    with pytest.raises(ValueError, match="a frame begins with"):
        two.receive()
    assert not two.open


def test_a_large_frame_goes_through_a_socket_and_its_bytes_are_counted():
    door, body = listen(), bytes(range(256)) * 2**14
    sender = Channel.connect(door.getsockname()[1])
    receiver = Channel(door.accept()[0], len(body))
    thread = threading.Thread(target=sender.send, args=({"id": 7}, body))
    thread.start()
    frames = []
    while not frames:
        until_readable([receiver], 5)
        frames = receiver.receive()
    thread.join(5)
    assert frames == [({"id": 7}, body)]
    assert sender.sent_bytes == HEADER.size + len(json.dumps({"id": 7})) + len(body)
    for end in (sender, receiver, door):
        end.close()


# -- keys and values ----------------------------------------------------------------------------------------------


def state_of(model, n):
    cache = DynamicCache(model)
    prefill(model, torch.arange(n)[None] % 30, cache)
    return cache.export(0)


@pytest.mark.parametrize("n", [1, 7, 32])
def test_a_state_is_the_same_on_the_other_side_and_as_large_as_the_formula_says(model, n):
    state = state_of(model, n)
    body = pack_state(state)
    there = unpack_state(body, model, n)
    assert there.keys() == state.keys() and all(torch.equal(there[name], state[name]) for name in state)
    counted = sum(tensor.nbytes for tensor in there.values())
    # by the formula of the roofline chapter, and 8 bytes for each position
    assert counted == state_bytes(model, n) == kv_bytes(ModelShape.of(model.config), n, 4) + 8 * n
    assert counted < len(body) < counted + 120 * len(state)  # names and shapes
    StaticCache(model, 1, 32).load("there", there)


@pytest.mark.parametrize(
    ("change", "said"),
    [
        (lambda s: s.pop("k.1"), "k.1 is None"),
        (lambda s: s.update({"v.0": s["v.0"][:, :-1]}), "v.0 is ((2, 4, 8), torch.float32)"),
        (lambda s: s.update({"k.0": s["k.0"].double()}), "k.0 is ((2, 5, 8), torch.float64)"),
        (lambda s: s.update({"k.2": s["k.1"].clone()}), "k.2 is ((2, 5, 8), torch.float32), it must be None"),
        (lambda s: s.update({"k_pos": s["k_pos"].flip(0)}), "not those of a text from its beginning"),
        (lambda s: s.update({"k_pos": s["k_pos"] + 10**9}), "not those of a text from its beginning"),
    ],
)
def test_a_state_that_does_not_fit_is_refused(model, change, said):
    state = {name: tensor.clone() for name, tensor in state_of(model, 5).items()}
    change(state)
    with pytest.raises(ValueError) as error:
        unpack_state(pack_state(state), model, 5)
    assert said in str(error.value)


@pytest.mark.parametrize("body", [b"", b"x" * 40, b"\x00" * 100, save({"a": torch.ones(2)})[:-3]])
def test_a_body_that_is_no_safetensors_is_refused(model, body):
    with pytest.raises(ValueError, match="is not safetensors"):
        unpack_state(body, model, 5)
