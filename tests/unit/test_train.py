"""Training goes on where it was stopped, to the last bit; refuses what it can't continue; and learns."""

import json
import math
import os
import signal
import subprocess
import sys
from dataclasses import asdict, replace

import pytest
import torch
from safetensors import safe_open
from safetensors.torch import load as load_bytes

from gptlite.checkpoint import load_checkpoint, read_card
from gptlite.config import GPTConfig
from gptlite.data import CharTokenizer, Corpus, training_batch
from gptlite.measure import validation_loss
from gptlite.model import GPTlite
from gptlite.train import TrainSettings, loss_of, train

CONFIG = GPTConfig(
    vocab_size=99, context_length=12, n_layers=2, d_model=12, n_heads=4, d_head=4, n_kv_heads=2, d_ff=16, dropout=0.1
)
CORPUS = Corpus(
    "rhyme", "one two three four five, once I caught a fish alive.\n" * 8, "six seven eight nine ten.\n" * 2
)
SETTINGS = TrainSettings(steps=12, batch_size=3, warmup=3, save_every=4, cooldown=0.5, lr=0.02)


def losses_of(out, settings=SETTINGS, stop_after=None, **more):
    """Runs a training, if asked for only until a step is done, and returns the loss of each step."""
    seen = []

    def on_step(step, loss):
        seen.append((step, loss))
        if step == stop_after:
            raise KeyboardInterrupt

    if stop_after is None:
        train(CONFIG, CORPUS, settings, out, on_step=on_step, **more)
    else:
        with pytest.raises(KeyboardInterrupt):
            train(CONFIG, CORPUS, settings, out, on_step=on_step, **more)
    return seen


def weights(path):
    return load_bytes(path.read_bytes())


def assert_same_state(a, b):
    one, two = (weights(path.with_suffix(".state.safetensors")) for path in (a, b))
    assert one.keys() == two.keys()
    for name in one:
        assert torch.equal(one[name], two[name]), name


@pytest.mark.parametrize("optimizer", ["muon", "adamw"])
@pytest.mark.parametrize("stops", [(1,), (4,), (5, 11), (4, 8, 9)])
def test_a_stopped_run_ends_as_if_it_had_not_been_stopped(tmp_path, optimizer, stops):
    settings = replace(SETTINGS, optimizer=optimizer)
    plain = losses_of(tmp_path / "plain.safetensors", settings)
    assert [step for step, _ in plain] == list(range(1, 13))
    out, last = tmp_path / "stopped.safetensors", {}
    for stop in stops:
        torch.manual_seed(stop)  # whatever the state of the world
        last |= dict(losses_of(out, settings, stop_after=stop))
        assert not out.exists()
    last |= dict(losses_of(out, settings))
    assert sorted(last.items()) == plain  # the very same numbers
    assert_same_state(tmp_path / "plain.safetensors", out)
    assert read_card(out)["loss_curve"] == read_card(tmp_path / "plain.safetensors")["loss_curve"]
    assert read_card(out)["validation_loss"] == read_card(tmp_path / "plain.safetensors")["validation_loss"]


def test_what_a_resumed_run_computes_again_is_less_than_save_every(tmp_path):
    out = tmp_path / "m.safetensors"
    losses_of(out, stop_after=7)
    assert [step for step, _ in losses_of(out)] == list(range(5, 13))


def test_a_finished_run_computes_no_more_steps_and_writes_the_same_checkpoint(tmp_path):
    out = tmp_path / "m.safetensors"
    losses_of(out)
    before, card = weights(out), read_card(out)
    out.unlink()
    assert losses_of(out) == []
    assert read_card(out) == card
    assert all(torch.equal(before[name], t) for name, t in weights(out).items())


def test_begin_anew(tmp_path):
    out = tmp_path / "m.safetensors"
    first = losses_of(out)
    assert losses_of(out, resume=False) == first
    assert len(losses_of(out, replace(SETTINGS, seed=1), resume=False)) == 12


@pytest.mark.parametrize("steps", [10, 16, 30])
def test_the_number_of_steps_can_change_before_the_rate_falls(tmp_path, steps):
    """12 planned steps fall from step 6 on; a change at step 4 is one of plans that share those steps."""
    changed = replace(SETTINGS, steps=steps)
    plain = losses_of(tmp_path / "plain.safetensors", changed)
    out = tmp_path / "changed.safetensors"
    begun = losses_of(out, stop_after=4)
    assert begun + losses_of(out, changed) == plain
    assert_same_state(tmp_path / "plain.safetensors", out)


@pytest.mark.parametrize(("done", "steps"), [(8, 16), (8, 9), (4, 7), (12, 24)])
def test_the_number_of_steps_cannot_change_once_the_rate_falls(tmp_path, done, steps):
    out = tmp_path / "m.safetensors"
    losses_of(out, stop_after=done if done < 12 else None)
    with pytest.raises(ValueError, match=rf"has done {done} of 12 steps, {steps} can only be chosen up to step"):
        losses_of(out, replace(SETTINGS, steps=steps))


@pytest.mark.parametrize(
    ("change", "message"),
    [
        ({"lr": 0.01}, "with lr 0.02, not 0.01"),
        ({"seed": 5}, "with seed 0, not 5"),
        ({"optimizer": "adamw"}, "with optimizer muon, not adamw"),
        ({"batch_size": 4}, "with batch_size 3, not 4"),
        ({"precision": "bf16"}, "with precision fp32, not bf16"),
    ],
)
def test_the_state_of_another_run_is_refused(tmp_path, change, message):
    out = tmp_path / "m.safetensors"
    losses_of(out, stop_after=4)
    before = out.with_suffix(".state.safetensors").read_bytes()
    with pytest.raises(ValueError, match=message):
        losses_of(out, replace(SETTINGS, **change))
    assert out.with_suffix(".state.safetensors").read_bytes() == before


def test_the_state_of_another_shape_text_or_teacher_is_refused(tmp_path):
    out = tmp_path / "m.safetensors"
    losses_of(out, stop_after=4)
    with pytest.raises(ValueError, match="another config"):
        train(GPTConfig(**{**CONFIG.to_dict(), "n_layers": 1}), CORPUS, SETTINGS, out)
    with pytest.raises(ValueError, match="another corpus"):
        train(CONFIG, Corpus("rhyme", CORPUS.train + "once", CORPUS.held_out), SETTINGS, out)
    with pytest.raises(ValueError, match="another teacher"):
        train(CONFIG, CORPUS, SETTINGS, out, teacher=teacher())


@pytest.mark.parametrize("content", [b"", b"junk that is long enough to be a header", None])
def test_a_damaged_state_is_named(tmp_path, content):
    out = tmp_path / "m.safetensors"
    losses_of(out, stop_after=4)
    path = out.with_suffix(".state.safetensors")
    path.write_bytes(path.read_bytes()[:-100] if content is None else content)
    with pytest.raises(ValueError, match=r"m\.state\.safetensors is damaged .*; delete it, or begin anew"):
        losses_of(out)
    assert len(losses_of(out, resume=False)) == 12


def test_a_state_of_the_first_version_which_does_not_name_the_teacher_goes_on(tmp_path):
    from safetensors.torch import save_file

    plain = losses_of(tmp_path / "plain.safetensors")
    out = tmp_path / "m.safetensors"
    losses_of(out, stop_after=4)
    path = out.with_suffix(".state.safetensors")
    with safe_open(path, framework="pt") as file:
        header = file.metadata()
    run = json.loads(header["run"])
    del run["teacher"]
    save_file(weights(path), path, {**header, "run": json.dumps(run)})
    assert losses_of(out) == plain[4:]


def test_the_card_says_how_the_model_was_made(tmp_path):
    out = tmp_path / "m.safetensors"
    card = train(CONFIG, CORPUS, SETTINGS, out, command="gptlite train --steps 12")
    assert card == read_card(out)
    model, tokenizer = load_checkpoint(out)
    assert tokenizer.chars == "".join(sorted(set(CORPUS.train + CORPUS.held_out)))
    assert model.config.vocab_size == tokenizer.vocab_size != 99
    assert card["command"] == "gptlite train --steps 12"
    assert card["n_params"] == model.n_params
    assert card["config"] == model.config.to_dict()
    assert card["corpus"] == {"name": "rhyme", "sha256": CORPUS.sha256, "train_chars": len(CORPUS.train)}
    assert card["settings"] == asdict(SETTINGS)
    assert card["steps"] == 12
    assert card["tokens_seen"] == 12 * 3 * 12
    assert card["device"] == "cpu"
    assert card["torch"] == torch.__version__
    assert card["validation_loss_unit"] == "nats per character"
    # measured again from the file that was written
    again = validation_loss(model, tokenizer.encode(CORPUS.held_out))
    assert card["validation_loss"] == round(again, 4)


@pytest.mark.parametrize(("d_model", "moves"), [(12, False), (36, True)])
def test_the_head_s_bias_ends_in_the_last_norm_where_there_is_room(tmp_path, d_model, moves):
    out = tmp_path / "m.safetensors"
    config = GPTConfig(**{**CONFIG.to_dict(), "d_model": d_model})
    train(config, CORPUS, SETTINGS, out)
    model, tokenizer = load_checkpoint(out)
    assert (tokenizer.vocab_size < d_model) == moves
    assert bool(model.fc_out.bias.any()) != moves and model.ln.bias.any()


def test_the_curve_is_the_mean_of_the_steps_since_the_row_before(tmp_path):
    out = tmp_path / "m.safetensors"
    seen = dict(losses_of(out, replace(SETTINGS, steps=10)))
    expected = [[4, range(1, 5)], [8, range(5, 9)], [10, range(9, 11)]]
    assert read_card(out)["loss_curve"] == [
        [step, pytest.approx(sum(seen[i] for i in part) / len(part), abs=6e-5)] for step, part in expected
    ]


def test_the_first_loss_is_that_of_the_first_batch(tmp_path):
    out = tmp_path / "m.safetensors"
    config = GPTConfig(**{**CONFIG.to_dict(), "dropout": 0.0})
    first = []
    train(config, CORPUS, replace(SETTINGS, steps=1), out, on_step=lambda _step, loss: first.append(loss))
    tokenizer = CharTokenizer.of(CORPUS.train, CORPUS.held_out)
    torch.manual_seed(SETTINGS.seed)
    model = GPTlite(GPTConfig(**{**config.to_dict(), "vocab_size": tokenizer.vocab_size}))
    x, y = training_batch(tokenizer.encode(CORPUS.train), 0, 3, 12, SETTINGS.seed)
    log_probs = model(x).detach().log_softmax(-1)
    expected = -sum(float(log_probs[b, s, y[b, s]]) for b in range(3) for s in range(12)) / 36
    assert first == [pytest.approx(expected, abs=1e-5)]
    assert first[0] == pytest.approx(math.log(tokenizer.vocab_size), abs=0.1)


@pytest.mark.parametrize("optimizer", ["muon", "adamw"])
@pytest.mark.parametrize("precision", ["fp32", "bf16"])
def test_it_learns_a_short_text(tmp_path, optimizer, precision):
    settings = TrainSettings(
        steps=60, batch_size=4, warmup=3, save_every=60, lr=0.02, optimizer=optimizer, precision=precision
    )
    losses = [loss for _, loss in losses_of(tmp_path / "m.safetensors", settings)]
    assert losses[0] > 2.8
    assert sum(losses[-5:]) / 5 < 0.72 * losses[0]
    assert {p.dtype for p in load_checkpoint(tmp_path / "m.safetensors")[0].parameters()} == {torch.float32}


def teacher(n_chars=None, seed=9):
    torch.manual_seed(seed)
    V = n_chars or len(set(CORPUS.train + CORPUS.held_out))
    model = GPTlite(GPTConfig(**{**CONFIG.to_dict(), "vocab_size": V, "n_layers": 1, "dropout": 0.5}))
    with torch.no_grad():
        model.fc_out.weight.mul_(50)  # sure of itself, so that there is something to learn
    return model


def test_a_student_learns_its_teacher_s_distribution(tmp_path):
    master = teacher().train()
    before = {name: t.clone() for name, t in master.state_dict().items()}
    settings = replace(SETTINGS, steps=40, save_every=40, optimizer="adamw")
    seen = losses_of(tmp_path / "m.safetensors", settings, teacher=master)
    losses = [loss for _, loss in seen]
    assert min(losses) >= 0
    assert sum(losses[-5:]) < 0.6 * sum(losses[:5])
    assert not master.training  # without its dropout
    assert all(torch.equal(before[name], t) for name, t in master.state_dict().items())
    assert all(p.grad is None for p in master.parameters())


def test_a_stopped_student_ends_as_if_it_had_not_been_stopped(tmp_path):
    plain = losses_of(tmp_path / "plain.safetensors", teacher=teacher())
    out = tmp_path / "m.safetensors"
    losses_of(out, stop_after=4, teacher=teacher())
    for other in (None, teacher(seed=10)):
        with pytest.raises(ValueError, match="another teacher"):
            losses_of(out, teacher=other)
    assert losses_of(out, teacher=teacher()) == plain[4:]


def test_a_teacher_of_another_vocabulary_is_refused(tmp_path):
    with pytest.raises(ValueError, match="the teacher has a vocabulary of 5, the corpus has"):
        losses_of(tmp_path / "m.safetensors", teacher=teacher(n_chars=5))


def test_the_loss_is_cross_entropy_or_the_divergence_from_the_teacher():
    generator = torch.Generator().manual_seed(0)
    logits, goal = torch.randn(2, 3, 5, generator=generator), torch.randn(2, 3, 5, generator=generator)
    targets = torch.randint(5, (2, 3), generator=generator)
    q, p = logits.double().softmax(-1), goal.double().softmax(-1)
    places = [(b, s) for b in range(2) for s in range(3)]
    cross_entropy = -sum(math.log(q[b, s, targets[b, s]]) for b, s in places) / 6
    assert loss_of(logits, targets, None).item() == pytest.approx(cross_entropy, abs=1e-6)
    divergence = sum(float(p[b, s, v]) * math.log(p[b, s, v] / q[b, s, v]) for b, s in places for v in range(5)) / 6
    assert loss_of(logits, targets, goal).item() == pytest.approx(divergence, abs=1e-6)
    assert loss_of(goal, targets, goal).item() == pytest.approx(0, abs=1e-6)


def test_the_rate_warms_up_stays_and_falls():
    settings = TrainSettings(steps=100, warmup=4, cooldown=0.2)
    assert settings.falls_at == 80
    rates = [settings.rate(step) for step in range(100)]
    assert rates[:5] == pytest.approx([0.2, 0.4, 0.6, 0.8, 1.0])
    assert rates[4:81] == [1.0] * 77
    assert rates[80:] == pytest.approx([1 - i / 20 for i in range(20)])
    assert all(0 < rate <= 1 for rate in rates)
    assert TrainSettings(steps=3, warmup=0, cooldown=1.0).rate(2) == pytest.approx(1 / 3)


@pytest.mark.parametrize(
    ("values", "message"),
    [
        ({"steps": 0}, "steps is 0, it must be at least 1"),
        ({"batch_size": -1}, "batch_size is -1"),
        ({"save_every": 0}, "save_every is 0"),
        ({"lr": 0.0}, "lr is 0.0"),
        ({"lr": float("nan")}, "lr is nan"),
        ({"optimizer": "sgd"}, "optimizer is 'sgd', it must be 'muon' or 'adamw'"),
        ({"precision": "fp8"}, "precision is 'fp8', it must be 'fp32' or 'bf16'"),
        ({"cooldown": 0.0}, r"cooldown is 0.0, it must be in \(0, 1\]"),
        ({"cooldown": 1.5}, "cooldown is 1.5"),
        ({"warmup": -1}, "warmup"),
        ({"weight_decay": -0.1}, "weight_decay"),
    ],
)
def test_bad_settings_are_named(values, message):
    with pytest.raises(ValueError, match=message):
        TrainSettings(**{"steps": 5, **values})


def test_bad_places_and_texts_are_named(tmp_path):
    with pytest.raises(ValueError, match=r"must end in \.safetensors"):
        train(CONFIG, CORPUS, SETTINGS, tmp_path / "model")
    with pytest.raises(ValueError, match="a window of 12 needs at least 13"):
        train(CONFIG, Corpus("short", "too short", "a text for it"), SETTINGS, tmp_path / "m.safetensors")


ENDLESS = """
import sys
from pathlib import Path
sys.path.insert(0, {here!r})
from dataclasses import replace
import torch
torch.set_num_threads(1)
from test_train import CONFIG, CORPUS, SETTINGS
from gptlite.train import train
endless = replace(SETTINGS, steps=10**6, cooldown=1e-6)
train(CONFIG, CORPUS, endless, {out!r}, on_step=lambda step, _: print(step, flush=True))
"""


@pytest.fixture
def one_thread():
    """As the child of the next test has: with more threads, sums are rounded in another order."""
    before = torch.get_num_threads()
    torch.set_num_threads(1)
    yield
    torch.set_num_threads(before)


@pytest.mark.slow
def test_a_kill_loses_at_most_the_steps_since_the_last_save(tmp_path, one_thread):
    out = tmp_path / "m.safetensors"
    here = os.path.dirname(__file__)
    child = subprocess.Popen(
        [sys.executable, "-c", ENDLESS.format(here=here, out=str(out))], stdout=subprocess.PIPE, text=True
    )
    try:
        for line in child.stdout:
            if int(line) >= 22:
                break
        child.send_signal(signal.SIGKILL)
        done = max([22, *(int(line) for line in child.stdout if line.strip().isdigit() and line.endswith("\n"))])
    finally:
        child.kill()
        child.wait(timeout=30)
    long = replace(SETTINGS, steps=10**6, cooldown=1e-6)
    begun = losses_of(out, long, stop_after=done + 8)
    assert done - SETTINGS.save_every <= begun[0][0] - 1 <= done + 1
    plain = losses_of(tmp_path / "plain.safetensors", long, stop_after=done + 8)
    assert plain[-len(begun) :] == begun
