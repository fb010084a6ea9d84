"""The Minitron recipe on a tiny model: shapes, stages, steps, cards; and the sweeps that the chapter records."""

import json
from dataclasses import replace

import pytest
import torch

import gptlite.sweeps.pruning as sweeps
from gptlite.arithmetic import ModelShape, n_params
from gptlite.checkpoint import load_checkpoint, save_checkpoint
from gptlite.compress import minitron
from gptlite.compress.minitron import STARTS, Recipe, distil, first_student, make_pruned, target_shape
from gptlite.compress.sparsify import zeros
from gptlite.compress.structured import describe
from gptlite.config import GPTConfig, preset
from gptlite.data import CharTokenizer, load_corpus
from gptlite.measure import validation_loss
from gptlite.model import GPTlite
from gptlite.notebook.labs_pruning import PruningLab
from gptlite.record import random_model, run_sweep
from gptlite.sweeps.pruning import read_curve
from gptlite.sweeps.pruning_times import CUTS, cut_model
from gptlite.train import TrainSettings

TEXT = torch.randint(23, (600,), generator=torch.Generator().manual_seed(3))
SETTINGS = TrainSettings(10, 2, 0.002, "adamw", "fp32", 2, 1.0, 0.0, 1, 2)


def make_model(n_kv_heads: int = 4, n_layers: int = 4) -> GPTlite:
    torch.manual_seed(1)
    return GPTlite(GPTConfig(23, 16, n_layers, d_model=16, n_heads=4, d_head=4, n_kv_heads=n_kv_heads, d_ff=20)).eval()


@pytest.mark.parametrize("start", STARTS)
def test_every_start_ends_at_its_shape_after_as_many_steps(start: str) -> None:
    teacher, steps = make_model(), []
    before = {name: value.clone() for name, value in teacher.state_dict().items()}
    student, curve = distil(teacher, Recipe(start), TEXT, SETTINGS, TEXT[:40], lambda step, loss: steps.append(step))
    config = student.config
    expected = (2, 4, 20) if start == "depth" else (4, 2, 10)
    assert (config.n_layers, config.n_heads, config.d_ff) == expected
    assert student.n_params == n_params(ModelShape.of(config)) == curve[-1][2]
    assert steps == list(range(1, 11))  # those of the search for masks count too
    assert curve[-1][0] == 10 * 2 * 16
    assert curve[-1][1] == pytest.approx(validation_loss(student, TEXT[:40]), abs=1e-4)
    assert all(torch.equal(teacher.state_dict()[name], value) for name, value in before.items())


def test_the_iterative_start_shrinks_by_a_fifth_of_what_goes() -> None:
    _, curve = distil(make_model(), Recipe("iterative"), TEXT, replace(SETTINGS, save_every=1), TEXT[:40])
    sizes = {row[0]: row[2] for row in curve if curve.count(row) == 1}
    assert len({row[2] for row in curve}) == 5
    assert sorted({row[2] for row in curve}, reverse=True) == list(dict.fromkeys(row[2] for row in curve))
    assert sizes
    assert Recipe("iterative").shares == pytest.approx([0.9, 0.8, 0.7, 0.6, 0.5])
    assert Recipe("one-shot", 0.3).shares == pytest.approx([0.3])
    with pytest.raises(ValueError, match="steps is 4, the 5 stages"):
        distil(make_model(), Recipe("iterative"), TEXT, replace(SETTINGS, steps=4), TEXT[:40])


def test_each_stage_learns_from_other_batches_towards_the_whole_model(monkeypatch) -> None:
    calls = []

    def uptrain(student, tokens, settings, teacher, parts, watch, on_step):
        calls.append((settings.seed, settings.steps, teacher, parts))
        return [[0, 1.0], [settings.steps * 32, 0.5, 1.0]]

    monkeypatch.setattr(minitron, "uptrain", uptrain)
    teacher = make_model()
    for seed in (1, 2):
        distil(teacher, Recipe("iterative"), TEXT, replace(SETTINGS, steps=12, seed=seed), TEXT[:40])
    assert len({seed for seed, *_ in calls}) == 10
    assert [steps for _, steps, *_ in calls[:5]] == [2, 2, 3, 2, 3]
    assert all(given is teacher and parts == "all" for *_, given, parts in calls)


def test_a_random_start_has_nothing_of_the_teacher_and_depends_on_its_seed() -> None:
    teacher = make_model()
    one, same, other = (
        first_student(teacher, Recipe("random"), TEXT, replace(SETTINGS, seed=seed))[0] for seed in (1, 1, 2)
    )
    cut, _ = first_student(teacher, Recipe("one-shot"), TEXT, SETTINGS)
    assert torch.equal(one.fc_out.weight, same.fc_out.weight)
    assert not torch.equal(one.fc_out.weight, other.fc_out.weight)
    assert torch.equal(cut.fc_out.weight, teacher.fc_out.weight)
    assert one.config == cut.config


def test_shapes_of_grouped_heads() -> None:
    assert target_shape(preset("gptlite"), 0.5) == (4, 512)
    config = GPTConfig(23, 16, 1, d_model=16, n_heads=8, d_head=4, n_kv_heads=4)
    assert [target_shape(config, keep)[0] for keep in (0.9, 0.5, 0.3, 0.01)] == [8, 4, 4, 4]
    student, _ = first_student(make_model(n_kv_heads=2), Recipe("random"), TEXT, SETTINGS)
    cut, _ = first_student(make_model(n_kv_heads=2), Recipe("one-shot"), TEXT, SETTINGS)
    assert student.config == cut.config == describe(cut)
    assert cut.config.n_kv_heads == 2


@pytest.mark.parametrize(
    ("fields", "message"),
    [({"start": "luck"}, "start is 'luck'"), ({"keep": 0.0}, "keep is 0.0"), ({"keep": 1.0}, "keep is 1.0")],
)
def test_a_bad_recipe_is_refused(fields: dict, message: str) -> None:
    with pytest.raises(ValueError, match=message):
        Recipe(**fields)


def test_a_depth_that_takes_no_block_is_refused() -> None:
    model = make_model()
    with pytest.raises(ValueError, match=f"keep is 0.95, so all {len(model.blocks)} blocks would stay"):
        first_student(model, Recipe("depth", 0.95), TEXT, SETTINGS)


@pytest.fixture
def base(tmp_path, monkeypatch):
    text = tmp_path / "text.txt"
    text.write_text("the rain in spain stays mainly in the plain. " * 40, encoding="utf-8")
    corpus = load_corpus(text)
    tokenizer = CharTokenizer.of(corpus.train, corpus.held_out)
    torch.manual_seed(0)
    model = GPTlite(GPTConfig(tokenizer.vocab_size, 16, 2, d_model=16, n_heads=4, d_head=4)).eval()
    named = {"name": corpus.name, "sha256": corpus.sha256, "train_chars": len(corpus.train)}
    path = tmp_path / "base.safetensors"
    save_checkpoint(path, model, tokenizer, {"corpus": named, "validation_loss": 3.0, "tokens_seen": 3200})
    monkeypatch.setattr(sweeps, "load_corpus", lambda: corpus)
    return path, corpus


def test_the_card_says_what_was_made_and_its_loss_is_that_of_the_file(base, tmp_path) -> None:
    path, corpus = base
    out = tmp_path / "small.safetensors"
    card = make_pruned(path, Recipe("one-shot"), corpus, out, SETTINGS, "gptlite prune")
    stored, tokenizer = load_checkpoint(out)
    assert card["n_params"] == stored.n_params
    assert card["losses"]["after"] == pytest.approx(
        validation_loss(stored, tokenizer.encode(corpus.held_out)), abs=1e-4
    )
    assert (card["tokens_seen"], card["share_of_original_tokens"]) == (320, 0.1)
    assert json.loads(out.with_suffix(".json").read_text(encoding="utf-8")) == card
    other = replace(corpus, train=corpus.train + "!")
    with pytest.raises(ValueError, match="was trained on another text"):
        make_pruned(path, Recipe(), other, out, SETTINGS)


def test_finished_runs_are_kept_and_others_are_made(base, tmp_path, monkeypatch) -> None:
    path, _ = base
    params = {"model": str(path), "curves": ["one-shot 0.002", "random 0.004"], "seeds": [1, 2], "steps": 4, "batch": 1}
    *_, first = run_sweep("minitron", **params, folder=str(tmp_path))
    assert [(p.at["start"], p.at["seed"]) for p in first.points] == [
        (s, i) for s in ("one-shot", "random") for i in (1, 2)
    ]
    assert first.params["folder"] == tmp_path.name
    assert [run["settings"]["lr"] for run in first.data["runs"]] == [0.002, 0.002, 0.004, 0.004]
    assert "gptlite prune --start one-shot --steps 4" in first.data["runs"][0]["command"]
    (tmp_path / "random-0.004-2.json").unlink()
    made = []
    real = sweeps.make_pruned
    monkeypatch.setattr(sweeps, "make_pruned", lambda *args: made.append(args[1].start) or real(*args))
    *_, second = run_sweep("minitron", **params, folder=str(tmp_path))
    assert made == ["random"]
    assert second.data["runs"] == first.data["runs"]
    assert [p.samples for p in second.points[:3]] == [p.samples for p in first.points[:3]]
    *_, longer = run_sweep("minitron", **{**params, "steps": 5, "seeds": [1]}, folder=str(tmp_path))
    assert made[1:] == ["one-shot", "random"]  # another run is not taken for this one
    assert longer.complete
    for text in ("one-shot", "one-shot fast", "a b c"):
        with pytest.raises(ValueError, match="curve is"):
            read_curve(text)


def test_losses_without_training_are_recorded(base) -> None:
    path, _ = base
    *_, weights = run_sweep(
        "prune-weights", model=str(path), methods=["magnitude", "wanda"], sparsities=[50], calibration=2, windows=4
    )
    assert [(r["method"], r["pattern"], r["zeros"]) for r in weights.data["losses"]] == [
        (method, pattern, 50) for method in ("magnitude", "wanda") for pattern in ("scattered", "2:4")
    ]
    *_, parts = run_sweep(
        "prune-structures",
        model=str(path),
        criteria=["activation", "random"],
        shares=[25, 50],
        calibration=2,
        windows=4,
    )
    data = parts.data
    assert (len(data["influence"]), len(data["without_block"])) == (2, 2)
    assert data["whole"] == {"heads": 4, "neurons": 64, "n_params": load_checkpoint(path)[0].n_params}
    assert [(r["gone"], r["heads"], r["neurons"]) for r in data["losses"][:2]] == [(25, 3, 48), (50, 2, 32)]
    for row in data["losses"]:
        assert row["n_params_both"] < min(row["n_params_heads"], row["n_params_neurons"])


@pytest.mark.parametrize("cut", CUTS)
def test_cut_models_have_half_of_something(cut: str) -> None:
    config = preset("nano", n_kv_heads=2)
    model = cut_model(random_model(config), cut)
    now, whole = describe(model), n_params(ModelShape.of(config))
    if cut.startswith("zeros"):
        none, total = zeros(model)
        assert (now, model.n_params, none) == (config, whole, total // 2)
    elif cut != "whole":
        changed = {
            "half the blocks": {"n_layers": 1},
            "half the channels": {"d_model": 32},
            "half the heads and neurons": {"n_heads": 2, "d_ff": 128},
        }[cut]
        assert now == GPTConfig.from_dict({**config.to_dict(), **changed})


def test_the_lab_measures_and_names_every_cut() -> None:
    lab = PruningLab("cpu")
    for name, value in {"preset": "nano", "context": 64, "prompt": 16, "repeats": 2}.items():
        lab.inputs[name].value = value
    lab.start()
    assert lab.wait(60)
    assert lab.state == "done", lab.message
    rows = lab.rows(lab.recording)
    assert [(row["Pruned"], row["Phase"]) for row in rows] == [(c, p) for c in CUTS for p in ("decode", "prefill")]
    assert rows[0]["Times as fast"] == rows[1]["Times as fast"] == 1
    shape = ModelShape.of(preset("nano", context_length=64))
    assert lab.needed_bytes(lab.settings) > 8 * n_params(shape)
    assert {p.at["n_params"] for p in lab.recording.points if p.at["cut"].startswith("zeros")} == {n_params(shape)}


def test_a_sweep_of_times_that_makes_no_sense_is_refused() -> None:
    for changes, message in (
        ({"cuts": ["half the floor"]}, "cut is 'half the floor'"),
        ({"context": 4}, "context is 4"),
    ):
        with pytest.raises(ValueError, match=message):
            list(run_sweep("prune-times", preset="nano", **changes))
