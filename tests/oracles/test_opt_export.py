"""The exported folder is the same model and the same tokenizer to transformers, an independent implementation."""

import copy
import json
from collections.abc import Callable
from pathlib import Path

import pytest
import torch
from safetensors.torch import load_file
from transformers import AutoModelForCausalLM, AutoTokenizer, OPTForCausalLM
from transformers.cache_utils import DynamicCache as HFDynamicCache
from transformers.cache_utils import StaticCache as HFStaticCache

import gptlite
from gptlite.cache.dense import DynamicCache, StaticCache
from gptlite.data import CharTokenizer
from gptlite.export import export_hf
from gptlite.generate import decode_step, prefill
from gptlite.model import GPTlite
from gptlite.sampling import SamplingParams

Exported = tuple[GPTlite, CharTokenizer, Path]
AsOPT = Callable[..., OPTForCausalLM]
GREEDY = SamplingParams(temperature=0.0)
TEXT = "KING HENRY:\nNow, sir, what make you here? You speak of one that lov'd not wisely but too well.\n\nROMEO:\nO, "


@torch.no_grad()
def difference(ours: GPTlite, theirs: OPTForCausalLM, tokens: torch.Tensor) -> float:
    """The largest difference of two models' logits."""
    return (ours(tokens) - theirs(tokens).logits).abs().max().item()


@pytest.mark.parametrize(
    "changes", [{}, {"n_layers": 1}, {"n_heads": 1, "d_head": 64}, {"n_heads": 16, "d_head": 4, "d_ff": 17}]
)
def test_logits_of_random_models(
    random_model: Callable[..., GPTlite], as_opt: AsOPT, tmp_path: Path, changes: dict[str, int]
) -> None:
    model = random_model(**changes)
    V = model.token_embedding.num_embeddings
    export_hf(model, CharTokenizer("".join(map(chr, range(40, 40 + V)))), tmp_path / "opt")
    theirs = as_opt(tmp_path / "opt")
    tokens = torch.randint(V, (3, model.context_length), generator=torch.Generator().manual_seed(1))
    assert difference(model, theirs, tokens) < 1e-5
    # the head's bias matters here: without the fold the logits differ by far more
    model.fc_out.bias.data.zero_()
    assert difference(model, theirs, tokens) > 1e-2


def test_logits_of_the_trained_model(exported_trained: Exported, as_opt: AsOPT) -> None:
    """To 1e-5 in fp32, on logits of up to 20, where one unit in the last place is 2e-6.

    The same sums in the same order: the head has no bias to fold, and both scale the queries.
    """
    model, tokenizer, folder = exported_trained
    tokens = tokenizer.encode((TEXT * 3)[: model.context_length])[None]
    assert difference(model, as_opt(folder), tokens) < 1e-5
    random = torch.randint(tokenizer.vocab_size, (4, model.context_length), generator=torch.Generator().manual_seed(1))
    assert difference(model, as_opt(folder), random) < 1e-5
    assert difference(copy.deepcopy(model).double(), as_opt(folder, torch.float64), tokens) < 1e-7


def test_a_large_vocabulary_with_a_bias_of_zero(
    random_model: Callable[..., GPTlite], as_opt: AsOPT, tmp_path: Path
) -> None:
    model = random_model(vocab_size=100)
    model.fc_out.bias.data.zero_()
    export_hf(model, CharTokenizer("".join(map(chr, range(40, 140)))), tmp_path / "opt")
    assert difference(model, as_opt(tmp_path / "opt"), torch.arange(96).view(2, 48)) < 1e-5


def test_the_folder_is_what_auto_classes_expect(exported: Exported) -> None:
    model, _, folder = exported
    theirs = AutoModelForCausalLM.from_pretrained(folder)
    assert type(theirs) is OPTForCausalLM
    stored = load_file(folder / "model.safetensors")
    assert {t.dtype for t in stored.values()} == {torch.float32}
    # no weight is missing, none is left over, and the head is not the embedding
    assert {name: tuple(t.shape) for name, t in theirs.state_dict().items()} == {
        name: tuple(t.shape) for name, t in stored.items()
    }
    assert not torch.equal(theirs.lm_head.weight, theirs.model.decoder.embed_tokens.weight)
    config = json.loads((folder / "config.json").read_text())
    assert config["max_position_embeddings"] == model.context_length and config["word_embed_proj_dim"] == 64


def greedy_text_of_both(exported: Exported, as_opt: AsOPT, prompt: str, n_new: int) -> tuple[str, str]:
    """Greedy text by us and by transformers' generate; in fp64, where rounding cannot decide between near ties."""
    model, tokenizer, folder = exported
    model = copy.deepcopy(model).double()
    ours = gptlite.generate(model, tokenizer.encode(prompt)[None], n_new, GREEDY)
    hf = AutoTokenizer.from_pretrained(folder)
    theirs = as_opt(folder, torch.float64).generate(
        **hf(prompt, return_tensors="pt"), max_new_tokens=n_new, do_sample=False
    )
    return tokenizer.decode(ours[0]), hf.decode(theirs[0])


def test_greedy_text_of_the_trained_model(exported_trained: Exported, as_opt: AsOPT) -> None:
    ours, theirs = greedy_text_of_both(exported_trained, as_opt, "ROMEO:\n", 200)
    assert len(ours) == len("ROMEO:\n") + 200
    assert ours == theirs


def test_greedy_text_of_a_random_model(exported: Exported, as_opt: AsOPT) -> None:
    ours, theirs = greedy_text_of_both(exported, as_opt, "A b:\n", 40)
    assert ours == theirs


def test_tokenizer_round_trip(exported: Exported) -> None:
    _, tokenizer, folder = exported
    theirs = AutoTokenizer.from_pretrained(folder)
    for text in (
        tokenizer.chars,
        tokenizer.chars[::-1],
        "A  b\n\n\n c , d . e ! ' f\n",
        " \n",
        "\n",
        " ",
        "\t\n \t",
        "é—😀é",
        " a ",
        "i'j - A'a",
    ):
        ids = theirs.encode(text)
        assert ids == tokenizer.encode(text).tolist(), text
        assert theirs.decode(ids) == text == theirs.decode(ids, skip_special_tokens=True)
    for i, char in enumerate(tokenizer.chars):
        assert theirs.encode(char) == [i] and theirs.decode([i]) == char
    assert len(theirs) == tokenizer.vocab_size


def test_tokenizer_of_the_trained_model(exported_trained: Exported) -> None:
    _, tokenizer, folder = exported_trained
    theirs = AutoTokenizer.from_pretrained(folder)
    for text in (tokenizer.chars, TEXT, *tokenizer.chars):
        assert theirs.encode(text) == tokenizer.encode(text).tolist()
        assert theirs.decode(theirs.encode(text)) == text


def test_an_unknown_character_is_refused_by_both(exported: Exported) -> None:
    _, tokenizer, folder = exported
    with pytest.raises(ValueError, match="'Z' at position 1"):
        tokenizer.encode("AZ")
    with pytest.raises(Exception, match="UNK"):
        AutoTokenizer.from_pretrained(folder).encode("AZ")


@pytest.mark.parametrize("kind", ["dynamic", "static"])
@pytest.mark.parametrize("trained", [False, True])
def test_caches_step_by_step(request: pytest.FixtureRequest, as_opt: AsOPT, kind: str, trained: bool) -> None:
    """A prompt, a chunk of tokens, then single ones: after each, our logits equal those over transformers' cache."""
    model, tokenizer, folder = request.getfixturevalue("exported_trained" if trained else "exported")
    theirs = as_opt(folder)
    B, n = 2, 40
    tokens = torch.randint(tokenizer.vocab_size, (B, n), generator=torch.Generator().manual_seed(2))
    ours = DynamicCache(model) if kind == "dynamic" else StaticCache(model, B, n)
    cache = HFDynamicCache() if kind == "dynamic" else HFStaticCache(theirs.config, max_cache_len=n)
    begin = 0
    for n_new in (9, 5, *[1] * (n - 14)):
        part = tokens[:, begin : begin + n_new]
        logits = prefill(model, part, ours) if n_new > 1 else decode_step(model, part[:, 0], ours)
        with torch.no_grad():
            want = theirs(part, cache=cache, use_cache=True).logits[:, -1]
        # the trained model's logits are large: for them as in `test_logits_of_the_trained_model`
        torch.testing.assert_close(logits, want, atol=1e-5, rtol=1e-5 if trained else 0)
        begin += n_new
        assert cache.get_seq_length() == ours.next_position(0) == begin
