"""Typical wrong answers to problem set 2, and the points that each must lose."""

WRONG = {
    "causal mask ends in the upper left corner": {
        "task": "extend",
        "source": """import torch


def extend(cache, q, k, v, positions, slopes):
    along = LAYOUT.index("T")
    keys, values = (torch.cat(pair, dim=along) for pair in zip(cache, (k, v)))
    key_positions = torch.cat([cache[2], positions], dim=1)
    repeats = q.shape[1] // keys.shape[LAYOUT.index("G")]
    k_all, v_all = (x if LAYOUT == "BGTD" else x.transpose(1, 2) for x in (keys, values))
    v_all = v_all.masked_fill((key_positions < 0)[:, None, :, None], 0.0)
    k_all, v_all = (x.repeat_interleave(repeats, dim=1) for x in (k_all, v_all))
    S, T = q.shape[2], k_all.shape[2]
    seen = torch.ones(S, T, dtype=torch.bool).tril()
    seen = seen & (key_positions >= 0)[:, None, None, :] & (positions >= 0)[:, None, :, None]
    distance = (positions[:, :, None] - key_positions[:, None, :])[:, None]
    scores = q @ k_all.mT / q.shape[-1] ** 0.5 - slopes[:, None, None] * distance
    weights = scores.masked_fill(~seen, float("-inf")).softmax(-1).masked_fill(~seen, 0.0)
    return weights @ v_all, (keys, values, key_positions)
""",
        "loses": ["extend-hidden", "extend-hidden-edges"],
    },
    "scores not divided by the root of the head size": {
        "task": "extend",
        "source": """import torch


def extend(cache, q, k, v, positions, slopes):
    along = LAYOUT.index("T")
    keys, values = (torch.cat(pair, dim=along) for pair in zip(cache, (k, v)))
    key_positions = torch.cat([cache[2], positions], dim=1)
    repeats = q.shape[1] // keys.shape[LAYOUT.index("G")]
    k_all, v_all = (x if LAYOUT == "BGTD" else x.transpose(1, 2) for x in (keys, values))
    v_all = v_all.masked_fill((key_positions < 0)[:, None, :, None], 0.0)
    k_all, v_all = (x.repeat_interleave(repeats, dim=1) for x in (k_all, v_all))
    distance = (positions[:, :, None] - key_positions[:, None, :])[:, None]
    seen = (distance >= 0) & (key_positions >= 0)[:, None, None, :]
    scores = q @ k_all.mT - slopes[:, None, None] * distance
    weights = scores.masked_fill(~seen, float("-inf")).softmax(-1).masked_fill(~seen, 0.0)
    return weights @ v_all, (keys, values, key_positions)
""",
        "loses": ["extend-public", "extend-hidden", "extend-hidden-edges"],
    },
    "holes of the cache are seen": {
        "task": "extend",
        "source": """import torch


def extend(cache, q, k, v, positions, slopes):
    along = LAYOUT.index("T")
    keys, values = (torch.cat(pair, dim=along) for pair in zip(cache, (k, v)))
    key_positions = torch.cat([cache[2], positions], dim=1)
    repeats = q.shape[1] // keys.shape[LAYOUT.index("G")]
    k_all, v_all = (x if LAYOUT == "BGTD" else x.transpose(1, 2) for x in (keys, values))
    k_all, v_all = (x.repeat_interleave(repeats, dim=1) for x in (k_all, v_all))
    distance = (positions[:, :, None] - key_positions[:, None, :])[:, None]
    scores = q @ k_all.mT / q.shape[-1] ** 0.5 - slopes[:, None, None] * distance
    out = scores.masked_fill(distance < 0, float("-inf")).softmax(-1) @ v_all
    return out.masked_fill((positions < 0)[:, None, :, None], 0.0), (keys, values, key_positions)
""",
        "loses": ["extend-hidden", "extend-hidden-edges"],
    },
    "query head h reads KV head h mod G": {
        "task": "extend",
        "source": """import torch


def extend(cache, q, k, v, positions, slopes):
    along = LAYOUT.index("T")
    keys, values = (torch.cat(pair, dim=along) for pair in zip(cache, (k, v)))
    key_positions = torch.cat([cache[2], positions], dim=1)
    repeats = q.shape[1] // keys.shape[LAYOUT.index("G")]
    k_all, v_all = (x if LAYOUT == "BGTD" else x.transpose(1, 2) for x in (keys, values))
    v_all = v_all.masked_fill((key_positions < 0)[:, None, :, None], 0.0)
    k_all, v_all = (x.repeat(1, repeats, 1, 1) for x in (k_all, v_all))
    distance = (positions[:, :, None] - key_positions[:, None, :])[:, None]
    seen = (distance >= 0) & (key_positions >= 0)[:, None, None, :]
    scores = q @ k_all.mT / q.shape[-1] ** 0.5 - slopes[:, None, None] * distance
    weights = scores.masked_fill(~seen, float("-inf")).softmax(-1).masked_fill(~seen, 0.0)
    return weights @ v_all, (keys, values, key_positions)
""",
        "loses": ["extend-hidden", "extend-hidden-edges"],
    },
    "distance counted in slots": {
        "task": "extend",
        "source": """import torch


def extend(cache, q, k, v, positions, slopes):
    along = LAYOUT.index("T")
    keys, values = (torch.cat(pair, dim=along) for pair in zip(cache, (k, v)))
    key_positions = torch.cat([cache[2], positions], dim=1)
    repeats = q.shape[1] // keys.shape[LAYOUT.index("G")]
    k_all, v_all = (x if LAYOUT == "BGTD" else x.transpose(1, 2) for x in (keys, values))
    v_all = v_all.masked_fill((key_positions < 0)[:, None, :, None], 0.0)
    k_all, v_all = (x.repeat_interleave(repeats, dim=1) for x in (k_all, v_all))
    S, T = q.shape[2], k_all.shape[2]
    distance = torch.arange(T - S, T)[:, None] - torch.arange(T)
    seen = (distance >= 0) & (key_positions >= 0)[:, None, None, :] & (positions >= 0)[:, None, :, None]
    scores = q @ k_all.mT / q.shape[-1] ** 0.5 - slopes[:, None, None] * distance
    weights = scores.masked_fill(~seen, float("-inf")).softmax(-1).masked_fill(~seen, 0.0)
    return weights @ v_all, (keys, values, key_positions)
""",
        "loses": ["extend-hidden"],
    },
    "slots for positions in the causal mask": {
        "task": "extend",
        "source": """import torch


def extend(cache, q, k, v, positions, slopes):
    along = LAYOUT.index("T")
    keys, values = (torch.cat(pair, dim=along) for pair in zip(cache, (k, v)))
    key_positions = torch.cat([cache[2], positions], dim=1)
    repeats = q.shape[1] // keys.shape[LAYOUT.index("G")]
    k_all, v_all = (x if LAYOUT == "BGTD" else x.transpose(1, 2) for x in (keys, values))
    v_all = v_all.masked_fill((key_positions < 0)[:, None, :, None], 0.0)
    k_all, v_all = (x.repeat_interleave(repeats, dim=1) for x in (k_all, v_all))
    S, T = q.shape[2], k_all.shape[2]
    seen = torch.ones(S, T, dtype=torch.bool).tril(T - S)
    seen = seen & (key_positions >= 0)[:, None, None, :] & (positions >= 0)[:, None, :, None]
    distance = (positions[:, :, None] - key_positions[:, None, :])[:, None]
    scores = q @ k_all.mT / q.shape[-1] ** 0.5 - slopes[:, None, None] * distance
    weights = scores.masked_fill(~seen, float("-inf")).softmax(-1).masked_fill(~seen, 0.0)
    return weights @ v_all, (keys, values, key_positions)
""",
        "loses": ["extend-hidden"],
    },
    "a weight of zero lets NaN through": {
        "task": "extend",
        "source": """import torch


def extend(cache, q, k, v, positions, slopes):
    along = LAYOUT.index("T")
    keys, values = (torch.cat(pair, dim=along) for pair in zip(cache, (k, v)))
    key_positions = torch.cat([cache[2], positions], dim=1)
    repeats = q.shape[1] // keys.shape[LAYOUT.index("G")]
    k_all, v_all = (x if LAYOUT == "BGTD" else x.transpose(1, 2) for x in (keys, values))
    k_all, v_all = (x.repeat_interleave(repeats, dim=1) for x in (k_all, v_all))
    distance = (positions[:, :, None] - key_positions[:, None, :])[:, None]
    seen = (distance >= 0) & (key_positions >= 0)[:, None, None, :]
    scores = q @ k_all.mT / q.shape[-1] ** 0.5 - slopes[:, None, None] * distance
    weights = scores.masked_fill(~seen, float("-inf")).softmax(-1).masked_fill(~seen, 0.0)
    return weights @ v_all, (keys, values, key_positions)
""",
        "loses": ["extend-hidden-edges"],
    },
    "the holes of the caller are zeroed in place": {
        "task": "extend",
        "source": """import torch


def extend(cache, q, k, v, positions, slopes):
    along = LAYOUT.index("T")
    hole = (positions < 0)[:, None, :, None] if LAYOUT == "BGTD" else (positions < 0)[:, :, None, None]
    k.masked_fill_(hole, 0.0)
    v.masked_fill_(hole, 0.0)
    keys, values = (torch.cat(pair, dim=along) for pair in zip(cache, (k, v)))
    key_positions = torch.cat([cache[2], positions], dim=1)
    repeats = q.shape[1] // keys.shape[LAYOUT.index("G")]
    k_all, v_all = (x if LAYOUT == "BGTD" else x.transpose(1, 2) for x in (keys, values))
    k_all, v_all = (x.repeat_interleave(repeats, dim=1) for x in (k_all, v_all))
    distance = (positions[:, :, None] - key_positions[:, None, :])[:, None]
    seen = (distance >= 0) & (key_positions >= 0)[:, None, None, :]
    scores = q @ k_all.mT / q.shape[-1] ** 0.5 - slopes[:, None, None] * distance
    weights = scores.masked_fill(~seen, float("-inf")).softmax(-1).masked_fill(~seen, 0.0)
    return weights @ v_all, (keys, values, key_positions)
""",
        "loses": ["extend-hidden-edges"],
    },
    "ring of a window, the chunk forgotten": {
        "task": "ring-contents",
        "source": """def ring_contents(n_tokens, window, chunk, sinks):
    if window < 1 or chunk < 1 or n_tokens < 0 or sinks < 0:
        raise ValueError("a count is too small")
    kept, ring = [-1] * sinks, [-1] * window
    for p in range(n_tokens):
        if p < sinks:
            kept[p] = p
        else:
            ring[(p - sinks) % window] = p
    return kept + ring if SINKS_AT == "front" else ring + kept
""",
        "loses": ["ring-contents-hidden", "ring-contents-hidden-edges"],
    },
    "slot from the position without taking off the sinks": {
        "task": "ring-contents",
        "source": """def ring_contents(n_tokens, window, chunk, sinks):
    if window < 1 or chunk < 1 or n_tokens < 0 or sinks < 0:
        raise ValueError("a count is too small")
    size = window + chunk - 1
    kept, ring = [-1] * sinks, [-1] * size
    for p in range(n_tokens):
        if p < sinks:
            kept[p] = p
        else:
            ring[p % size] = p
    return kept + ring if SINKS_AT == "front" else ring + kept
""",
        "loses": ["ring-contents-hidden"],
    },
    "sinks are overwritten when the ring comes round": {
        "task": "ring-contents",
        "source": """def ring_contents(n_tokens, window, chunk, sinks):
    if window < 1 or chunk < 1 or n_tokens < 0 or sinks < 0:
        raise ValueError("a count is too small")
    size = sinks + window + chunk - 1
    slots = [-1] * size
    for p in range(n_tokens):
        slots[p % size] = p
    return slots
""",
        "loses": ["ring-contents-hidden"],
    },
    "the answer of the public test, hard-coded": {
        "task": "ring-contents",
        "source": """def ring_contents(n_tokens, window, chunk, sinks):
    return [4, 5, 2, 3]
""",
        "loses": ["ring-contents-hidden", "ring-contents-hidden-edges"],
    },
    "GB and GiB exchanged": {
        "task": "cache-size",
        "source": """bytes_per_layer = 2 * N_KV_HEADS * D_HEAD * VALUE_BITS // 8
bytes_per_token = N_LAYERS * bytes_per_layer
full, sliding = N_LAYERS - N_SLIDING, N_SLIDING
sequence_bytes = (full * N_TOKENS + sliding * WINDOW) * bytes_per_layer
sequence_gib, sequence_gb = sequence_bytes / 10**9, sequence_bytes / 2**30
budget = MEMORY_GIB * 2**30 - WEIGHTS_GB * 10**9
n_sequences = int(budget // sequence_bytes)
n_shared_tokens = N_PREFIX // BLOCK_SIZE * BLOCK_SIZE
shared_bytes = full * n_shared_tokens * bytes_per_layer
n_sharing = int((budget - shared_bytes) // (sequence_bytes - shared_bytes))
""",
        "loses": ["cache-size-hidden"],
    },
    "query heads for KV heads": {
        "task": "cache-size",
        "source": """bytes_per_layer = 2 * N_HEADS * D_HEAD * VALUE_BITS // 8
bytes_per_token = N_LAYERS * bytes_per_layer
full, sliding = N_LAYERS - N_SLIDING, N_SLIDING
sequence_bytes = (full * N_TOKENS + sliding * WINDOW) * bytes_per_layer
sequence_gib, sequence_gb = sequence_bytes / 2**30, sequence_bytes / 10**9
budget = MEMORY_GIB * 2**30 - WEIGHTS_GB * 10**9
n_sequences = int(budget // sequence_bytes)
n_shared_tokens = N_PREFIX // BLOCK_SIZE * BLOCK_SIZE
shared_bytes = full * n_shared_tokens * bytes_per_layer
n_sharing = int((budget - shared_bytes) // (sequence_bytes - shared_bytes))
""",
        "loses": ["cache-size-hidden", "cache-size-hidden-counts"],
    },
    "a partly filled block is shared": {
        "task": "cache-size",
        "source": """bytes_per_layer = 2 * N_KV_HEADS * D_HEAD * VALUE_BITS // 8
bytes_per_token = N_LAYERS * bytes_per_layer
full, sliding = N_LAYERS - N_SLIDING, N_SLIDING
sequence_bytes = (full * N_TOKENS + sliding * WINDOW) * bytes_per_layer
sequence_gib, sequence_gb = sequence_bytes / 2**30, sequence_bytes / 10**9
budget = MEMORY_GIB * 2**30 - WEIGHTS_GB * 10**9
n_sequences = int(budget // sequence_bytes)
n_shared_tokens = N_PREFIX
shared_bytes = full * n_shared_tokens * bytes_per_layer
n_sharing = int((budget - shared_bytes) // (sequence_bytes - shared_bytes))
""",
        "loses": ["cache-size-hidden-counts"],
    },
    "a block named by its own tokens alone": {
        "task": "block-names",
        "source": """import hashlib


def block_names(tokens, block_size, salt, images):
    names = []
    for begin in range(0, len(tokens) - block_size + 1, block_size):
        places = range(begin, begin + block_size)
        content = (salt, [(tokens[place], images.get(place)) for place in places])
        names.append(hashlib.sha256(repr(content).encode()).digest()[:16])
    return names
""",
        "loses": ["block-names-hidden", "block-names-hidden-images"],
    },
    "tokens joined without a separator": {
        "task": "block-names",
        "source": """import hashlib


def block_names(tokens, block_size, salt, images):
    names, parent = [], hashlib.sha256(salt.encode()).digest()
    for begin in range(0, len(tokens) - block_size + 1, block_size):
        places = range(begin, begin + block_size)
        text = "".join(str(tokens[place]) for place in places)
        pictures = repr([images.get(place) for place in places])
        parent = hashlib.sha256(parent + text.encode() + pictures.encode()).digest()
        names.append(parent[:16])
    return names
""",
        "loses": ["block-names-hidden"],
    },
    "the pictures of the whole text in every name": {
        "task": "block-names",
        "source": """import hashlib


def block_names(tokens, block_size, salt, images):
    pictures = sorted((place, picture) for place, picture in images.items() if place < len(tokens))
    names, parent = [], hashlib.sha256(repr((salt, pictures)).encode()).digest()
    for begin in range(0, len(tokens) - block_size + 1, block_size):
        parent = hashlib.sha256(parent + repr(tokens[begin : begin + block_size]).encode()).digest()
        names.append(parent[:16])
    return names
""",
        "loses": ["block-names-hidden-images"],
    },
    "Python's hash of the prefix": {
        "task": "block-names",
        "source": """def block_names(tokens, block_size, salt, images):
    names = []
    for end in range(block_size, len(tokens) + 1, block_size):
        pictures = tuple(sorted((place, picture) for place, picture in images.items() if place < end))
        names.append(hash((salt, tuple(tokens[:end]), pictures)).to_bytes(16, "little", signed=True))
    return names
""",
        "loses": ["block-names-hidden"],
    },
    "a picture runs into the tokens around it": {
        "task": "block-names",
        "source": """import hashlib


def block_names(tokens, block_size, salt, images):
    names, parent = [], hashlib.sha256(salt.encode()).digest()
    for begin in range(0, len(tokens) - block_size + 1, block_size):
        digest = hashlib.sha256(parent)
        for place in range(begin, begin + block_size):
            digest.update(tokens[place].to_bytes(4, "little") + images.get(place, b""))
        parent = digest.digest()
        names.append(parent[:16])
    return names
""",
        "loses": ["block-names-hidden-images"],
    },
    "tenants share their blocks": {
        "task": "block-names",
        "source": """import hashlib


def block_names(tokens, block_size, salt, images):
    names, parent = [], b"root"
    for begin in range(0, len(tokens) - block_size + 1, block_size):
        content = [(tokens[place], images.get(place)) for place in range(begin, begin + block_size)]
        parent = hashlib.sha256(parent + repr(content).encode()).digest()
        names.append(parent[:16])
    return names
""",
        "loses": ["block-names-hidden"],
    },
    "the rest of a text named like a full block": {
        "task": "block-names",
        "source": """import hashlib


def block_names(tokens, block_size, salt, images):
    names, parent = [], hashlib.sha256(salt.encode()).digest()
    for begin in range(0, len(tokens), block_size):
        places = range(begin, min(begin + block_size, len(tokens)))
        content = [(tokens[place], images.get(place)) for place in places]
        parent = hashlib.sha256(parent + repr(content).encode()).digest()
        names.append(parent[:16])
    return names
""",
        "loses": ["block-names-public", "block-names-hidden"],
    },
    "least recently used, whatever follows": {
        "task": "evict",
        "source": """def evict(blocks, n):
    idle = sorted((used, name) for name, (_, references, used) in blocks.items() if not references)
    if n > len(idle):
        raise ValueError("too few blocks are not held")
    return {name for _, name in idle[:n]}
""",
        "loses": ["evict-hidden"],
    },
    "held blocks go too": {
        "task": "evict",
        "source": """def evict(blocks, n):
    if n > len(blocks):
        raise ValueError("too few blocks")
    return set(sorted(blocks, key=lambda name: blocks[name][2])[:n])
""",
        "loses": ["evict-public", "evict-hidden"],
    },
    "leaves found once, a parent never becomes one": {
        "task": "evict",
        "source": """def evict(blocks, n):
    parents = {parent for parent, _, _ in blocks.values()}
    leaves = [name for name, (_, references, _) in blocks.items() if not references and name not in parents]
    if n > len(leaves):
        raise ValueError("too few blocks are not held")
    return set(sorted(leaves, key=lambda name: blocks[name][2])[:n])
""",
        "loses": ["evict-hidden"],
    },
    "a miss counted only where the answer was right": {
        "task": "best-threshold",
        "source": """def best_threshold(similarity, same, candidates, cost_wrong, cost_miss):
    if not candidates:
        raise ValueError("no candidate")

    def cost(threshold):
        total = 0
        for value, right in zip(similarity, same):
            served = value >= threshold if AT_THRESHOLD == "served" else value > threshold
            total += cost_wrong * (served and not right) + cost_miss * (right and not served)
        return total

    sign = 1 if TIES == "lowest" else -1
    return min(candidates, key=lambda threshold: (cost(threshold), sign * threshold))
""",
        "loses": ["best-threshold-hidden"],
    },
    "the first of the cheapest candidates": {
        "task": "best-threshold",
        "source": """def best_threshold(similarity, same, candidates, cost_wrong, cost_miss):
    if not candidates:
        raise ValueError("no candidate")

    def cost(threshold):
        total = 0
        for value, right in zip(similarity, same):
            served = value >= threshold if AT_THRESHOLD == "served" else value > threshold
            total += (0 if right else cost_wrong) if served else cost_miss
        return total

    return min(candidates, key=cost)
""",
        "loses": ["best-threshold-hidden"],
    },
    "the public threshold, hard-coded": {
        "task": "best-threshold",
        "source": """def best_threshold(similarity, same, candidates, cost_wrong, cost_miss):
    return 0.8
""",
        "loses": ["best-threshold-hidden"],
    },
}
