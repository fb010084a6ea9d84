"""Trees of drafts: which guesses are worth a place in the one pass that verifies them."""

from __future__ import annotations

import heapq
from dataclasses import dataclass, field

from torch import Tensor

from gptlite.config import check_counts


@dataclass
class Tree:
    """Drafts that share their beginnings.

    Args:
        tokens: of the nodes [n].
        parents: of each the index of its parent, -1 for a child of the text; parents come before children.
        values: of each the probability, by the drafter's reckoning, that all of its path is right.
    """

    tokens: list[int] = field(default_factory=list)
    parents: list[int] = field(default_factory=list)
    values: list[float] = field(default_factory=list)

    def add(self, token: int, parent: int, value: float) -> int:
        """Adds a node. Returns: its index."""
        self.tokens.append(token)
        self.parents.append(parent)
        self.values.append(value)
        return len(self.tokens) - 1

    def best(self, n_nodes: int) -> Tree:
        """The n nodes of the highest values; with a node its ancestors, which are worth as much or more."""
        order = sorted(range(len(self.tokens)), key=lambda i: (-self.values[i], i))[:n_nodes]
        places = {-1: -1} | {old: new for new, old in enumerate(order)}
        chosen = Tree()
        for old in order:
            chosen.add(self.tokens[old], places[self.parents[old]], self.values[old])
        return chosen


def product_tree(probs: Tensor, n_nodes: int) -> Tree:
    """The best tree over heads that do not see each other: a path is worth the product of its tokens' probabilities.

    Best first: a node's rivals are its next best sibling and its best child, and nothing else can come before them.
    A fixed tree that is chosen on a calibration text {cite}`cai2024medusa` is what this comes to on average.

    Args:
        probs: of the heads, the nearest first [K, V].
        n_nodes: nodes of the tree at most.
    Returns: the tree, at most K deep, best node first.
    Raises: ValueError when n_nodes is no whole number of at least 1.
    """
    check_counts(n_nodes=n_nodes)
    K, V = probs.shape
    ranked = probs.topk(min(n_nodes, V), dim=-1)
    p, token = ranked.values.tolist(), ranked.indices.tolist()  # [K, ranks] each
    tree = Tree()
    # (minus the value, order of coming, depth, rank among its siblings, parent, value of the parent)
    rivals = [(-p[0][0], 0, 0, 0, -1, 1.0)] if K else []
    came = 1
    while rivals and len(tree.tokens) < n_nodes:
        negative, _, depth, rank, parent, above = heapq.heappop(rivals)
        node = tree.add(token[depth][rank], parent, -negative)
        if rank + 1 < len(p[depth]):
            heapq.heappush(rivals, (-above * p[depth][rank + 1], came, depth, rank + 1, parent, above))
        if depth + 1 < K:
            heapq.heappush(rivals, (negative * p[depth + 1][0], came + 1, depth + 1, 0, node, -negative))
        came += 2
    return tree
