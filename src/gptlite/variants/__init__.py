"""Other attentions for the same model: each overrides `MultiHeadAttention.mix` and is swapped in block by block."""
