"""Typical wrong answers to problem set 3, and the points that each must lose."""

WRONG = {
    "a seat is free one step late": {
        "task": "seats",
        "source": """def serve(requests, seats, policy):
    if policy not in ("static", "continuous"):
        raise ValueError(f"policy is {policy!r}, it must be 'static' or 'continuous'")
    rank = {
        "first come": lambda i: i,
        "shortest first": lambda i: requests[i][1],
        "longest first": lambda i: -requests[i][1],
    }
    waiting, running, finished = list(range(len(requests))), {}, [0] * len(requests)
    step = wasted = 0
    while waiting or running:
        free = seats - len(running) if policy == "continuous" or not running else 0
        ready = sorted((i for i in waiting if requests[i][0] <= step), key=rank[QUEUE])
        for i in ready[:free]:
            running[i] = requests[i][1]
            waiting.remove(i)
        if running:
            wasted += seats
        for i in running:
            if running[i] > 0:
                running[i] -= 1
                wasted -= 1
                finished[i] = step
        if policy == "static" and not any(running.values()):
            running = {}
        if policy == "continuous":
            running = {i: left for i, left in running.items() if left or finished[i] == step}
        step += 1
    return finished, wasted
""",
        "loses": ["seats-public", "seats-hidden-continuous"],
    },
    "latecomers join a running group": {
        "task": "seats",
        "source": """def serve(requests, seats, policy):
    if policy not in ("static", "continuous"):
        raise ValueError(f"policy is {policy!r}, it must be 'static' or 'continuous'")
    rank = {
        "first come": lambda i: i,
        "shortest first": lambda i: requests[i][1],
        "longest first": lambda i: -requests[i][1],
    }
    waiting, running, finished = list(range(len(requests))), {}, [0] * len(requests)
    step = wasted = 0
    while waiting or running:
        free = seats - len(running)
        ready = sorted((i for i in waiting if requests[i][0] <= step), key=rank[QUEUE])
        for i in ready[:free]:
            running[i] = requests[i][1]
            waiting.remove(i)
        if running:
            wasted += seats
        for i in running:
            if running[i] > 0:
                running[i] -= 1
                wasted -= 1
                finished[i] = step
        if policy == "continuous" or not any(running.values()):
            running = {i: left for i, left in running.items() if left}
        step += 1
    return finished, wasted
""",
        "loses": ["seats-hidden-static"],
    },
    "steps in which nobody runs are counted as wasted": {
        "task": "seats",
        "source": """def serve(requests, seats, policy):
    if policy not in ("static", "continuous"):
        raise ValueError(f"policy is {policy!r}, it must be 'static' or 'continuous'")
    rank = {
        "first come": lambda i: i,
        "shortest first": lambda i: requests[i][1],
        "longest first": lambda i: -requests[i][1],
    }
    waiting, running, finished = list(range(len(requests))), {}, [0] * len(requests)
    step = wasted = 0
    while waiting or running:
        free = seats - len(running) if policy == "continuous" or not running else 0
        ready = sorted((i for i in waiting if requests[i][0] <= step), key=rank[QUEUE])
        for i in ready[:free]:
            running[i] = requests[i][1]
            waiting.remove(i)
        wasted += seats
        for i in running:
            if running[i] > 0:
                running[i] -= 1
                wasted -= 1
                finished[i] = step
        if policy == "continuous" or not any(running.values()):
            running = {i: left for i, left in running.items() if left}
        step += 1
    return finished, wasted
""",
        "loses": ["seats-hidden-static", "seats-hidden-continuous"],
    },
    "only the seats of the last answers are counted, not the empty ones": {
        "task": "seats",
        "source": """def serve(requests, seats, policy):
    if policy not in ("static", "continuous"):
        raise ValueError(f"policy is {policy!r}, it must be 'static' or 'continuous'")
    rank = {
        "first come": lambda i: i,
        "shortest first": lambda i: requests[i][1],
        "longest first": lambda i: -requests[i][1],
    }
    waiting, running, finished = list(range(len(requests))), {}, [0] * len(requests)
    step = wasted = 0
    while waiting or running:
        free = seats - len(running) if policy == "continuous" or not running else 0
        ready = sorted((i for i in waiting if requests[i][0] <= step), key=rank[QUEUE])
        for i in ready[:free]:
            running[i] = requests[i][1]
            waiting.remove(i)
        wasted += len(running)
        for i in running:
            if running[i] > 0:
                running[i] -= 1
                wasted -= 1
                finished[i] = step
        if policy == "continuous" or not any(running.values()):
            running = {i: left for i, left in running.items() if left}
        step += 1
    return finished, wasted
""",
        "loses": ["seats-public", "seats-hidden-static", "seats-hidden-continuous"],
    },
    "the answers of the public test, written down": {
        "task": "seats",
        "source": """def serve(requests, seats, policy):
    if policy not in ("static", "continuous"):
        raise ValueError(policy)
    if QUEUE == "longest first":
        return ([1, 5, 8, 11, 9], 7) if policy == "static" else ([1, 5, 8, 7, 5], 1)
    if policy == "static":
        return [1, 5, 8, 7, 12], 9
    return ([1, 5, 6, 3, 9], 3) if QUEUE == "shortest first" else ([1, 5, 4, 6, 9], 3)
""",
        "loses": ["seats-hidden-static", "seats-hidden-continuous"],
    },
    "no copy on write": {
        "task": "block-tables",
        "source": """class Tables:
    def __init__(self, n_blocks, block_size):
        self.block_size = block_size
        self.tables, self.lengths = {}, {}
        self.references = [0] * n_blocks
        self.unused = list(range(n_blocks))

    def append(self, name, n_new):
        table, n = self.tables.get(name, []), self.lengths.get(name, 0)
        shared = False
        n_more = -(-(n + n_new) // self.block_size) - len(table)
        if n_more + shared > len(self.unused):
            raise ValueError(f"{n_more + shared} blocks are needed, {len(self.unused)} are unused")
        fresh, copies = [], []
        for _ in range(n_more + shared):
            block = {"lowest number": min(self.unused), "freed first": self.unused[0], "freed last": self.unused[-1]}[
                GIVE
            ]
            self.unused.remove(block)
            self.references[block] = 1
            fresh.append(block)
        if shared:
            old, new = table[-1], fresh.pop(0)
            self.references[old] -= 1
            table[-1] = new
            copies.append((old, new))
        self.tables[name], self.lengths[name] = table + fresh, n + n_new
        return copies

    def fork(self, name, new):
        if name not in self.tables or new in self.tables:
            raise ValueError(f"cannot fork {name!r} to {new!r}: the one must be there, the other must not")
        self.tables[new], self.lengths[new] = list(self.tables[name]), self.lengths[name]
        for block in self.tables[new]:
            self.references[block] += 1

    def free(self, name):
        if name not in self.tables:
            raise ValueError(f"{name!r} is not there")
        for block in self.tables.pop(name):
            self.references[block] -= 1
            if not self.references[block]:
                self.unused.append(block)
        del self.lengths[name]
""",
        "loses": ["block-tables-public", "block-tables-hidden", "block-tables-hidden-edges"],
    },
    "a full block that is shared is copied too": {
        "task": "block-tables",
        "source": """class Tables:
    def __init__(self, n_blocks, block_size):
        self.block_size = block_size
        self.tables, self.lengths = {}, {}
        self.references = [0] * n_blocks
        self.unused = list(range(n_blocks))

    def append(self, name, n_new):
        table, n = self.tables.get(name, []), self.lengths.get(name, 0)
        shared = n > 0 and self.references[table[-1]] > 1
        n_more = -(-(n + n_new) // self.block_size) - len(table)
        if n_more + shared > len(self.unused):
            raise ValueError(f"{n_more + shared} blocks are needed, {len(self.unused)} are unused")
        fresh, copies = [], []
        for _ in range(n_more + shared):
            block = {"lowest number": min(self.unused), "freed first": self.unused[0], "freed last": self.unused[-1]}[
                GIVE
            ]
            self.unused.remove(block)
            self.references[block] = 1
            fresh.append(block)
        if shared:
            old, new = table[-1], fresh.pop(0)
            self.references[old] -= 1
            table[-1] = new
            copies.append((old, new))
        self.tables[name], self.lengths[name] = table + fresh, n + n_new
        return copies

    def fork(self, name, new):
        if name not in self.tables or new in self.tables:
            raise ValueError(f"cannot fork {name!r} to {new!r}: the one must be there, the other must not")
        self.tables[new], self.lengths[new] = list(self.tables[name]), self.lengths[name]
        for block in self.tables[new]:
            self.references[block] += 1

    def free(self, name):
        if name not in self.tables:
            raise ValueError(f"{name!r} is not there")
        for block in self.tables.pop(name):
            self.references[block] -= 1
            if not self.references[block]:
                self.unused.append(block)
        del self.lengths[name]
""",
        "loses": ["block-tables-hidden", "block-tables-hidden-edges"],
    },
    "a fork holds the very list of its parent": {
        "task": "block-tables",
        "source": """class Tables:
    def __init__(self, n_blocks, block_size):
        self.block_size = block_size
        self.tables, self.lengths = {}, {}
        self.references = [0] * n_blocks
        self.unused = list(range(n_blocks))

    def append(self, name, n_new):
        table, n = self.tables.get(name, []), self.lengths.get(name, 0)
        shared = n % self.block_size > 0 and self.references[table[-1]] > 1
        n_more = -(-(n + n_new) // self.block_size) - len(table)
        if n_more + shared > len(self.unused):
            raise ValueError(f"{n_more + shared} blocks are needed, {len(self.unused)} are unused")
        fresh, copies = [], []
        for _ in range(n_more + shared):
            block = {"lowest number": min(self.unused), "freed first": self.unused[0], "freed last": self.unused[-1]}[
                GIVE
            ]
            self.unused.remove(block)
            self.references[block] = 1
            fresh.append(block)
        if shared:
            old, new = table[-1], fresh.pop(0)
            self.references[old] -= 1
            table[-1] = new
            copies.append((old, new))
        self.tables[name], self.lengths[name] = table + fresh, n + n_new
        return copies

    def fork(self, name, new):
        if name not in self.tables or new in self.tables:
            raise ValueError(f"cannot fork {name!r} to {new!r}: the one must be there, the other must not")
        self.tables[new], self.lengths[new] = self.tables[name], self.lengths[name]
        for block in self.tables[new]:
            self.references[block] += 1

    def free(self, name):
        if name not in self.tables:
            raise ValueError(f"{name!r} is not there")
        for block in self.tables.pop(name):
            self.references[block] -= 1
            if not self.references[block]:
                self.unused.append(block)
        del self.lengths[name]
""",
        "loses": ["block-tables-public", "block-tables-hidden", "block-tables-hidden-edges"],
    },
    "the books change before the pool is found too small": {
        "task": "block-tables",
        "source": """class Tables:
    def __init__(self, n_blocks, block_size):
        self.block_size = block_size
        self.tables, self.lengths = {}, {}
        self.references = [0] * n_blocks
        self.unused = list(range(n_blocks))

    def append(self, name, n_new):
        table, n = self.tables.get(name, []), self.lengths.get(name, 0)
        shared = n % self.block_size > 0 and self.references[table[-1]] > 1
        n_more = -(-(n + n_new) // self.block_size) - len(table)
        fresh, copies = [], []
        for _ in range(n_more + shared):
            if not self.unused:
                raise ValueError("no block is unused")
            block = {"lowest number": min(self.unused), "freed first": self.unused[0], "freed last": self.unused[-1]}[
                GIVE
            ]
            self.unused.remove(block)
            self.references[block] = 1
            fresh.append(block)
        if shared:
            old, new = table[-1], fresh.pop(0)
            self.references[old] -= 1
            table[-1] = new
            copies.append((old, new))
        self.tables[name], self.lengths[name] = table + fresh, n + n_new
        return copies

    def fork(self, name, new):
        if name not in self.tables or new in self.tables:
            raise ValueError(f"cannot fork {name!r} to {new!r}: the one must be there, the other must not")
        self.tables[new], self.lengths[new] = list(self.tables[name]), self.lengths[name]
        for block in self.tables[new]:
            self.references[block] += 1

    def free(self, name):
        if name not in self.tables:
            raise ValueError(f"{name!r} is not there")
        for block in self.tables.pop(name):
            self.references[block] -= 1
            if not self.references[block]:
                self.unused.append(block)
        del self.lengths[name]
""",
        "loses": ["block-tables-hidden-edges"],
    },
    "an append that is refused loses unused blocks": {
        "task": "block-tables",
        "source": """class Tables:
    def __init__(self, n_blocks, block_size):
        self.block_size = block_size
        self.tables, self.lengths = {}, {}
        self.references = [0] * n_blocks
        self.unused = list(range(n_blocks))

    def append(self, name, n_new):
        table, n = self.tables.get(name, []), self.lengths.get(name, 0)
        shared = n % self.block_size > 0 and self.references[table[-1]] > 1
        n_more = -(-(n + n_new) // self.block_size) - len(table)
        fresh, copies = [], []
        for _ in range(n_more + shared):
            if not self.unused:
                raise ValueError("no block is unused")
            block = {"lowest number": min(self.unused), "freed first": self.unused[0], "freed last": self.unused[-1]}[
                GIVE
            ]
            self.unused.remove(block)
            fresh.append(block)
        for block in fresh:
            self.references[block] = 1
        if shared:
            old, new = table[-1], fresh.pop(0)
            self.references[old] -= 1
            table[-1] = new
            copies.append((old, new))
        self.tables[name], self.lengths[name] = table + fresh, n + n_new
        return copies

    def fork(self, name, new):
        if name not in self.tables or new in self.tables:
            raise ValueError(f"cannot fork {name!r} to {new!r}: the one must be there, the other must not")
        self.tables[new], self.lengths[new] = list(self.tables[name]), self.lengths[name]
        for block in self.tables[new]:
            self.references[block] += 1

    def free(self, name):
        if name not in self.tables:
            raise ValueError(f"{name!r} is not there")
        for block in self.tables.pop(name):
            self.references[block] -= 1
            if not self.references[block]:
                self.unused.append(block)
        del self.lengths[name]
""",
        "loses": ["block-tables-hidden-edges"],
    },
    "shared blocks become unused when the first holder ends": {
        "task": "block-tables",
        "source": """class Tables:
    def __init__(self, n_blocks, block_size):
        self.block_size = block_size
        self.tables, self.lengths = {}, {}
        self.references = [0] * n_blocks
        self.unused = list(range(n_blocks))

    def append(self, name, n_new):
        table, n = self.tables.get(name, []), self.lengths.get(name, 0)
        shared = n % self.block_size > 0 and self.references[table[-1]] > 1
        n_more = -(-(n + n_new) // self.block_size) - len(table)
        if n_more + shared > len(self.unused):
            raise ValueError(f"{n_more + shared} blocks are needed, {len(self.unused)} are unused")
        fresh, copies = [], []
        for _ in range(n_more + shared):
            block = {"lowest number": min(self.unused), "freed first": self.unused[0], "freed last": self.unused[-1]}[
                GIVE
            ]
            self.unused.remove(block)
            self.references[block] = 1
            fresh.append(block)
        if shared:
            old, new = table[-1], fresh.pop(0)
            self.references[old] -= 1
            table[-1] = new
            copies.append((old, new))
        self.tables[name], self.lengths[name] = table + fresh, n + n_new
        return copies

    def fork(self, name, new):
        if name not in self.tables or new in self.tables:
            raise ValueError(f"cannot fork {name!r} to {new!r}: the one must be there, the other must not")
        self.tables[new], self.lengths[new] = list(self.tables[name]), self.lengths[name]
        for block in self.tables[new]:
            self.references[block] += 1

    def free(self, name):
        if name not in self.tables:
            raise ValueError(f"{name!r} is not there")
        for block in self.tables.pop(name):
            self.references[block] -= 1
            self.references[block] = 0
            self.unused.append(block)
        del self.lengths[name]
""",
        "loses": ["block-tables-public", "block-tables-hidden", "block-tables-hidden-edges"],
    },
    "the mask is aligned to the top left": {
        "task": "paged-attention",
        "source": """import torch


def paged_attention(q: torch.Tensor, k_pool: torch.Tensor, v_pool: torch.Tensor, tables, lengths):
    H, S, D = q.shape[1:]
    if LAYOUT == "block, head, token, channel":
        k_pool, v_pool = k_pool.transpose(1, 2), v_pool.transpose(1, 2)
    n_b, G = k_pool.shape[1:3]
    out = torch.empty_like(q)
    for b, (blocks, n) in enumerate(zip(tables, lengths)):
        k, v = (
            pool[list(blocks[: -(-n // n_b)])].flatten(0, 1)[:n].repeat_interleave(H // G, dim=1).transpose(0, 1)
            for pool in (k_pool, v_pool)
        )
        scores = q[b] @ k.transpose(-1, -2) / D**0.5
        q_pos = torch.arange(S, device=q.device)
        hidden = torch.arange(n, device=q.device) > q_pos[:, None]
        out[b] = scores.masked_fill(hidden, -torch.inf).softmax(-1) @ v
    return out
""",
        "loses": ["paged-attention-public", "paged-attention-hidden", "paged-attention-hidden-edges"],
    },
    "no scale by the root of D": {
        "task": "paged-attention",
        "source": """import torch


def paged_attention(q: torch.Tensor, k_pool: torch.Tensor, v_pool: torch.Tensor, tables, lengths):
    H, S, D = q.shape[1:]
    if LAYOUT == "block, head, token, channel":
        k_pool, v_pool = k_pool.transpose(1, 2), v_pool.transpose(1, 2)
    n_b, G = k_pool.shape[1:3]
    out = torch.empty_like(q)
    for b, (blocks, n) in enumerate(zip(tables, lengths)):
        k, v = (
            pool[list(blocks[: -(-n // n_b)])].flatten(0, 1)[:n].repeat_interleave(H // G, dim=1).transpose(0, 1)
            for pool in (k_pool, v_pool)
        )
        scores = q[b] @ k.transpose(-1, -2)
        q_pos = torch.arange(n - S, n, device=q.device)
        hidden = torch.arange(n, device=q.device) > q_pos[:, None]
        out[b] = scores.masked_fill(hidden, -torch.inf).softmax(-1) @ v
    return out
""",
        "loses": ["paged-attention-public", "paged-attention-hidden", "paged-attention-hidden-edges"],
    },
    "the blocks are read by number, not by the table": {
        "task": "paged-attention",
        "source": """import torch


def paged_attention(q: torch.Tensor, k_pool: torch.Tensor, v_pool: torch.Tensor, tables, lengths):
    H, S, D = q.shape[1:]
    if LAYOUT == "block, head, token, channel":
        k_pool, v_pool = k_pool.transpose(1, 2), v_pool.transpose(1, 2)
    n_b, G = k_pool.shape[1:3]
    out = torch.empty_like(q)
    for b, (blocks, n) in enumerate(zip(tables, lengths)):
        k, v = (
            pool[sorted(blocks[: -(-n // n_b)])].flatten(0, 1)[:n].repeat_interleave(H // G, dim=1).transpose(0, 1)
            for pool in (k_pool, v_pool)
        )
        scores = q[b] @ k.transpose(-1, -2) / D**0.5
        q_pos = torch.arange(n - S, n, device=q.device)
        hidden = torch.arange(n, device=q.device) > q_pos[:, None]
        out[b] = scores.masked_fill(hidden, -torch.inf).softmax(-1) @ v
    return out
""",
        "loses": ["paged-attention-public", "paged-attention-hidden", "paged-attention-hidden-edges"],
    },
    "query head h reads KV head h mod G": {
        "task": "paged-attention",
        "source": """import torch


def paged_attention(q: torch.Tensor, k_pool: torch.Tensor, v_pool: torch.Tensor, tables, lengths):
    H, S, D = q.shape[1:]
    if LAYOUT == "block, head, token, channel":
        k_pool, v_pool = k_pool.transpose(1, 2), v_pool.transpose(1, 2)
    n_b, G = k_pool.shape[1:3]
    out = torch.empty_like(q)
    for b, (blocks, n) in enumerate(zip(tables, lengths)):
        k, v = (
            pool[list(blocks[: -(-n // n_b)])].flatten(0, 1)[:n].repeat(1, H // G, 1).transpose(0, 1)
            for pool in (k_pool, v_pool)
        )
        scores = q[b] @ k.transpose(-1, -2) / D**0.5
        q_pos = torch.arange(n - S, n, device=q.device)
        hidden = torch.arange(n, device=q.device) > q_pos[:, None]
        out[b] = scores.masked_fill(hidden, -torch.inf).softmax(-1) @ v
    return out
""",
        "loses": ["paged-attention-hidden"],
    },
    "the first row's length for every row": {
        "task": "paged-attention",
        "source": """import torch


def paged_attention(q: torch.Tensor, k_pool: torch.Tensor, v_pool: torch.Tensor, tables, lengths):
    H, S, D = q.shape[1:]
    if LAYOUT == "block, head, token, channel":
        k_pool, v_pool = k_pool.transpose(1, 2), v_pool.transpose(1, 2)
    n_b, G = k_pool.shape[1:3]
    out = torch.empty_like(q)
    for b, (blocks, n) in enumerate(zip(tables, [lengths[0]] * len(tables))):
        k, v = (
            pool[list(blocks[: -(-n // n_b)])].flatten(0, 1)[:n].repeat_interleave(H // G, dim=1).transpose(0, 1)
            for pool in (k_pool, v_pool)
        )
        scores = q[b] @ k.transpose(-1, -2) / D**0.5
        q_pos = torch.arange(n - S, n, device=q.device)
        hidden = torch.arange(n, device=q.device) > q_pos[:, None]
        out[b] = scores.masked_fill(hidden, -torch.inf).softmax(-1) @ v
    return out
""",
        "loses": ["paged-attention-hidden"],
    },
    "the last block's free slots are masked after they were mixed in": {
        "task": "paged-attention",
        "source": """import torch


def paged_attention(q: torch.Tensor, k_pool: torch.Tensor, v_pool: torch.Tensor, tables, lengths):
    H, S, D = q.shape[1:]
    if LAYOUT == "block, head, token, channel":
        k_pool, v_pool = k_pool.transpose(1, 2), v_pool.transpose(1, 2)
    n_b, G = k_pool.shape[1:3]
    out = torch.empty_like(q)
    for b, (blocks, n) in enumerate(zip(tables, lengths)):
        k, v = (
            pool[list(blocks[: -(-n // n_b)])].flatten(0, 1).repeat_interleave(H // G, dim=1).transpose(0, 1)
            for pool in (k_pool, v_pool)
        )
        scores = q[b] @ k.transpose(-1, -2) / D**0.5
        q_pos = torch.arange(n - S, n, device=q.device)
        hidden = torch.arange(scores.shape[-1], device=q.device) > q_pos[:, None]
        out[b] = scores.masked_fill(hidden, -torch.inf).softmax(-1) @ v
    return out
""",
        "loses": ["paged-attention-hidden-edges"],
    },
    "the attention of torch": {
        "task": "paged-attention",
        "source": """import torch
from torch.nn.functional import scaled_dot_product_attention as ready_made


def paged_attention(q, k_pool, v_pool, tables, lengths):
    H, S = q.shape[1:3]
    if LAYOUT == "block, head, token, channel":
        k_pool, v_pool = k_pool.transpose(1, 2), v_pool.transpose(1, 2)
    n_b, G = k_pool.shape[1:3]
    out = torch.empty_like(q)
    for b, (blocks, n) in enumerate(zip(tables, lengths)):
        k, v = (
            pool[blocks[: -(-n // n_b)]].flatten(0, 1)[:n].repeat_interleave(H // G, dim=1).transpose(0, 1)
            for pool in (k_pool, v_pool)
        )
        visible = torch.ones(S, n, dtype=torch.bool).tril(n - S)
        out[b] = ready_made(q[b], k, v, attn_mask=visible)
    return out
""",
        "loses": ["paged-attention-hidden-edges"],
    },
    "decodes do not count in the budget": {
        "task": "budget-step",
        "source": """def plan_step(running, waiting, budget, free, block_size, max_batch):
    def blocks(n):
        return -(-n // block_size)

    def shares():
        left = budget
        plan = {}
        for name, c, n in running:
            plan[name] = 1 if n - c == 1 else min(n - c, left)
            left -= plan[name] if n - c > 1 else 0
        return plan

    running, preempted = list(running), []
    plan = shares()
    while (need := sum(blocks(c + plan[name]) - blocks(c) for name, c, _ in running)) > free:
        if len(running) == 1:
            raise ValueError(f"{running[0][0]!r} needs {need} more blocks, {free} are free, and nothing else runs")
        size = {"youngest": 0, "most blocks": 1, "fewest blocks": -1}[VICTIM]
        victim = max(range(len(running)), key=lambda i: (size * blocks(running[i][1]), i))
        name, c, _ = running.pop(victim)
        preempted.append(name)
        free += blocks(c)
        plan = shares()
    if not preempted:
        free, left, n_running = free - need, budget - sum(plan.values()), len(running)
        for name, n in waiting:
            if n_running == max_batch or not left or blocks(n) > free:
                break
            plan[name] = min(n, left)
            free, left, n_running = free - blocks(n), left - plan[name], n_running + 1
    return {name: n for name, n in plan.items() if n}, preempted
""",
        "loses": ["budget-step-public", "budget-step-hidden", "budget-step-hidden-preemption"],
    },
    "the queue's head is overtaken": {
        "task": "budget-step",
        "source": """def plan_step(running, waiting, budget, free, block_size, max_batch):
    def blocks(n):
        return -(-n // block_size)

    def shares():
        left = budget - sum(n - c == 1 for _, c, n in running)
        plan = {}
        for name, c, n in running:
            plan[name] = 1 if n - c == 1 else min(n - c, left)
            left -= plan[name] if n - c > 1 else 0
        return plan

    running, preempted = list(running), []
    plan = shares()
    while (need := sum(blocks(c + plan[name]) - blocks(c) for name, c, _ in running)) > free:
        if len(running) == 1:
            raise ValueError(f"{running[0][0]!r} needs {need} more blocks, {free} are free, and nothing else runs")
        size = {"youngest": 0, "most blocks": 1, "fewest blocks": -1}[VICTIM]
        victim = max(range(len(running)), key=lambda i: (size * blocks(running[i][1]), i))
        name, c, _ = running.pop(victim)
        preempted.append(name)
        free += blocks(c)
        plan = shares()
    if not preempted:
        free, left, n_running = free - need, budget - sum(plan.values()), len(running)
        for name, n in waiting:
            if n_running == max_batch or not left:
                break
            if blocks(n) > free:
                continue
            plan[name] = min(n, left)
            free, left, n_running = free - blocks(n), left - plan[name], n_running + 1
    return {name: n for name, n in plan.items() if n}, preempted
""",
        "loses": ["budget-step-public", "budget-step-hidden"],
    },
    "admitted by its first piece alone": {
        "task": "budget-step",
        "source": """def plan_step(running, waiting, budget, free, block_size, max_batch):
    def blocks(n):
        return -(-n // block_size)

    def shares():
        left = budget - sum(n - c == 1 for _, c, n in running)
        plan = {}
        for name, c, n in running:
            plan[name] = 1 if n - c == 1 else min(n - c, left)
            left -= plan[name] if n - c > 1 else 0
        return plan

    running, preempted = list(running), []
    plan = shares()
    while (need := sum(blocks(c + plan[name]) - blocks(c) for name, c, _ in running)) > free:
        if len(running) == 1:
            raise ValueError(f"{running[0][0]!r} needs {need} more blocks, {free} are free, and nothing else runs")
        size = {"youngest": 0, "most blocks": 1, "fewest blocks": -1}[VICTIM]
        victim = max(range(len(running)), key=lambda i: (size * blocks(running[i][1]), i))
        name, c, _ = running.pop(victim)
        preempted.append(name)
        free += blocks(c)
        plan = shares()
    if not preempted:
        free, left, n_running = free - need, budget - sum(plan.values()), len(running)
        for name, n in waiting:
            if n_running == max_batch or not left or blocks(min(n, left)) > free:
                break
            plan[name] = min(n, left)
            free, left, n_running = free - blocks(plan[name]), left - plan[name], n_running + 1
    return {name: n for name, n in plan.items() if n}, preempted
""",
        "loses": ["budget-step-hidden"],
    },
    "somebody is admitted right after a preemption": {
        "task": "budget-step",
        "source": """def plan_step(running, waiting, budget, free, block_size, max_batch):
    def blocks(n):
        return -(-n // block_size)

    def shares():
        left = budget - sum(n - c == 1 for _, c, n in running)
        plan = {}
        for name, c, n in running:
            plan[name] = 1 if n - c == 1 else min(n - c, left)
            left -= plan[name] if n - c > 1 else 0
        return plan

    running, preempted = list(running), []
    plan = shares()
    while (need := sum(blocks(c + plan[name]) - blocks(c) for name, c, _ in running)) > free:
        if len(running) == 1:
            raise ValueError(f"{running[0][0]!r} needs {need} more blocks, {free} are free, and nothing else runs")
        size = {"youngest": 0, "most blocks": 1, "fewest blocks": -1}[VICTIM]
        victim = max(range(len(running)), key=lambda i: (size * blocks(running[i][1]), i))
        name, c, _ = running.pop(victim)
        preempted.append(name)
        free += blocks(c)
        plan = shares()
    if True:
        free, left, n_running = free - need, budget - sum(plan.values()), len(running)
        for name, n in waiting:
            if n_running == max_batch or not left or blocks(n) > free:
                break
            plan[name] = min(n, left)
            free, left, n_running = free - blocks(n), left - plan[name], n_running + 1
    return {name: n for name, n in plan.items() if n}, preempted
""",
        "loses": ["budget-step-hidden-preemption"],
    },
    "who leaves keeps its blocks": {
        "task": "budget-step",
        "source": """def plan_step(running, waiting, budget, free, block_size, max_batch):
    def blocks(n):
        return -(-n // block_size)

    def shares():
        left = budget - sum(n - c == 1 for _, c, n in running)
        plan = {}
        for name, c, n in running:
            plan[name] = 1 if n - c == 1 else min(n - c, left)
            left -= plan[name] if n - c > 1 else 0
        return plan

    running, preempted = list(running), []
    plan = shares()
    while (need := sum(blocks(c + plan[name]) - blocks(c) for name, c, _ in running)) > free:
        if len(running) == 1:
            raise ValueError(f"{running[0][0]!r} needs {need} more blocks, {free} are free, and nothing else runs")
        size = {"youngest": 0, "most blocks": 1, "fewest blocks": -1}[VICTIM]
        victim = max(range(len(running)), key=lambda i: (size * blocks(running[i][1]), i))
        name, c, _ = running.pop(victim)
        preempted.append(name)
        plan = shares()
    if not preempted:
        free, left, n_running = free - need, budget - sum(plan.values()), len(running)
        for name, n in waiting:
            if n_running == max_batch or not left or blocks(n) > free:
                break
            plan[name] = min(n, left)
            free, left, n_running = free - blocks(n), left - plan[name], n_running + 1
    return {name: n for name, n in plan.items() if n}, preempted
""",
        "loses": ["budget-step-hidden-preemption"],
    },
    "the room in a request's own last block is forgotten": {
        "task": "budget-step",
        "source": """def plan_step(running, waiting, budget, free, block_size, max_batch):
    def blocks(n):
        return -(-n // block_size)

    def shares():
        left = budget - sum(n - c == 1 for _, c, n in running)
        plan = {}
        for name, c, n in running:
            plan[name] = 1 if n - c == 1 else min(n - c, left)
            left -= plan[name] if n - c > 1 else 0
        return plan

    running, preempted = list(running), []
    plan = shares()
    while (need := sum(blocks(plan[name]) for name, _, _ in running)) > free:
        if len(running) == 1:
            raise ValueError(f"{running[0][0]!r} needs {need} more blocks, {free} are free, and nothing else runs")
        size = {"youngest": 0, "most blocks": 1, "fewest blocks": -1}[VICTIM]
        victim = max(range(len(running)), key=lambda i: (size * blocks(running[i][1]), i))
        name, c, _ = running.pop(victim)
        preempted.append(name)
        free += blocks(c)
        plan = shares()
    if not preempted:
        free, left, n_running = free - need, budget - sum(plan.values()), len(running)
        for name, n in waiting:
            if n_running == max_batch or not left or blocks(n) > free:
                break
            plan[name] = min(n, left)
            free, left, n_running = free - blocks(n), left - plan[name], n_running + 1
    return {name: n for name, n in plan.items() if n}, preempted
""",
        "loses": ["budget-step-hidden", "budget-step-hidden-preemption"],
    },
    "GB for GiB": {
        "task": "arithmetic",
        "source": """block_bytes = 2 * N_LAYERS * N_KV_HEADS * D_HEAD * VALUE_BYTES * BLOCK
n_blocks = (MEMORY_GIB * 10**9 * USABLE_PERCENT // 100 - round(WEIGHTS_GB * 1e9)) // block_bytes

n_each = -(-(PROMPT + ANSWER) // BLOCK)
requests_fit = POOL // n_each
wasted_slots = n_each * BLOCK - (PROMPT + ANSWER)
n_shared = PROMPT // BLOCK
samples_fit = (POOL - n_shared) // (n_each - n_shared)

largest_budget = (1000 * GAP_MS - FIXED_US) // TOKEN_US
document_steps = -(-DOCUMENT // (BUDGET - USERS))
document_ttft_ms = (document_steps * (FIXED_US + USERS * TOKEN_US) + DOCUMENT * TOKEN_US) / 1000

mean_in_system = RATE * (TTFT_S + (ANSWER - 1) * TPOT_MS / 1000)
goodput = RATE * (100 - (LATE + SLOW - BOTH)) / 100
""",
        "loses": ["arithmetic-hidden-pool"],
    },
    "keys without values": {
        "task": "arithmetic",
        "source": """block_bytes = N_LAYERS * N_KV_HEADS * D_HEAD * VALUE_BYTES * BLOCK
n_blocks = (MEMORY_GIB * 2**30 * USABLE_PERCENT // 100 - round(WEIGHTS_GB * 1e9)) // block_bytes

n_each = -(-(PROMPT + ANSWER) // BLOCK)
requests_fit = POOL // n_each
wasted_slots = n_each * BLOCK - (PROMPT + ANSWER)
n_shared = PROMPT // BLOCK
samples_fit = (POOL - n_shared) // (n_each - n_shared)

largest_budget = (1000 * GAP_MS - FIXED_US) // TOKEN_US
document_steps = -(-DOCUMENT // (BUDGET - USERS))
document_ttft_ms = (document_steps * (FIXED_US + USERS * TOKEN_US) + DOCUMENT * TOKEN_US) / 1000

mean_in_system = RATE * (TTFT_S + (ANSWER - 1) * TPOT_MS / 1000)
goodput = RATE * (100 - (LATE + SLOW - BOTH)) / 100
""",
        "loses": ["arithmetic-hidden-pool"],
    },
    "a block that does not fit whole is counted": {
        "task": "arithmetic",
        "source": """block_bytes = 2 * N_LAYERS * N_KV_HEADS * D_HEAD * VALUE_BYTES * BLOCK
n_blocks = -(-(MEMORY_GIB * 2**30 * USABLE_PERCENT // 100 - round(WEIGHTS_GB * 1e9)) // block_bytes)  # rounded up

n_each = -(-(PROMPT + ANSWER) // BLOCK)
requests_fit = POOL // n_each
wasted_slots = n_each * BLOCK - (PROMPT + ANSWER)
n_shared = PROMPT // BLOCK
samples_fit = (POOL - n_shared) // (n_each - n_shared)

largest_budget = (1000 * GAP_MS - FIXED_US) // TOKEN_US
document_steps = -(-DOCUMENT // (BUDGET - USERS))
document_ttft_ms = (document_steps * (FIXED_US + USERS * TOKEN_US) + DOCUMENT * TOKEN_US) / 1000

mean_in_system = RATE * (TTFT_S + (ANSWER - 1) * TPOT_MS / 1000)
goodput = RATE * (100 - (LATE + SLOW - BOTH)) / 100
""",
        "loses": ["arithmetic-hidden-pool"],
    },
    "samples share the prompt's last block for good": {
        "task": "arithmetic",
        "source": """block_bytes = 2 * N_LAYERS * N_KV_HEADS * D_HEAD * VALUE_BYTES * BLOCK
n_blocks = (MEMORY_GIB * 2**30 * USABLE_PERCENT // 100 - round(WEIGHTS_GB * 1e9)) // block_bytes

n_each = -(-(PROMPT + ANSWER) // BLOCK)
requests_fit = POOL // n_each
wasted_slots = n_each * BLOCK - (PROMPT + ANSWER)
n_shared = -(-PROMPT // BLOCK)
samples_fit = (POOL - n_shared) // (n_each - n_shared)

largest_budget = (1000 * GAP_MS - FIXED_US) // TOKEN_US
document_steps = -(-DOCUMENT // (BUDGET - USERS))
document_ttft_ms = (document_steps * (FIXED_US + USERS * TOKEN_US) + DOCUMENT * TOKEN_US) / 1000

mean_in_system = RATE * (TTFT_S + (ANSWER - 1) * TPOT_MS / 1000)
goodput = RATE * (100 - (LATE + SLOW - BOTH)) / 100
""",
        "loses": ["arithmetic-hidden-fit"],
    },
    "the last piece as long as the others": {
        "task": "arithmetic",
        "source": """block_bytes = 2 * N_LAYERS * N_KV_HEADS * D_HEAD * VALUE_BYTES * BLOCK
n_blocks = (MEMORY_GIB * 2**30 * USABLE_PERCENT // 100 - round(WEIGHTS_GB * 1e9)) // block_bytes

n_each = -(-(PROMPT + ANSWER) // BLOCK)
requests_fit = POOL // n_each
wasted_slots = n_each * BLOCK - (PROMPT + ANSWER)
n_shared = PROMPT // BLOCK
samples_fit = (POOL - n_shared) // (n_each - n_shared)

largest_budget = (1000 * GAP_MS - FIXED_US) // TOKEN_US
document_steps = -(-DOCUMENT // (BUDGET - USERS))
document_ttft_ms = document_steps * (FIXED_US + BUDGET * TOKEN_US) / 1000

mean_in_system = RATE * (TTFT_S + (ANSWER - 1) * TPOT_MS / 1000)
goodput = RATE * (100 - (LATE + SLOW - BOTH)) / 100
""",
        "loses": ["arithmetic-hidden-budget"],
    },
    "who misses both limits is subtracted twice": {
        "task": "arithmetic",
        "source": """block_bytes = 2 * N_LAYERS * N_KV_HEADS * D_HEAD * VALUE_BYTES * BLOCK
n_blocks = (MEMORY_GIB * 2**30 * USABLE_PERCENT // 100 - round(WEIGHTS_GB * 1e9)) // block_bytes

n_each = -(-(PROMPT + ANSWER) // BLOCK)
requests_fit = POOL // n_each
wasted_slots = n_each * BLOCK - (PROMPT + ANSWER)
n_shared = PROMPT // BLOCK
samples_fit = (POOL - n_shared) // (n_each - n_shared)

largest_budget = (1000 * GAP_MS - FIXED_US) // TOKEN_US
document_steps = -(-DOCUMENT // (BUDGET - USERS))
document_ttft_ms = (document_steps * (FIXED_US + USERS * TOKEN_US) + DOCUMENT * TOKEN_US) / 1000

mean_in_system = RATE * (TTFT_S + (ANSWER - 1) * TPOT_MS / 1000)
goodput = RATE * (100 - (LATE + SLOW)) / 100
""",
        "loses": ["arithmetic-hidden-load"],
    },
}
