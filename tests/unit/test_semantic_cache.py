"""The caches of answers: keys, thresholds, scopes, age, size, threads, and the file on disk."""

import hashlib
import os
import random
import signal
import subprocess
import sys
import threading
import time
from pathlib import Path

import numpy as np
import pytest
import torch

from gptlite.config import preset
from gptlite.model import GPTlite
from gptlite.sampling import GREEDY, SamplingParams
from gptlite.semantic import store
from gptlite.semantic.cache import SemanticCache
from gptlite.semantic.entries import BoundedEntries
from gptlite.semantic.exact import ExactCache, fingerprint, request_key

DIM = 48


def fake_embed(texts):
    """A vector of unit length that depends on the text alone: two texts are as far apart as chance has it."""
    rows = []
    for text in texts:
        seed = int.from_bytes(hashlib.sha256(text.encode()).digest()[:8], "big")
        row = np.random.default_rng(seed).standard_normal(DIM).astype(np.float32)
        rows.append(row / np.linalg.norm(row))
    return np.stack(rows)


def on_circle(texts):
    """A text that is a number of degrees lies there on a circle, so that similarities are known cosines."""
    angles = np.radians([float(text) for text in texts])
    return np.stack([np.cos(angles), np.sin(angles)], axis=1).astype(np.float32)


class Clock:
    def __init__(self):
        self.now = 1000.0

    def __call__(self):
        return self.now


def counted(answers=None):
    calls = []

    def generate(prompt):
        calls.append(prompt)
        return (answers or {}).get(prompt, f"answer {len(calls)} to {prompt}")

    generate.calls = calls
    return generate


# -- exact --------------------------------------------------------------------------------------------------------


def test_the_same_request_hits_and_any_other_misses():
    cache, generate = ExactCache("model-1"), counted()
    first = cache.ask("To be", GREEDY, generate)
    assert cache.ask("To be", GREEDY, generate) == first and len(generate.calls) == 1
    for prompt, params, seed, scope in (
        ("to be", GREEDY, None, ""),
        ("To be ", GREEDY, None, ""),
        ("To be", SamplingParams(0.7), 1, ""),
        ("To be", SamplingParams(0.7), 2, ""),
        ("To be", SamplingParams(0.7, top_k=3), 1, ""),
        ("To be", SamplingParams(0.7, top_p=0.9), 1, ""),
        ("To be", GREEDY, None, "another user"),
    ):
        before = len(generate.calls)
        cache.ask(prompt, params, generate, seed, scope)
        assert len(generate.calls) == before + 1
        cache.ask(prompt, params, generate, seed, scope)
        assert len(generate.calls) == before + 1
    assert (cache.hits, cache.misses) == (8, 8) and len(cache) == 8
    for n_new in (20, 30):  # the length that is allowed is part of the request
        before = len(generate.calls)
        cache.ask("To be", GREEDY, generate, n_new=n_new)
        assert len(generate.calls) == before + 1


def test_a_greedy_answer_does_not_depend_on_the_seed():
    cache, generate = ExactCache("m"), counted()
    assert cache.ask("a", GREEDY, generate, seed=1) == cache.ask("a", GREEDY, generate, seed=2)


def test_a_drawn_answer_is_cached_only_by_choice():
    for chosen, n_calls in ((False, 3), (True, 1)):
        cache, generate = ExactCache("m", cache_sampled=chosen), counted()
        answers = {cache.ask("a", SamplingParams(1.0), generate) for _ in range(3)}
        assert len(generate.calls) == n_calls == len(answers)


def test_the_parts_of_a_key_stay_apart():
    keys = {
        request_key(prompt, model, GREEDY, scope=scope)
        for prompt, model, scope in (
            ("ab", "c", ""),
            ("a", "bc", ""),
            ('a","b', "c", ""),
            ("ab", "", "c"),
            ("", "abc", ""),
        )
    }
    assert len(keys) == 5
    assert request_key("a", "m", SamplingParams(0.5), 1) != request_key("a", "m", SamplingParams(0.5), None)


def test_a_fingerprint_changes_with_any_weight():
    model = GPTlite(preset("nano", vocab_size=20))
    before = fingerprint(model)
    assert fingerprint(model) == before and len(before) == 16
    with torch.no_grad():
        model.fc_out.bias[3] += 1e-6
    assert fingerprint(model) != before


# -- entries ------------------------------------------------------------------------------------------------------


def test_the_least_recently_used_leaves_and_a_look_is_no_use():
    entries = BoundedEntries(3)
    for key in "abc":
        entries.put(key, key.upper())
    assert entries.get("a") == "A" and entries.peek("b") == "B"
    assert entries.put("d", "D") == [("b", "B")]
    assert [key for key, *_ in entries.items()] == ["c", "a", "d"]


def test_age_counts_from_birth_and_a_replaced_entry_is_born_again():
    clock = Clock()
    entries = BoundedEntries(10, expires_after=60, clock=clock)
    entries.put("a", 1)
    clock.now += 30
    entries.put("b", 2)
    entries.put("a", 3)
    clock.now += 30  # the first birth of a is too old now, the second isn't
    assert entries.expire() == [] and entries.get("a") == 3
    clock.now += 29.9
    assert entries.get("b") == 2
    clock.now += 0.1
    assert entries.get("b") is None and dict(entries.expire()) == {"a": 3, "b": 2} and len(entries) == 0


def test_entries_that_were_born_elsewhere_expire_in_their_order():
    clock = Clock()
    entries = BoundedEntries(10, expires_after=60, clock=clock)
    for key, born in (("new", 990.0), ("old", 950.0), ("middle", 970.0)):
        entries.put(key, key, born)
    clock.now = 1015.0
    assert [key for key, _ in entries.expire()] == ["old"]
    clock.now = 1035.0
    assert [key for key, _ in entries.expire()] == ["middle"]


def test_births_of_what_left_otherwise_take_no_memory():
    entries = BoundedEntries(4, expires_after=1e9)
    for i in range(1000):
        entries.put(i % 7, i)
    assert len(entries) == 4 and len(entries._born) <= 2 * 4 + 16


# -- semantic: threshold, scope, age, size ------------------------------------------------------------------------


@pytest.mark.parametrize(("degrees", "hit"), [(0, True), (24, True), (26, False), (180, False)])
def test_a_hit_is_a_cosine_of_at_least_the_threshold(degrees, hit):
    cache = SemanticCache(on_circle, threshold=np.cos(np.radians(25)))
    cache.put("0", "zero")
    found = cache.lookup(str(degrees))
    assert (found.hit, found.answer) == (hit, "zero" if hit else None)
    assert found.similarity == pytest.approx(np.cos(np.radians(degrees)), abs=1e-6) and found.question == "0"


def test_ask_generates_on_a_miss_only_and_then_hits():
    cache, generate = SemanticCache(on_circle, threshold=0.99), counted()
    assert cache.ask("0", generate).similarity is None  # nothing is there yet
    far, near = cache.ask("90", generate), cache.ask("91", generate)
    assert (far.hit, far.answer, near.hit, near.answer) == (False, "answer 2 to 90", True, "answer 2 to 90")
    assert generate.calls == ["0", "90"] and (cache.hits, cache.misses, len(cache)) == (1, 2, 2)


def test_the_most_similar_one_is_served():
    cache = SemanticCache(on_circle, threshold=0.9)
    for degrees in (0, 10, 20, 30):
        cache.put(str(degrees), f"at {degrees}")
    assert [cache.lookup(str(d)).answer for d in (1, 9, 16, 29)] == ["at 0", "at 10", "at 20", "at 30"]


def test_an_answer_never_crosses_scopes():
    cache = SemanticCache(fake_embed, threshold=0.5)
    for user in range(20):
        for question in range(5):
            cache.put(f"question {question}", f"{question} of {user}", scope=f"user {user}")
    for user in range(20):
        for question in range(5):
            assert cache.lookup(f"question {question}", f"user {user}").answer == f"{question} of {user}"
    for scope in ("", "user", "user 20", "USER 1"):
        assert cache.lookup("question 1", scope).similarity is None
    assert cache.forget("question 1", "user 3") and not cache.forget("question 1", "user 3")
    assert cache.lookup("question 1", "user 4").hit and not cache.lookup("question 1", "user 3").hit


@pytest.mark.parametrize("index", ["flat", "ivf", "hnsw", "pq"])
def test_age_and_size_hold_with_every_index(index):
    clock = Clock()
    cache = SemanticCache(fake_embed, 0.99, index=index, max_entries=30, expires_after=60, clock=clock)
    for i in range(50):
        cache.put(f"q{i}", f"a{i}")
    assert len(cache) == 30
    assert [cache.lookup(f"q{i}").hit for i in range(50)] == [False] * 20 + [True] * 30
    cache.lookup("q20")  # used again: q21 is the next to leave
    clock.now += 30
    cache.put("late", "later")
    assert cache.lookup("q20").hit and not cache.lookup("q21").hit
    clock.now += 30
    assert not cache.lookup("q20").hit and cache.lookup("late").answer == "later" and len(cache) == 1
    assert cache.lookup("q49").question == "late"  # expired ones are no candidates either


def test_the_same_question_again_replaces_its_answer():
    cache = SemanticCache(fake_embed, 0.99)
    cache.put("a", "old")
    cache.put("a", "new")
    assert (len(cache), cache.lookup("a").answer) == (1, "new")


def test_a_check_is_asked_above_the_threshold_and_the_next_candidate_gets_a_chance():
    asked = []

    def check(question, cached):
        asked.append((question, cached))
        return "too round" if cached == "0" else None

    cache = SemanticCache(on_circle, threshold=0.9, check=check, candidates=2)
    for degrees in (0, 10, 90):
        cache.put(str(degrees), f"at {degrees}")
    assert cache.lookup("1").answer == "at 10"
    assert asked == [("1", "0"), ("1", "10")]
    found = cache.lookup("-20")
    assert (found.hit, found.objection, found.question) == (False, "too round", "0") and cache.refused == 1


@pytest.mark.slow
@pytest.mark.parametrize("index", ["flat", "hnsw"])
def test_50_threads_and_10_000_calls_leave_exactly_what_fits_and_nothing_torn(index):
    """Each answer repeats its question, so that a torn or swapped one shows; so does an entry whose index disagrees."""
    maximum, n_questions = 300, 900
    cache = SemanticCache(fake_embed, 0.999, index=index, max_entries=maximum)
    wrong, put, lock = [], set(), threading.Lock()

    def work(thread):
        random_ = random.Random(thread)
        for _ in range(200):
            question, scope = f"question {random_.randrange(n_questions)}", f"user {random_.randrange(3)}"
            found = cache.ask(question, lambda text, scope=scope: f"{scope}: {text}" * 20, scope)
            if found.answer != f"{scope}: {question}" * 20:
                wrong.append(found)
            with lock:
                put.add((scope, question))

    threads = [threading.Thread(target=work, args=(i,)) for i in range(50)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    assert not wrong and cache.hits + cache.misses == 10_000
    assert len(put) > maximum
    assert len(cache) == min(len(put), maximum) == sum(len(one) for one in cache._indexes.values()) == len(cache._ids)
    for entry in cache.entries():
        assert entry.answer == f"{entry.scope}: {entry.question}" * 20
        assert np.array_equal(entry.vector, fake_embed([entry.question])[0])
        assert cache.lookup(entry.question, entry.scope).answer == entry.answer


def test_fewer_than_the_maximum_all_stay_with_50_threads():
    cache = SemanticCache(fake_embed, 0.999, max_entries=5000)
    threads = [
        threading.Thread(target=lambda i=i: [cache.put(f"q{(i * 37 + j) % 450}", "a") for j in range(100)])
        for i in range(50)
    ]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    assert len(cache) == 450


# -- on disk ------------------------------------------------------------------------------------------------------


def filled(n=40, **options):
    cache = SemanticCache(fake_embed, 0.99, **options)
    for i in range(n):
        cache.put(f"q{i}", f"a{i} ünïcode", scope=f"user {i % 3}")
    return cache


@pytest.mark.parametrize("index", ["flat", "ivf", "hnsw", "pq"])
def test_a_saved_cache_comes_back_in_another_index(tmp_path, index):
    filled().save(tmp_path / "cache.safetensors")
    cache = SemanticCache(fake_embed, 0.99, index=index)
    assert cache.load(tmp_path / "cache.safetensors") == 40
    for i in range(40):
        assert cache.lookup(f"q{i}", f"user {i % 3}").answer == f"a{i} ünïcode"
        assert not cache.lookup(f"q{i}", f"user {(i + 1) % 3}").hit


def test_age_and_order_of_use_survive_a_restart(tmp_path):
    clock = Clock()
    cache = filled(n=10, expires_after=60, clock=clock)
    clock.now += 30
    cache.put("young", "y")
    cache.lookup("q0", "user 0")  # the oldest, used last
    cache.save(tmp_path / "c")
    again = SemanticCache(fake_embed, 0.99, max_entries=3, expires_after=60, clock=clock)
    assert again.load(tmp_path / "c") == 3
    assert [entry.question for entry in again.entries()] == ["q9", "young", "q0"]
    clock.now += 30
    assert [entry.question for entry in again.entries()] == ["young"]
    late = SemanticCache(fake_embed, 0.99, expires_after=60, clock=clock)
    assert late.load(tmp_path / "c") == 1
    assert SemanticCache(fake_embed, 0.99).load(tmp_path / "c") == 11  # for ever: nothing is too old


def test_what_is_too_old_in_a_file_drives_out_nothing_that_lives(tmp_path):
    clock = Clock()
    filled(n=5, clock=clock).save(tmp_path / "c")
    clock.now += 100
    cache = SemanticCache(fake_embed, 0.99, max_entries=3, expires_after=60, clock=clock)
    for i in range(3):
        cache.put(f"live {i}", "a")
    assert cache.load(tmp_path / "c") == 0
    assert [entry.question for entry in cache.entries()] == ["live 0", "live 1", "live 2"]


def test_a_clock_in_whole_seconds_is_stored_as_well(tmp_path):
    filled(n=2, clock=lambda: 5).save(tmp_path / "c")
    assert SemanticCache(fake_embed).load(tmp_path / "c") == 2


def test_an_empty_cache_is_saved_and_loaded(tmp_path):
    SemanticCache(fake_embed).save(tmp_path / "c")
    assert SemanticCache(fake_embed).load(tmp_path / "c") == 0


# a disk that takes its time, so that many of the kills fall into a write
WRITERS = """
import os, sys, time
sys.path.insert(0, sys.argv[2])
from test_semantic_cache import filled
small, large = filled(5), filled(1000)
sync = os.fsync
os.fsync = lambda file: (time.sleep(0.01), sync(file))
for line in sys.stdin:
    child = os.fork()
    if not child:
        print(os.getpid(), flush=True)
        while True:
            small.save(sys.argv[1])
            large.save(sys.argv[1])
    os.waitpid(child, 0)
    print("gone", flush=True)
"""


@pytest.mark.slow
def test_a_writer_that_is_killed_at_any_moment_leaves_a_store_that_opens(tmp_path):
    """A process makes the writers, since each would take seconds to import what it needs."""
    path, random_ = tmp_path / "store.safetensors", random.Random(0)
    filled(5).save(path)
    sizes, n_parts = [], 0
    command = [sys.executable, "-c", WRITERS, str(path), str(Path(__file__).parent)]
    with subprocess.Popen(command, stdin=subprocess.PIPE, stdout=subprocess.PIPE, text=True) as writers:
        for _ in range(30):
            writers.stdin.write("next\n")
            writers.stdin.flush()
            writer = int(writers.stdout.readline())
            time.sleep(random_.uniform(0, 0.04))
            os.kill(writer, signal.SIGKILL)
            assert writers.stdout.readline() == "gone\n"
            n_parts += len(list(tmp_path.iterdir())) == 2
            vectors, rows = store.read(path)
            sizes.append(len(rows))
            assert len(rows) in (5, 1000) and rows[0]["question"] == "q0" and len(vectors) == len(rows)
        writers.stdin.close()
    assert n_parts  # some died within a write, and left a part of a file
    cache = SemanticCache(fake_embed)
    assert cache.load(path) == sizes[-1]
    cache.save(path)  # what a killed writer left beside it is in nobody's way
    assert [file.name for file in tmp_path.iterdir()] == [path.name]


class Died(BaseException):
    """Ends a write as a kill would: nothing handles it."""


@pytest.mark.parametrize("step", ["open", "write", "flush", "fsync", "replace"])
def test_a_write_that_dies_at_any_step_leaves_the_old_store(tmp_path, monkeypatch, step):
    path = tmp_path / "store"
    filled(7).save(path)

    def dies(*args, **options):
        raise Died

    real = open

    class Dying:
        def __init__(self, file):
            self.file = file

        def __enter__(self):
            return self

        def __exit__(self, *error):
            self.file.close()

        def __getattr__(self, name):
            if name != step:
                return getattr(self.file, name)
            self.file.write(b"half of it")
            return dies

    if step in ("write", "flush"):
        monkeypatch.setattr("builtins.open", lambda *args, **options: Dying(real(*args, **options)))
    elif step == "replace":
        monkeypatch.setattr(Path, "replace", dies)
    else:
        monkeypatch.setattr({"open": "builtins.open", "fsync": "os.fsync"}[step], dies)
    with pytest.raises(Died):
        filled(20).save(path)
    monkeypatch.undo()
    cache = SemanticCache(fake_embed, 0.99)
    assert cache.load(path) == 7 and cache.lookup("q3", "user 0").answer == "a3 ünïcode"
    filled(20).save(path)
    assert SemanticCache(fake_embed).load(path) == 20


def test_saving_while_others_write_gives_a_whole_store(tmp_path):
    cache, stop = SemanticCache(fake_embed, 0.99, max_entries=100), threading.Event()

    def write(thread):
        i = 0
        while not stop.is_set():
            cache.put(f"q{thread}-{i}", f"a{thread}-{i}")
            i += 1

    threads = [threading.Thread(target=write, args=(i,)) for i in range(4)]
    for thread in threads:
        thread.start()
    try:
        for _ in range(20):
            cache.save(tmp_path / "c")
            _, rows = store.read(tmp_path / "c")
            assert all(row["answer"] == "a" + row["question"][1:] for row in rows) and len(rows) <= 100
    finally:
        stop.set()
        for thread in threads:
            thread.join()
