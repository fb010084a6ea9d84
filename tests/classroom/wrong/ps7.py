"""Typical wrong answers to problem set 7, and the points that each must lose."""

WRONG = {
    "rest is p again after a rejection": {
        "task": "siblings",
        "source": """import torch


def siblings(p, q, tokens):
    proposal, stays = q, []
    for i in range(tokens.shape[1]):
        if i and REPLACEMENT == "without":
            proposal = proposal.scatter(1, tokens[:, i - 1 : i], 0.0)
            proposal = proposal / proposal.sum(1, keepdim=True)
        x = tokens[:, i : i + 1]
        stays.append((p.gather(1, x) / proposal.gather(1, x)).clamp(max=1))
    return torch.cat(stays, 1), p.clone()
""",
        "loses": ["siblings-hidden", "siblings-hidden-rivals"],
    },
    "residual not scaled up to 1": {
        "task": "siblings",
        "source": """import torch


def siblings(p, q, tokens):
    rest, proposal, stays = p, q, []
    for i in range(tokens.shape[1]):
        if i and REPLACEMENT == "without":
            proposal = proposal.scatter(1, tokens[:, i - 1 : i], 0.0)
            proposal = proposal / proposal.sum(1, keepdim=True)
        x = tokens[:, i : i + 1]
        stays.append((rest.gather(1, x) / proposal.gather(1, x)).clamp(max=1))
        rest = (rest - proposal).clamp(min=0)
    return torch.cat(stays, 1), rest
""",
        "loses": ["siblings-public", "siblings-hidden", "siblings-hidden-rivals"],
    },
    "residual of p equal to q divides 0 by 0": {
        "task": "siblings",
        "source": """import torch


def siblings(p, q, tokens):
    rest, proposal, stays = p, q, []
    for i in range(tokens.shape[1]):
        if i and REPLACEMENT == "without":
            proposal = proposal.scatter(1, tokens[:, i - 1 : i], 0.0)
            proposal = proposal / proposal.sum(1, keepdim=True)
        x = tokens[:, i : i + 1]
        stays.append((rest.gather(1, x) / proposal.gather(1, x)).clamp(max=1))
        left = (rest - proposal).clamp(min=0)
        rest = left / left.sum(1, keepdim=True)
    return torch.cat(stays, 1), rest
""",
        "loses": ["siblings-hidden"],
    },
    "rejected siblings stay in the proposal": {
        "task": "siblings",
        "source": """import torch


def siblings(p, q, tokens):
    rest, stays = p, []
    for x in tokens.T:
        stays.append((rest.gather(1, x[:, None]) / q.gather(1, x[:, None])).clamp(max=1))
        left = (rest - q).clamp(min=0)
        total = left.sum(1, keepdim=True)
        rest = torch.where(total > 0, left / total, rest)
    return torch.cat(stays, 1), rest
""",
        "loses": ["siblings-hidden-rivals"],
    },
    "only the first draft of a place is tried": {
        "task": "siblings",
        "source": """import torch


def siblings(p, q, tokens):
    x = tokens[:, :1]
    stays = torch.zeros(tokens.shape, dtype=p.dtype)
    stays[:, :1] = (p.gather(1, x) / q.gather(1, x)).clamp(max=1)
    left = (p - q).clamp(min=0)
    total = left.sum(1, keepdim=True)
    return stays, torch.where(total > 0, left / total, p)
""",
        "loses": ["siblings-hidden-rivals"],
    },
    "rejected siblings struck out of q itself": {
        "task": "siblings",
        "source": """import torch


def siblings(p, q, tokens):
    rest, stays = p, []
    for i in range(tokens.shape[1]):
        if i and REPLACEMENT == "without":
            q.scatter_(1, tokens[:, i - 1 : i], 0.0)
            q /= q.sum(1, keepdim=True)
        x = tokens[:, i : i + 1]
        stays.append((rest.gather(1, x) / q.gather(1, x)).clamp(max=1))
        left = (rest - q).clamp(min=0)
        total = left.sum(1, keepdim=True)
        rest = torch.where(total > 0, left / total, rest)
    return torch.cat(stays, 1), rest
""",
        "loses": ["siblings-hidden-rivals"],
    },
    "first drafts kept instead of the path": {
        "task": "rollback",
        "source": """import torch


def roll_back(kv, lengths, paths):
    slots = 2 if LAYOUT == "BHTD" else 1
    out = torch.zeros_like(kv)
    new_lengths = lengths + 1 + torch.tensor([len(path) for path in paths])
    for b, n in enumerate(new_lengths.tolist()):
        out.movedim(slots, 1)[b, :n] = kv.movedim(slots, 1)[b, :n]
    return out, new_lengths
""",
        "loses": ["rollback-public", "rollback-hidden"],
    },
    "cache changed in place": {
        "task": "rollback",
        "source": """import torch


def roll_back(kv, lengths, paths):
    by_slot = kv.movedim(2 if LAYOUT == "BHTD" else 1, 1)
    new_lengths = []
    for b, path in enumerate(paths):
        length = int(lengths[b])
        stay = [*range(length + 1), *(length + 1 + j for j in path)]
        by_slot[b, : len(stay)] = by_slot[b, stay]
        by_slot[b, len(stay) :] = 0
        new_lengths.append(len(stay))
    return kv, torch.tensor(new_lengths)
""",
        "loses": ["rollback-hidden"],
    },
    "last token of the text not counted": {
        "task": "rollback",
        "source": """import torch


def roll_back(kv, lengths, paths):
    slots = 2 if LAYOUT == "BHTD" else 1
    out = torch.zeros_like(kv)
    new_lengths = []
    for b, path in enumerate(paths):
        length = int(lengths[b])
        stay = [*range(length), *(length + j for j in path)]
        out.movedim(slots, 1)[b, : len(stay)] = kv.movedim(slots, 1)[b, stay]
        new_lengths.append(len(stay))
    return out, torch.tensor(new_lengths)
""",
        "loses": ["rollback-public", "rollback-hidden"],
    },
    "lengths in floating point": {
        "task": "rollback",
        "source": """import torch


def roll_back(kv, lengths, paths):
    slots = 2 if LAYOUT == "BHTD" else 1
    out, new_lengths = torch.zeros_like(kv), torch.zeros(len(paths))
    for b, path in enumerate(paths):
        length = int(lengths[b])
        stay = [*range(length + 1), *(length + 1 + j for j in path)]
        out.movedim(slots, 1)[b, : len(stay)] = kv.movedim(slots, 1)[b, stay]
        new_lengths[b] = len(stay)
    return out, new_lengths
""",
        "loses": ["rollback-public", "rollback-hidden"],
    },
    "GiB for GB": {
        "task": "arithmetic",
        "source": """tokens_per_round = sum(ALPHA**i for i in range(GAMMA + 1))
speed_up = tokens_per_round / (GAMMA * COST + VERIFY)
best_gamma = max(range(1, 13), key=lambda n: sum(ALPHA**i for i in range(n + 1)) / (n * COST + VERIFY))
break_even = COST + VERIFY - 1
gb_per_token = 2 * (TARGET_B + GAMMA * DRAFT_B) * 1e9 / 2**30 / tokens_per_round
chain_tokens = 1 + HEADS[0][0] + HEADS[0][0] * HEADS[1][0]
paths = [*HEADS[0], *(a * b for a in HEADS[0] for b in HEADS[1])]
tree_tokens = 1 + sum(sorted(paths, reverse=True)[:NODES])
""",
        "loses": ["arithmetic-hidden"],
    },
    "price of the longer pass left out": {
        "task": "arithmetic",
        "source": """tokens_per_round = sum(ALPHA**i for i in range(GAMMA + 1))
speed_up = tokens_per_round / (GAMMA * COST + 1)
best_gamma = max(range(1, 13), key=lambda n: sum(ALPHA**i for i in range(n + 1)) / (n * COST + 1))
break_even = COST
gb_per_token = 2 * (TARGET_B + GAMMA * DRAFT_B) / tokens_per_round
chain_tokens = 1 + HEADS[0][0] + HEADS[0][0] * HEADS[1][0]
paths = [*HEADS[0], *(a * b for a in HEADS[0] for b in HEADS[1])]
tree_tokens = 1 + sum(sorted(paths, reverse=True)[:NODES])
""",
        "loses": ["arithmetic-hidden"],
    },
    "nodes of head 2 counted without their parents": {
        "task": "arithmetic",
        "source": """tokens_per_round = sum(ALPHA**i for i in range(GAMMA + 1))
speed_up = tokens_per_round / (GAMMA * COST + VERIFY)
best_gamma = max(range(1, 13), key=lambda n: sum(ALPHA**i for i in range(n + 1)) / (n * COST + VERIFY))
break_even = COST + VERIFY - 1
gb_per_token = 2 * (TARGET_B + GAMMA * DRAFT_B) / tokens_per_round
chain_tokens = 1 + HEADS[0][0] + HEADS[0][0] * HEADS[1][0]
tree_tokens = 1 + sum(sorted([*HEADS[0], *HEADS[1]], reverse=True)[:NODES])
""",
        "loses": ["arithmetic-hidden-tree"],
    },
    "drafts stop where the text ends": {
        "task": "lookup",
        "source": """def look_up(tokens, n_draft):
    for n in range(min(LONGEST, len(tokens) - 1), SHORTEST - 1, -1):
        places = [b for b in range(len(tokens) - n) if tokens[b : b + n] == tokens[-n:]]
        if places:
            begin = (places[-1] if MATCH == "latest" else places[0]) + n
            return tokens[begin : begin + n_draft]
    return []
""",
        "loses": ["lookup-hidden"],
    },
    "shortest ending tried first": {
        "task": "lookup",
        "source": """def look_up(tokens, n_draft):
    for n in range(SHORTEST, min(LONGEST, len(tokens) - 1) + 1):
        places = [b for b in range(len(tokens) - n) if tokens[b : b + n] == tokens[-n:]]
        if places:
            begin = (places[-1] if MATCH == "latest" else places[0]) + n
            text = list(tokens)
            for i in range(n_draft):
                text.append(text[begin + i])
            return text[len(tokens) :]
    return []
""",
        "loses": ["lookup-hidden"],
    },
    "ending found as its own match": {
        "task": "lookup",
        "source": """def look_up(tokens, n_draft):
    for n in range(min(LONGEST, len(tokens)), SHORTEST - 1, -1):
        places = [b for b in range(len(tokens) - n + 1) if tokens[b : b + n] == tokens[-n:]]
        if places:
            begin = (places[-1] if MATCH == "latest" else places[0]) + n
            return [tokens[(begin + i) % len(tokens)] for i in range(n_draft)]
    return []
""",
        "loses": ["lookup-public", "lookup-hidden"],
    },
    "answers of the visible test written down": {
        "task": "lookup",
        "source": """def look_up(tokens, n_draft):
    if tokens == [7, 1, 2, 8, 1, 2, 9, 1, 2]:
        return [9, 1, 2] if MATCH == "latest" else [8, 1, 2]
    return []
""",
        "loses": ["lookup-hidden"],
    },
    "siblings see each other": {
        "task": "tree-pass",
        "source": """import torch


def tree_pass(n_cached, parents):
    depth = [0]
    for parent in parents:
        depth.append(depth[parent + 1] + 1)
    positions = n_cached + torch.tensor(depth)
    k_pos = torch.cat([torch.arange(n_cached), positions])
    distance = positions[:, None] - k_pos
    near = distance <= WINDOW if EDGE == "inclusive" else distance < WINDOW
    return positions, near & (distance >= 0)
""",
        "loses": ["tree-pass-public", "tree-pass-hidden"],
    },
    "window counted in slots": {
        "task": "tree-pass",
        "source": """import torch


def tree_pass(n_cached, parents):
    n = len(parents)
    depth, sees = [0], torch.eye(n + 1, dtype=torch.bool)
    for i, parent in enumerate(parents, start=1):
        depth.append(depth[parent + 1] + 1)
        sees[i] |= sees[parent + 1]
    distance = n_cached + torch.arange(n + 1)[:, None] - torch.arange(n_cached + n + 1)
    near = distance <= WINDOW if EDGE == "inclusive" else distance < WINDOW
    seen = torch.cat([torch.ones(n + 1, n_cached, dtype=torch.bool), sees], dim=1)
    return n_cached + torch.tensor(depth), seen & near
""",
        "loses": ["tree-pass-hidden"],
    },
    "parent seen and no other ancestor": {
        "task": "tree-pass",
        "source": """import torch


def tree_pass(n_cached, parents):
    n = len(parents)
    depth, sees = [0], torch.eye(n + 1, dtype=torch.bool)
    for i, parent in enumerate(parents, start=1):
        depth.append(depth[parent + 1] + 1)
        sees[i, parent + 1] = True
    positions = n_cached + torch.tensor(depth)
    distance = positions[:, None] - torch.cat([torch.arange(n_cached), positions])
    near = distance <= WINDOW if EDGE == "inclusive" else distance < WINDOW
    return positions, torch.cat([torch.ones(n + 1, n_cached, dtype=torch.bool), sees], dim=1) & near
""",
        "loses": ["tree-pass-hidden"],
    },
    "window one token off": {
        "task": "tree-pass",
        "source": """import torch


def tree_pass(n_cached, parents):
    n = len(parents)
    depth, sees = [0], torch.eye(n + 1, dtype=torch.bool)
    for i, parent in enumerate(parents, start=1):
        depth.append(depth[parent + 1] + 1)
        sees[i] |= sees[parent + 1]
    positions = n_cached + torch.tensor(depth)
    distance = positions[:, None] - torch.cat([torch.arange(n_cached), positions])
    near = distance < WINDOW if EDGE == "inclusive" else distance < WINDOW - 1
    return positions, torch.cat([torch.ones(n + 1, n_cached, dtype=torch.bool), sees], dim=1) & near
""",
        "loses": ["tree-pass-hidden"],
    },
    "positions in floating point": {
        "task": "tree-pass",
        "source": """import torch


def tree_pass(n_cached, parents):
    n = len(parents)
    positions, sees = torch.full((n + 1,), float(n_cached)), torch.eye(n + 1, dtype=torch.bool)
    for i, parent in enumerate(parents, start=1):
        positions[i] = positions[parent + 1] + 1
        sees[i] |= sees[parent + 1]
    distance = positions[:, None] - torch.cat([torch.arange(n_cached), positions])
    near = distance <= WINDOW if EDGE == "inclusive" else distance < WINDOW
    return positions, torch.cat([torch.ones(n + 1, n_cached, dtype=torch.bool), sees], dim=1) & near
""",
        "loses": ["tree-pass-public", "tree-pass-hidden"],
    },
    "nodes walked once, in their order": {
        "task": "tree-path",
        "source": """def accepted_path(logits, tokens, parents):
    best = logits.argmax(-1).tolist()
    after = best[1:] + best[:1] if ROOT_ROW == "first" else best
    path, end = [], -1
    for j, parent in enumerate(parents):
        if parent == end and tokens[j] == after[end]:
            path.append(j)
            end = j
    return path, [*(tokens[j] for j in path), after[end]]
""",
        "loses": ["tree-path-hidden"],
    },
    "bonus token dropped": {
        "task": "tree-path",
        "source": """def accepted_path(logits, tokens, parents):
    best = logits.argmax(-1).tolist()
    after = best[1:] + best[:1] if ROOT_ROW == "first" else best
    path, end = [], -1
    while True:
        following = [j for j, parent in enumerate(parents) if parent == end and tokens[j] == after[end]]
        if not following:
            return path, [tokens[j] for j in path]
        end = following[0]
        path.append(end)
""",
        "loses": ["tree-path-public", "tree-path-hidden"],
    },
    "draft judged by the row after itself": {
        "task": "tree-path",
        "source": """def accepted_path(logits, tokens, parents):
    best = logits.argmax(-1).tolist()
    after = best[1:] + best[:1] if ROOT_ROW == "first" else best
    stays = []
    for j, parent in enumerate(parents):
        if after[j] == tokens[j] and (parent == -1 or parent in stays):
            stays.append(j)
    return stays, [*(tokens[j] for j in stays), after[stays[-1] if stays else -1]]
""",
        "loses": ["tree-path-public", "tree-path-hidden"],
    },
}
