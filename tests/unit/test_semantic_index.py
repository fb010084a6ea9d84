"""Every index forgets what is removed, gives exact similarities, and finds nearly what the search of all finds."""

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from gptlite.semantic.index import KINDS, VectorIndex

DIM = 48


def unit_vectors(n, seed=0, groups=40):
    """Vectors in groups, as questions about the same subject are."""
    random = np.random.default_rng(seed)
    centres = random.standard_normal((groups, DIM))
    rows = centres[random.integers(groups, size=n)] + 0.6 * random.standard_normal((n, DIM))
    return (rows / np.linalg.norm(rows, axis=1, keepdims=True)).astype(np.float32)


def brute(held, query, n):
    keys, similarities = list(held), np.stack(list(held.values())) @ query if held else np.empty(0)
    return [(keys[i], float(similarities[i])) for i in np.argsort(-similarities)[:n]]


@pytest.mark.parametrize("kind", KINDS)
@given(plan=st.lists(st.tuples(st.sampled_from("aars"), st.integers(0, 39)), max_size=120))
@settings(max_examples=15, deadline=None)
def test_any_plan_of_adding_and_removing_equals_the_search_of_all(kind, plan):
    """Below the training size, and for hnsw at any size this small, all indexes are exact."""
    vectors, index, held = unit_vectors(40), VectorIndex(kind, DIM), {}
    for action, key in plan:
        if action == "a" and key not in held:
            index.add(key, vectors[key])
            held[key] = vectors[key]
        elif action == "r" and key in held:
            index.remove(key)
            del held[key]
        elif action == "s":
            found, right = index.search(vectors[key], 3), brute(held, vectors[key], 3)
            assert [k for k, _ in found] == [k for k, _ in right]
            assert [s for _, s in found] == pytest.approx([s for _, s in right], abs=1e-6)
    assert len(index) == len(held)


@pytest.mark.parametrize(("kind", "least"), [("flat", 1.0), ("ivf", 0.9), ("hnsw", 0.95), ("pq", 0.9)])
def test_a_trained_index_finds_nearly_all_and_its_similarities_are_exact(kind, least):
    vectors, index = unit_vectors(3000), VectorIndex(kind, DIM, train_at=1024)
    for key, vector in enumerate(vectors):
        index.add(key, vector)
    assert index.trained and index.builds == (2 if kind in ("ivf", "pq") else 1)
    queries = unit_vectors(200, seed=1)
    hits = 0
    for query in queries:
        found = index.search(query, 1)
        hits += found[0][0] == (vectors @ query).argmax()
        assert found[0][1] == pytest.approx(float(vectors[found[0][0]] @ query), abs=1e-6)
    assert hits / len(queries) >= least
    for key in range(0, 3000, 100):  # what is stored is found, as an asked question is
        assert index.search(vectors[key], 1) == [(key, pytest.approx(1, abs=1e-5))]


@pytest.mark.parametrize("kind", KINDS)
def test_what_is_removed_is_never_found_again(kind):
    vectors, index = unit_vectors(1500), VectorIndex(kind, DIM, train_at=1024)
    for key, vector in enumerate(vectors):
        index.add(key, vector)
    for key in range(0, 1500, 2):
        index.remove(key)
    assert len(index) == 750
    for key in range(0, 1500, 30):
        found = [k for k, _ in index.search(vectors[key], 5)]
        assert len(found) == 5 and all(k % 2 for k in found)
    for key in range(0, 1500, 2):  # and it may come back
        index.add(key, vectors[key])
    assert index.search(vectors[0], 1)[0][0] == 0 and len(index) == 1500


def test_hnsw_passes_over_what_died_since_the_last_search():
    vectors, index = unit_vectors(100), VectorIndex("hnsw", DIM)
    for key, vector in enumerate(vectors):
        index.add(key, vector)
    for key in range(40):
        assert index.search(vectors[key], 1)[0][0] == key
        index.remove(key)
        assert index.search(vectors[key], 1)[0][0] != key
    assert index.builds == 1


def test_hnsw_is_built_again_when_half_of_it_is_dead_and_not_before():
    vectors, index = unit_vectors(100), VectorIndex("hnsw", DIM)
    for key, vector in enumerate(vectors):
        index.add(key, vector)
    for key in range(50):
        index.remove(key)
    assert index.builds == 1 and index._index.ntotal == 100
    assert [k for k, _ in index.search(vectors[3], 50)] == [
        k for k, _ in brute(dict(enumerate(vectors[50:], 50)), vectors[3], 50)
    ]
    index.remove(50)
    assert index.builds == 2 and index._index.ntotal == 49
    assert index.search(vectors[60], 1)[0][0] == 60


@pytest.mark.parametrize("kind", ["ivf", "pq"])
def test_too_few_to_train_on_are_searched_one_by_one(kind, capfd):
    vectors, index = unit_vectors(1100), VectorIndex(kind, DIM, train_at=300)
    for key in range(299):
        index.add(key, vectors[key])
    assert not index.trained
    assert [k for k, _ in index.search(vectors[7], 9)] == [
        k for k, _ in brute(dict(enumerate(vectors[:299])), vectors[7], 9)
    ]
    index.add(299, vectors[299])
    assert index.trained and index.builds == 2
    for key in range(300, 1100):
        index.add(key, vectors[key])
    assert index.builds == 2
    for key in range(1100, 1200):
        index.add(key, vectors[key - 1100])
    assert index.builds == 3  # four times as many as at the first training
    for key in range(1190):
        index.remove(key)
    assert not index.trained and index.builds == 4 and len(index) == 10 and len(index.search(vectors[95], 20)) == 10
    assert capfd.readouterr() == ("", "")  # FAISS prints nothing about few points


def test_nothing_is_found_in_an_empty_index():
    for kind in KINDS:
        assert VectorIndex(kind, DIM).search(unit_vectors(1)[0], 3) == []
