"""Prefill and decode in two processes give what one process gives, and one of them may die."""

import os
import signal
import socket
import time

import pytest
import torch

from gptlite.cache.dense import DynamicCache
from gptlite.config import GPTConfig
from gptlite.generate import generate, prefill
from gptlite.model import GPTlite
from gptlite.sampling import SamplingParams
from gptlite.serving.disaggregation import ROLES, Answer, Disaggregated
from gptlite.serving.sequence import Request
from gptlite.serving.transfer import HEADER, MARK, Channel, Frame, encode, pack_state, until_readable

LONG = 300.0  # seconds that nothing takes but on a machine with far too much to do


@pytest.fixture(scope="module")
def model():
    torch.manual_seed(0)
    config = GPTConfig(40, 128, 2, d_model=24, n_heads=4, d_head=8, n_kv_heads=2)
    return GPTlite(config).double().eval()


@pytest.fixture(scope="module")
def processes(model):
    with Disaggregated(model, max_batch=3) as both:
        yield both


@pytest.fixture
def pair(processes):
    """Both processes alive, and no request left over from another test."""
    processes.poll()
    for role in ROLES:
        if not processes.alive(role):
            processes.restart(role)
    processes.answers.clear()
    return processes


def alone(model, request):
    n = len(request.tokens)
    return generate(model, torch.tensor([request.tokens]), request.n_new, request.params, seed=request.seed)[
        0, n:
    ].tolist()


def requests(n, n_new=12):
    generator = torch.Generator().manual_seed(n)
    for i in range(n):
        length = int(torch.randint(1, 40, (), generator=generator))
        tokens = torch.randint(0, 40, (length,), generator=generator).tolist()
        yield Request(tokens, 1 + (n_new + i) % 17, SamplingParams(0.0 if i % 3 == 0 else 0.9, top_k=20), seed=i)


def wait_for(condition, both, seconds=LONG):
    end = time.monotonic() + seconds
    while not condition():
        assert time.monotonic() < end, both.answers
        both.poll(0.2)


def test_two_processes_give_the_tokens_of_one_in_fp64(model, pair):
    asked = list(requests(10)) + [Request([3, 1], 1), Request([5] * 117, 12)]
    for request in asked:
        pair.submit(request)
    answers = pair.wait(LONG)
    pids = {process.pid for process in pair.processes.values()}
    assert len(pids) == 2 and os.getpid() not in pids
    for request, answer in zip(asked, answers, strict=True):
        assert (answer.error, answer.tokens) == ("", alone(model, request))
        assert answer.times == sorted(answer.times) and answer.where == ("decode" if request.n_new > 1 else "link")


def test_a_killed_decode_process_ends_its_requests_and_prefill_goes_on(model, pair):
    long = [Request([7, i], 120, seed=i) for i in range(2)]
    for request in long:
        pair.submit(request)
    wait_for(lambda: all(len(answer.tokens) > 2 for answer in pair.answers.values()), pair)
    os.kill(pair.processes["decode"].pid, signal.SIGKILL)
    answers = pair.wait(LONG)
    for i, answer in enumerate(answers):
        assert answer.error == f"the decode process ended (signal 9) while it held request {i}"
        assert answer.tokens == alone(model, long[i])[: len(answer.tokens)]
    assert pair.alive("prefill") and not pair.alive("decode")
    # prefill still reads prompts: an answer of one token needs nothing else, and a longer one says what is missing
    one, two = Request([1, 2, 3], 1), Request([1, 2, 3], 5)
    numbers = [pair.submit(one), pair.submit(two)]
    pair.wait(LONG)
    assert pair.answers[numbers[0]].tokens == alone(model, one) and not pair.answers[numbers[0]].error
    assert pair.answers[numbers[1]].error == "there is no decode process to take the sequence over"
    pair.restart("decode")
    number = pair.submit(two)
    pair.wait(LONG)
    assert (pair.answers[number].error, pair.answers[number].tokens) == ("", alone(model, two))


def test_a_killed_prefill_process_ends_its_requests_and_decode_goes_on(model, pair):
    begun = Request([9, 9, 9], 100)
    pair.submit(begun)
    wait_for(lambda: pair.answers[0].where == "decode", pair)
    os.kill(pair.processes["prefill"].pid, signal.SIGSTOP)  # so that it holds the next one for sure
    number = pair.submit(Request([1] * 50, 5))
    os.kill(pair.processes["prefill"].pid, signal.SIGKILL)
    answers = pair.wait(LONG)
    assert answers[number].error == f"the prefill process ended (signal 9) while it held request {number}"
    assert (answers[0].error, answers[0].tokens) == ("", alone(model, begun))
    with pytest.raises(RuntimeError, match="the prefill process has ended: restart it"):
        pair.submit(Request([1], 2))
    pair.restart("prefill")
    number = pair.submit(begun)
    pair.wait(LONG)
    assert pair.answers[number].tokens == alone(model, begun)


def test_both_killed_at_once_leave_no_request_without_an_end(pair):
    for i in range(6):
        pair.submit(Request([i] * 20, 80))
    for process in pair.processes.values():
        os.kill(process.pid, signal.SIGKILL)
    for role, process in pair.processes.items():
        process.wait()
        assert not pair.alive(role)  # though nobody has looked yet
    with pytest.raises(RuntimeError, match="the prefill process has ended: restart it"):
        pair.submit(Request([1], 2))
    answers = pair.wait(LONG)
    assert all(answer.done and "process ended (signal 9)" in answer.error for answer in answers)


class Said:
    """A channel that says what a test wants, poll by poll, and then ends."""

    def __init__(self, *frames):
        self.frames, self.open = list(frames), True

    def fileno(self):
        return -1

    def receive(self):
        if not self.frames:
            self.open = False
            return []
        return [Frame(info, b"") for info in self.frames.pop(0)]


class Ended:
    returncode = -9

    def wait(self, timeout=None):
        return -9


TOKEN, TOOK, OPEN, CLOSED = {"id": 0, "token": 1}, {"id": 0, "took": True}, {"link": "open"}, {"link": "closed"}


@pytest.mark.parametrize(
    ("by_prefill", "by_decode", "where"),
    [
        ([[TOKEN]], [[OPEN], [], [CLOSED], []], "link"),  # the end of the process is seen first, then that of the link
        ([[TOKEN], [], []], [[OPEN], [CLOSED], [], [], []], "link"),  # and the other way round
        ([[], [], [TOKEN]], [[OPEN, CLOSED], [], [], [], []], "link"),  # even before the token
        ([[TOKEN]], [[], [], [], []], "link"),  # it died before there was a link
        ([[], []], [[OPEN], [CLOSED], [], [], []], "prefill"),
        ([[TOKEN]], [[OPEN], [TOOK], [CLOSED], []], "decode"),  # the sequence has arrived: it goes on
    ],
)
def test_in_whatever_order_the_ends_are_noticed_no_request_waits_for_ever(by_prefill, by_decode, where):
    both = Disaggregated.__new__(Disaggregated)
    both.channels = {"prefill": Said(*by_prefill), "decode": Said(*by_decode)}
    both.processes, both._links = dict.fromkeys(ROLES, Ended()), 0
    both.answers = {0: Answer(Request([1], 5), 0.0)}
    for _ in range(4):
        both.poll()
    answer = both.answers[0]
    assert not both.channels["prefill"].open and both.channels["decode"].open
    assert (answer.where, answer.done) == (where, where != "decode")
    assert not answer.done or answer.error == "the prefill process ended (signal 9) while it held request 0"


def test_strangers_at_the_door_get_nothing_and_harm_nothing(model, pair):
    rubbish = [
        b"GET / HTTP/1.1\r\n\r\n",
        HEADER.pack(MARK, 10, 2**62),
        encode({"key": "guessed"}),
        encode({"key": "guessed"}) + encode({"id": 0, "first": 1}),
        b"WpB",
    ]
    strangers = []
    for data in [b""] * 20 + rubbish:  # more than it keeps, who say nothing
        strangers.append(socket.create_connection(("127.0.0.1", pair.kv_port), LONG))
        strangers[-1].sendall(data)
    request = Request([4, 5, 6], 20)
    pair.submit(request)
    assert pair.wait(LONG)[0].tokens == alone(model, request)
    for stranger in strangers[:5] + strangers[20:-1]:  # the last one has said too little to be judged
        stranger.settimeout(LONG)
        assert stranger.recv(10) == b""
    for stranger in strangers:
        stranger.close()


def test_a_frame_that_is_no_sequence_ends_its_request_alone(model, pair):
    link = Channel.connect(pair.kv_port)
    link.send({"key": pair._key})
    until_readable([link], LONG)
    assert link.receive() == [({"welcome": True}, b"")]
    request = Request([1, 2], 8)
    number = pair.submit(request)
    told = {"tokens": [1, 2], "n_new": 8, "seed": 0, "first": 1, "params": {}}
    cache = DynamicCache(model)
    prefill(model, torch.tensor([[1, 2]]), cache)
    good = pack_state(cache.export(0))
    odd = [
        {"first": "x"},
        {"first": 40},
        {"first": -1},
        {"n_new": 1},
        {"n_new": float("inf")},
        {"n_new": 1000},
        {"seed": 2**70},
        {"tokens": [1.5, 2]},
        {"tokens": [1, 2, 3]},
        {"params": {"temperature": -1}},
        {"params": {"warmth": 1}},
    ]
    bad = [(told, b""), (told, b"x" * 64), ({}, b""), *(({**told, **change}, good) for change in odd)]
    link.send(told, good)  # without a number: nobody hears of it
    for i, (info, body) in enumerate(bad, start=number + 1):
        pair.answers[i] = Answer(request, 0.0)  # as if it had been submitted
        link.send({"id": i, **info}, body)
    answers = pair.wait(LONG)
    assert (answers[0].error, answers[0].tokens) == ("", alone(model, request))
    for answer in answers[1:]:
        assert answer.error.startswith("what came from the prefill process is no sequence: ")
    link.close()


def test_a_request_that_can_never_fit_is_refused_with_both_sizes(pair):
    said = "a request of 120 tokens and 10 new ones needs 129 positions, the context window has 128"
    with pytest.raises(ValueError, match=said):
        pair.submit(Request([1] * 120, 10))
    with pytest.raises(ValueError, match="the processes have no tokenizer"):
        pair.submit(Request([1], 2, stop=("x",)))
    number = pair.submit(Request([99], 2))  # no such token
    assert "token 99 is outside the vocabulary of 40" in pair.wait(LONG)[number].error
    for odd in (Request([1.5], 2), Request([1], 2, seed=2**70)):
        number = pair.submit(odd)
        assert "no request: " in pair.wait(LONG)[number].error


@pytest.mark.parametrize("wrong", [{"max_batch": 0}, {"threads": 0}, {"max_batch": 4, "prefill_tokens": 3}])
def test_settings_that_make_no_sense_are_refused(model, wrong):
    with pytest.raises(ValueError, match="they must be at least"):
        Disaggregated(model, **wrong)


def test_nothing_is_left_running(model):
    with Disaggregated(model) as both:
        processes = list(both.processes.values())
        with pytest.raises(ValueError, match="cannot be started again"):
            both.restart("decode")
        with pytest.raises(TimeoutError, match="a request has not ended"):
            both.submit(Request([1], 100))
            both.wait(0.0)
    assert all(process.returncode is not None for process in processes)
    assert not both.alive("prefill") and not both.alive("decode")
    until_readable([], 0.0)
