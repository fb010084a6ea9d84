"""Drafting without a draft model beside transformers: its prompt look-up, and the exit of an OPT model cut short."""

import copy

import pytest
import torch
from transformers.generation.candidate_generator import PromptLookupCandidateGenerator

from gptlite.sampling import GREEDY
from gptlite.speculative.decode import speculate
from gptlite.speculative.lookup import LookupDrafter, last_match
from gptlite.speculative.self_draft import with_blocks
from gptlite.sweeps.drafting import REPEATING


def test_prompt_lookup_of_transformers_writes_the_same_greedy_text(exported_trained, as_opt) -> None:
    """In fp64, on a text that repeats itself, so that both really find something."""
    model, tokenizer, folder = exported_trained
    target = as_opt(folder, torch.float64)
    tokens = tokenizer.encode(REPEATING)[None]
    calls: list[int] = []
    target.register_forward_hook(lambda *_: calls.append(1))
    with torch.inference_mode():
        theirs = target.generate(
            tokens,
            attention_mask=torch.ones_like(tokens),
            prompt_lookup_num_tokens=4,
            max_matching_ngram_size=5,
            max_new_tokens=40,
            do_sample=False,
            eos_token_id=None,
            pad_token_id=0,
        )
    trace: list = []
    ours = speculate(copy.deepcopy(model).double(), tokens, 40, LookupDrafter(5, 1), 4, GREEDY, trace=trace)
    assert torch.equal(theirs, ours)
    assert len(calls) < 40 and len(trace) < 40


@pytest.mark.parametrize("seed", range(40))
def test_a_look_up_with_one_match_is_that_of_transformers(seed: int) -> None:
    """Where the ending occurs once before, both go on from there; of several, theirs takes the first, ours the last."""
    generator = torch.Generator().manual_seed(seed)
    tokens = torch.randint(3, 30, (1, 25), generator=generator)
    n = 1 + seed % 3
    at = int(torch.randint(0, 20 - n, (1,), generator=generator))
    tokens[0, -n:] = tokens[0, at : at + n]
    found = [i for i in range(25 - n) if tokens[0, i : i + n].tolist() == tokens[0, -n:].tolist()]
    finder = PromptLookupCandidateGenerator(
        eos_token_id=torch.tensor([1]), num_output_tokens=4, max_matching_ngram_size=n, max_length=99, vocab_size=30
    )
    theirs = finder.get_candidates(tokens)[0][0, 25:].tolist()
    place = last_match(tokens[0].tolist(), n, n)
    assert place == found[-1] + n
    first = found[0] + n
    assert theirs == tokens[0, first : first + 4].tolist()
    if len(found) == 1:
        assert theirs == tokens[0, place : place + 4].tolist()


def test_a_model_of_the_first_blocks_is_transformers_model_of_as_many_layers(exported_trained, as_opt) -> None:
    model, tokenizer, folder = exported_trained
    theirs = as_opt(folder, torch.float64)
    theirs.model.decoder.layers = theirs.model.decoder.layers[:3]
    tokens = tokenizer.encode("What news, my lord?")[None]
    with torch.inference_mode():
        ours = with_blocks(copy.deepcopy(model).double(), range(3))(tokens)
        # the export folds the head's bias into the last norm, solved and stored in fp32: its tests allow 1e-5
        torch.testing.assert_close(theirs(tokens).logits, ours, rtol=0, atol=1e-5)
