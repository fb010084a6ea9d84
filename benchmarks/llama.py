"""llama.cpp on the shapes that are compared.

It has no OPT. Its GPT-2 has the same tensors and differs in one operation, GELU where OPT has ReLU, so the work is the
same and the tokens are not. `pip install -e ".[llama]"` compiles it for the machine, which takes a C++ compiler and ten
minutes or more.
"""

import tempfile
from pathlib import Path
from typing import Any

import gguf
import llama_cpp
import numpy as np
import torch
from torch import Tensor

import gptlite
from gptlite.export import POSITION_SHIFT, opt_config, opt_weights

CELLS = 256  # llama.cpp makes a sequence's part of the cache a multiple of this long


def write_gguf(model: gptlite.GPTlite, path: Path, kind: gguf.GGMLQuantizationType) -> None:
    """The model's weights as a GPT-2 in GGUF, without a vocabulary; matrices of `kind`, the rest in fp32."""
    config, opt = opt_config(model), opt_weights(model)
    heads, d_model = config["num_attention_heads"], config["hidden_size"]
    decoder = "model.decoder."
    tensors = {
        "token_embd.weight": opt[f"{decoder}embed_tokens.weight"],
        "position_embd.weight": opt[f"{decoder}embed_positions.weight"][POSITION_SHIFT:],
        "output.weight": opt["lm_head.weight"],
    }
    names = {"attn_norm": "self_attn_layer_norm", "attn_output": "self_attn.out_proj"}
    names |= {"ffn_norm": "final_layer_norm", "ffn_up": "fc1", "ffn_down": "fc2"}
    for what in ("weight", "bias"):
        tensors[f"output_norm.{what}"] = opt[f"{decoder}final_layer_norm.{what}"]
        for i in range(config["num_hidden_layers"]):
            layer = f"{decoder}layers.{i}."
            parts = [opt[f"{layer}self_attn.{part}_proj.{what}"] for part in "qkv"]
            tensors[f"blk.{i}.attn_qkv.{what}"] = torch.cat(parts)  # [3d, d] or [3d]
            for ours, theirs in names.items():
                tensors[f"blk.{i}.{ours}.{what}"] = opt[f"{layer}{theirs}.{what}"]
    writer = gguf.GGUFWriter(path, "gpt2")
    writer.add_context_length(config["max_position_embeddings"])
    writer.add_embedding_length(d_model)
    writer.add_feed_forward_length(config["ffn_dim"])
    writer.add_block_count(config["num_hidden_layers"])
    writer.add_head_count(heads)
    writer.add_layer_norm_eps(model.ln.eps)
    writer.add_vocab_size(config["vocab_size"])
    writer.add_tokenizer_model("none")
    for name, tensor in tensors.items():
        values, fp32 = tensor.numpy(), gguf.GGMLQuantizationType.F32
        stored = kind if values.ndim == 2 and name != "position_embd.weight" else fp32
        writer.add_tensor(name, gguf.quants.quantize(values, stored), raw_dtype=stored)
    writer.write_header_to_file()
    writer.write_kv_data_to_file()
    writer.write_tensors_to_file()
    writer.close()


class LlamaCpp:
    """A model in llama.cpp. Keys and values are in fp16, as it comes: its kernel for fp32 is several times slower."""

    def __init__(self, model: gptlite.GPTlite, threads: int, kind: str) -> None:
        llama_cpp.llama_log_set(silent, None)
        self.threads, self.vocab_size = threads, model.fc_out.out_features
        self.contexts: dict[tuple[int, int], Any] = {}
        with tempfile.TemporaryDirectory() as scratch:
            path = Path(scratch) / "model.gguf"
            write_gguf(model, path, gguf.GGMLQuantizationType[kind])
            options = llama_cpp.llama_model_default_params()
            options.use_mmap = False  # the file goes
            self.model = llama_cpp.llama_model_load_from_file(str(path).encode(), options)
        if not self.model:
            raise RuntimeError(f"llama.cpp does not load the model in {kind}")

    def context(self, batch: int, n_tokens: int) -> Any:
        """An empty cache for so many sequences of n_tokens, made once for each size."""
        if (batch, n_tokens) not in self.contexts:
            options = llama_cpp.llama_context_default_params()
            options.n_ctx = batch * -(-n_tokens // CELLS) * CELLS
            options.n_batch = batch * n_tokens
            options.n_seq_max = batch
            options.n_threads = options.n_threads_batch = self.threads
            context = llama_cpp.llama_init_from_model(self.model, options)
            if not context:
                raise RuntimeError(f"llama.cpp has no cache for {batch} sequences of {n_tokens} tokens")
            self.contexts[batch, n_tokens] = context
        context = self.contexts[batch, n_tokens]
        llama_cpp.llama_memory_clear(llama_cpp.llama_get_memory(context), False)
        return context

    def step(self, context: Any, tokens: np.ndarray, start: int) -> np.ndarray:
        """Read tokens [B, n] at positions from `start`. Returns: the logits [B, V] after the last of each row."""
        B, n = tokens.shape
        packed = llama_cpp.llama_batch_init(B * n, 0, 1)
        packed.n_tokens = B * n
        for i, token in enumerate(tokens.flat):
            packed.token[i], packed.pos[i] = int(token), start + i % n
            packed.n_seq_id[i], packed.seq_id[i][0] = 1, i // n
            packed.logits[i] = i % n == n - 1
        failed = llama_cpp.llama_decode(context, packed)
        llama_cpp.llama_batch_free(packed)
        if failed:
            raise RuntimeError(f"llama.cpp's step of {B} x {n} tokens ended with {failed}")
        rows = [llama_cpp.llama_get_logits_ith(context, n * (b + 1) - 1) for b in range(B)]
        return np.stack([np.ctypeslib.as_array(row, (self.vocab_size,)) for row in rows])

    def prefill(self, prompt: Tensor) -> Tensor:
        """Prompts [B, n] -> the logits [B, V] after them."""
        return torch.from_numpy(self.step(self.context(*prompt.shape), prompt.numpy(), 0))

    def generate(self, prompt: Tensor, n_new: int) -> Tensor:
        """Prompts [B, n] -> n_new greedy tokens for each [B, n_new]."""
        (B, n), new = prompt.shape, []
        context = self.context(B, n + n_new)
        logits = self.step(context, prompt.numpy(), 0)
        for i in range(n_new):
            new.append(logits.argmax(-1))  # [B]
            if i + 1 < n_new:
                logits = self.step(context, new[-1][:, None], n + i)
        return torch.from_numpy(np.stack(new, 1))


@llama_cpp.llama_log_callback
def silent(level: int, text: bytes, data: Any) -> None:
    """llama.cpp's log, which is long, goes nowhere; what fails is raised."""
