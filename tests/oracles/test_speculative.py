"""Speculative decoding beside transformers' assisted generation: the same text, and the same verdicts."""

import copy
from pathlib import Path

import pytest
import torch
import transformers.generation.utils as generation

import gptlite
from gptlite.export import export_hf
from gptlite.sampling import GREEDY
from gptlite.speculative.decode import speculate
from gptlite.speculative.drafters import ModelDrafter
from gptlite.speculative.verify import verify


def test_assisted_generation_of_the_exported_pair_writes_the_same_greedy_text(
    exported_trained, as_opt, tmp_path: Path
) -> None:
    """In fp64, where no near-tie turns: transformers' target and assistant, ours, and our plain loop."""
    model, tokenizer, folder = exported_trained
    draft, _ = gptlite.load("draft")
    export_hf(draft, tokenizer, tmp_path / "draft")
    target, assistant = (as_opt(where, torch.float64) for where in (folder, tmp_path / "draft"))
    assistant.generation_config.num_assistant_tokens = 4
    assistant.generation_config.num_assistant_tokens_schedule = "constant"
    assistant.generation_config.assistant_confidence_threshold = 0.0  # draft four, however unsure
    tokens = tokenizer.encode("KING HENRY:\nNow, my good lords, what news from France?")[None]
    calls = []
    target.register_forward_hook(lambda *_: calls.append(1))
    with torch.inference_mode():
        theirs = target.generate(
            tokens,
            attention_mask=torch.ones_like(tokens),
            assistant_model=assistant,
            max_new_tokens=60,
            do_sample=False,
            eos_token_id=None,
            pad_token_id=0,
        )
    trace: list = []
    pair = [copy.deepcopy(one).double() for one in (model, draft)]
    ours = speculate(pair[0], tokens, 60, ModelDrafter(pair[1]), 4, GREEDY, trace=trace)
    assert theirs.shape == ours.shape and torch.equal(theirs, ours)
    assert torch.equal(ours, gptlite.generate(pair[0], tokens, 60, GREEDY))
    # the assistant really drafted: far fewer passes of the target than tokens, as with ours
    assert len(calls) < 40 and len(trace) < 40


@pytest.mark.parametrize("seed", range(60))
def test_verdicts_are_those_of_transformers(seed: int, monkeypatch: pytest.MonkeyPatch) -> None:
    """The same logits, drafts and uniform numbers give the same kept drafts, and the same law of the next token."""
    torch.manual_seed(seed)
    n, vocab = 4, 7
    target, draft = (torch.randn(1, rows, vocab, dtype=torch.float64) * 0.7 for rows in (n + 1, n))
    draft += 0.7 * target[:, :n]  # alike, so that some are kept
    tokens = torch.distributions.Categorical(logits=draft).sample()  # [1, n]
    u = torch.rand(1, n + 1, dtype=torch.float64)
    laws = []

    def take(probs: torch.Tensor, num_samples: int) -> torch.Tensor:
        laws.append(probs)
        return probs.argmax(-1, keepdim=True)

    monkeypatch.setattr(generation.torch, "rand_like", lambda like: u[:, :n].reshape(like.shape))
    monkeypatch.setattr(generation.torch, "multinomial", take)
    _, n_kept = generation._speculative_sampling(tokens, draft.clone(), n, target.clone())
    p, q = target.softmax(-1), draft.softmax(-1)
    kept, _ = verify(p, q, tokens, u)
    assert kept.sum() == int(n_kept)
    # the next token's law, by drawing along a grid of uniform numbers
    N = 4000
    grid = torch.cat([u[:, :n].expand(N, -1), ((torch.arange(N) + 0.5) / N)[:, None].double()], 1)
    _, following = verify(p.expand(N, -1, -1), q.expand(N, -1, -1), tokens.expand(N, -1), grid)
    seen = torch.bincount(following, minlength=vocab) / N
    torch.testing.assert_close(seen, laws[0][0].to(seen), rtol=0, atol=1.5 / N)
