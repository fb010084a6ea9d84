"""Uptraining and the files of converted models: what moves, what stays, what is stored, and what a card says."""

import hashlib
import json
from copy import deepcopy
from pathlib import Path

import pytest
import torch
from safetensors.torch import load_file, save_file

import gptlite
from gptlite import checkpoint
from gptlite.checkpoint import load_checkpoint, read_card, save_checkpoint
from gptlite.config import GPTConfig
from gptlite.data import CharTokenizer, Corpus
from gptlite.measure import validation_loss
from gptlite.model import GPTlite
from gptlite.train import TrainSettings
from gptlite.variants.convert import Conversion, calibration_moments, make_variant
from gptlite.variants.grouped import to_grouped
from gptlite.variants.mla import LatentAttention, to_latent
from gptlite.variants.stored import attention_of, load_variant, save_variant
from gptlite.variants.uptrain import uptrain

CHARS = "\nabcdefgh"
TEXT = "".join(CHARS[(i * i + i // 7) % len(CHARS)] for i in range(900))
CORPUS = Corpus("squares", TEXT[:700], TEXT[700:])
SETTINGS = TrainSettings(steps=5, batch_size=2, lr=0.01, optimizer="adamw", warmup=0, cooldown=1.0, save_every=2)


@pytest.fixture(scope="module")
def base(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A checkpoint with a card, as training writes it; its weights are random and large enough to matter."""
    torch.manual_seed(0)
    model = GPTlite(GPTConfig(len(CHARS), 12, n_layers=2, d_model=16, n_heads=4, d_head=4, d_ff=24)).eval()
    for parameter in model.parameters():
        torch.nn.init.normal_(parameter, std=0.2)
    path = tmp_path_factory.mktemp("base") / "base.safetensors"
    corpus = {"name": CORPUS.name, "sha256": CORPUS.sha256, "train_chars": len(CORPUS.train)}
    save_checkpoint(path, model, CharTokenizer(CHARS))
    stored, tokenizer = load_checkpoint(path)
    loss = validation_loss(stored, tokenizer.encode(CORPUS.held_out))
    save_checkpoint(path, model, tokenizer, {"corpus": corpus, "validation_loss": loss, "tokens_seen": 10_000})
    return path


def tokens_of(text: str) -> torch.Tensor:
    return CharTokenizer(CHARS).encode(text)


# -- uptraining ---------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("parts", ["attention", "all"])
@pytest.mark.parametrize("distil", [True, False])
def test_a_run_moves_what_it_may_and_brings_the_loss_down(base: Path, parts: str, distil: bool) -> None:
    teacher, _ = load_checkpoint(base)
    model = to_latent(teacher, 3)
    before = deepcopy(model.state_dict())
    text = tokens_of(CORPUS.train)
    curve = uptrain(model, text, SETTINGS, teacher if distil else None, parts, text[:49])
    moved = {name for name, weight in model.state_dict().items() if not torch.equal(weight, before[name])}
    attention = {name for name in before if ".mha." in name or ".ln1." in name}
    assert moved >= attention - {"blocks.0.mha.query_proj.bias"}
    assert (moved - attention == set()) == (parts == "attention")
    # rows at the start, every two steps and at the end; 2 windows of 12 tokens a step
    assert [row[0] for row in curve] == [0, 48, 96, 120]
    assert [len(row) for row in curve] == [2, 3, 3, 3]
    assert curve[0][1] == pytest.approx(validation_loss_of(before, text[:49], teacher), abs=1e-4)
    # a teacher's distribution comes nearer step by step; of the text itself the loss of the first windows falls
    assert curve[-1][1] < curve[1][1] if distil else curve[-1][2] < curve[0][1]
    assert not model.training
    assert all(parameter.requires_grad for parameter in model.parameters())


def validation_loss_of(state: dict[str, torch.Tensor], text: torch.Tensor, like: GPTlite) -> float:
    model = to_latent(like, 3)
    model.load_state_dict(state)
    return validation_loss(model, text)


def test_the_same_run_twice_gives_the_same_weights(base: Path) -> None:
    found = []
    for _ in range(2):
        teacher, _ = load_checkpoint(base)
        model = to_grouped(teacher, 2)
        uptrain(model, tokens_of(CORPUS.train), SETTINGS, teacher)
        found.append(model.state_dict())
    assert all(torch.equal(weight, found[1][name]) for name, weight in found[0].items())


def test_distilling_into_the_teacher_itself_changes_nothing(base: Path) -> None:
    """KL(p || p) is zero with a gradient of zero: an optimiser without weight decay stays where it is."""
    teacher, _ = load_checkpoint(base)
    model = deepcopy(teacher)
    settings = TrainSettings(**{**SETTINGS.__dict__, "lr": 1e-6, "weight_decay": 0.0})
    curve = uptrain(model, tokens_of(CORPUS.train), settings, teacher)
    assert all(abs(row[1]) < 1e-5 for row in curve[1:])


def test_a_run_that_diverges_stops_with_the_step_and_the_rate(base: Path) -> None:
    model, _ = load_checkpoint(base)
    settings = TrainSettings(**{**SETTINGS.__dict__, "lr": 1e30})
    with pytest.raises(ValueError, match=r"the loss of step \d is (nan|inf): choose a learning rate below 1e\+30"):
        uptrain(model, tokens_of(CORPUS.train), settings, None, "all")


def test_unknown_parts_are_refused(base: Path) -> None:
    with pytest.raises(ValueError, match="parts is 'head', it must be one of attention, all"):
        uptrain(load_checkpoint(base)[0], tokens_of(TEXT), SETTINGS, None, "head")


# -- conversions --------------------------------------------------------------------------------------------------


def test_a_card_says_what_was_lost_and_won_back(base: Path, tmp_path: Path) -> None:
    for name in ("base.safetensors", "base.json"):
        (tmp_path / name).write_bytes((base.parent / name).read_bytes())
    there, out = tmp_path / "base.safetensors", tmp_path / "small.safetensors"
    card = make_variant(there, Conversion("grouped", 1, "mean"), CORPUS, out, SETTINGS, parts="attention", command="x")
    assert json.loads(out.with_suffix(".json").read_text()) == card
    held_out = tokens_of(CORPUS.held_out)
    model, tokenizer = load_variant(out)
    plain, _ = load_checkpoint(there)
    losses = {
        "original": validation_loss(plain, held_out),
        "converted": validation_loss(to_grouped(plain, 1), held_out),
        "after": validation_loss(model, held_out),
    }
    assert card["losses"] == {name: round(loss, 4) for name, loss in losses.items()}
    lost, left = losses["converted"] - losses["original"], losses["after"] - losses["original"]
    assert card["recovered"] == (pytest.approx(1 - left / lost, abs=1e-3) if lost > 0 else None)
    assert card["tokens_seen"] == 5 * 2 * 12
    assert card["share_of_original_tokens"] == 0.012
    assert card["cache_values_per_token"] == 2 * 2 * 4  # layers, keys and values, head size, of one head
    assert (card["base"], card["command"], card["parts"]) == ("base.safetensors", "x", "attention")
    assert tokenizer.chars == CHARS
    again = make_variant(there, Conversion("grouped", 1, "mean"), CORPUS, out, SETTINGS, True, "attention", "x")
    assert again == card


def test_a_conversion_alone_has_no_curve_and_recovers_nothing(base: Path, tmp_path: Path) -> None:
    for name in ("base.safetensors", "base.json"):
        (tmp_path / name).write_bytes((base.parent / name).read_bytes())
    card = make_variant(
        tmp_path / "base.safetensors", Conversion("latent", 5, "data"), CORPUS, tmp_path / "a.safetensors"
    )
    assert card["losses"]["after"] == card["losses"]["converted"]
    assert (card["settings"], card["loss_curve"], card["tokens_seen"], card["recovered"]) == (None, [], 0, None)
    model, _ = load_variant(tmp_path / "a.safetensors")
    plain, _ = load_checkpoint(base)
    want = to_latent(plain, 5, calibration_moments(plain, tokens_of(CORPUS.train)))
    for name, weight in want.state_dict().items():
        torch.testing.assert_close(model.state_dict()[name], weight, rtol=1e-3, atol=1e-3)  # fp16 on disk


def test_another_text_is_refused(base: Path, tmp_path: Path) -> None:
    with pytest.raises(ValueError, match="was trained on another text than other"):
        make_variant(base, Conversion("grouped", 2, "mean"), Corpus("other", "abc", "def"), tmp_path / "x.safetensors")


def test_a_file_that_would_not_find_its_base_again_is_refused_before_any_work(base: Path, tmp_path: Path) -> None:
    """A delta and its base lie side by side; anything else would only fail after the uptraining, or eat the base."""
    for out in (tmp_path / "x.safetensors", base):
        with pytest.raises(ValueError, match="it must lie beside it, under another name"):
            make_variant(base, Conversion("grouped", 2, "mean"), CORPUS, out)
    assert load_checkpoint(base)[0].config.n_kv_heads == 4
    assert not list(tmp_path.iterdir())


@pytest.mark.parametrize(
    ("words", "message"),
    [
        (("sparse", 2, "mean"), "kind is 'sparse', it must be one of grouped, latent"),
        (("latent", 2, "mean"), "start is 'mean', for latent it must be one of weights, data"),
        (
            ("grouped", 2, "median"),
            "start is 'median', for grouped it must be one of mean, first, random, weights, data",
        ),
    ],
)
def test_a_conversion_that_is_none_is_refused(words: tuple[str, int, str], message: str) -> None:
    with pytest.raises(ValueError, match=message):
        Conversion(*words)


# -- files --------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("kind", ["grouped", "latent"])
def test_a_file_holds_what_changed_and_gives_the_model_back(base: Path, kind: str) -> None:
    plain, _ = load_checkpoint(base)
    model = to_grouped(plain, 2) if kind == "grouped" else to_latent(plain, 6)
    out = base.parent / f"{kind}.safetensors"
    save_variant(out, model, base)
    stored = load_file(out)
    parts = ("key_proj", "value_proj") if kind == "grouped" else ("latent_proj", "key_up", "value_up", "out_proj.bias")
    assert stored and all(any(part in name for part in parts) for name in stored)
    assert {tensor.dtype for tensor in stored.values()} == {torch.float16}
    found, tokenizer = load_variant(out)
    assert attention_of(found.blocks[1].mha) == (kind, 2 if kind == "grouped" else 6)
    assert isinstance(found.blocks[0].mha, LatentAttention) == (kind == "latent")
    tokens = tokenizer.encode("abcabc\nh")[None]
    with torch.no_grad():
        torch.testing.assert_close(found(tokens), model.half().float()(tokens), rtol=0, atol=1e-5)
    assert not found.training
    if kind == "grouped":
        assert found.config.n_kv_heads == 2


def written(source: Path, **changes: str) -> Path:
    """The file of a converted model with another header, or with other tensors."""
    plain, _ = load_checkpoint(source)
    path = source.parent / "changed.safetensors"
    save_variant(path, to_latent(plain, 6), source)
    tensors = load_file(path)
    header = {
        "format": "gptlite-variant-1",
        "base": "base.safetensors",
        "base_sha256": hashlib.sha256(source.read_bytes()).hexdigest(),
        "attention": json.dumps({"kind": "latent", "size": 6}),
    }
    tensor = changes.pop("tensor", None)
    if tensor == "missing":
        del tensors["blocks.0.mha.key_up.weight"]
    elif tensor == "unknown":
        tensors["blocks.0.mha.door.weight"] = torch.ones(2)
    elif tensor == "shape":
        tensors["blocks.0.mha.key_up.weight"] = torch.ones(3, 6, dtype=torch.float16)
    elif tensor == "nan":
        tensors["blocks.0.mha.key_up.weight"][0, 0] = float("nan")
    save_file(tensors, path, metadata={**header, **changes})
    return path


@pytest.mark.parametrize(
    ("changes", "message"),
    [
        ({"format": "gptlite-1"}, "its header does not say gptlite-variant-1"),
        ({"base": "other.safetensors"}, "its base other.safetensors is not there"),
        ({"base": "../../base.safetensors", "base_sha256": "0"}, "is not the one that it was converted from"),
        ({"base_sha256": "0" * 64}, "is not the one that it was converted from"),
        ({"attention": '{"kind": "sparse", "size": 6}'}, "its attention is"),
        ({"attention": '{"kind": "latent", "size": 0}'}, "its attention is"),
        ({"attention": '{"kind": "latent", "size": true}'}, "its attention is"),
        ({"attention": '{"kind": "latent", "size": 1e99}'}, "its attention is"),
        ({"attention": '{"kind": "latent", "size": 999999999999}'}, "its attention is"),
        ({"attention": '{"kind": "grouped", "size": 3}'}, "n_kv_heads is 3"),
        ({"attention": '{"kind": "grouped", "size": 2}'}, "is unknown"),
        ({"attention": '{"kind": "latent", "size": 5}'}, "it must be"),
        ({"attention": "[1"}, "no converted model of gptlite"),
        ({"attention": '["latent", 6]'}, "no converted model of gptlite"),
        ({"tensor": "missing"}, "weight blocks.0.mha.key_up.weight is missing"),
        ({"tensor": "unknown"}, "weight blocks.0.mha.door.weight is unknown"),
        ({"tensor": "shape"}, r"has shape \(3, 6\), it must be \(16, 6\)"),
        ({"tensor": "nan"}, "holds values that are not finite"),
    ],
)
def test_a_file_that_is_wrong_is_refused_in_one_line(base: Path, changes: dict[str, str], message: str) -> None:
    with pytest.raises(ValueError, match=message) as error:
        load_variant(written(base, **changes))
    assert "\n" not in str(error.value)


def test_a_truncated_or_missing_file_is_refused(base: Path, tmp_path: Path) -> None:
    content = written(base).read_bytes()
    for n in (0, 7, 200, len(content) - 1):
        path = base.parent / "cut.safetensors"
        path.write_bytes(content[:n])
        with pytest.raises(ValueError, match="no converted model of gptlite, or is damaged"):
            load_variant(path)
    with pytest.raises(ValueError, match="there is no checkpoint"):
        load_variant(tmp_path / "none.safetensors")


def test_what_cannot_be_written_is_refused(base: Path, tmp_path: Path) -> None:
    plain, _ = load_checkpoint(base)
    with pytest.raises(ValueError, match=r"must end in \.safetensors"):
        save_variant(tmp_path / "x.pt", to_latent(plain, 6), base)
    mixed = to_latent(plain, 6)
    mixed.blocks[0].mha = plain.blocks[0].mha
    with pytest.raises(ValueError, match="the blocks have different attentions"):
        save_variant(tmp_path / "x.safetensors", mixed, base)


# -- what ships ---------------------------------------------------------------------------------------------------

SHIPPED_VARIANTS = {"gptlite-gqa2": ("grouped", 2, 64 * 2), "gptlite-mla128": ("latent", 128, 128)}


@pytest.mark.parametrize("name", SHIPPED_VARIANTS)
def test_a_shipped_variant_loads_by_its_name_and_is_small(name: str) -> None:
    kind, size, width = SHIPPED_VARIANTS[name]
    model, tokenizer = gptlite.load(name)
    assert {attention_of(block.mha) for block in model.blocks} == {(kind, size)}
    assert tokenizer.chars == gptlite.load("gptlite")[1].chars
    path = checkpoint.checkpoint_path(name)
    assert path.stat().st_size < 4e6
    card = read_card(name)
    assert card["cache_values_per_token"] == 6 * width
    assert card["tokens_seen"] <= 0.05 * read_card("gptlite")["tokens_seen"]
    assert card["losses"]["original"] == read_card("gptlite")["validation_loss"]
    assert card["losses"]["original"] < card["validation_loss"] <= card["losses"]["converted"]
    # the card's losses are in bf16, the one that `gptlite measure --loss` computes again is in fp32
    assert card["validation_loss"] == pytest.approx(card["losses"]["after"], abs=2e-4)
    assert path.name in card["command"]
