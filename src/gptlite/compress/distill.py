"""The losses of distillation: what it means that a student is close to its teacher.

Every loss is a mean per token, in fp32 or wider, and its gradient goes to the student alone.
"""

from __future__ import annotations

from collections.abc import Sequence

import torch
import torch.nn.functional as F
from torch import Tensor


def distillation_loss(student_logits: Tensor, teacher_logits: Tensor, temperature: float = 1.0) -> Tensor:
    """KL(teacher || student) of the softened distributions, times the squared temperature {cite}`hinton2015distilling`.

    Softening divides the gradient by about the squared temperature; the factor gives it back, so that the learning
    rate and the weight of other terms need not change with the temperature.

    Args:
        student_logits, teacher_logits: [..., V]; the teacher's get no gradient.
        temperature: tau, divides both logits; 1 leaves the distributions as they are.
    Returns: a scalar in nats per token at temperature 1, the mean over all tokens.
    Raises: ValueError when the shapes differ or hold no token, or the temperature is not a positive number.
    """
    student, teacher = _both(student_logits, teacher_logits)  # [n, V]
    check_temperature(temperature)
    goal = (teacher / temperature).log_softmax(-1)
    found = (student / temperature).log_softmax(-1)
    return F.kl_div(found, goal, reduction="batchmean", log_target=True) * temperature**2


def reverse_loss(student_logits: Tensor, teacher_logits: Tensor) -> Tensor:
    """KL(student || teacher): what the student would say and the teacher would not costs most {cite}`gu2024minillm`.

    Args:
        student_logits, teacher_logits: [..., V]; the teacher's get no gradient.
    Returns: a scalar in nats per token, the mean over all tokens.
    Raises: ValueError when the shapes differ or hold no token.
    """
    student, teacher = _both(student_logits, teacher_logits)  # [n, V]
    return F.kl_div(teacher.log_softmax(-1), student.log_softmax(-1), reduction="batchmean", log_target=True)


def logit_loss(student_logits: Tensor, teacher_logits: Tensor) -> Tensor:
    """Half the mean squared difference of the centred logits, the limit of `distillation_loss` for high temperature.

    A constant added to all logits of a token changes no probability, so each token's mean is taken out first.

    Args:
        student_logits, teacher_logits: [..., V]; the teacher's get no gradient.
    Returns: a scalar in squared logits, the mean over all tokens and the vocabulary.
    Raises: ValueError when the shapes differ or hold no token.
    """
    student, teacher = _both(student_logits, teacher_logits)  # [n, V]
    return F.mse_loss(student - student.mean(-1, keepdim=True), teacher - teacher.mean(-1, keepdim=True)) / 2


def hidden_loss(student_hidden: Tensor, teacher_hidden: Tensor) -> Tensor:
    """Mean squared difference of hidden states over the teacher's variance {cite}`romero2015fitnets`.

    Hidden states of different depths differ in size by far; the division makes 1 the loss of a student that only
    knows the teacher's mean, at any depth.

    Args:
        student_hidden, teacher_hidden: [..., d], the student's after its projection; the teacher's get no gradient.
    Returns: a scalar without unit, the mean over all tokens.
    Raises: ValueError when the shapes differ or hold no token.
    """
    student, teacher = _both(student_hidden, teacher_hidden)  # [n, d]
    spread = (teacher - teacher.mean(0)).square().mean()
    # a teacher that does not vary would divide by nothing; the root keeps the quotient within the dtype
    return F.mse_loss(student, teacher) / spread.clamp(min=torch.finfo(teacher.dtype).tiny ** 0.5)


def cosine_loss(student_hidden: Tensor, teacher_hidden: Tensor) -> Tensor:
    """One minus the cosine between hidden states: their directions, not their lengths {cite}`sanh2019distilbert`.

    Args:
        student_hidden, teacher_hidden: [..., d], the student's after its projection; the teacher's get no gradient.
    Returns: a scalar in [0, 2], the mean over all tokens.
    Raises: ValueError when the shapes differ or hold no token.
    """
    student, teacher = _both(student_hidden, teacher_hidden)  # [n, d]
    return 1 - F.cosine_similarity(student, teacher, dim=-1).mean()


def mean_teacher(logits: Sequence[Tensor], temperature: float = 1.0) -> Tensor:
    """Logits whose softened distribution is the mean of the teachers' softened ones {cite}`hinton2015distilling`.

    Args:
        logits: of each teacher [..., V].
        temperature: tau, at which the distributions are averaged and the result is to be used.
    Returns: [..., V], in fp32 or wider; divided by the temperature they are the logarithm of the mean.
    Raises: ValueError when there is no teacher, shapes differ or the temperature is not a positive number.
    """
    check_temperature(temperature)
    if not logits:
        raise ValueError("an ensemble of 0 teachers is asked for, it needs at least 1")
    if odd := [tuple(t.shape) for t in logits if t.shape != logits[0].shape]:
        raise ValueError(f"the teachers' logits have shapes {tuple(logits[0].shape)} and {odd[0]}")
    each = torch.stack([(_wide(t) / temperature).log_softmax(-1) for t in logits])  # [teachers, ..., V]
    return temperature * (each.logsumexp(0) - torch.tensor(float(len(logits))).log())


def check_temperature(temperature: float) -> None:
    """Raises: ValueError when a temperature is not a positive number."""
    if not 0 < temperature < float("inf"):
        raise ValueError(f"temperature is {temperature}, it must be a positive number")


def _both(student: Tensor, teacher: Tensor) -> tuple[Tensor, Tensor]:
    """Both as [n, width] in fp32 or wider, the teacher's without a gradient."""
    if student.shape != teacher.shape:
        raise ValueError(f"the student has shape {tuple(student.shape)}, the teacher {tuple(teacher.shape)}")
    if student.dim() == 0 or student.numel() == 0:
        raise ValueError(f"student and teacher have shape {tuple(student.shape)}, a loss needs at least one token")
    width = student.shape[-1]
    return _wide(student).reshape(-1, width), _wide(teacher).detach().reshape(-1, width)


def _wide(x: Tensor) -> Tensor:
    return x if x.dtype == torch.float64 else x.float()
