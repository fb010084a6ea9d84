"""Typical wrong answers to problem set 6, and the points that each must lose."""

WRONG = {
    "temperature not squared": {
        "task": "distill-loss",
        "source": """import torch.nn.functional as F


def distill_loss(student, teacher, targets, temperature, weight):
    real = targets != -100
    x, y, came = student[real], teacher.detach()[real], targets[real]
    soft = F.kl_div(
        F.log_softmax(x / temperature, -1), F.log_softmax(y / temperature, -1), reduction="batchmean", log_target=True
    )
    return (1 - weight) * soft + weight * F.cross_entropy(x, came)
""",
        "loses": ["distill-loss-public", "distill-loss-hidden", "distill-loss-hidden-padding"],
    },
    "divergence in the other direction": {
        "task": "distill-loss",
        "source": """import torch.nn.functional as F


def distill_loss(student, teacher, targets, temperature, weight):
    real = targets != -100
    x, y, came = student[real], teacher.detach()[real], targets[real]
    soft = F.kl_div(
        F.log_softmax(y / temperature, -1), F.log_softmax(x / temperature, -1), reduction="batchmean", log_target=True
    )
    return (1 - weight) * temperature**2 * soft + weight * F.cross_entropy(x, came)
""",
        "loses": ["distill-loss-public", "distill-loss-hidden", "distill-loss-hidden-padding"],
    },
    "padding counted in the mean": {
        "task": "distill-loss",
        "source": """import torch.nn.functional as F


def distill_loss(student, teacher, targets, temperature, weight):
    padding = targets == -100
    x = student.masked_fill(padding[..., None], 0.0)
    y = teacher.detach().masked_fill(padding[..., None], 0.0)
    log_q, log_p = F.log_softmax(x / temperature, -1), F.log_softmax(y / temperature, -1)
    soft = (log_p.exp() * (log_p - log_q)).sum(-1)
    hard = F.cross_entropy(x.transpose(1, 2), targets, reduction="none")
    losses = (1 - weight) * temperature**2 * soft + weight * hard
    return losses.masked_fill(padding, 0.0).mean()
""",
        "loses": ["distill-loss-hidden-padding"],
    },
    "padding masked by multiplication, so that NaN stays NaN": {
        "task": "distill-loss",
        "source": """import torch.nn.functional as F


def distill_loss(student, teacher, targets, temperature, weight):
    real = (targets != -100).to(student.dtype)
    teacher = teacher.detach()
    log_q, log_p = F.log_softmax(student / temperature, -1), F.log_softmax(teacher / temperature, -1)
    soft = (log_p.exp() * (log_p - log_q)).sum(-1)
    hard = F.cross_entropy(student.transpose(1, 2), targets, reduction="none", ignore_index=-100)
    losses = (1 - weight) * temperature**2 * soft + weight * hard
    return (losses * real).sum() / real.sum()
""",
        "loses": ["distill-loss-hidden-padding"],
    },
    "a gradient for the teacher": {
        "task": "distill-loss",
        "source": """import torch.nn.functional as F


def distill_loss(student, teacher, targets, temperature, weight):
    real = targets != -100
    x, y, came = student[real], teacher[real], targets[real]
    log_q, log_p = F.log_softmax(x / temperature, -1), F.log_softmax(y / temperature, -1)
    soft = (log_p.exp() * (log_p - log_q)).sum(-1).mean()
    return (1 - weight) * temperature**2 * soft + weight * F.cross_entropy(x, came)
""",
        "loses": ["distill-loss-hidden"],
    },
    "padding overwritten in the caller's tensors": {
        "task": "distill-loss",
        "source": """import torch.nn.functional as F


def distill_loss(student, teacher, targets, temperature, weight):
    padding = targets == -100
    teacher, targets = teacher.detach(), targets.clone()
    teacher[padding], targets[padding] = 0.0, 0
    x = student.masked_fill(padding[..., None], 0.0)
    log_q, log_p = F.log_softmax(x / temperature, -1), F.log_softmax(teacher / temperature, -1)
    soft = (log_p.exp() * (log_p - log_q)).sum(-1)
    hard = F.cross_entropy(x.transpose(1, 2), targets, reduction="none")
    losses = (1 - weight) * temperature**2 * soft + weight * hard
    return losses[~padding].mean()
""",
        "loses": ["distill-loss-hidden-padding"],
    },
    "logarithm of a softmax that underflows": {
        "task": "distill-loss",
        "source": """import torch.nn.functional as F


def distill_loss(student, teacher, targets, temperature, weight):
    real = targets != -100
    x, y, came = student[real], teacher.detach()[real], targets[real]
    q, p = (x / temperature).softmax(-1), (y / temperature).softmax(-1)
    soft = (p * (p.log() - q.log())).sum(-1).mean()
    return (1 - weight) * temperature**2 * soft + weight * F.cross_entropy(x, came)
""",
        "loses": ["distill-loss-hidden"],
    },
    "hard-coded divergence of the public example": {
        "task": "distill-loss",
        "source": """import math

import torch


def distill_loss(student, teacher, targets, temperature, weight):
    soft = 0.25 * math.log(0.5) + 0.75 * math.log(1.5)
    return torch.tensor((1 - weight) * temperature**2 * soft + weight * math.log(2))
""",
        "loses": ["distill-loss-hidden", "distill-loss-hidden-padding"],
    },
    "stored probabilities scaled to a sum of 1, the tail forgotten": {
        "task": "stored-labels",
        "source": """import torch


def stored_labels_loss(student, probs, indices):
    p = probs / probs.sum(-1, keepdim=True)
    log_q = student.log_softmax(-1).gather(-1, indices)
    return (torch.xlogy(p, p) - p * log_q).sum(-1).mean()
""",
        "loses": ["stored-labels-public", "stored-labels-hidden", "stored-labels-hidden-edges"],
    },
    "rest spread over the whole vocabulary, the stored tokens too": {
        "task": "stored-labels",
        "source": """import torch


def stored_labels_loss(student, probs, indices):
    V = student.shape[-1]
    rest = (1 - probs.sum(-1, keepdim=True)).clamp(min=0)
    p = (rest / V).expand(-1, V).scatter_add(-1, indices, probs)
    return (torch.xlogy(p, p) - p * student.log_softmax(-1)).sum(-1).mean()
""",
        "loses": ["stored-labels-public", "stored-labels-hidden", "stored-labels-hidden-edges"],
    },
    "0 ln 0 is NaN, and so is the rest over no tokens": {
        "task": "stored-labels",
        "source": """import torch


def stored_labels_loss(student, probs, indices):
    V, k = student.shape[-1], probs.shape[-1]
    rest = 1 - probs.sum(-1, keepdim=True)
    p = (rest / (V - k) if k < V else rest).expand(-1, V).scatter(-1, indices, probs)
    return (p * (p.log() - student.log_softmax(-1))).sum(-1).mean()
""",
        "loses": ["stored-labels-hidden-edges"],
    },
    "sum over the tokens instead of their mean": {
        "task": "stored-labels",
        "source": """import torch


def stored_labels_loss(student, probs, indices):
    V, k = student.shape[-1], probs.shape[-1]
    rest = (1 - probs.sum(-1, keepdim=True)).clamp(min=0)
    p = (rest / max(V - k, 1)).expand(-1, V).scatter(-1, indices, probs)
    return (torch.xlogy(p, p) - p * student.log_softmax(-1)).sum()
""",
        "loses": ["stored-labels-hidden"],
    },
    "signed values instead of sizes": {
        "task": "magnitude-masks",
        "source": """import torch


def magnitude_masks(weights, percent):
    if not 0 <= percent <= 100:
        raise ValueError(percent)
    masks = {}
    for name, weight in weights.items():
        flat = weight.flatten()
        keep = torch.ones(len(flat), dtype=torch.bool)
        keep[flat.argsort(stable=True)[: percent * len(flat) // 100]] = False
        masks[name] = keep.view_as(weight)
    return masks
""",
        "loses": ["magnitude-masks-public", "magnitude-masks-hidden", "magnitude-masks-hidden-ties"],
    },
    "threshold that takes all ties along": {
        "task": "magnitude-masks",
        "source": """import torch


def magnitude_masks(weights, percent):
    if not 0 <= percent <= 100:
        raise ValueError(percent)
    masks = {}
    for name, weight in weights.items():
        n = percent * weight.numel() // 100
        size = weight.abs()
        threshold = size.flatten().kthvalue(n).values if n else -1.0
        masks[name] = size > threshold
    return masks
""",
        "loses": ["magnitude-masks-hidden-ties"],
    },
    "compared in each row instead of each matrix": {
        "task": "magnitude-masks",
        "source": """import torch


def magnitude_masks(weights, percent):
    if not 0 <= percent <= 100:
        raise ValueError(percent)
    masks = {}
    for name, weight in weights.items():
        n = percent * weight.shape[1] // 100
        lowest = weight.abs().argsort(dim=1, stable=True)[:, :n]
        masks[name] = torch.ones_like(weight, dtype=torch.bool).scatter(1, lowest, False)
    return masks
""",
        "loses": ["magnitude-masks-public", "magnitude-masks-hidden", "magnitude-masks-hidden-ties"],
    },
    "number of zeros from a fraction that is rounded down": {
        "task": "magnitude-masks",
        "source": """import torch


def magnitude_masks(weights, percent):
    if not 0 <= percent <= 100:
        raise ValueError(percent)
    masks = {}
    for name, weight in weights.items():
        flat = weight.abs().flatten()
        keep = torch.ones(len(flat), dtype=torch.bool)
        keep[flat.argsort(stable=True)[: int(percent / 100 * len(flat))]] = False
        masks[name] = keep.view_as(weight)
    return masks
""",
        "loses": ["magnitude-masks-hidden"],
    },
    "sizes taken in place": {
        "task": "magnitude-masks",
        "source": """import torch


def magnitude_masks(weights, percent):
    if not 0 <= percent <= 100:
        raise ValueError(percent)
    masks = {}
    for name, weight in weights.items():
        flat = weight.abs_().flatten()
        keep = torch.ones(len(flat), dtype=torch.bool)
        keep[flat.argsort(stable=True)[: percent * len(flat) // 100]] = False
        masks[name] = keep.view_as(weight)
    return masks
""",
        "loses": ["magnitude-masks-hidden"],
    },
    "hard-coded masks of the public example": {
        "task": "magnitude-masks",
        "source": """import torch


def magnitude_masks(weights, percent):
    return {"a": torch.tensor([[False, True], [True, False]]), "b": torch.tensor([[False, False], [True, True]])}
""",
        "loses": ["magnitude-masks-hidden", "magnitude-masks-hidden-ties"],
    },
    "magnitude instead of Wanda": {
        "task": "pack-pattern",
        "source": """import torch


def pack_pattern(weight, batches, n, m):
    rows = weight.T
    if rows.shape[1] % m:
        raise ValueError(rows.shape)
    groups = rows.unflatten(1, (-1, m))
    places = groups.abs().topk(n, dim=-1).indices.sort(-1).values
    return groups.gather(-1, places).flatten(1), places.flatten(1).to(torch.uint8)
""",
        "loses": ["pack-pattern-hidden", "pack-pattern-hidden-batches"],
    },
    "norms of the batches added": {
        "task": "pack-pattern",
        "source": """import torch


def pack_pattern(weight, batches, n, m):
    rows = weight.T
    if rows.shape[1] % m:
        raise ValueError(rows.shape)
    norms = sum(batch.flatten(0, 1).norm(dim=0) for batch in batches)
    groups = rows.unflatten(1, (-1, m))
    places = (rows.abs() * norms).unflatten(1, (-1, m)).topk(n, dim=-1).indices.sort(-1).values
    return groups.gather(-1, places).flatten(1), places.flatten(1).to(torch.uint8)
""",
        "loses": ["pack-pattern-hidden-batches"],
    },
    "places in the order of their scores": {
        "task": "pack-pattern",
        "source": """import torch


def pack_pattern(weight, batches, n, m):
    rows = weight.T
    if rows.shape[1] % m:
        raise ValueError(rows.shape)
    norms = torch.cat([batch.flatten(0, 1) for batch in batches]).norm(dim=0)
    groups = rows.unflatten(1, (-1, m))
    places = (rows.abs() * norms).unflatten(1, (-1, m)).topk(n, dim=-1).indices
    return groups.gather(-1, places).flatten(1), places.flatten(1).to(torch.uint8)
""",
        "loses": ["pack-pattern-hidden", "pack-pattern-hidden-batches"],
    },
    "groups of outputs instead of inputs": {
        "task": "pack-pattern",
        "source": """import torch


def pack_pattern(weight, batches, n, m):
    norms = torch.cat([batch.flatten(0, 1) for batch in batches]).norm(dim=0)
    if weight.shape[1] % m:
        raise ValueError(weight.shape)
    groups = weight.unflatten(1, (-1, m))
    places = (weight.abs() * norms[:, None]).unflatten(1, (-1, m)).topk(n, dim=-1).indices.sort(-1).values
    return groups.gather(-1, places).flatten(1), places.flatten(1).to(torch.uint8)
""",
        "loses": ["pack-pattern-public", "pack-pattern-hidden", "pack-pattern-hidden-batches"],
    },
    "bias without the mean of the units that go": {
        "task": "cut-units",
        "source": """import torch.nn.functional as F


def cut_units(gate, up, down, bias, x, n_keep):
    a = F.silu(x @ gate.T) * (x @ up.T)
    errors = a.var(0, correction=0) * down.square().sum(0)
    kept = errors.topk(n_keep).indices.sort().values
    return gate[kept], up[kept], down[:, kept], bias, kept
""",
        "loses": ["cut-units-hidden-bias"],
    },
    "units chosen by their size instead of how they vary": {
        "task": "cut-units",
        "source": """import torch
import torch.nn.functional as F


def cut_units(gate, up, down, bias, x, n_keep):
    a = F.silu(x @ gate.T) * (x @ up.T)
    errors = a.square().mean(0) * down.square().sum(0)
    kept = errors.topk(n_keep).indices.sort().values
    goes = torch.ones(len(gate), dtype=torch.bool)
    goes[kept] = False
    return gate[kept], up[kept], down[:, kept], bias + down[:, goes] @ a.mean(0)[goes], kept
""",
        "loses": ["cut-units-hidden", "cut-units-hidden-bias"],
    },
    "kept units in the order of their errors": {
        "task": "cut-units",
        "source": """import torch
import torch.nn.functional as F


def cut_units(gate, up, down, bias, x, n_keep):
    a = F.silu(x @ gate.T) * (x @ up.T)
    errors = a.var(0, correction=0) * down.square().sum(0)
    order = errors.argsort()
    goes, kept = order[: len(gate) - n_keep], order[len(gate) - n_keep :]
    return gate[kept], up[kept], down[:, kept], bias + down[:, goes] @ a.mean(0)[goes], kept
""",
        "loses": ["cut-units-hidden", "cut-units-hidden-bias"],
    },
    "another activation than the variant's": {
        "task": "cut-units",
        "source": """import torch
import torch.nn.functional as F


def cut_units(gate, up, down, bias, x, n_keep):
    a = F.relu(x @ gate.T) * (x @ up.T)
    errors = a.var(0, correction=0) * down.square().sum(0)
    kept = errors.topk(n_keep).indices.sort().values
    goes = torch.ones(len(gate), dtype=torch.bool)
    goes[kept] = False
    return gate[kept], up[kept], down[:, kept], bias + down[:, goes] @ a.mean(0)[goes], kept
""",
        "loses": ["cut-units-hidden", "cut-units-hidden-bias"],
    },
    "norm of a column that is not squared": {
        "task": "cut-units",
        "source": """import torch
import torch.nn.functional as F


def cut_units(gate, up, down, bias, x, n_keep):
    a = F.silu(x @ gate.T) * (x @ up.T)
    errors = a.var(0, correction=0) * down.norm(dim=0)
    kept = errors.topk(n_keep).indices.sort().values
    goes = torch.ones(len(gate), dtype=torch.bool)
    goes[kept] = False
    return gate[kept], up[kept], down[:, kept], bias + down[:, goes] @ a.mean(0)[goes], kept
""",
        "loses": ["cut-units-hidden"],
    },
    "bias changed in place": {
        "task": "cut-units",
        "source": """import torch
import torch.nn.functional as F


def cut_units(gate, up, down, bias, x, n_keep):
    a = F.silu(x @ gate.T) * (x @ up.T)
    errors = a.var(0, correction=0) * down.square().sum(0)
    kept = errors.topk(n_keep).indices.sort().values
    goes = torch.ones(len(gate), dtype=torch.bool)
    goes[kept] = False
    bias += down[:, goes] @ a.mean(0)[goes]
    return gate[kept], up[kept], down[:, kept], bias, kept
""",
        "loses": ["cut-units-hidden"],
    },
    "index bits forgotten, and the bitmap over the weights that stay": {
        "task": "by-hand",
        "source": """n_weights = 3 * D_MODEL * D_FF
dense_bytes = n_weights * BITS / 8
pattern_bytes = n_weights * N / M * (BITS + {4: 2, 8: 3}[M]) / 8
list_bytes = n_weights * (100 - ZEROS) / 100 * BITS / 8
bitmap_bytes = n_weights * (100 - ZEROS) / 100 * (BITS + 1) / 8
break_even_percent = 100 * BITS / (BITS + INDEX_BITS)
flops_left = 2 * 3 * D_MODEL * (D_FF - UNITS_GONE)
lesson_ratio = (6 * STUDENT * EPOCHS + 2 * TEACHER) / (6 * STUDENT * EPOCHS)
""",
        "loses": ["by-hand-hidden-lists"],
    },
    "two matrices instead of three": {
        "task": "by-hand",
        "source": """n_weights = 2 * D_MODEL * D_FF
dense_bytes = n_weights * BITS / 8
pattern_bytes = n_weights * N / M * (BITS + {4: 2, 8: 3}[M]) / 8
list_bytes = n_weights * (100 - ZEROS) / 100 * (BITS + INDEX_BITS) / 8
bitmap_bytes = n_weights * ((100 - ZEROS) / 100 * BITS + 1) / 8
break_even_percent = 100 * INDEX_BITS / (BITS + INDEX_BITS)
flops_left = 2 * 2 * D_MODEL * (D_FF - UNITS_GONE)
lesson_ratio = (6 * STUDENT * EPOCHS + 2 * TEACHER) / (6 * STUDENT * EPOCHS)
""",
        "loses": ["by-hand-hidden", "by-hand-hidden-lists", "by-hand-hidden-work"],
    },
    "bits taken for bytes": {
        "task": "by-hand",
        "source": """n_weights = 3 * D_MODEL * D_FF
dense_bytes = n_weights * BITS
pattern_bytes = n_weights * N / M * (BITS + {4: 2, 8: 3}[M])
list_bytes = n_weights * (100 - ZEROS) / 100 * (BITS + INDEX_BITS)
bitmap_bytes = n_weights * ((100 - ZEROS) / 100 * BITS + 1)
break_even_percent = 100 * INDEX_BITS / (BITS + INDEX_BITS)
flops_left = 2 * 3 * D_MODEL * (D_FF - UNITS_GONE)
lesson_ratio = (6 * STUDENT * EPOCHS + 2 * TEACHER) / (6 * STUDENT * EPOCHS)
""",
        "loses": ["by-hand-public", "by-hand-hidden", "by-hand-hidden-lists"],
    },
    "multiply-add counted once, and the teacher run in every epoch": {
        "task": "by-hand",
        "source": """n_weights = 3 * D_MODEL * D_FF
dense_bytes = n_weights * BITS / 8
pattern_bytes = n_weights * N / M * (BITS + {4: 2, 8: 3}[M]) / 8
list_bytes = n_weights * (100 - ZEROS) / 100 * (BITS + INDEX_BITS) / 8
bitmap_bytes = n_weights * ((100 - ZEROS) / 100 * BITS + 1) / 8
break_even_percent = 100 * INDEX_BITS / (BITS + INDEX_BITS)
flops_left = 3 * D_MODEL * (D_FF - UNITS_GONE)
lesson_ratio = (6 * STUDENT + 2 * TEACHER) / (6 * STUDENT)
""",
        "loses": ["by-hand-hidden-work"],
    },
}
