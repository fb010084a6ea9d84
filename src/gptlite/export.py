"""Export to a Hugging Face folder: GPTlite is OPT {cite}`zhang2022opt` in other words, so serving stacks can run it."""

from __future__ import annotations

import json
import os
import tempfile
from pathlib import Path
from typing import Any

import torch
from safetensors.torch import save
from torch import Tensor, nn

from gptlite.data import CharTokenizer
from gptlite.model import GPTlite, MultiHeadAttention

FILES = {"config.json", "generation_config.json", "model.safetensors", "tokenizer.json", "tokenizer_config.json"}
POSITION_SHIFT = 2  # OPT's table of positions begins with two rows that no text uses


def export_hf(model: GPTlite, tokenizer: CharTokenizer, folder: str | Path) -> None:
    """Writes the model as an OPT model in fp32, and its characters as a `tokenizer.json`.

    The folder is whole or not there. OPT's head has no bias: ours moves into the last LayerNorm's bias, which is exact
    while V < d.

    Args:
        folder: where it goes; must be new, empty, or written by this function.
    Raises: ValueError with the reason when the model is not an OPT model, or the folder cannot be taken.
    """
    folder = Path(folder)
    weights, config = opt_weights(model), opt_config(model)
    if tokenizer.vocab_size != config["vocab_size"]:
        raise ValueError(
            f"the tokenizer has {tokenizer.vocab_size} characters, the model a vocabulary of {config['vocab_size']}"
        )
    texts = {
        "config.json": config,
        "generation_config.json": {"do_sample": True},
        "tokenizer.json": tokenizer_json(tokenizer),
        "tokenizer_config.json": {
            "tokenizer_class": "PreTrainedTokenizerFast",
            "model_max_length": config["max_position_embeddings"],
            "clean_up_tokenization_spaces": False,  # a space before a comma is a character too
        },
    }
    _check_replaceable(folder)
    try:
        folder.parent.mkdir(parents=True, exist_ok=True)
        with tempfile.TemporaryDirectory(prefix=f".{folder.name}.", dir=folder.parent) as scratch:
            new = Path(scratch) / "new"
            new.mkdir()
            (new / "model.safetensors").write_bytes(save(weights, metadata={"format": "pt"}))
            for name, content in texts.items():
                (new / name).write_text(json.dumps(content, indent=1) + "\n", encoding="utf-8")
            if folder.exists():
                os.replace(folder, Path(scratch) / "old")
            os.replace(new, folder)
    except OSError as error:
        raise ValueError(f"cannot write {folder}: {error.strerror or error}") from None


def opt_config(model: GPTlite) -> dict[str, Any]:
    """The `config.json` of the model, read from its weights. Raises: ValueError when OPT has no such shape."""
    d_model = model.token_embedding.embedding_dim
    sizes = [(block.mha.kv_shape[0], block.ffwd.net[0].out_features) for block in model.blocks]
    if len(set(sizes)) != 1:
        raise ValueError(f"OPT's layers are all alike, these have (KV heads, hidden size) {sorted(set(sizes))}")
    return {
        "architectures": ["OPTForCausalLM"],
        "model_type": "opt",
        "exported_by": "gptlite",
        "vocab_size": model.token_embedding.num_embeddings,
        "max_position_embeddings": model.context_length,
        "num_hidden_layers": len(model.blocks),
        "num_attention_heads": d_model // model.blocks[0].mha.d_head,
        "hidden_size": d_model,
        "word_embed_proj_dim": d_model,
        "ffn_dim": sizes[0][1],
        "activation_function": "relu",
        "do_layer_norm_before": True,
        "enable_bias": True,
        "layer_norm_elementwise_affine": True,
        "tie_word_embeddings": False,
        "dropout": 0.0,
        "attention_dropout": 0.0,
        "layerdrop": 0.0,
        "torch_dtype": "float32",
        # a text of characters has no token that begins, ends or pads it
        "bos_token_id": None,
        "eos_token_id": None,
        "pad_token_id": None,
    }


def opt_weights(model: GPTlite) -> dict[str, Tensor]:
    """The model's weights by OPT's names, fp32, on the CPU. Raises: ValueError when a layer does not map."""
    weights = {
        "model.decoder.embed_tokens.weight": model.token_embedding.weight,
        "model.decoder.embed_positions.weight": nn.functional.pad(
            model.position_embedding.weight, (0, 0, POSITION_SHIFT, 0)
        ),
        "model.decoder.final_layer_norm.weight": model.ln.weight,
        "model.decoder.final_layer_norm.bias": folded_bias(model),
        "lm_head.weight": model.fc_out.weight,
    }
    for i, block in enumerate(model.blocks):
        _check_block(i, block, model.token_embedding.embedding_dim)
        layers: dict[str, Any] = {
            "self_attn.q_proj": block.mha.query_proj,
            "self_attn.k_proj": block.mha.key_proj,
            "self_attn.v_proj": block.mha.value_proj,
            "self_attn.out_proj": block.mha.out_proj,
            "self_attn_layer_norm": block.ln1,
            "fc1": block.ffwd.net[0],
            "fc2": block.ffwd.net[2],
            "final_layer_norm": block.ln2,
        }
        for name, layer in layers.items():
            weights[f"model.decoder.layers.{i}.{name}.weight"] = layer.weight
            weights[f"model.decoder.layers.{i}.{name}.bias"] = layer.bias
    return {name: tensor.detach().to("cpu", torch.float32).contiguous() for name, tensor in weights.items()}


def folded_bias(model: GPTlite) -> Tensor:
    """The last LayerNorm's bias [d] that gives, with no bias in the head, the same logits: ln.bias + x with W x = b.

    Raises: ValueError when no such x exists, as is usual when V >= d.
    """
    W, b = (tensor.detach().to("cpu", torch.float64) for tensor in (model.fc_out.weight, model.fc_out.bias))
    before = model.ln.bias.detach().to("cpu", torch.float64)  # [d]
    x = torch.linalg.lstsq(W, b[:, None], driver="gelsd").solution[:, 0]  # [d], the smallest of the solutions
    after = (before + x).float()  # [d], as stored
    error = (W @ after.double() - (W @ before + b)).abs().max().item()
    if error > 1e-6:
        V, d_model = W.shape
        raise ValueError(
            f"OPT's head has no bias, and folding ours into the last LayerNorm leaves an error of {error:.1e} in the "
            f"logits: it needs a vocabulary (here {V}) smaller than d_model (here {d_model}), or a bias of zero"
        )
    return after


def fold_head_bias(model: GPTlite) -> None:
    """Moves the head's bias into the last LayerNorm's, in place: the logits stay, and OPT holds the very same numbers.

    Raises: ValueError as `folded_bias`, and the model is as it was.
    """
    bias = folded_bias(model)
    with torch.no_grad():
        model.ln.bias.copy_(bias)
        model.fc_out.bias.zero_()


def tokenizer_json(tokenizer: CharTokenizer) -> dict[str, Any]:
    """The tokenizer in the format of the `tokenizers` library: one token per character, others are an error."""
    return {
        "version": "1.0",
        "truncation": None,
        "padding": None,
        "added_tokens": [],
        "normalizer": None,
        "pre_tokenizer": {
            "type": "Split",
            "pattern": {"Regex": r"[\s\S]"},
            "behavior": "Isolated",
            "invert": False,
        },
        "post_processor": None,
        "decoder": {"type": "Fuse"},  # without it tokens are joined by spaces
        "model": {
            "type": "WordLevel",
            "vocab": {char: i for i, char in enumerate(tokenizer.chars)},
            "unk_token": "",  # not in the vocabulary, so that an unknown character raises instead of vanishing
        },
    }


def _check_block(number: int, block: Any, d_model: int) -> None:
    """Raises: ValueError when OPT's decoder layer does not compute what this block does."""
    mha, net = block.mha, block.ffwd.net
    where = f"layer {number} is not one of OPT's: "
    if type(mha) is not MultiHeadAttention:
        raise ValueError(f"{where}its attention is {type(mha).__name__}, OPT has plain multi-head attention")
    for linear in (mha.query_proj, mha.key_proj, mha.value_proj, mha.out_proj, net[0], net[2]):
        if type(linear) is not nn.Linear:
            raise ValueError(f"{where}it has a {type(linear).__name__} where OPT has a plain Linear")
    n_heads, (n_kv_heads, _, d_value) = mha.query_proj.out_features // mha.d_head, mha.kv_shape
    if n_kv_heads != n_heads:
        raise ValueError(f"{where}{n_kv_heads} KV heads serve {n_heads} query heads, OPT has as many of both")
    if n_heads * mha.d_head != d_model or d_value != mha.d_head:
        raise ValueError(f"{where}{n_heads} heads of {mha.d_head} are not d_model, which is {d_model}")
    if mha.window is not None or mha.sinks:
        raise ValueError(f"{where}its attention has a window of {mha.window}, OPT's sees everything")
    if mha.scale != mha.d_head**-0.5:
        raise ValueError(f"{where}it scales its scores by {mha.scale}, OPT by 1 / sqrt(d_head), {mha.d_head**-0.5}")
    if type(net[1]) is not nn.ReLU:
        raise ValueError(f"{where}its activation is {type(net[1]).__name__}, the export is made for ReLU")


def _check_replaceable(folder: Path) -> None:
    """Raises: ValueError when something lies there that `export_hf` did not write."""
    try:
        if not folder.exists() and not folder.is_symlink():
            return
        names = {entry.name for entry in folder.iterdir()}
        config = folder / "config.json"
        ours = (
            names <= FILES and json.loads(config.read_text(encoding="utf-8")).get("exported_by") == "gptlite"
            if names
            else True
        )
    except (OSError, ValueError, AttributeError):
        ours = False
    if not ours:
        raise ValueError(f"{folder} exists and is no folder that an export wrote; choose another, or remove it")
