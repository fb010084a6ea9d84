"""The caches of answers refuse what they cannot work with, in one clear line, and stay as they were."""

import json
import os

import numpy as np
import pytest
import torch
from safetensors.numpy import save_file

from gptlite.notebook.explorers_semantic import recorded_pairs
from gptlite.record import Recording, run_sweep
from gptlite.semantic import embed, index, store
from gptlite.semantic.cache import SemanticCache
from gptlite.semantic.embed import MiniLM, mean_pool
from gptlite.semantic.entries import BoundedEntries
from gptlite.semantic.evaluate import auc, load_pairs
from gptlite.semantic.index import VectorIndex


def unit(texts):
    return np.tile(np.eye(4, dtype=np.float32)[0], (len(texts), 1))


@pytest.mark.parametrize(
    ("make", "says"),
    [
        (lambda: SemanticCache(unit, threshold=0), "threshold is 0, it must be in (0, 1]"),
        (lambda: SemanticCache(unit, threshold=1.01), "threshold is 1.01, it must be in (0, 1]"),
        (lambda: SemanticCache(unit, threshold=float("nan")), "threshold is nan, it must be in (0, 1]"),
        (lambda: SemanticCache(unit, index="lsh"), "index is 'lsh', it must be one of flat, ivf, hnsw, pq"),
        (lambda: SemanticCache(unit, candidates=0), "candidates is 0, it must be a whole number of at least 1"),
        (lambda: SemanticCache(unit, max_entries=0), "max_entries is 0, it must be a whole number of at least 1"),
        (lambda: BoundedEntries(True), "max_entries is True, it must be a whole number of at least 1"),
        (lambda: BoundedEntries(2.5), "max_entries is 2.5, it must be a whole number of at least 1"),
        (lambda: BoundedEntries(5, 0), "expires_after is 0, it must be None or a positive number of seconds"),
        (lambda: VectorIndex("tree", 4), "index is 'tree', it must be one of flat, ivf, hnsw, pq"),
        (lambda: VectorIndex("flat", 0), "dim is 0, it must be a whole number of at least 1"),
        (lambda: VectorIndex("flat", 2.5), "dim is 2.5, it must be a whole number of at least 1"),
        (lambda: VectorIndex("pq", 100), "dim is 100, it must be a multiple of 48 for pq"),
        (lambda: VectorIndex("ivf", 4, n_probe=0), "n_probe is 0, it must be a whole number of at least 1"),
        (lambda: SemanticCache(unit, candidates=1.5), "candidates is 1.5, it must be a whole number of at least 1"),
        (lambda: SemanticCache(unit).lookup(None), "the question is None, it must be a text"),
        (lambda: SemanticCache(unit).put("a", "b", scope=7), "the scope is 7, it must be a text"),
        (lambda: SemanticCache(unit).put("a", None), "the answer is None, it must be a text"),
        (lambda: VectorIndex("ivf", 4, train_at=100), "train_at is 100, it must be at least 256"),
        (lambda: load_pairs("train"), "half is 'train', it must be 'choose', 'judge' or None"),
        (lambda: auc([], [1]), "there are 0 positives and 1 negatives, both are needed"),
        (lambda: mean_pool(torch.zeros(2, 3, 4), torch.ones(2, 4)), "mask has shape (2, 4), states begins with (2, 3)"),
        (lambda: mean_pool(torch.zeros(1, 2, 4), torch.zeros(1, 2)), "a text has no token, so it has no mean"),
        (lambda: SemanticCache(unit).put(" ", "a"), "the question is empty"),
        (lambda: SemanticCache(unit).ask("", str), "the question is empty"),
        (lambda: SemanticCache(lambda t: 2 * unit(t)).put("a", "b"), "embed gave a vector of length 2, it must be 1"),
        (lambda: SemanticCache(lambda t: 0 * unit(t)).put("a", "b"), "embed gave a vector of length 0, it must be 1"),
        (lambda: SemanticCache(lambda t: np.nan * unit(t)).put("a", "b"), "embed gave a vector of length nan"),
        (lambda: SemanticCache(lambda t: unit(t)[0]).put("a", "b"), "embed gave shape (4,) for one text"),
        (lambda: next(run_sweep("semantic-lookup", kinds=["tree"])), "kinds has 'tree', it must be of flat, ivf"),
    ],
)
def test_a_bad_argument_is_named(make, says):
    with pytest.raises(ValueError) as refused:
        make()
    assert str(refused.value).startswith(says) and "\n" not in str(refused.value)


def test_a_bad_vector_leaves_the_index_as_it_was():
    one = VectorIndex("flat", 4)
    one.add(3, unit("a")[0])
    for act, says in (
        (lambda: one.add(3, unit("a")[0]), "key 3 is in the index already"),
        (lambda: one.add(4, np.ones(5)), r"vector has shape \(5,\), it must be \(4,\)"),
        (lambda: one.add(4, np.full(4, np.nan)), "vector holds a number that is not finite"),
        (lambda: one.add(-1, unit("a")[0]), r"key is -1, it must be a whole number from 0 to 2\^63 - 1"),
        (lambda: one.add(2**63, unit("a")[0]), "key is 9223372036854775808, it must be a whole number from 0"),
        (lambda: one.search(np.ones(5), 1), r"vector has shape \(5,\), it must be \(4,\)"),
        (lambda: one.search(np.full(4, np.inf), 1), "vector holds a number that is not finite"),
        (lambda: one.remove(7), "key 7 is not in the index"),
    ):
        with pytest.raises(ValueError, match=says):
            act()
    assert len(one) == 1 and one.search(unit("a")[0], 5) == [(3, 1.0)]


def test_an_embedding_that_changes_its_size_is_refused():
    width = [4]
    cache = SemanticCache(lambda texts: np.tile(np.eye(width[0], dtype=np.float32)[0], (len(texts), 1)))
    cache.put("a", "b")
    width[0] = 5
    with pytest.raises(ValueError, match="embed gave 5 numbers, before it gave 4"):
        cache.put("c", "d")
    assert len(cache) == 1


def test_an_answer_or_an_index_that_cannot_be_leaves_the_cache_as_it_was(tmp_path):
    cache = SemanticCache(unit)
    cache.put("a", "b")
    with pytest.raises(ValueError, match="the answer is None, it must be a text"):
        cache.put("a", None)
    assert cache.lookup("a").answer == "b"
    cache = SemanticCache(unit, index="pq")
    for _ in range(2):
        with pytest.raises(ValueError, match="dim is 4, it must be a multiple of 48 for pq"):
            cache.put("a", "b")
        assert len(cache) == 0 and not cache.forget("a") and not cache.lookup("a").hit


def test_an_answer_that_fails_is_not_stored_and_the_cache_goes_on():
    cache = SemanticCache(unit)

    def fails(question):
        raise RuntimeError("no model")

    with pytest.raises(RuntimeError, match="no model"):
        cache.ask("a", fails)
    assert len(cache) == 0 and cache.ask("a", lambda question: "fine").answer == "fine"


# -- files --------------------------------------------------------------------------------------------------------


@pytest.fixture
def saved(tmp_path):
    path = tmp_path / "cache.safetensors"
    cache = SemanticCache(unit)
    cache.put("question", "answer")
    cache.save(path)
    return path


def entries(*rows):
    return np.frombuffer(json.dumps(list(rows)).encode(), dtype=np.uint8)


ROW = {"question": "q", "answer": "a", "scope": "", "born": 1.0}
FOREIGN = {
    "another format": ({"vectors": unit("a"), "entries": entries(ROW)}, {"format": "other"}, "does not say"),
    "no header": ({"vectors": unit("a"), "entries": entries(ROW)}, None, "does not say"),
    "no entries": ({"vectors": unit("a")}, {}, "entries"),
    "other fields": ({"vectors": unit("a"), "entries": entries({"question": "q"})}, {}, "other fields"),
    "another type": ({"vectors": unit("a"), "entries": entries({**ROW, "answer": 3})}, {}, "other fields"),
    "entries are no list": ({"vectors": unit("a"), "entries": entries(ROW)[1:-1]}, {}, "do not belong together"),
    "a row too few": ({"vectors": unit("ab"), "entries": entries(ROW)}, {}, "do not belong together"),
    "another dtype": ({"vectors": unit("a").astype("f8"), "entries": entries(ROW)}, {}, "do not belong together"),
    "no time": ({"vectors": unit("a"), "entries": entries({**ROW, "born": np.inf})}, {}, "is not finite"),
    "a row is no object": ({"vectors": unit("a"), "entries": entries("q")}, {}, "no store"),
    "no JSON": ({"vectors": unit("a"), "entries": np.zeros(3, np.uint8)}, {}, "no store"),
    "not of unit length": ({"vectors": 3 * unit("a"), "entries": entries(ROW)}, {}, "unit length"),
    "not a number": ({"vectors": np.nan * unit("a"), "entries": entries(ROW)}, {}, "unit length"),
}


@pytest.mark.parametrize("what", FOREIGN)
def test_a_foreign_file_is_refused(tmp_path, what):
    parts, header, says = FOREIGN[what]
    path = tmp_path / "foreign"
    if header is not None:
        header = {"format": store.FORMAT, "sha256": store._digest(parts)} | header
    save_file(parts, path, metadata=header)
    cache = SemanticCache(unit)
    cache.put("mine", "stays")
    with pytest.raises(ValueError, match=says) as refused:
        cache.load(path)
    assert "\n" not in str(refused.value) and str(path) in str(refused.value)
    assert len(cache) == 1 and cache.lookup("mine").answer == "stays"


def test_a_truncated_or_changed_file_is_refused_at_every_place(saved):
    whole = saved.read_bytes()
    for length in range(0, len(whole), 7):
        saved.write_bytes(whole[:length])
        with pytest.raises(ValueError, match=r"no store|is damaged"):
            SemanticCache(unit).load(saved)
    for place in range(8, len(whole), 5):
        saved.write_bytes(whole[:place] + bytes([whole[place] ^ 1]) + whole[place + 1 :])
        with pytest.raises(ValueError, match=r"no store|is damaged"):
            SemanticCache(unit).load(saved)
    saved.write_bytes(whole)
    assert SemanticCache(unit).load(saved) == 1


def test_a_missing_file_a_folder_and_another_size_are_named(saved):
    with pytest.raises(ValueError, match="there is no store"):
        SemanticCache(unit).load(saved.parent / "none")
    with pytest.raises(ValueError, match="there is no store"):
        SemanticCache(unit).load(saved.parent)
    with pytest.raises(ValueError, match="holds embeddings of 4 numbers, this cache makes 3"):
        SemanticCache(lambda texts: np.tile(np.eye(3, dtype=np.float32)[0], (len(texts), 1))).load(saved)
    with pytest.raises(ValueError, match="holds embeddings of another encoder"):
        SemanticCache(lambda texts: np.tile(np.eye(4, dtype=np.float32)[1], (len(texts), 1))).load(saved)


def test_a_folder_that_cannot_be_written_is_named(saved):
    (saved.parent / "file").write_text("in the way")
    cache = SemanticCache(unit)
    cache.put("a", "b")
    with pytest.raises(ValueError, match="cannot write"):
        cache.save(saved.parent / "file" / "cache")
    assert not os.path.exists(saved.parent / ".cache.part") and len(cache) == 1


# -- what is missing ----------------------------------------------------------------------------------------------


def test_a_missing_extra_is_named(monkeypatch):
    for module, make in ((embed, MiniLM), (index, lambda: VectorIndex("flat", 4))):
        monkeypatch.setattr(module, "find_spec", lambda name: None)
        with pytest.raises(ImportError, match=r'needs \w+: pip install "gptlite\[semantic\]"'):
            make()


def test_a_recording_of_other_pairs_is_refused():
    data = {"pairs": [{"cached": "a", "asked": "b", "similarity": 1.0, "objection": None}]}
    with pytest.raises(ValueError, match="make it again with `gptlite record semantic-pairs`"):
        recorded_pairs(Recording("semantic-pairs", {}, data=data))
