"""Typical wrong answers to problem set 4, and the points that each must lose."""

WRONG = {
    "the old sum and output are not rescaled when the maximum rises": {
        "task": "stream",
        "source": """def stream_attend(q, tiles):
    never = float("-inf")
    m, l, acc = q.new_full(q.shape[:-1], never), q.new_zeros(q.shape[:-1]), 0.0
    for k, v, mask in tiles:
        scores = q @ k.mT * q.shape[-1] ** -0.5
        if mask is not None:
            scores = scores.masked_fill(~mask, never)
        if scores.shape[-1]:
            m = torch.maximum(m, scores.amax(-1))
        p = (scores - m.masked_fill(m == never, 0.0)[..., None]).exp()
        l = l + p.sum(-1)
        acc = acc + p @ v
    lse = m + l.log()
    return acc / l.masked_fill(l == 0, 1.0)[..., None], lse / lse.new_tensor(2.0).log() if LSE_BASE == "2" else lse
""",
        "loses": ["stream-public", "stream-hidden", "stream-hidden-edges", "stream-hidden-memory"],
    },
    "scores are not divided by the root of the head size": {
        "task": "stream",
        "source": """def stream_attend(q, tiles):
    never = float("-inf")
    m, l, acc = q.new_full(q.shape[:-1], never), q.new_zeros(q.shape[:-1]), 0.0
    for k, v, mask in tiles:
        if k.shape[2] == 0:
            acc = acc + q.new_zeros(*q.shape[:-1], v.shape[-1])
            continue
        scores = q @ k.mT
        if mask is not None:
            scores = scores.masked_fill(~mask, never)
        m_new = torch.maximum(m, scores.amax(-1))
        safe = m_new.masked_fill(m_new == never, 0.0)
        shrink = (m - safe).exp()
        p = (scores - safe[..., None]).exp()
        l, acc, m = l * shrink + p.sum(-1), acc * shrink[..., None] + p @ v, m_new
    lse = m + l.log()
    return acc / l.masked_fill(l == 0, 1.0)[..., None], lse / lse.new_tensor(2.0).log() if LSE_BASE == "2" else lse
""",
        "loses": ["stream-hidden", "stream-hidden-edges", "stream-hidden-memory"],
    },
    "no maximum is subtracted, so that large scores overflow": {
        "task": "stream",
        "source": """def stream_attend(q, tiles):
    l, acc = q.new_zeros(q.shape[:-1]), 0.0
    for k, v, mask in tiles:
        p = (q @ k.mT * q.shape[-1] ** -0.5).exp()
        if mask is not None:
            p = p * mask
        l, acc = l + p.sum(-1), acc + p @ v
    lse = l.log()
    return acc / l.masked_fill(l == 0, 1.0)[..., None], lse / lse.new_tensor(2.0).log() if LSE_BASE == "2" else lse
""",
        "loses": ["stream-hidden"],
    },
    "a maximum of minus infinity is subtracted from minus infinity": {
        "task": "stream",
        "source": """def stream_attend(q, tiles):
    m, l, acc = q.new_full(q.shape[:-1], float("-inf")), q.new_zeros(q.shape[:-1]), 0.0
    for k, v, mask in tiles:
        if k.shape[2] == 0:
            continue
        scores = q @ k.mT * q.shape[-1] ** -0.5
        if mask is not None:
            scores = scores.masked_fill(~mask, float("-inf"))
        m_new = torch.maximum(m, scores.amax(-1))
        shrink = (m - m_new).exp()
        p = (scores - m_new[..., None]).exp()
        l, acc, m = l * shrink + p.sum(-1), acc * shrink[..., None] + p @ v, m_new
    lse = m + l.log()
    return acc / l[..., None], lse / lse.new_tensor(2.0).log() if LSE_BASE == "2" else lse
""",
        "loses": ["stream-hidden-edges"],
    },
    "all tiles are put together and one softmax is taken": {
        "task": "stream",
        "source": """def stream_attend(q, tiles):
    scores, values = [], []
    for k, v, mask in tiles:
        s = q @ k.mT * q.shape[-1] ** -0.5
        scores.append(s if mask is None else s.masked_fill(~mask, float("-inf")))
        values.append(v)
    scores, values = torch.cat(scores, -1), torch.cat(values, 2)
    if scores.shape[-1] == 0:
        return q.new_zeros(*q.shape[:-1], values.shape[-1]), q.new_full(q.shape[:-1], float("-inf"))
    lse = scores.logsumexp(-1)
    out = scores.softmax(-1).nan_to_num(0.0) @ values
    return out, lse / lse.new_tensor(2.0).log() if LSE_BASE == "2" else lse
""",
        "loses": ["stream-hidden-memory"],
    },
    "all keys are put together, and queries taken one by one": {
        "task": "stream",
        "source": """def stream_attend(q, tiles):
    keys, values, masks = zip(*tiles)
    k, v = torch.cat(keys, dim=2), torch.cat(values, dim=2)
    sees = (q.shape[0], 1, q.shape[2])
    masks = [
        torch.ones(*sees, key.shape[2], dtype=torch.bool) if mask is None else mask for key, mask in zip(keys, masks)
    ]
    mask, outs, sums = torch.cat(masks, dim=-1), [], []
    for i in range(q.shape[2]):
        scores = q[:, :, i : i + 1] @ k.mT * q.shape[-1] ** -0.5
        scores = scores.masked_fill(~mask[:, :, i : i + 1], float("-inf"))
        outs.append(scores.softmax(-1).nan_to_num(0.0) @ v)
        sums.append(scores.logsumexp(-1))
    lse = torch.cat(sums, dim=2)
    return torch.cat(outs, dim=2), lse / lse.new_tensor(2.0).log() if LSE_BASE == "2" else lse
""",
        "loses": ["stream-hidden-memory"],
    },
    "the numbers of the public example are returned": {
        "task": "stream",
        "source": """def stream_attend(q, tiles):
    lse = q.new_tensor(8.0).log() if LSE_BASE == "e" else q.new_tensor(3.0)
    return q.new_full((*q.shape[:-1], 1), 9.0), lse.expand(q.shape[:-1])
""",
        "loses": ["stream-hidden", "stream-hidden-edges", "stream-hidden-memory"],
    },
    "the two outputs are averaged without their sums": {
        "task": "cascade",
        "source": """def cascade_attend(q, prefix_kernel, own_kernel, n_kv_heads):
    B, H, _ = q.shape
    R = H // n_kv_heads
    strided = GROUPING == "strided"
    grouped = q.unflatten(1, (R, n_kv_heads)).transpose(1, 2) if strided else q.unflatten(1, (n_kv_heads, R))
    out1, _ = prefix_kernel(grouped.transpose(0, 1).flatten(1, 2))
    out2, _ = own_kernel(grouped)
    out = (out1.unflatten(1, (B, R)).transpose(0, 1) + out2) / 2
    return (out.transpose(1, 2) if strided else out).flatten(1, 2)
""",
        "loses": ["cascade-public", "cascade-hidden", "cascade-hidden-edges"],
    },
    "heads are grouped in the other order": {
        "task": "cascade",
        "source": """def cascade_attend(q, prefix_kernel, own_kernel, n_kv_heads):
    B, H, _ = q.shape
    R = H // n_kv_heads
    strided = GROUPING != "strided"
    grouped = q.unflatten(1, (R, n_kv_heads)).transpose(1, 2) if strided else q.unflatten(1, (n_kv_heads, R))
    out1, lse1 = (x.unflatten(1, (B, R)).transpose(0, 1) for x in prefix_kernel(grouped.transpose(0, 1).flatten(1, 2)))
    out2, lse2 = own_kernel(grouped)
    base = q.new_tensor(2.0).log() if LSE_BASE == "2" else 1.0
    m = torch.maximum(lse1, lse2)
    m = m.masked_fill(m == float("-inf"), 0.0)
    w1, w2 = (((lse - m) * base).exp()[..., None] for lse in (lse1, lse2))
    out = (w1 * out1 + w2 * out2) / (w1 + w2).masked_fill(w1 + w2 == 0, 1.0)
    return (out.transpose(1, 2) if strided else out).flatten(1, 2)
""",
        "loses": ["cascade-hidden"],
    },
    "the prefix is read once for every sequence": {
        "task": "cascade",
        "source": """def cascade_attend(q, prefix_kernel, own_kernel, n_kv_heads):
    B, H, _ = q.shape
    R = H // n_kv_heads
    strided = GROUPING == "strided"
    grouped = q.unflatten(1, (R, n_kv_heads)).transpose(1, 2) if strided else q.unflatten(1, (n_kv_heads, R))
    parts = [prefix_kernel(rows) for rows in grouped]
    out1, lse1 = (torch.stack([part[i] for part in parts]) for i in (0, 1))
    out2, lse2 = own_kernel(grouped)
    base = q.new_tensor(2.0).log() if LSE_BASE == "2" else 1.0
    m = torch.maximum(lse1, lse2)
    m = m.masked_fill(m == float("-inf"), 0.0)
    w1, w2 = (((lse - m) * base).exp()[..., None] for lse in (lse1, lse2))
    out = (w1 * out1 + w2 * out2) / (w1 + w2).masked_fill(w1 + w2 == 0, 1.0)
    return (out.transpose(1, 2) if strided else out).flatten(1, 2)
""",
        "loses": ["cascade-hidden"],
    },
    "log-sum-exps are raised to powers as they are": {
        "task": "cascade",
        "source": """def cascade_attend(q, prefix_kernel, own_kernel, n_kv_heads):
    B, H, _ = q.shape
    R = H // n_kv_heads
    strided = GROUPING == "strided"
    grouped = q.unflatten(1, (R, n_kv_heads)).transpose(1, 2) if strided else q.unflatten(1, (n_kv_heads, R))
    out1, lse1 = (x.unflatten(1, (B, R)).transpose(0, 1) for x in prefix_kernel(grouped.transpose(0, 1).flatten(1, 2)))
    out2, lse2 = own_kernel(grouped)
    w1, w2 = ((lse.exp2() if LSE_BASE == "2" else lse.exp())[..., None] for lse in (lse1, lse2))
    out = (w1 * out1 + w2 * out2) / (w1 + w2)
    return (out.transpose(1, 2) if strided else out).flatten(1, 2)
""",
        "loses": ["cascade-hidden-edges"],
    },
    "bytes of one head, not of the layer": {
        "task": "traffic",
        "source": """matrix, vectors, tiles_q = N_TOKENS * N_TOKENS, N_TOKENS * D_HEAD, N_TOKENS // TILE_Q
standard_bytes = BYTES * (4 * vectors + 4 * matrix)
tiled_bytes = BYTES * (2 * vectors + 2 * vectors * tiles_q)
causal_tiles = TILE_Q // TILE_K * tiles_q * (tiles_q + 1) // 2
causal_bytes = BYTES * (2 * vectors + 2 * D_HEAD * TILE_K * causal_tiles)
chip_bytes = BYTES * (2 * TILE_Q * D_HEAD + 2 * TILE_K * D_HEAD + TILE_Q * TILE_K + 2 * TILE_Q)
tiled_intensity = 4 * matrix * D_HEAD / tiled_bytes
""",
        "loses": ["traffic-hidden", "traffic-hidden-causal"],
    },
    "gigabytes instead of bytes": {
        "task": "traffic",
        "source": """matrix, vectors, tiles_q = N_TOKENS * N_TOKENS, N_TOKENS * D_HEAD, N_TOKENS // TILE_Q
standard_bytes = BYTES * N_HEADS * (4 * vectors + 4 * matrix) / 1e9
tiled_bytes = BYTES * N_HEADS * (2 * vectors + 2 * vectors * tiles_q) / 1e9
causal_tiles = TILE_Q // TILE_K * tiles_q * (tiles_q + 1) // 2
causal_bytes = BYTES * N_HEADS * (2 * vectors + 2 * D_HEAD * TILE_K * causal_tiles) / 1e9
chip_bytes = BYTES * (2 * TILE_Q * D_HEAD + 2 * TILE_K * D_HEAD + TILE_Q * TILE_K + 2 * TILE_Q)
tiled_intensity = N_HEADS * 4 * matrix * D_HEAD / tiled_bytes / 1e9
""",
        "loses": ["traffic-public", "traffic-hidden", "traffic-hidden-causal"],
    },
    "a causal mask is taken to halve the tiles": {
        "task": "traffic",
        "source": """matrix, vectors, tiles_q = N_TOKENS * N_TOKENS, N_TOKENS * D_HEAD, N_TOKENS // TILE_Q
standard_bytes = BYTES * N_HEADS * (4 * vectors + 4 * matrix)
tiled_bytes = BYTES * N_HEADS * (2 * vectors + 2 * vectors * tiles_q)
causal_tiles = tiles_q * (N_TOKENS // TILE_K) // 2
causal_bytes = BYTES * N_HEADS * (2 * vectors + 2 * D_HEAD * TILE_K * causal_tiles)
chip_bytes = BYTES * (2 * TILE_Q * D_HEAD + 2 * TILE_K * D_HEAD + TILE_Q * TILE_K + 2 * TILE_Q)
tiled_intensity = N_HEADS * 4 * matrix * D_HEAD / tiled_bytes
""",
        "loses": ["traffic-hidden-causal"],
    },
    "the chip holds numbers, not bytes, and a multiply-add is one FLOP": {
        "task": "traffic",
        "source": """matrix, vectors, tiles_q = N_TOKENS * N_TOKENS, N_TOKENS * D_HEAD, N_TOKENS // TILE_Q
standard_bytes = BYTES * N_HEADS * (4 * vectors + 4 * matrix)
tiled_bytes = BYTES * N_HEADS * (2 * vectors + 2 * vectors * tiles_q)
causal_tiles = TILE_Q // TILE_K * tiles_q * (tiles_q + 1) // 2
causal_bytes = BYTES * N_HEADS * (2 * vectors + 2 * D_HEAD * TILE_K * causal_tiles)
chip_bytes = 2 * TILE_Q * D_HEAD + 2 * TILE_K * D_HEAD + TILE_Q * TILE_K + 2 * TILE_Q
tiled_intensity = N_HEADS * 2 * matrix * D_HEAD / tiled_bytes
""",
        "loses": ["traffic-hidden-chip"],
    },
    "importances are normalised over all heads, not over the group": {
        "task": "pool",
        "source": """def weighted_pool(weight, bias, importance, n_kv_heads):
    H, G = len(importance), n_kv_heads
    if G < 1 or H % G:
        raise ValueError(f"{G} KV heads, {H} heads")
    strided = GROUPING == "strided"
    total = importance.sum()
    shares = importance / total if total > 0 else torch.ones_like(importance) / H

    def pool(x):
        x = x.unflatten(0, (H, -1))
        x = x * shares.view(H, *[1] * (x.dim() - 1))
        x = x.unflatten(0, (H // G, G)).sum(0) if strided else x.unflatten(0, (G, H // G)).sum(1)
        return x.flatten(0, 1)

    return pool(weight), pool(bias)
""",
        "loses": ["pool-public", "pool-hidden", "pool-hidden-model", "pool-hidden-edges"],
    },
    "the sizes of the public example are fixed": {
        "task": "pool",
        "source": """def weighted_pool(weight, bias, importance, n_kv_heads):
    if GROUPING == "consecutive":
        pairs = ((0, 1), (2, 3))
    else:
        pairs = ((0, 2), (1, 3))
    rows, shifts = [], []
    for a, b in pairs:
        whole = importance[a] + importance[b]
        rows.append((importance[a] * weight[a] + importance[b] * weight[b]) / whole)
        shifts.append((importance[a] * bias[a] + importance[b] * bias[b]) / whole)
    return torch.stack(rows), torch.stack(shifts)
""",
        "loses": ["pool-hidden", "pool-hidden-model", "pool-hidden-edges"],
    },
    "a projection's rows are taken as [D, H] instead of [H, D]": {
        "task": "pool",
        "source": """def weighted_pool(weight, bias, importance, n_kv_heads):
    H, G = len(importance), n_kv_heads
    if G < 1 or H % G:
        raise ValueError(f"{G} KV heads, {H} heads")
    strided = GROUPING == "strided"

    def by_group(x):
        return x.unflatten(0, (H // G, G)).transpose(0, 1) if strided else x.unflatten(0, (G, H // G))

    shares = by_group(importance)
    shares = torch.where(shares.sum(1, keepdim=True) == 0, torch.ones_like(shares), shares)
    shares = shares / shares.sum(1, keepdim=True)
    heads, shifts = weight.unflatten(0, (-1, H)).transpose(0, 1), bias.unflatten(0, (-1, H)).T
    pooled = (shares[..., None, None] * by_group(heads)).sum(1), (shares[..., None] * by_group(shifts)).sum(1)
    return pooled[0].flatten(0, 1), pooled[1].flatten()
""",
        "loses": ["pool-hidden", "pool-hidden-model", "pool-hidden-edges"],
    },
    "a group of importance 0 is divided by 0, and the importances are normalised in place": {
        "task": "pool",
        "source": """def weighted_pool(weight, bias, importance, n_kv_heads):
    H, G = len(importance), n_kv_heads
    if G < 1 or H % G:
        raise ValueError(f"{G} KV heads, {H} heads")
    strided = GROUPING == "strided"

    def by_group(x):
        return x.unflatten(0, (H // G, G)).transpose(0, 1) if strided else x.unflatten(0, (G, H // G))

    shares = by_group(importance)
    shares /= shares.sum(1, keepdim=True)
    weights, biases = by_group(weight.unflatten(0, (H, -1))), by_group(bias.unflatten(0, (H, -1)))
    pooled = (shares[..., None, None] * weights).sum(1), (shares[..., None] * biases).sum(1)
    return pooled[0].flatten(0, 1), pooled[1].flatten()
""",
        "loses": ["pool-hidden-edges"],
    },
    "importances of zero are looked for over all heads": {
        "task": "pool",
        "source": """def weighted_pool(weight, bias, importance, n_kv_heads):
    H, G = len(importance), n_kv_heads
    if G < 1 or H % G:
        raise ValueError(f"{G} KV heads, {H} heads")
    if importance.sum() == 0:
        importance = torch.ones_like(importance)
    strided = GROUPING == "strided"

    def by_group(x):
        return x.unflatten(0, (H // G, G)).transpose(0, 1) if strided else x.unflatten(0, (G, H // G))

    shares = by_group(importance)
    shares = shares / shares.sum(1, keepdim=True)
    weights, biases = by_group(weight.unflatten(0, (H, -1))), by_group(bias.unflatten(0, (H, -1)))
    pooled = (shares[..., None, None] * weights).sum(1), (shares[..., None] * biases).sum(1)
    return pooled[0].flatten(0, 1), pooled[1].flatten()
""",
        "loses": ["pool-hidden-edges"],
    },
    "importances of zero are overwritten by ones": {
        "task": "pool",
        "source": """def weighted_pool(weight, bias, importance, n_kv_heads):
    H, G = len(importance), n_kv_heads
    if G < 1 or H % G:
        raise ValueError(f"{G} KV heads, {H} heads")
    weights, biases = [], []
    for g in range(G):
        members = slice(g, None, G) if GROUPING == "strided" else slice(g * H // G, (g + 1) * H // G)
        if importance[members].sum() == 0:
            importance[members] = 1
        shares = importance[members] / importance[members].sum()
        weights.append(torch.tensordot(shares, weight.unflatten(0, (H, -1))[members], 1))
        biases.append(shares @ bias.unflatten(0, (H, -1))[members])
    return torch.cat(weights), torch.cat(biases)
""",
        "loses": ["pool-hidden-edges"],
    },
    "latents are broadcast to all heads": {
        "task": "latent",
        "source": """def latent_attend(q, q_rope, c, k_rope, w_uk, w_uv):
    swap = LAYOUT == "tokens first"
    if swap:
        q, q_rope = q.transpose(1, 2), q_rope.transpose(1, 2)
    S, T = q.shape[2], c.shape[1]
    scores = (q @ w_uk) @ c[:, None].mT + q_rope @ k_rope[:, None].mT
    seen = torch.ones(S, T, dtype=torch.bool).tril(T - S)
    scores = (scores / (q.shape[-1] + q_rope.shape[-1]) ** 0.5).masked_fill(~seen, float("-inf"))
    out = scores.softmax(-1) @ c[:, None] @ w_uv.mT
    return out.transpose(1, 2) if swap else out
""",
        "loses": ["latent-hidden-absorbed"],
    },
    "scores are divided by the root of the latent's size": {
        "task": "latent",
        "source": """def latent_attend(q, q_rope, c, k_rope, w_uk, w_uv):
    swap = LAYOUT == "tokens first"
    if swap:
        q, q_rope = q.transpose(1, 2), q_rope.transpose(1, 2)
    H, S, T = q.shape[1], q.shape[2], c.shape[1]
    rows, keys = torch.cat([q @ w_uk, q_rope], -1).flatten(1, 2), torch.cat([c, k_rope], -1)
    scores = (rows @ keys.mT / rows.shape[-1] ** 0.5).unflatten(1, (H, S))
    seen = torch.ones(S, T, dtype=torch.bool).tril(T - S)
    weights = scores.masked_fill(~seen, float("-inf")).softmax(-1)
    out = (weights.flatten(1, 2) @ c).unflatten(1, (H, S)) @ w_uv.mT
    return out.transpose(1, 2) if swap else out
""",
        "loses": ["latent-public", "latent-hidden", "latent-hidden-edges", "latent-hidden-absorbed"],
    },
    "the scale leaves the rotary part out": {
        "task": "latent",
        "source": """def latent_attend(q, q_rope, c, k_rope, w_uk, w_uv):
    swap = LAYOUT == "tokens first"
    if swap:
        q, q_rope = q.transpose(1, 2), q_rope.transpose(1, 2)
    H, S, T = q.shape[1], q.shape[2], c.shape[1]
    rows, keys = torch.cat([q @ w_uk, q_rope], -1).flatten(1, 2), torch.cat([c, k_rope], -1)
    scores = (rows @ keys.mT / q.shape[-1] ** 0.5).unflatten(1, (H, S))
    seen = torch.ones(S, T, dtype=torch.bool).tril(T - S)
    weights = scores.masked_fill(~seen, float("-inf")).softmax(-1)
    out = (weights.flatten(1, 2) @ c).unflatten(1, (H, S)) @ w_uv.mT
    return out.transpose(1, 2) if swap else out
""",
        "loses": ["latent-public", "latent-hidden", "latent-hidden-edges", "latent-hidden-absorbed"],
    },
    "new tokens see those that come after them": {
        "task": "latent",
        "source": """def latent_attend(q, q_rope, c, k_rope, w_uk, w_uv):
    swap = LAYOUT == "tokens first"
    if swap:
        q, q_rope = q.transpose(1, 2), q_rope.transpose(1, 2)
    H, S = q.shape[1], q.shape[2]
    rows, keys = torch.cat([q @ w_uk, q_rope], -1).flatten(1, 2), torch.cat([c, k_rope], -1)
    weights = (rows @ keys.mT / (q.shape[-1] + q_rope.shape[-1]) ** 0.5).softmax(-1)
    out = (weights @ c).unflatten(1, (H, S)) @ w_uv.mT
    return out.transpose(1, 2) if swap else out
""",
        "loses": ["latent-hidden", "latent-hidden-edges"],
    },
    "keys and values of every head are made again": {
        "task": "latent",
        "source": """def latent_attend(q, q_rope, c, k_rope, w_uk, w_uv):
    swap = LAYOUT == "tokens first"
    if swap:
        q, q_rope = q.transpose(1, 2), q_rope.transpose(1, 2)
    S, T, outs = q.shape[2], c.shape[1], []
    seen = torch.ones(S, T, dtype=torch.bool).tril(T - S)
    for h in range(q.shape[1]):
        k, v = c @ w_uk[h].T, c @ w_uv[h].T
        scores = (q[:, h] @ k.mT + q_rope[:, h] @ k_rope.mT) / (q.shape[-1] + q_rope.shape[-1]) ** 0.5
        outs.append(scores.masked_fill(~seen, float("-inf")).softmax(-1) @ v)
    return torch.stack(outs, 2 if swap else 1)
""",
        "loses": ["latent-hidden-absorbed"],
    },
    "a latent is cached for keys and another for values": {
        "task": "kv-budget",
        "source": """per_head = 2 * MODEL_LAYERS * MODEL_D_HEAD * 2
mha_bytes, gqa_bytes, mqa_bytes = MODEL_HEADS * per_head, MODEL_KV_HEADS * per_head, per_head
mla_bytes = MODEL_LAYERS * 2 * (D_LATENT + D_ROPE) * 2
gqa_sequences = BUDGET_GIB * 2**30 // (CONTEXT * gqa_bytes)
mla_sequences = BUDGET_GIB * 2**30 // (CONTEXT * mla_bytes)
mla_equal_heads = (D_LATENT + D_ROPE) / MODEL_D_HEAD
gqa_intensity = MODEL_HEADS / MODEL_KV_HEADS
mla_intensity = MODEL_HEADS * (2 * D_LATENT + D_ROPE) / (2 * (D_LATENT + D_ROPE))
""",
        "loses": ["kv-budget-hidden", "kv-budget-hidden-fit"],
    },
    "GB instead of GiB": {
        "task": "kv-budget",
        "source": """per_head = 2 * MODEL_LAYERS * MODEL_D_HEAD * 2
mha_bytes, gqa_bytes, mqa_bytes = MODEL_HEADS * per_head, MODEL_KV_HEADS * per_head, per_head
mla_bytes = MODEL_LAYERS * (D_LATENT + D_ROPE) * 2
gqa_sequences = BUDGET_GIB * 10**9 // (CONTEXT * gqa_bytes)
mla_sequences = BUDGET_GIB * 10**9 // (CONTEXT * mla_bytes)
mla_equal_heads = (D_LATENT + D_ROPE) / (2 * MODEL_D_HEAD)
gqa_intensity = MODEL_HEADS / MODEL_KV_HEADS
mla_intensity = MODEL_HEADS * (2 * D_LATENT + D_ROPE) / (D_LATENT + D_ROPE)
""",
        "loses": ["kv-budget-hidden-fit"],
    },
    "keys are counted, values forgotten": {
        "task": "kv-budget",
        "source": """per_head = MODEL_LAYERS * MODEL_D_HEAD * 2
mha_bytes, gqa_bytes, mqa_bytes = MODEL_HEADS * per_head, MODEL_KV_HEADS * per_head, per_head
mla_bytes = MODEL_LAYERS * (D_LATENT + D_ROPE) * 2
gqa_sequences = BUDGET_GIB * 2**30 // (CONTEXT * gqa_bytes)
mla_sequences = BUDGET_GIB * 2**30 // (CONTEXT * mla_bytes)
mla_equal_heads = (D_LATENT + D_ROPE) / MODEL_D_HEAD
gqa_intensity = MODEL_HEADS / MODEL_KV_HEADS
mla_intensity = MODEL_HEADS * (2 * D_LATENT + D_ROPE) / (D_LATENT + D_ROPE)
""",
        "loses": ["kv-budget-hidden", "kv-budget-hidden-fit"],
    },
}
