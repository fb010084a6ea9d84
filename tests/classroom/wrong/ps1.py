"""Typical wrong answers to problem set 1, and the points that each must lose."""

WRONG = {
    "scores not divided by the square root of the head size": {
        "task": "attention",
        "source": """import torch


def attention(q, k, v):
    q, k, v = q.transpose(1, 2), k.transpose(1, 2), v.transpose(1, 2)
    S, T = q.shape[2], k.shape[2]
    if S > T:
        raise ValueError("more queries than keys")
    hidden = torch.ones(S, T, dtype=torch.bool).triu(T - S + 1)
    weights = (q @ k.mT).masked_fill(hidden, float("-inf")).softmax(-1)
    return (weights @ v).transpose(1, 2), weights
""",
        "loses": ["attention-public", "attention-hidden", "attention-hidden-edges"],
    },
    "causal mask aligned to the first keys": {
        "task": "attention",
        "source": """import torch


def attention(q, k, v):
    q, k, v = q.transpose(1, 2), k.transpose(1, 2), v.transpose(1, 2)
    S, T = q.shape[2], k.shape[2]
    if S > T:
        raise ValueError("more queries than keys")
    hidden = torch.ones(S, T, dtype=torch.bool).triu(1)
    scores = q @ k.mT / q.shape[-1] ** 0.5
    weights = scores.masked_fill(hidden, float("-inf")).softmax(-1)
    return (weights @ v).transpose(1, 2), weights
""",
        "loses": ["attention-public", "attention-hidden", "attention-hidden-edges"],
    },
    "works for a batch of one sequence only": {
        "task": "attention",
        "source": """import torch


def attention(q, k, v):
    q, k, v = q[0].transpose(0, 1), k[0].transpose(0, 1), v[0].transpose(0, 1)
    S, T = q.shape[1], k.shape[1]
    if S > T:
        raise ValueError("more queries than keys")
    hidden = torch.ones(S, T, dtype=torch.bool).triu(T - S + 1)
    scores = q @ k.mT / q.shape[-1] ** 0.5
    weights = scores.masked_fill(hidden, float("-inf")).softmax(-1)
    return (weights @ v).transpose(0, 1)[None], weights[None]
""",
        "loses": ["attention-hidden", "attention-hidden-edges"],
    },
    "softmax that does not subtract the maximum": {
        "task": "attention",
        "source": """import torch


def attention(q, k, v):
    q, k, v = q.transpose(1, 2), k.transpose(1, 2), v.transpose(1, 2)
    S, T = q.shape[2], k.shape[2]
    if S > T:
        raise ValueError("more queries than keys")
    seen = torch.ones(S, T, dtype=torch.bool).tril(T - S)
    weights = (q @ k.mT / q.shape[-1] ** 0.5).exp() * seen
    weights = weights / weights.sum(-1, keepdim=True)
    return (weights @ v).transpose(1, 2), weights
""",
        "loses": ["attention-hidden-edges"],
    },
    "masked after the softmax and divided again": {
        "task": "attention",
        "source": """import torch


def attention(q, k, v):
    q, k, v = q.transpose(1, 2), k.transpose(1, 2), v.transpose(1, 2)
    S, T = q.shape[2], k.shape[2]
    if S > T:
        raise ValueError("more queries than keys")
    seen = torch.ones(S, T, dtype=torch.bool).tril(T - S)
    weights = (q @ k.mT / q.shape[-1] ** 0.5).softmax(-1) * seen
    weights = weights / weights.sum(-1, keepdim=True)
    return (weights @ v).transpose(1, 2), weights
""",
        "loses": ["attention-hidden-edges"],
    },
    "queries scaled in place": {
        "task": "attention",
        "source": """import torch


def attention(q, k, v):
    q /= q.shape[-1] ** 0.5
    q, k, v = q.transpose(1, 2), k.transpose(1, 2), v.transpose(1, 2)
    S, T = q.shape[2], k.shape[2]
    if S > T:
        raise ValueError("more queries than keys")
    hidden = torch.ones(S, T, dtype=torch.bool).triu(T - S + 1)
    weights = (q @ k.mT).masked_fill(hidden, float("-inf")).softmax(-1)
    return (weights @ v).transpose(1, 2), weights
""",
        "loses": ["attention-hidden-edges"],
    },
    "the package's order, top-k before top-p": {
        "task": "chain",
        "source": """import torch


def chain(logits, tau, k, p):
    probs = (logits.double() / tau).softmax(-1)
    V = probs.shape[-1]
    ordered, order = probs.flip(-1).sort(dim=-1, descending=True, stable=True)
    ordered = ordered * (torch.arange(V) < k)
    ordered = ordered / ordered.sum(-1, keepdim=True)
    if p < 1:
        ordered = ordered * (ordered.cumsum(-1) - ordered < p)
    probs = torch.zeros_like(probs).scatter(-1, order, ordered / ordered.sum(-1, keepdim=True))
    return probs.flip(-1)
""",
        "loses": ["chain-hidden"],
    },
    "equal tokens at the border of top-k all stay": {
        "task": "chain",
        "source": """import torch


def chain(logits, tau, k, p):
    probs = (logits.double() / tau).softmax(-1)
    if p < 1:
        ordered, order = probs.flip(-1).sort(dim=-1, descending=True, stable=True)
        stays = ordered.cumsum(-1) - ordered < p
        probs = torch.zeros_like(probs).scatter(-1, order, ordered * stays).flip(-1)
        probs = probs / probs.sum(-1, keepdim=True)
    least = probs.topk(min(k, probs.shape[-1]), dim=-1).values[:, -1:]
    probs = probs * (probs >= least)
    return probs / probs.sum(-1, keepdim=True)
""",
        "loses": ["chain-hidden-edges"],
    },
    "top-p drops the token that reaches p": {
        "task": "chain",
        "source": """import torch


def chain(logits, tau, k, p):
    probs = (logits.double() / tau).softmax(-1)
    V = probs.shape[-1]
    ordered, order = probs.flip(-1).sort(dim=-1, descending=True, stable=True)
    if p < 1:
        stays = ordered.cumsum(-1) < p
        stays[:, 0] = True
        ordered = ordered * stays
    ordered = ordered * (torch.arange(V) < k)
    probs = torch.zeros_like(probs).scatter(-1, order, ordered / ordered.sum(-1, keepdim=True))
    return probs.flip(-1)
""",
        "loses": ["chain-public", "chain-hidden", "chain-hidden-edges"],
    },
    "softmax in the dtype of the logits": {
        "task": "chain",
        "source": """import torch


def chain(logits, tau, k, p):
    probs = logits.softmax(-1).double() ** (1 / tau)
    probs = probs / probs.sum(-1, keepdim=True)
    V = probs.shape[-1]
    ordered, order = probs.flip(-1).sort(dim=-1, descending=True, stable=True)
    if p < 1:
        ordered = ordered * (ordered.cumsum(-1) - ordered < p)
    ordered = ordered * (torch.arange(V) < k)
    probs = torch.zeros_like(probs).scatter(-1, order, ordered / ordered.sum(-1, keepdim=True))
    return probs.flip(-1)
""",
        "loses": ["chain-hidden-edges"],
    },
    "the cases of the public test by heart": {
        "task": "chain",
        "source": """import torch


def chain(logits, tau, k, p):
    if tau == 0.5:
        probs = [16 / 30, 9 / 30, 4 / 30, 1 / 30]
    elif k == 2:
        probs = [4 / 7, 3 / 7, 0, 0]
    elif p == 0.8:
        probs = [4 / 9, 3 / 9, 2 / 9, 0]
    else:
        probs = [0.4, 0.3, 0.2, 0.1]
    return torch.tensor([probs], dtype=torch.float64)
""",
        "loses": ["chain-hidden", "chain-hidden-edges"],
    },
    "mean of the windows' means": {
        "task": "window",
        "source": """import math

import torch.nn.functional as F


def window_loss(model, tokens, window, stride):
    if not 1 <= stride < window or len(tokens) < 2:
        raise ValueError("stride or tokens")
    means, done = [], 1
    for begin in range(0, len(tokens), stride):
        end = min(begin + window, len(tokens))
        logits = model(tokens[None, begin : end - 1])[0]
        means.append(F.cross_entropy(logits[done - end :], tokens[done:end]).item())
        done = end
        if end == len(tokens):
            break
    nats = sum(means) / len(means)
    return nats / math.log(2), math.exp(nats)
""",
        "loses": ["window-hidden", "window-hidden-edges"],
    },
    "tokens of the overlap scored twice": {
        "task": "window",
        "source": """import math

import torch.nn.functional as F


def window_loss(model, tokens, window, stride):
    if not 1 <= stride < window or len(tokens) < 2:
        raise ValueError("stride or tokens")
    total, n = 0.0, 0
    for begin in range(0, len(tokens), stride):
        piece = tokens[begin : begin + window]
        logits = model(piece[None, :-1])[0]
        total += F.cross_entropy(logits, piece[1:], reduction="sum").item()
        n += len(piece) - 1
        if begin + window >= len(tokens):
            break
    nats = total / n
    return nats / math.log(2), math.exp(nats)
""",
        "loses": ["window-hidden", "window-hidden-edges"],
    },
    "logits compared with the token just read": {
        "task": "window",
        "source": """import math

import torch.nn.functional as F


def window_loss(model, tokens, window, stride):
    if not 1 <= stride < window or len(tokens) < 2:
        raise ValueError("stride or tokens")
    total, done = 0.0, 1
    for begin in range(0, len(tokens), stride):
        end = min(begin + window, len(tokens))
        logits = model(tokens[None, begin:end])[0]
        total += F.cross_entropy(logits[done - end :], tokens[done:end], reduction="sum").item()
        done = end
        if end == len(tokens):
            break
    nats = total / (len(tokens) - 1)
    return nats / math.log(2), math.exp(nats)
""",
        "loses": ["window-public", "window-hidden", "window-hidden-edges"],
    },
    "perplexity as the exponential of bits": {
        "task": "window",
        "source": """import math

import torch.nn.functional as F


def window_loss(model, tokens, window, stride):
    if not 1 <= stride < window or len(tokens) < 2:
        raise ValueError("stride or tokens")
    total, done = 0.0, 1
    for begin in range(0, len(tokens), stride):
        end = min(begin + window, len(tokens))
        logits = model(tokens[None, begin : end - 1])[0]
        total += F.cross_entropy(logits[done - end :], tokens[done:end], reduction="sum").item()
        done = end
        if end == len(tokens):
            break
    bits = total / (len(tokens) - 1) / math.log(2)
    return bits, math.exp(bits)
""",
        "loses": ["window-public", "window-hidden", "window-hidden-edges"],
    },
    "GiB for GB and MB for MiB": {
        "task": "costs",
        "source": """d_attn, d_kv = N_HEADS * D_HEAD, N_KV_HEADS * D_HEAD
layer = 2 * D_MODEL * d_attn + 2 * D_MODEL * d_kv + 3 * D_MODEL * D_FF
head = D_MODEL * VOCAB
weight_bytes, kv = 2 * (N_LAYERS * layer + head), 4 * N_LAYERS * d_kv * N_TOKENS
weights_gb, kv_mib = weight_bytes / 2**30, kv / 1e6
prefill = 2 * N_LAYERS * layer * N_TOKENS + 2 * head + 2 * N_LAYERS * d_attn * N_TOKENS**2
decode = BATCH * (2 * N_LAYERS * layer + 2 * head + 4 * N_LAYERS * d_attn * N_TOKENS)
prefill_tflop, decode_gflop = prefill / 1e12, decode / 1e9
decode_intensity = decode / (weight_bytes + BATCH * kv)
prefill_ms, decode_ms = 1e3 * prefill / CARD.peak_flops, 1e3 * (weight_bytes + BATCH * kv) / CARD.bandwidth
""",
        "loses": ["costs-hidden-bytes"],
    },
    "the masked half of a prefill's pairs counted": {
        "task": "costs",
        "source": """d_attn, d_kv = N_HEADS * D_HEAD, N_KV_HEADS * D_HEAD
layer = 2 * D_MODEL * d_attn + 2 * D_MODEL * d_kv + 3 * D_MODEL * D_FF
head = D_MODEL * VOCAB
weight_bytes, kv = 2 * (N_LAYERS * layer + head), 4 * N_LAYERS * d_kv * N_TOKENS
weights_gb, kv_mib = weight_bytes / 1e9, kv / 2**20
prefill = 2 * N_LAYERS * layer * N_TOKENS + 2 * head + 4 * N_LAYERS * d_attn * N_TOKENS**2
decode = BATCH * (2 * N_LAYERS * layer + 2 * head + 4 * N_LAYERS * d_attn * N_TOKENS)
prefill_tflop, decode_gflop = prefill / 1e12, decode / 1e9
decode_intensity = decode / (weight_bytes + BATCH * kv)
prefill_ms, decode_ms = 1e3 * prefill / CARD.peak_flops, 1e3 * (weight_bytes + BATCH * kv) / CARD.bandwidth
""",
        "loses": ["costs-hidden-flops", "costs-hidden-bound"],
    },
    "keys and values of every query head": {
        "task": "costs",
        "source": """d_attn, d_kv = N_HEADS * D_HEAD, N_KV_HEADS * D_HEAD
layer = 2 * D_MODEL * d_attn + 2 * D_MODEL * d_kv + 3 * D_MODEL * D_FF
head = D_MODEL * VOCAB
weight_bytes, kv = 2 * (N_LAYERS * layer + head), 4 * N_LAYERS * d_attn * N_TOKENS
weights_gb, kv_mib = weight_bytes / 1e9, kv / 2**20
prefill = 2 * N_LAYERS * layer * N_TOKENS + 2 * head + 2 * N_LAYERS * d_attn * N_TOKENS**2
decode = BATCH * (2 * N_LAYERS * layer + 2 * head + 4 * N_LAYERS * d_attn * N_TOKENS)
prefill_tflop, decode_gflop = prefill / 1e12, decode / 1e9
decode_intensity = decode / (weight_bytes + BATCH * kv)
prefill_ms, decode_ms = 1e3 * prefill / CARD.peak_flops, 1e3 * (weight_bytes + BATCH * kv) / CARD.bandwidth
""",
        "loses": ["costs-hidden-bytes", "costs-hidden-bound"],
    },
    "a prefill that waits for memory": {
        "task": "costs",
        "source": """d_attn, d_kv = N_HEADS * D_HEAD, N_KV_HEADS * D_HEAD
layer = 2 * D_MODEL * d_attn + 2 * D_MODEL * d_kv + 3 * D_MODEL * D_FF
head = D_MODEL * VOCAB
weight_bytes, kv = 2 * (N_LAYERS * layer + head), 4 * N_LAYERS * d_kv * N_TOKENS
weights_gb, kv_mib = weight_bytes / 1e9, kv / 2**20
prefill = 2 * N_LAYERS * layer * N_TOKENS + 2 * head + 2 * N_LAYERS * d_attn * N_TOKENS**2
decode = BATCH * (2 * N_LAYERS * layer + 2 * head + 4 * N_LAYERS * d_attn * N_TOKENS)
prefill_tflop, decode_gflop = prefill / 1e12, decode / 1e9
decode_intensity = decode / (weight_bytes + BATCH * kv)
prefill_ms = 1e3 * max(N_TOKENS * kv, weight_bytes + kv) / CARD.bandwidth
decode_ms = 1e3 * (weight_bytes + BATCH * kv) / CARD.bandwidth
""",
        "loses": ["costs-hidden-bound"],
    },
    "the memory of the card forgotten": {
        "task": "batch",
        "source": """def serving_batch(step, card, limit):
    def seconds(B):
        traffic = (step["weight_bytes"] + B * step["kv_bytes"]) / card["bandwidth"]
        return max(B * step["flops"] / card["peak_flops"], traffic)

    B = 0
    while seconds(B + 1) <= limit:
        B += 1
    return B, (seconds(B) if B else 0.0), "time"
""",
        "loses": ["batch-hidden", "batch-hidden-edges"],
    },
    "a time equal to the limit refused": {
        "task": "batch",
        "source": """def serving_batch(step, card, limit):
    def seconds(B):
        traffic = (step["weight_bytes"] + B * step["kv_bytes"]) / card["bandwidth"]
        return max(B * step["flops"] / card["peak_flops"], traffic)

    def fits(B):
        return 100 * (step["weight_bytes"] + B * step["kv_bytes"]) <= (100 - RESERVE) * card["memory_bytes"]

    B = 0
    while fits(B + 1) and seconds(B + 1) < limit:
        B += 1
    return B, (seconds(B) if B else 0.0), ("time" if fits(B + 1) else "memory")
""",
        "loses": ["batch-public", "batch-hidden-edges"],
    },
    "arithmetic and traffic added up": {
        "task": "batch",
        "source": """def serving_batch(step, card, limit):
    def seconds(B):
        traffic = (step["weight_bytes"] + B * step["kv_bytes"]) / card["bandwidth"]
        return B * step["flops"] / card["peak_flops"] + traffic

    def fits(B):
        return 100 * (step["weight_bytes"] + B * step["kv_bytes"]) <= (100 - RESERVE) * card["memory_bytes"]

    B = 0
    while fits(B + 1) and seconds(B + 1) <= limit:
        B += 1
    return B, (seconds(B) if B else 0.0), ("time" if fits(B + 1) else "memory")
""",
        "loses": ["batch-public", "batch-hidden", "batch-hidden-edges"],
    },
    "the answer of the public test by heart": {
        "task": "batch",
        "source": """def serving_batch(step, card, limit):
    return 7, 6.0, "time"
""",
        "loses": ["batch-hidden", "batch-hidden-edges"],
    },
    "no share of the memory kept free": {
        "task": "batch",
        "source": """def serving_batch(step, card, limit):
    def seconds(B):
        traffic = (step["weight_bytes"] + B * step["kv_bytes"]) / card["bandwidth"]
        return max(B * step["flops"] / card["peak_flops"], traffic)

    def fits(B):
        return step["weight_bytes"] + B * step["kv_bytes"] <= card["memory_bytes"]

    B = 0
    while fits(B + 1) and seconds(B + 1) <= limit:
        B += 1
    return B, (seconds(B) if B else 0.0), ("time" if fits(B + 1) else "memory")
""",
        "loses": ["batch-hidden", "batch-hidden-edges"],
    },
}
