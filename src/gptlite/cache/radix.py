"""A store of texts as a radix tree: any shared beginning is found to the token {cite}`zheng2024sglang`."""

from __future__ import annotations

import heapq
from collections.abc import Iterator, Sequence

import numpy as np
from torch import Tensor

from gptlite.cache.prefix import Hit, PrefixStore, State, check_state, token_array
from gptlite.config import check_counts


class Node:
    """A run of tokens that the tree has, their keys and values, and the runs that follow it.

    Args:
        tokens: of the run [n], int64; the root of a salt has none.
        state: their keys and values.
        parent: the node before it; None for a root.
    """

    def __init__(self, tokens: np.ndarray, state: State, parent: Node | None) -> None:
        self.tokens, self.state, self.parent = tokens, state, parent
        self.children: dict[int, Node] = {}  # by the first token of each
        self.locks = 0  # hits that hold it, itself or something below it
        self.used = 0  # the store's clock when it was last used
        self.serial = 0  # tells nodes apart in a recording

    def __len__(self) -> int:
        return len(self.tokens)


class RadixStore(PrefixStore):
    """Texts as paths of a tree whose nodes are runs of tokens; the least recently used leaf is evicted first.

    A text that leaves a run in the middle splits it in two, and each half keeps its tokens' keys and values, its
    children, and the locks of those who hold it.

    Args:
        capacity: tokens.
    Raises: ValueError when the capacity is not a whole number of at least 1.
    """

    def __init__(self, capacity: int) -> None:
        super().__init__()
        check_counts(capacity=capacity)
        self.capacity = capacity
        self.roots: dict[str, Node] = {}  # a tree for each salt
        self.evictable = self.protected = 0  # tokens of the nodes that nobody holds, and of those that somebody does
        self._clock = self._serial = 0

    @property
    def total(self) -> int:
        """Tokens held."""
        return self.evictable + self.protected

    def nodes(self) -> Iterator[Node]:
        """All nodes but the roots, each before its children."""
        waiting = [child for root in self.roots.values() for child in root.children.values()]
        while waiting:
            node = waiting.pop()
            yield node
            waiting.extend(node.children.values())

    def match(self, tokens: Sequence[int] | Tensor, salt: str = "") -> int:
        return sum(n for _, n in self._path(token_array(tokens), salt))

    def acquire(self, tokens: Sequence[int] | Tensor, salt: str = "") -> Hit:
        path = self._path(token_array(tokens), salt)
        hit = Hit()
        if path:
            last, n = path[-1]
            node = last if n == len(last) else self._split(last, n)
            chain = self._chain(node)
            self._lock(chain)
            hit = Hit(sum(map(len, chain)), [one.state for one in chain], [node])
        self.counts.update(asked=len(tokens), hit=hit.n_tokens)
        return hit

    def release(self, hit: Hit) -> None:
        for node in hit.held:
            self._unlock(self._chain(node))
        hit.held = []

    def insert(self, tokens: Sequence[int] | Tensor, state: State, salt: str = "") -> int:
        new = token_array(tokens)
        check_state(state, len(new))
        path = self._path(new, salt)
        n_held = sum(n for _, n in path)
        node = self.roots.setdefault(salt, Node(new[:0], {}, None))
        if path:
            last, n = path[-1]
            node = last if n == len(last) else self._split(last, n)
        chain = self._chain(node)
        self._lock(chain)  # making room must not take what the new leaf hangs on
        self._evict(self.total + len(new) - n_held - self.capacity)
        end = n_held + min(len(new) - n_held, self.capacity - self.total)
        if end > n_held:
            # a copy of its own, so that evicting it gives its memory back
            own = {name: part[:, n_held:end].clone() for name, part in state.items()}
            leaf = self._new(new[n_held:end].copy(), own, node)
            node.children[int(leaf.tokens[0])] = leaf
            self.evictable += len(leaf)
            leaf.used = self._clock  # the same as its path
            self.counts["stored"] += end - n_held
        self._unlock(chain)
        self.roots = {salt: root for salt, root in self.roots.items() if root.children}
        return end - n_held

    def _path(self, tokens: np.ndarray, salt: str) -> list[tuple[Node, int]]:
        """The nodes along a text [n], and how many tokens of each it shares; only of the last it may be a part."""
        node, path, begin = self.roots.get(salt), [], 0
        while node is not None and begin < len(tokens):
            node = node.children.get(int(tokens[begin]))
            if node is not None:
                rest = tokens[begin : begin + len(node)]
                differ = np.flatnonzero(node.tokens[: len(rest)] != rest)
                n = int(differ[0]) if len(differ) else len(rest)
                path.append((node, n))
                begin += n
                node = node if n == len(node) else None
        return path

    def _split(self, node: Node, n: int) -> Node:
        """Cuts a node after n tokens. Returns: the upper half, a new node; the lower half stays the node it was."""
        assert node.parent is not None
        upper = self._new(
            node.tokens[:n].copy(), {k: part[:, :n].clone() for k, part in node.state.items()}, node.parent
        )
        upper.locks, upper.used = node.locks, node.used  # whoever holds the lower half holds what it hangs on
        upper.children = {int(node.tokens[n]): node}
        upper.parent.children[int(upper.tokens[0])] = upper  # type: ignore[union-attr]
        node.tokens, node.parent = node.tokens[n:].copy(), upper
        node.state = {k: part[:, n:].clone() for k, part in node.state.items()}
        return upper

    def _new(self, tokens: np.ndarray, state: State, parent: Node) -> Node:
        node = Node(tokens, state, parent)
        self._serial += 1
        node.serial = self._serial
        return node

    @staticmethod
    def _chain(node: Node) -> list[Node]:
        """The nodes from the top down to this one, without the root."""
        chain = []
        while node.parent is not None:
            chain.append(node)
            node = node.parent
        return chain[::-1]

    def _lock(self, chain: list[Node]) -> None:
        for node in chain:
            if node.locks == 0:
                self.evictable -= len(node)
                self.protected += len(node)
            node.locks += 1

    def _unlock(self, chain: list[Node]) -> None:
        self._clock += 1
        for node in chain:
            node.locks -= 1
            node.used = self._clock
            if node.locks == 0:
                self.protected -= len(node)
                self.evictable += len(node)

    def _evict(self, n_tokens: int) -> None:
        """Removes leaves that nobody holds, the least recently used first, until so many tokens are gone."""
        if n_tokens <= 0:
            return
        leaves = [(node.used, node.serial, node) for node in self.nodes() if not node.children and not node.locks]
        heapq.heapify(leaves)
        while n_tokens > 0 and leaves:
            *_, leaf = heapq.heappop(leaves)
            parent = leaf.parent
            assert parent is not None
            del parent.children[int(leaf.tokens[0])]
            self.evictable -= len(leaf)
            self.counts["evicted"] += len(leaf)
            n_tokens -= len(leaf)
            if parent.parent is not None and not parent.children and not parent.locks:
                heapq.heappush(leaves, (parent.used, parent.serial, parent))
