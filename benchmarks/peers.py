"""Engines that run the same model: gptlite in several ways, transformers, CTranslate2, and llama.cpp where it is.

Each engine is made from the same weights, in a process of its own, and answers the same two questions: which n_new
greedy tokens follow these prompts, and what are the logits after a prompt.
"""

import copy
import json
import tempfile
import time
from collections.abc import Callable, Sequence
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass
from importlib.util import find_spec
from pathlib import Path
from typing import Any

import torch
import transformers
from torch import Tensor, nn
from transformers import OPTConfig, OPTForCausalLM

import gptlite
from gptlite.cache.dense import StaticCache
from gptlite.config import GPTConfig
from gptlite.data import CharTokenizer
from gptlite.export import export_hf, opt_config, opt_weights
from gptlite.fast import compile_step, pack, split
from gptlite.generate import prefill
from gptlite.quantize.kernels import use_kernels
from gptlite.quantize.rtn import Grid, round_to_nearest
from gptlite.record import random_model
from gptlite.sampling import GREEDY

PEER = "transformers generate"
PLAIN, PACKED, COMPILED = "gptlite", "gptlite, packed weights", "gptlite, compiled step"
SPLIT = "gptlite, split products"
INT8, INT8_INPUTS = "gptlite, int8 weights", "gptlite, int8 weights and inputs"
CT2, CT2_INT8 = "CTranslate2", "CTranslate2, int8"
LLAMA, LLAMA_INT8 = "llama.cpp", "llama.cpp, q8_0"
ENGINES = [PEER, PLAIN, SPLIT, PACKED, COMPILED, INT8, INT8_INPUTS, CT2, CT2_INT8]
NOT_TORCH = (CT2, CT2_INT8, LLAMA, LLAMA_INT8)  # those that compute with threads of their own
EXACT = (PEER, PLAIN, SPLIT, PACKED, COMPILED, CT2)  # those whose tokens have to agree
if find_spec("llama_cpp") and find_spec("gguf"):  # it has to be compiled
    ENGINES += [LLAMA, LLAMA_INT8]

# the shapes of OPT that are compared: S1 is bound by what surrounds the products, S2 by reading weights
SHAPES = {
    "S1": GPTConfig(128, 2048, n_layers=6, d_model=256, n_heads=8, d_head=32),
    "S2": GPTConfig(50_272, 2048, n_layers=12, d_model=768, n_heads=12, d_head=64),
    # for trying the benchmark itself
    "tiny": GPTConfig(64, 64, n_layers=2, d_model=64, n_heads=4, d_head=16),
}


@dataclass
class Engine:
    """One way to run the model.

    Args:
        generate: prompts [B, n] and a number of tokens -> the new tokens [B, n_new], greedy.
        prefill: prompts [B, n] -> reads them, and gives the logits after the last token [B, V], or None for an engine
            that shows no logits.
    """

    generate: Callable[[Tensor, int], Tensor]
    prefill: Callable[[Tensor], Tensor | None]


def make_model(shape: str) -> gptlite.GPTlite:
    """The shape with random weights, the same ones each time."""
    torch.manual_seed(0)
    return random_model(SHAPES[shape], "cpu", torch.float32)


def int8_weights(model: gptlite.GPTlite, int8_inputs: bool = False) -> gptlite.GPTlite:
    """The same model with the weights of all linear layers, the head's too, in INT8, and a kernel that reads them.

    Args:
        int8_inputs: whether the inputs are rounded to INT8 as well.
    """
    coded = round_to_nearest(copy.deepcopy(model), Grid(8, group_size=None, symmetric=True), head=True)
    use_kernels(coded, int8_inputs)
    return coded


def ours(model: gptlite.GPTlite) -> Engine:
    """The package's plain loop over its static cache."""

    def generate(prompt: Tensor, n_new: int) -> Tensor:
        B, n = prompt.shape
        return gptlite.generate(model, prompt, n_new, GREEDY, StaticCache(model, B, n + n_new))[:, n:]

    def read(prompt: Tensor) -> Tensor:
        return prefill(model, prompt, StaticCache(model, *prompt.shape))

    return Engine(generate, read)


def theirs(model: gptlite.GPTlite) -> Engine:
    """transformers' `generate`, as it comes."""
    transformers.logging.set_verbosity_error()
    peer = OPTForCausalLM(OPTConfig(**opt_config(model))).eval()
    peer.load_state_dict(opt_weights(model), strict=True)

    def generate(prompt: Tensor, n_new: int) -> Tensor:
        answer = peer.generate(prompt, attention_mask=torch.ones_like(prompt), max_new_tokens=n_new, do_sample=False)
        return answer[:, prompt.shape[1] :]

    def read(prompt: Tensor) -> Tensor:
        return peer(prompt, use_cache=True, logits_to_keep=1).logits[:, -1]

    return Engine(generate, read)


class CTranslate2:
    """CTranslate2 on the exported folder; its vocabulary is a character for each token."""

    def __init__(self, model: gptlite.GPTlite, threads: int, compute_type: str = "float32") -> None:
        from ctranslate2 import Generator
        from ctranslate2.converters import TransformersConverter

        first, V = 0x20000, model.fc_out.out_features  # a plane of Unicode with room for 65,536 characters
        self.tokenizer = CharTokenizer("".join(map(chr, range(first, first + V))))
        with tempfile.TemporaryDirectory() as scratch:
            folder = Path(scratch)
            export_hf(model, self.tokenizer, folder / "hf")
            TransformersConverter(str(folder / "hf")).convert(str(folder / "ct2"))
            # it wants names for special tokens, which a text of characters has not: the last character stands for
            # them, and as the end of a text it never comes (min_length), which costs one token of the vocabulary
            config = json.loads((folder / "ct2" / "config.json").read_text())
            config |= dict.fromkeys(("bos_token", "eos_token", "unk_token"), self.tokenizer.chars[-1])
            (folder / "ct2" / "config.json").write_text(json.dumps(config))
            options = {"device": "cpu", "compute_type": compute_type, "intra_threads": threads}
            # rounding weights leaves threads with whoever loads them, and they would count (see `Apart`)
            with ThreadPoolExecutor(1) as loader:
                self.generator = loader.submit(Generator, str(folder / "ct2"), **options).result()

    def answer(self, prompts: Sequence[Sequence[int]], n_new: int) -> list[list[int]]:
        """n_new greedy tokens for each prompt, which may differ in length."""
        words = [[self.tokenizer.chars[i] for i in row] for row in prompts]
        answers = self.generator.generate_batch(
            words, max_length=n_new, min_length=n_new, sampling_topk=1, include_prompt_in_result=False
        )
        return [answer.sequences_ids[0] for answer in answers]

    def engine(self) -> Engine:
        """The same for prompts of one length."""

        def read(prompt: Tensor) -> None:
            self.answer(prompt.tolist(), 1)

        return Engine(lambda prompt, n_new: torch.tensor(self.answer(prompt.tolist(), n_new)), read)


@torch.inference_mode()
def llama(model: gptlite.GPTlite, threads: int, kind: str) -> Engine:
    """llama.cpp, which has no OPT: the same work, and other tokens.

    Raises: SystemExit when its logits are not those of the same weights with GELU.
    """
    from llama import LlamaCpp

    peer = LlamaCpp(model, threads, kind)
    gelu = copy.deepcopy(model)
    for block in gelu.blocks:
        block.ffwd.net[1] = nn.GELU("tanh")
    prompt = torch.arange(16).view(2, 8)
    expected = gelu(prompt)[:, -1]
    # it looks GELU up in fp16 and keeps keys and values in it, and q8_0 rounds more; wrong weights are off by about 1
    off = float((peer.prefill(prompt) - expected).std() / expected.std())
    if off > 0.05:
        raise SystemExit(f"llama.cpp's logits in {kind} are off by {off:.2f} of their spread: nothing to compare")
    return Engine(peer.generate, peer.prefill)


def make_engine(shape: str, threads: int, name: str) -> Engine:
    """One of `ENGINES`, with the shape's weights, in a process of its own (see `Apart`).

    Args:
        threads: those of the engine. torch keeps none beside another library's: both would share the cores.
    """
    torch.set_num_threads(threads if name not in NOT_TORCH else 1)
    model = make_model(shape)
    make: dict[str, Callable[[], Engine]] = {
        PEER: lambda: theirs(model),
        PLAIN: lambda: ours(model),
        SPLIT: lambda: ours(split(model)),
        PACKED: lambda: ours(pack(model)),
        COMPILED: lambda: ours(compile_step(model)),
        INT8: lambda: ours(int8_weights(model)),
        INT8_INPUTS: lambda: ours(int8_weights(model, int8_inputs=True)),
        CT2: lambda: CTranslate2(model, threads).engine(),
        CT2_INT8: lambda: CTranslate2(model, threads, "int8").engine(),
        LLAMA: lambda: llama(model, threads, "F32"),
        LLAMA_INT8: lambda: llama(model, threads, "Q8_0"),
    }
    return make[name]()


def timed_engine(shape: str, threads: int, name: str) -> Callable[[list[list[int]], int], tuple[Any, float]]:
    """The engine as a function of prompts [B, n] and n_new: its new tokens [B, n_new] and its seconds.

    Without new tokens it reads the prompts, and gives None and its seconds.
    """
    engine = make_engine(shape, threads, name)

    @torch.inference_mode()
    def run(prompts: list[list[int]], n_new: int) -> tuple[Any, float]:
        prompt = torch.tensor(prompts)
        start = time.perf_counter()
        tokens = engine.generate(prompt, n_new) if n_new else engine.prefill(prompt)
        seconds = time.perf_counter() - start
        return tokens.tolist() if n_new else None, seconds

    return run


def timed_answers(
    shape: str, threads: int, groups: list[tuple[list[list[int]], int]]
) -> Callable[[], tuple[list[list[list[int]]], float, float]]:
    """CTranslate2 on groups of prompts of mixed lengths, each with the number of tokens it needs.

    Returns: a function that gives each group's new tokens, its seconds and the processor's.
    """
    torch.set_num_threads(1)
    peer = CTranslate2(make_model(shape), threads)

    def run() -> tuple[list[list[list[int]]], float, float]:
        start, used = time.perf_counter(), time.process_time()
        answers = [peer.answer(prompts, n_new) for prompts, n_new in groups]
        return answers, time.perf_counter() - start, time.process_time() - used

    return run
