"""Beam search beside transformers' own, on the same exported model."""

import copy
from collections.abc import Callable
from pathlib import Path

import pytest
import torch
from transformers import OPTForCausalLM

from gptlite.cache.paged import PagedCache
from gptlite.data import CharTokenizer
from gptlite.model import GPTlite
from gptlite.serving.beam import beam_search


@pytest.mark.parametrize("n_beams", [2, 5])
@pytest.mark.parametrize("text", ["KING HENRY:\nNow, sir, ", "ROMEO:\nO, "])
def test_beams_and_scores_are_those_of_transformers(
    exported_trained: tuple[GPTlite, CharTokenizer, Path],
    as_opt: Callable[..., OPTForCausalLM],
    n_beams: int,
    text: str,
) -> None:
    """In fp64; transformers divides a score by the length unless its length penalty is 0. The model has no end."""
    trained, tokenizer, folder = exported_trained
    model = copy.deepcopy(trained).double()
    theirs = as_opt(folder, torch.float64)
    prompt = tokenizer.encode(text)
    out = theirs.generate(
        prompt[None],
        attention_mask=torch.ones(1, len(prompt), dtype=torch.int64),
        num_beams=n_beams,
        num_return_sequences=n_beams,
        max_new_tokens=24,
        do_sample=False,
        length_penalty=0.0,
        eos_token_id=None,
        pad_token_id=0,
        return_dict_in_generate=True,
        output_scores=True,
    )
    cache = PagedCache(model, 60)
    found = beam_search(model, prompt, n_beams, 24, cache)
    assert [list(beam.tokens) for beam in found] == out.sequences[:, len(prompt) :].tolist()
    # the exported head's bias is stored in fp32: 1e-7 of a logit, over 24 tokens
    torch.testing.assert_close(
        torch.tensor([beam.score for beam in found], dtype=torch.float64),
        out.sequences_scores.double(),
        rtol=0,
        atol=1e-5,
    )
    cache.check()
    assert cache.free_blocks == 60
