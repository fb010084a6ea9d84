"""Embeddings: what is quick to work out by hand; the oracles compare whole texts with sentence-transformers."""

import torch

from gptlite.semantic.embed import mean_pool


def test_mean_pooling_counts_a_texts_own_tokens_and_no_padding() -> None:
    """Two texts of three and of one token; what stands in the padding is large, so that it would be seen."""
    states = torch.tensor([[[1.0, 2.0], [3.0, -2.0], [5.0, 9.0]], [[4.0, -1.0], [1e6, 1e6], [1e6, 1e6]]])  # [n, T, d]
    mask = torch.tensor([[1, 1, 1], [1, 0, 0]])
    assert mean_pool(states, mask).tolist() == [[3.0, 3.0], [4.0, -1.0]]
