"""The check reads numbers, negations and swapped words; the labelled pairs are whole; thresholds are chosen rightly."""

import hashlib
from collections import Counter

import numpy as np
import pytest

from gptlite.semantic.check import objection, words
from gptlite.semantic.evaluate import (
    KINDS,
    THRESHOLDS,
    Pair,
    auc,
    choose_threshold,
    load_pairs,
    rates,
)


@pytest.mark.parametrize(
    ("text", "expected"),
    [
        ("Why can't I? It won't, isn't and doesn't.", "why can not i it won not is not and does not"),
        ("What's 15% of 30,000?", "what s 15 percent of 30000"),
        ("Two eggs, version 3.11", "2 eggs version 3.11"),
        ("It cannot be: ¿Cómo está?", "it not be cómo está"),
        ("Don’t", "do not"),
        ("光速是多少？", "光速是多少"),
        ("", ""),
    ],
)
def test_words(text, expected):
    assert " ".join(words(text)) == expected


@pytest.mark.parametrize(
    ("asked", "cached", "says"),
    [
        ("How do I delete a file?", "How do I delete a folder?", "nearly the same wording: file / folder"),
        ("How do I sell gold?", "How do I buy gold?", "nearly the same wording: sell / buy"),
        ("From Rome to Oslo by train", "From Oslo to Rome by train", "nearly the same wording: "),
        ("How do I get a visa?", "How do I get a work visa?", "nearly the same wording: nothing / work"),
        ("Cook rice for 4", "Cook rice for six", "numbers: 4 / 6"),
        ("I need 2 of 3", "I need 3", "numbers: 2 / nothing"),
        ("Which boats sink?", "Which boats don't sink?", "negation: not in one of them"),
        ("Run it without root", "Run it with root", "negation: without in one of them"),
        ("Which metals are non-magnetic?", "Which metals are magnetic?", "negation: non"),
    ],
)
def test_what_speaks_against_an_answer(asked, cached, says):
    assert objection(asked, cached).startswith(says)
    assert objection(cached, asked) is not None


@pytest.mark.parametrize(
    ("asked", "cached"),
    [
        ("How do I delete a file?", "How do I delete a file?"),
        ("How can I delete my file?", "How do I delete the file"),
        ("Could you delete the file please", "can you delete a file?"),
        ("I can't log in, what do I do?", "What helps when the log-in does not work?"),
        ("Two eggs and flour: what can I cook?", "What is made of 2 eggs and flour?"),
        ("What is 1,000 g?", "what is 1000 g"),
        ("What is the capital of Australia?", "Which city is Australia's capital?"),
    ],
)
def test_nothing_speaks_against_the_same_question(asked, cached):
    assert objection(asked, cached) is None


def test_the_wording_counts_from_the_overlap_on():
    asked, cached = "a red b c", "a blue b c"  # three of four words
    assert objection(asked, cached, overlap=0.75) and objection(asked, cached, overlap=0.76) is None


# -- the labelled pairs -------------------------------------------------------------------------------------------


def test_the_pairs_are_whole_and_their_halves_are_fixed_by_a_hash():
    pairs = load_pairs()
    assert len(pairs) == 264 and len({(pair.cached, pair.asked) for pair in pairs}) == 264
    counts = Counter(pair.kind for pair in pairs)
    assert list(counts) == [kind for kind in counts if kind in KINDS] and set(counts) == set(KINDS)
    assert (counts["paraphrase"], counts["near-miss"], counts["negation"], counts["number"]) == (72, 56, 32, 28)
    for kind in KINDS:
        own = sorted(
            (pair for pair in pairs if pair.kind == kind),
            key=lambda pair: hashlib.sha256(f"{pair.cached}\n{pair.asked}".encode()).hexdigest(),
        )
        assert [pair.half for pair in own] == [("choose", "judge")[i % 2] for i in range(len(own))]
        assert {pair.same for pair in own} == {kind.endswith("paraphrase")}
    assert load_pairs("choose") + load_pairs("judge") != pairs  # they are mixed
    assert len(load_pairs("choose")) == len(load_pairs("judge")) == 132


def test_the_pairs_are_those_that_the_check_was_made_after():
    """They were written first; whoever changes one must choose and judge anew."""
    text = "\n".join(f"{pair.kind} | {pair.cached} | {pair.asked}" for pair in load_pairs())
    assert hashlib.sha256(text.encode()).hexdigest()[:16] == "336539199c1c2988"


# -- rates and thresholds -----------------------------------------------------------------------------------------

PAIRS = [
    Pair("a", "b", "paraphrase", True, "choose"),
    Pair("c", "d", "paraphrase", True, "choose"),
    Pair("e 1", "e 2", "number", False, "choose"),
    Pair("f", "g", "unrelated", False, "choose"),
]
SIMILARITY = [0.9, 0.7, 0.8, 0.2]


def test_rates_by_hand():
    at = rates(PAIRS, SIMILARITY, 0.7)
    assert (at.right, at.wrong, at.same) == (2, 1, 2)
    assert (at.precision, at.recall) == (2 / 3, 1.0)
    assert (at.served["paraphrase"], at.served["number"], at.served["unrelated"]) == (2, 1, 0)
    assert at.share("number", "unrelated") == 0.5
    assert rates(PAIRS, SIMILARITY, 0.7, objection).wrong == 0
    nothing = rates(PAIRS, SIMILARITY, 0.95)
    assert (nothing.precision, nothing.recall, nothing.share("paraphrase")) == (1.0, 0.0, 0.0)


def test_the_lowest_threshold_within_the_limit_is_chosen():
    assert choose_threshold(PAIRS, SIMILARITY) == 0.81
    assert choose_threshold(PAIRS, SIMILARITY, max_wrong=1) == 0.5
    assert choose_threshold(PAIRS, SIMILARITY, objection) == 0.5
    assert choose_threshold(PAIRS, [1.0, 1.0, 1.0, 0.0]) is None
    assert THRESHOLDS[0] == 0.5 and THRESHOLDS[-1] == 0.99 and len(THRESHOLDS) == 50


def test_auc_is_the_share_of_pairs_in_the_right_order():
    assert auc([3, 2], [1, 0]) == 1 and auc([0], [1]) == 0 and auc([1], [1]) == 0.5
    positive, negative = np.random.default_rng(0).standard_normal((2, 50))
    right = np.mean([(p > n) + 0.5 * (p == n) for p in positive for n in negative])
    assert auc(positive, negative) == pytest.approx(right)
