"""What a student learns from: each objective's loss by hand, teachers that stay as they are, and runs that go on."""

import json
import math
from dataclasses import replace
from pathlib import Path

import pytest
import torch
from safetensors.torch import load_file

from gptlite.checkpoint import load_checkpoint, save_checkpoint
from gptlite.compress.agreement import agreement, all_logits, spread_windows
from gptlite.compress.distill import cosine_loss, distillation_loss, hidden_loss, logit_loss, mean_teacher, reverse_loss
from gptlite.compress.hidden import HiddenStates, even_pairs, with_hidden
from gptlite.compress.mutual import Mutual
from gptlite.compress.objectives import SoftLabels
from gptlite.compress.offline import Offline, ask_teacher, training_windows
from gptlite.compress.on_policy import OnPolicy, write
from gptlite.compress.responses import Responses, write_responses
from gptlite.compress.students import LOSSES, Recipe, load_teachers, make_objective, make_student, remember
from gptlite.config import GPTConfig
from gptlite.data import CharTokenizer, Corpus, training_batch
from gptlite.generate import generate
from gptlite.model import GPTlite
from gptlite.train import Objective, TrainSettings, loss_of, train
from gptlite.variants.uptrain import uptrain

CORPUS = Corpus("rhyme", "one two three four five, once I caught a fish alive.\n" * 8, "six seven eight nine.\n" * 4)
TOKENIZER = CharTokenizer.of(CORPUS.train, CORPUS.held_out)
V, TOKENS = TOKENIZER.vocab_size, TOKENIZER.encode(CORPUS.train)
# d_model other than n_heads * d_head, fewer KV heads than heads, and dropout
STUDENT = GPTConfig(V, 12, n_layers=2, d_model=12, n_heads=4, d_head=4, n_kv_heads=2, d_ff=16, dropout=0.1)
SETTINGS = TrainSettings(steps=6, batch_size=3, lr=0.01, optimizer="adamw", warmup=1, cooldown=0.5, save_every=2)


def model(seed: int = 0, config: GPTConfig = STUDENT, **changes) -> GPTlite:
    torch.manual_seed(seed)
    made = GPTlite(replace(config, **changes))
    for parameter in made.parameters():
        torch.nn.init.normal_(parameter, std=0.3)
    return made


def teacher(seed: int = 9) -> GPTlite:
    """Deeper, wider, with a dropout that would be seen; in training mode, which it must not stay in."""
    return model(seed, n_layers=4, d_model=20, n_kv_heads=4, d_ff=24, dropout=0.5).train()


def objectives() -> dict[str, Objective]:
    store = ask_teacher(teacher(), training_windows(TOKENS, 6, 12, SETTINGS), 4)
    return {
        "text": Objective(),
        "soft": SoftLabels(teacher(), temperature=2.0, hard=0.25),
        "logits": SoftLabels(teacher(), logits=True),
        "ensemble": SoftLabels(teacher(), teacher(10)),
        "hidden": HiddenStates(teacher(), 12, [(0, 1), (1, 3)], cosine=0.5),
        "mutual": Mutual(model(5)),
        "offline": Offline(store),
        "on-policy": OnPolicy(teacher(), share=0.6, begin=2, n_prompt=4),
        "responses": Responses(write_responses(teacher(), TOKENS, 5, n_prompt=4), n_prompt=4),
    }


NAMES = list(objectives())


def batch() -> tuple[torch.Tensor, torch.Tensor]:
    return training_batch(TOKENS, 3, 3, 12, 0)


# -- what is minimised --------------------------------------------------------------------------------------------


def test_soft_and_hard_labels_are_weighed() -> None:
    x, y = batch()
    student, master = model().eval(), teacher()
    found = SoftLabels(master, temperature=2.0, hard=0.25).loss(student, x, y)
    assert not master.training
    right = 0.75 * distillation_loss(student(x), master(x), 2.0) + 0.25 * loss_of(student(x), y, None)
    assert found.item() == pytest.approx(right.item(), abs=1e-6)
    assert SoftLabels(master, hard=1.0).loss(student, x, y).item() == pytest.approx(loss_of(student(x), y, None).item())
    squares = SoftLabels(master, logits=True, hard=0.5).loss(student, x, y)
    right = 0.5 * logit_loss(student(x), master(x)) + 0.5 * loss_of(student(x), y, None)
    assert squares.item() == pytest.approx(right.item(), abs=1e-6)


def test_several_teachers_are_asked_as_one() -> None:
    x, y = batch()
    student, one, two = model().eval(), teacher(), teacher(10)
    found = SoftLabels(one, two, temperature=3.0).loss(student, x, y)
    right = distillation_loss(student(x), mean_teacher([one(x), two(x)], 3.0), 3.0)
    assert found.item() == pytest.approx(right.item(), abs=1e-6)


def test_hidden_states_are_compared_through_a_projection() -> None:
    x, y = batch()
    student, master = model().eval(), teacher()
    goal = HiddenStates(master, 12, [(0, 1), (1, 3)], squares=2.0, cosine=0.5, soft=0.5)
    assert [tuple(p.weight.shape) for p in goal.projections] == [(20, 12), (20, 12)]
    found = goal.loss(student, x, y)
    _, here = with_hidden(student, x, [0, 1])
    _, there = with_hidden(master, x, [1, 3])
    right = 0.5 * distillation_loss(student(x), master(x))
    for projection, mine, theirs in zip(goal.projections, here, there, strict=True):
        right = (
            right + 2.0 / 2 * hidden_loss(projection(mine), theirs) + 0.5 / 2 * cosine_loss(projection(mine), theirs)
        )
    assert found.item() == pytest.approx(right.item(), abs=1e-5)
    found.backward()
    assert all(p.grad is not None for p in goal.projections.parameters())
    assert not any(block._forward_hooks for block in (*student.blocks, *master.blocks))


def test_a_hidden_state_is_what_the_block_puts_out() -> None:
    x, _ = batch()
    one = model().eval()
    logits, (first, last) = with_hidden(one, x, [0, 1])
    assert torch.equal(logits, one(x))
    assert first.shape == last.shape == (36, 12)
    assert torch.allclose(one.head(one.ln(last)).view(3, 12, V), logits, atol=1e-6)
    assert not torch.allclose(first, last)
    with pytest.raises(ValueError, match="block 2 is asked for, the model has 2"):
        with_hidden(one, x, [2])


def test_blocks_are_paired_by_the_share_of_the_depth() -> None:
    assert even_pairs(2, 6) == [(0, 2), (1, 5)]
    assert even_pairs(1, 6) == [(0, 5)]
    assert even_pairs(3, 3) == [(0, 0), (1, 1), (2, 2)]
    for n_student, n_teacher in ((4, 6), (5, 7)):
        pairs = even_pairs(n_student, n_teacher)
        assert pairs[-1] == (n_student - 1, n_teacher - 1)
        assert len({there for _, there in pairs}) == n_student
    for n_student in (0, 7):
        with pytest.raises(ValueError, match=f"the student has {n_student} blocks"):
            even_pairs(n_student, 6)


def test_two_students_learn_from_each_other() -> None:
    x, y = batch()
    one, two = model(1).eval(), model(2).eval()
    Mutual(two).loss(one, x, y).backward()
    for mine, theirs in ((one, two), (two, one)):
        alone = model().eval()
        alone.load_state_dict(mine.state_dict())
        logits = alone(x)
        (loss_of(logits, y, None) + distillation_loss(logits, theirs(x))).backward()
        for (name, found), right in zip(mine.named_parameters(), alone.parameters(), strict=True):
            assert torch.allclose(found.grad, right.grad, atol=1e-6), name  # nothing comes from the other's loss


def test_own_samples_are_what_the_student_would_say_and_only_they_count() -> None:
    student, master = model().train(), teacher()
    goal = OnPolicy(master, share=1.0, begin=2, n_prompt=4)
    plain, first = goal.draw(student, TOKENS, 1, SETTINGS)
    assert first == 0 and torch.equal(plain, training_batch(TOKENS, 1, 3, 12, 0)[0])
    torch.manual_seed(7)
    x, first = goal.draw(student, TOKENS, 2, SETTINGS)
    assert (x.shape, int(first)) == ((3, 12), 3)
    assert student.training  # as it was
    prompts = training_batch(TOKENS, 2, 3, 12, 0)[0][:, :4]
    assert torch.equal(x[:, :4], prompts)
    torch.manual_seed(7)
    torch.rand(())
    seed = int(torch.randint(2**31, ()))
    assert torch.equal(x, generate(student.eval(), prompts, 8, seed=seed))
    found = goal.loss(student, x, first)
    right = distillation_loss(student(x)[:, 3:], master(x)[:, 3:])
    assert found.item() == pytest.approx(right.item(), abs=1e-6)
    reverse = OnPolicy(master, reverse=True).loss(student, x, first)
    assert reverse.item() == pytest.approx(reverse_loss(student(x)[:, 3:], master(x)[:, 3:]).item(), abs=1e-6)
    forward = OnPolicy(master, reverse=True).loss(student, x, torch.tensor(0))  # on text the direction stays
    assert forward.item() == pytest.approx(distillation_loss(student(x), master(x)).item(), abs=1e-6)


def test_the_share_of_own_samples_is_that_of_the_steps() -> None:
    student, goal = model(), OnPolicy(teacher(), share=0.25, n_prompt=4)
    own = 0
    for step in range(200):
        torch.manual_seed(step)
        own += int(goal.draw(student, TOKENS, step, SETTINGS)[1]) > 0
    assert 30 <= own <= 70  # 50, and three standard deviations of 6


def test_what_is_written_goes_on_from_the_prompts_and_learns_like_other_text() -> None:
    one = model(dropout=0.5).train()
    prompts = TOKENS[:8].view(2, 4)
    text = write(one, prompts, 13, seed=3)  # one more than the context: the last token is only a target
    assert text.shape == (2, 13) and torch.equal(text[:, :4], prompts)
    assert torch.equal(text, write(one, prompts, 13, seed=3))
    assert not torch.equal(text, write(one, prompts, 13, seed=4))
    greedy = write(one, prompts, 12, temperature=0, seed=0)
    assert torch.equal(greedy, write(one, prompts, 12, temperature=0, seed=1))
    assert one.training
    loss_of(one(text[:, :-1]), text[:, 1:], None).backward()  # autograd takes it
    for n_tokens in (4, 14):
        with pytest.raises(ValueError, match=f"n_tokens is {n_tokens}, it must be 5 to 13"):
            write(one, prompts, n_tokens)


def test_answers_do_not_depend_on_the_batch_and_the_prompt_is_not_learned() -> None:
    master = teacher()
    answers = write_responses(master, TOKENS, 5, n_prompt=4, seed=2)
    assert answers.shape == (5, 13)
    assert torch.equal(answers, write_responses(master, TOKENS, 5, n_prompt=4, seed=2, batch_size=2))
    assert not torch.equal(answers, write_responses(master, TOKENS, 5, n_prompt=4, seed=3))
    text = "".join(TOKENIZER.decode(TOKENS))
    assert all(TOKENIZER.decode(row[:4]) in text for row in answers)
    student, goal = model().eval(), Responses(answers, n_prompt=4)
    x, y = goal.draw(student, TOKENS, 1, SETTINGS)
    assert torch.equal(x[:2], answers[3:, :-1]) and torch.equal(x[2], answers[0, :-1])  # the sixth is the first again
    right = torch.nn.functional.cross_entropy(student(x)[:, 3:].flatten(0, 1), y[:, 3:].flatten())
    assert goal.loss(student, x, y).item() == pytest.approx(right.item(), abs=1e-6)


# -- the trap: a teacher without gradients and without dropout ----------------------------------------------------


@pytest.mark.parametrize("name", [name for name in NAMES if name not in ("text", "mutual", "offline", "responses")])
def test_a_teacher_has_no_gradient_no_dropout_and_keeps_its_weights(name: str) -> None:
    goal = objectives()[name]
    masters = getattr(goal, "teachers", None) or [goal.teacher]
    assert not any(master.training for master in masters)
    before = [{key: t.clone() for key, t in master.state_dict().items()} for master in masters]
    student = model(dropout=0.0)
    losses = []
    for _ in range(2):
        torch.manual_seed(1)
        torch.rand(len(losses))  # a dropout would draw from another place of the sequence
        student.zero_grad()
        drawn = Objective().draw(student, TOKENS, 0, SETTINGS)
        loss = goal.loss(student, *(drawn if name != "on-policy" else (drawn[0], torch.tensor(0))))
        loss.backward()
        losses.append(loss.item())
    assert losses[0] == losses[1]
    for master, old in zip(masters, before, strict=True):
        assert all(p.grad is None for p in master.parameters())
        assert all(torch.equal(t, old[key]) for key, t in master.state_dict().items())


# -- in the loop --------------------------------------------------------------------------------------------------


def losses_of(out: Path, goal: Objective, stop_after: int | None = None, settings: TrainSettings = SETTINGS):
    seen: dict[int, float] = {}

    def on_step(step: int, loss: float) -> None:
        seen[step] = loss
        if step == stop_after:
            raise KeyboardInterrupt

    if stop_after is None:
        train(STUDENT, CORPUS, settings, out, on_step=on_step, objective=goal)
    else:
        with pytest.raises(KeyboardInterrupt):
            train(STUDENT, CORPUS, settings, out, on_step=on_step, objective=goal)
    return seen


@pytest.mark.parametrize("name", NAMES)
def test_a_stopped_run_ends_as_if_it_had_not_been_stopped(tmp_path: Path, name: str) -> None:
    whole, out = tmp_path / "whole.safetensors", tmp_path / "stopped.safetensors"
    plain = losses_of(whole, objectives()[name])
    assert all(math.isfinite(loss) for loss in plain.values())
    seen = losses_of(out, objectives()[name], stop_after=3)
    torch.manual_seed(99)
    seen |= losses_of(out, objectives()[name])
    assert seen == plain  # the very same numbers
    one, two = (load_file(path.with_suffix(".state.safetensors")) for path in (whole, out))
    assert one.keys() == two.keys() and all(torch.equal(one[key], two[key]) for key in one)
    assert any(key.startswith("along.") for key in one) == (name in ("hidden", "mutual"))


def test_the_state_of_another_objective_is_refused(tmp_path: Path) -> None:
    out = tmp_path / "m.safetensors"
    losses_of(out, SoftLabels(teacher(), temperature=2.0), stop_after=3)
    for other in (SoftLabels(teacher(), temperature=3.0), SoftLabels(teacher(10), temperature=2.0), Mutual(model())):
        with pytest.raises(ValueError, match="state of a run with another objective"):
            losses_of(out, other)
    with pytest.raises(ValueError, match="another objective"):
        train(STUDENT, CORPUS, SETTINGS, out)
    assert len(losses_of(out, SoftLabels(teacher(), temperature=2.0))) == 4


def test_what_trains_along_does_train(tmp_path: Path) -> None:
    for name in ("hidden", "mutual"):
        goal = objectives()[name]
        before = [p.detach().clone() for p in goal.along.parameters()]
        losses_of(tmp_path / f"{name}.safetensors", goal)
        assert all(not torch.equal(p, old) for p, old in zip(goal.along.parameters(), before, strict=True))


def test_with_a_teacher_alone_training_gives_the_same_weights_as_soft_labels(tmp_path: Path) -> None:
    """One loop: `gptlite train --teacher` is soft labels at temperature 1, to the last bit."""
    losses_of(tmp_path / "a.safetensors", SoftLabels(teacher()))
    train(STUDENT, CORPUS, SETTINGS, tmp_path / "b.safetensors", teacher=teacher())
    one, two = (load_file(tmp_path / f"{name}.safetensors") for name in "ab")
    assert all(torch.equal(one[key], two[key]) for key in one)


def test_a_whole_store_teaches_what_the_teacher_itself_teaches(tmp_path: Path) -> None:
    """All V tokens kept: the same batches and the same loss, up to the fp16 of the stored logarithms."""
    windows = training_windows(TOKENS, 6, 12, SETTINGS)
    plain = losses_of(tmp_path / "a.safetensors", SoftLabels(teacher()))
    stored = losses_of(tmp_path / "b.safetensors", Offline(ask_teacher(teacher(), windows, V)))
    # fp16 keeps 11 bits: a logarithm of 10 is off by 0.005 at most
    assert list(stored.values()) == pytest.approx(list(plain.values()), abs=5e-3)


def test_a_teacher_and_an_objective_at_once_are_refused(tmp_path: Path) -> None:
    with pytest.raises(ValueError, match="the objective brings its own teacher"):
        train(STUDENT, CORPUS, SETTINGS, tmp_path / "m.safetensors", teacher=teacher(), objective=Objective())
    with pytest.raises(ValueError, match="the objective brings its own teacher"):
        uptrain(model(), TOKENS, SETTINGS, teacher(), objective=Objective())


@pytest.mark.parametrize("name", NAMES)
def test_uptraining_takes_the_same_objectives(name: str) -> None:
    settings = replace(SETTINGS, steps=8, save_every=4)
    curve = uptrain(model(), TOKENS, settings, parts="all", objective=objectives()[name])
    assert len(curve) == 3 and all(math.isfinite(value) for row in curve for value in row)


@pytest.mark.parametrize("name", ["soft", "logits", "hidden", "ensemble", "offline"])
def test_a_student_comes_nearer_to_its_teacher(name: str) -> None:
    master = teacher()
    windows = spread_windows(TOKENS, 16, 12)
    goal_logits = all_logits(master, windows)
    student = model(dropout=0.0)
    before = agreement(all_logits(student, windows), goal_logits)
    settings = replace(SETTINGS, steps=60, batch_size=4)
    goal = objectives()[name]
    if name == "offline":
        goal = Offline(ask_teacher(master, training_windows(TOKENS, 60, 12, settings), 8))
    uptrain(student, TOKENS, settings, parts="all", objective=goal)
    after = agreement(all_logits(student, windows), goal_logits)
    assert after.divergence < 0.8 * before.divergence
    assert after.overlap > before.overlap


@pytest.mark.parametrize(
    ("make", "message"),
    [
        (lambda: SoftLabels(), "0 teachers are given"),
        (lambda: SoftLabels(teacher(), hard=1.5), "hard is 1.5, it must be in"),
        (lambda: SoftLabels(teacher(), hard=float("nan")), "hard is nan"),
        (lambda: SoftLabels(teacher(), temperature=0), "temperature is 0"),
        (lambda: HiddenStates(teacher(), 12, []), "pairs is"),
        (lambda: HiddenStates(teacher(), 12, [(0, 4)]), "some of the teacher's 4"),
        (lambda: HiddenStates(teacher(), 12, [(0, 1)], cosine=-1), "cosine is -1, it must be at least 0"),
        (lambda: OnPolicy(teacher(), share=-0.1), "share is -0.1"),
        (lambda: OnPolicy(teacher(), begin=-1), "begin is -1"),
        (lambda: OnPolicy(teacher(), n_prompt=0), "n_prompt is 0"),
        (lambda: Responses(torch.zeros(2, 4, dtype=torch.int64), n_prompt=4), "hold no answer after 4"),
        (lambda: write_responses(teacher(), TOKENS, 0), "0 answers"),
        (lambda: spread_windows(TOKENS[:5], 2, 12), "the text has 5 tokens, a window needs 12"),
        (lambda: agreement(torch.zeros(2, 3), torch.zeros(2, 4)), "cannot be compared"),
        (lambda: agreement(torch.zeros(0, 3), torch.zeros(0, 3)), "hold no token"),
        (lambda: Recipe("softly"), "loss is 'softly', it must be one of text, soft"),
        (lambda: Recipe(begin=2.0), "begin is 2.0"),
    ],
)
def test_numbers_that_make_no_sense_are_refused(make, message: str) -> None:
    with pytest.raises(ValueError, match=message):
        make()


# -- students by recipe -------------------------------------------------------------------------------------------


@pytest.fixture
def master(tmp_path: Path) -> Path:
    path = tmp_path / "master.safetensors"
    save_checkpoint(path, teacher().eval(), TOKENIZER)
    return path


@pytest.mark.parametrize("loss", LOSSES)
def test_a_card_says_the_recipe_the_teachers_and_how_far_they_agree(tmp_path: Path, master: Path, loss: str) -> None:
    out = tmp_path / "student.safetensors"
    recipe = Recipe(temperature=3.0, hard=0.5) if loss == "soft" else Recipe(loss, answers=3)
    # samples go on from prompts of 32 tokens, for which the small context has no room
    writes = loss in ("on-policy", "responses")
    shape = replace(STUDENT, context_length=40) if writes else STUDENT
    masters = {"m": model(config=shape).eval()} if writes else load_teachers([str(master)], CORPUS)
    card = make_student(shape, CORPUS, SETTINGS, out, recipe, masters, "gptlite distill")
    assert json.loads(out.with_suffix(".json").read_text()) == card
    changes = {"temperature": 3.0, "hard": 0.5} if loss == "soft" else {"answers": 3}
    assert card["recipe"] == {"loss": loss, **changes}
    assert card["teachers"] == list(masters)
    student, _ = load_checkpoint(out)
    windows = spread_windows(TOKENIZER.encode(CORPUS.held_out), 64, shape.context_length)
    found = agreement(all_logits(student, windows), all_logits(next(iter(masters.values())), windows))
    assert card["agreement"]["same"] == round(found.same, 4)
    assert card["agreement"]["divergence"] == round(found.divergence, 4)


def test_a_store_is_written_once_and_read_again(tmp_path: Path, master: Path) -> None:
    masters, store = load_teachers([str(master)], CORPUS), tmp_path / "said.safetensors"
    first = make_objective(Recipe("offline", top_k=3), list(masters.values()), STUDENT, TOKENS, SETTINGS, store)
    written = store.read_bytes()
    again = make_objective(Recipe("offline", top_k=3), list(masters.values()), STUDENT, TOKENS, SETTINGS, store)
    assert store.read_bytes() == written
    assert again.describe() == first.describe()
    with pytest.raises(ValueError, match=rf"has a vocabulary of {V}, the corpus has {V + 1}"):
        other = replace(STUDENT, vocab_size=V + 1)
        make_objective(Recipe("offline"), list(masters.values()), other, TOKENS, SETTINGS, store)
    # the card would name a recipe and a teacher that the student did not learn from
    with pytest.raises(ValueError, match="keeps 3 tokens per position, the recipe asks for 5"):
        make_objective(Recipe("offline", top_k=5), list(masters.values()), STUDENT, TOKENS, SETTINGS, store)
    with pytest.raises(ValueError, match="holds the words of another teacher"):
        make_objective(Recipe("offline", top_k=3), [model(11)], STUDENT, TOKENS, SETTINGS, store)


def test_a_loss_that_needs_a_teacher_says_so() -> None:
    with pytest.raises(ValueError, match="0 teachers are given, loss 'offline' needs at least 1"):
        make_objective(Recipe("offline"), [], STUDENT, TOKENS, SETTINGS)
    assert type(make_objective(Recipe("text"), [], STUDENT, TOKENS, SETTINGS)) is Objective


def test_the_peer_of_a_student_is_another_one() -> None:
    state = torch.get_rng_state()
    peer = make_objective(Recipe("mutual"), [], STUDENT, TOKENS, SETTINGS).along
    assert torch.equal(torch.get_rng_state(), state)  # whatever else is random stays the same
    torch.manual_seed(SETTINGS.seed)
    assert not torch.equal(peer.fc_out.weight, GPTlite(STUDENT).fc_out.weight)


def test_a_teacher_of_another_vocabulary_is_refused(tmp_path: Path) -> None:
    path = tmp_path / "other.safetensors"
    save_checkpoint(path, model(vocab_size=3), CharTokenizer("abc"))
    with pytest.raises(ValueError, match="has another vocabulary than rhyme"):
        load_teachers([str(path)], CORPUS)


def test_a_teacher_that_remembers_is_asked_once_and_says_the_same() -> None:
    x, y = batch()
    plain, remembering, calls = teacher().eval(), teacher().eval(), []
    forward = remembering.forward
    remembering.forward = lambda *args: calls.append(1) or forward(*args)
    remembering = remember(remembering)
    with torch.no_grad():
        for _ in range(3):
            assert torch.equal(remembering(x), plain(x))
        assert len(calls) == 1
        with torch.autocast("cpu", torch.bfloat16):
            assert remembering(x).dtype == torch.bfloat16  # another precision is another answer
        assert torch.equal(remembering(y), plain(y))
        assert len(calls) == 3
        _, seen = with_hidden(remembering, x, [1])  # hidden states are not kept
        assert torch.equal(seen[0], with_hidden(plain, x, [1])[1][0])
    assert len(calls) == 4
    remembering(x).sum().backward()  # and gradients go through
    assert len(calls) == 5


# -- agreement ----------------------------------------------------------------------------------------------------


def test_agreement_by_hand() -> None:
    p = torch.tensor([[0.5, 0.3, 0.2], [0.1, 0.1, 0.8]]).double().log()
    q = torch.tensor([[0.2, 0.6, 0.2], [0.1, 0.2, 0.7]]).double().log()
    found = agreement(q, p)
    assert found.same == 0.5
    assert found.overlap == pytest.approx((0.2 + 0.3 + 0.2 + 0.1 + 0.1 + 0.7) / 2)
    first = 0.5 * math.log(2.5) + 0.3 * math.log(0.5)
    second = 0.1 * math.log(0.5) + 0.8 * math.log(8 / 7)
    assert found.divergence == pytest.approx((first + second) / 2)
    itself = agreement(p, p)
    assert (itself.same, itself.divergence) == (1, pytest.approx(0, abs=1e-12))
    assert itself.overlap == pytest.approx(1)


def test_windows_reach_from_the_first_token_to_the_last() -> None:
    windows = spread_windows(torch.arange(100), 4, 10)
    assert windows.shape == (4, 10)
    assert (windows[0, 0], windows[-1, -1]) == (0, 99)
    assert (windows[:, 1:] - windows[:, :-1] == 1).all()
