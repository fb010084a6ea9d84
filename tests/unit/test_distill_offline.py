"""What a store keeps of a teacher: the top k and the tail by hand, bounds that hold for all logits, files that lie."""

import json
import struct
from pathlib import Path

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from safetensors.torch import save_file

from gptlite.compress.distill import distillation_loss
from gptlite.compress.offline import (
    Offline,
    Store,
    ask_teacher,
    load_store,
    narrow,
    save_store,
    stored_loss,
    training_windows,
)
from gptlite.config import GPTConfig
from gptlite.data import training_batch
from gptlite.model import GPTlite
from gptlite.train import TrainSettings, weights_sha256

V = 20
SETTINGS = TrainSettings(steps=4, batch_size=3, optimizer="adamw", seed=5)
TOKENS = torch.randint(V, (200,), generator=torch.Generator().manual_seed(0))


def teacher(vocab: int = V) -> GPTlite:
    torch.manual_seed(1)
    model = GPTlite(GPTConfig(vocab, 12, n_layers=1, d_model=12, n_heads=2, d_head=4, dropout=0.4))
    torch.nn.init.normal_(model.fc_out.weight, std=1.0)
    return model.train()


def store(k: int = 4) -> Store:
    return ask_teacher(teacher(), training_windows(TOKENS, 4, 12, SETTINGS), k)


def top(logits: torch.Tensor, k: int) -> tuple[torch.Tensor, torch.Tensor]:
    found = logits.log_softmax(-1).topk(k, dim=-1)
    return found.values, found.indices


def test_windows_are_those_that_training_reads_in_their_order() -> None:
    windows = training_windows(TOKENS, 4, 12, SETTINGS)
    assert windows.shape == (12, 13)
    for step in range(4):
        x, y = training_batch(TOKENS, step, 3, 12, 5)
        assert torch.equal(windows[3 * step : 3 * step + 3, :-1], x)
        assert torch.equal(windows[3 * step : 3 * step + 3, 1:], y)


def test_a_store_holds_the_most_probable_tokens_and_their_logarithms() -> None:
    master, kept = teacher(), store()
    with torch.no_grad():
        p = master.eval()(kept.tokens[:, :-1].long()).double().softmax(-1)  # without dropout
    assert (kept.logs.shape, kept.indices.shape, kept.vocab_size) == ((12, 12, 4), (12, 12, 4), V)
    assert (kept.logs.dtype, kept.indices.dtype, kept.tokens.dtype) == (torch.float16, torch.uint8, torch.uint8)
    right = p.sort(-1, descending=True).values[..., :4]
    # fp16 keeps 11 bits, and logarithms here are below 16 in size: off by 2^-8 at most
    assert torch.allclose(kept.logs.double().exp(), right, rtol=2**-8, atol=0)
    assert torch.allclose(p.gather(-1, kept.indices.long()), right)
    assert kept.n_bytes == 12 * 13 + 12 * 12 * 4 * (2 + 1)


def test_a_store_does_not_depend_on_the_batch() -> None:
    windows = training_windows(TOKENS, 4, 12, SETTINGS)
    one, two = (ask_teacher(teacher(), windows, 4, batch_size=size) for size in (1, 12))
    assert torch.equal(one.indices, two.indices)
    assert torch.allclose(one.logs.float(), two.logs.float(), atol=2e-3)  # one step of fp16


def test_large_vocabularies_have_wider_tokens() -> None:
    assert (narrow(256), narrow(257)) == (torch.uint8, torch.int32)
    windows = training_windows(TOKENS, 1, 12, SETTINGS)
    assert ask_teacher(teacher(300), windows, 2).indices.dtype == torch.int32


@pytest.mark.parametrize("k", [0, V + 1])
def test_a_store_of_too_few_or_too_many_tokens_is_refused(k: int) -> None:
    with pytest.raises(ValueError, match=f"k is {k}, it must be 1 to the vocabulary's {V}"):
        store(k)


def test_the_stored_loss_by_hand() -> None:
    p, q = torch.tensor([0.5, 0.2, 0.2, 0.1]), torch.tensor([0.3, 0.4, 0.1, 0.2])
    logs, indices = p[:2].log(), torch.tensor([0, 1])
    joined = 0.5 * (0.5 / 0.3) ** 0 * torch.tensor(0.5 / 0.3).log() + 0.2 * torch.tensor(0.2 / 0.4).log()
    joined = joined + 0.3 * torch.tensor(0.3 / 0.3).log()  # the other two together, 0.3 of either
    assert stored_loss(q.log(), logs, indices).item() == pytest.approx(joined.item(), abs=1e-6)
    cut = 5 / 7 * torch.tensor((5 / 7) / 0.3).log() + 2 / 7 * torch.tensor((2 / 7) / 0.4).log()
    assert stored_loss(q.log(), logs, indices, tail=False).item() == pytest.approx(cut.item(), abs=1e-6)


@pytest.mark.parametrize("shapes", [((3, 9), (2, 4), (2, 4)), ((2, 9), (2, 4), (2, 3)), ((2, 3, 9), (2, 4), (2, 4))])
def test_a_store_of_other_positions_is_refused(shapes) -> None:
    student, logs, indices = (torch.zeros(shape) for shape in shapes)
    with pytest.raises(ValueError, match="logits, logs and indices have shapes"):
        stored_loss(student, logs, indices, tail=False)


def test_without_the_tail_the_student_learns_that_other_tokens_are_impossible() -> None:
    """The gradient at a student that equals the teacher: none with the tail, and against every other token without."""
    logits = torch.randn(1, 9, generator=torch.Generator().manual_seed(3)).requires_grad_()
    logs, indices = top(logits.detach(), 3)
    (grad,) = torch.autograd.grad(stored_loss(logits, logs, indices), logits)
    assert grad.abs().max() < 1e-6  # fp32
    (grad,) = torch.autograd.grad(stored_loss(logits, logs, indices, tail=False), logits)
    others = torch.ones(9, dtype=torch.bool).index_fill(0, indices[0], False)
    assert (grad[0, others] > 0).all()  # descent lowers them
    assert (grad[0, ~others] < 0).all()


@given(st.integers(0, 10_000), st.integers(1, 12), st.integers(0, 11))
@settings(max_examples=80, deadline=None)
def test_keeping_less_never_raises_the_divergence(seed: int, V: int, less: int) -> None:
    """The data processing inequality, with equality when all is kept; fp32, logits of size 3: to 1e-4."""
    generator = torch.Generator().manual_seed(seed)
    student, master = (3 * torch.randn(4, V, generator=generator) for _ in range(2))
    whole = distillation_loss(student, master).item()
    before = 0.0
    for k in range(max(1, V - less), V + 1):
        found = stored_loss(student, *top(master, k)).item()
        assert -1e-4 <= found <= whole + 1e-4
        assert found >= before - 1e-4  # and more tells more
        before = found
    assert found == pytest.approx(whole, abs=1e-4)


def test_rounded_logarithms_that_sum_to_more_than_one_stay_finite() -> None:
    logs = torch.tensor([[0.0, -9.0]], dtype=torch.float16)
    student = torch.zeros(1, 5, requires_grad=True)
    loss = stored_loss(student, logs, torch.tensor([[1, 2]]))
    (grad,) = torch.autograd.grad(loss, student)
    assert torch.isfinite(loss) and torch.isfinite(grad).all()


def test_batches_come_in_order_and_begin_again() -> None:
    kept, student = store(), teacher()
    goal = Offline(kept)
    for step, rows in ((0, [0, 1, 2]), (3, [9, 10, 11]), (4, [0, 1, 2])):
        x, logs, indices = goal.draw(student, TOKENS, step, SETTINGS)
        assert x.dtype == torch.int64 and torch.equal(x, kept.tokens[rows, :-1].long())
        assert torch.equal(logs, kept.logs[rows]) and torch.equal(indices, kept.indices[rows])
    five = TrainSettings(steps=4, batch_size=5, optimizer="adamw")
    x, _, _ = goal.draw(student, TOKENS, 2, five)
    assert torch.equal(x, kept.tokens[[10, 11, 0, 1, 2], :-1].long())
    found = goal.loss(student.eval(), *goal.draw(student, TOKENS, 0, SETTINGS))
    assert found.item() == pytest.approx(
        stored_loss(student(kept.tokens[:3, :-1].long()), kept.logs[:3], kept.indices[:3]).item()
    )


# -- files --------------------------------------------------------------------------------------------------------


def test_what_is_written_is_read_again(tmp_path: Path) -> None:
    kept = store()
    save_store(tmp_path / "said.safetensors", kept)
    again = load_store(tmp_path / "said.safetensors")
    assert (again.vocab_size, again.teacher) == (V, weights_sha256(teacher()))
    for name in ("tokens", "logs", "indices"):
        assert torch.equal(getattr(again, name), getattr(kept, name))


def tensors(**changes: torch.Tensor) -> dict[str, torch.Tensor]:
    kept = store()
    return {"tokens": kept.tokens, "logs": kept.logs, "indices": kept.indices, **changes}


HEADER = {"format": "gptlite-teacher-1", "vocab_size": str(V), "teacher": "its hash"}
BAD = {
    "another format": (tensors(), {**HEADER, "format": "gptlite-1"}, "its header does not say gptlite-teacher-1"),
    "no vocabulary": (tensors(), {"format": HEADER["format"]}, "vocab_size"),
    "no teacher": (tensors(), {key: HEADER[key] for key in ("format", "vocab_size")}, "teacher"),
    "a vocabulary that is no number": (tensors(), {**HEADER, "vocab_size": "many"}, "many"),
    "a vocabulary below k": (tensors(), {**HEADER, "vocab_size": "3"}, "for a vocabulary of 3"),
    "tokens outside the vocabulary": (tensors(), {**HEADER, "vocab_size": "9"}, "not tokens of a vocabulary of 9"),
    "a tensor more": (tensors(extra=torch.zeros(1)), HEADER, "it holds extra, indices, logs, tokens"),
    "fewer windows than logarithms": (tensors(tokens=store().tokens[:3]), HEADER, "its tensors have shapes"),
    "windows of another length": (tensors(tokens=store().tokens[:, :5]), HEADER, "its tensors have shapes"),
    "no window": (tensors(tokens=torch.zeros(0, 13, dtype=torch.uint8)), HEADER, "its tensors have shapes"),
    "a flat tensor": (tensors(logs=store().logs.flatten()), HEADER, "its tensors have shapes"),
    "an index too few": (tensors(indices=store().indices[..., :3]), HEADER, "its tensors have shapes"),
    "logarithms that are none": (tensors(logs=store().logs * float("nan")), HEADER, "not those of probabilities"),
    "probabilities above one": (tensors(logs=-store().logs), HEADER, "not those of probabilities"),
    "a token twice": (tensors(indices=store().indices * 0), HEADER, "names a token twice"),
    "another dtype": (tensors(indices=store().indices.int()), HEADER, "its indices are not tokens"),
    "wide logarithms": (tensors(logs=store().logs.float()), HEADER, "not those of probabilities"),
}


@pytest.mark.parametrize("name", BAD)
def test_a_store_that_lies_is_refused(tmp_path: Path, name: str) -> None:
    content, header, message = BAD[name]
    path = tmp_path / "said.safetensors"
    save_file({key: t.contiguous() for key, t in content.items()}, path, header)
    with pytest.raises(ValueError, match=message) as caught:
        load_store(path)
    assert str(path) in str(caught.value) and "\n" not in str(caught.value)


@pytest.mark.parametrize("cut", [0, 4, 60, -1])
def test_a_file_that_is_cut_or_missing_is_refused(tmp_path: Path, cut: int) -> None:
    path = tmp_path / "said.safetensors"
    with pytest.raises(ValueError, match="there is no store"):
        load_store(path)
    save_store(path, store())
    path.write_bytes(path.read_bytes()[:cut])
    with pytest.raises(ValueError, match="is no store of a teacher, or is damaged"):
        load_store(path)


def test_a_header_that_promises_more_than_the_file_holds_allocates_nothing(tmp_path: Path) -> None:
    size = 10**12
    about = {
        "tokens": {"dtype": "U8", "shape": [size, 2], "data_offsets": [0, 2 * size]},
        "__metadata__": HEADER,
    }
    header = json.dumps(about).encode()
    path = tmp_path / "said.safetensors"
    path.write_bytes(struct.pack("<Q", len(header)) + header + b"\0" * 100)
    with pytest.raises(ValueError, match="is no store of a teacher, or is damaged"):
        load_store(path)
