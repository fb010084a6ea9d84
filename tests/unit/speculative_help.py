"""Targets, drafters and caches that the tests of speculative decoding share; a new drafter joins by its line here."""

import torch

from gptlite.cache.dense import DynamicCache, StaticCache
from gptlite.cache.paged import PagedCache
from gptlite.config import GPTConfig
from gptlite.model import GPTlite
from gptlite.speculative.drafters import Draft, Drafter, ModelDrafter
from gptlite.speculative.eagle import EagleDrafter, EagleHeads
from gptlite.speculative.lookup import LookupDrafter
from gptlite.speculative.medusa import MedusaDrafter, MedusaHeads
from gptlite.speculative.mtp import MTPDrafter, MTPHeads
from gptlite.speculative.self_draft import ExitHeads, early_exit, with_blocks

CONTEXT, VOCAB = 48, 23


def make_target(seed=1, n_layers=2, vocab_size=VOCAB, context=CONTEXT):
    """Grouped heads, a width that is not heads times head size, and weights large enough for sharp distributions.

    Norms and biases stay as they are: the next token depends on the whole text, so that a wrong cache is seen.
    """
    torch.manual_seed(seed)
    model = GPTlite(GPTConfig(vocab_size, context, n_layers, d_model=20, n_heads=6, d_head=4, n_kv_heads=3)).eval()
    for parameter in model.parameters():
        if parameter.dim() > 1:
            torch.nn.init.normal_(parameter, std=0.6)
    return model.double()


def numbers_of(tokens, n, high):
    """n numbers below `high` that depend on a text alone, so that a batch changes nothing."""
    generator = torch.Generator().manual_seed(hash(tuple(tokens)) % 2**31)
    return torch.randint(high, (n,), generator=generator).tolist()


class RandomDrafter(Drafter):
    """Drafts any token, each as likely as the next, and says so."""

    def __init__(self, vocab_size=VOCAB):
        self.vocab_size = vocab_size

    def propose(self, texts, n_draft, hidden=None):
        depth = [min(n_draft, text.room) for text in texts]
        tokens = [[int(u * self.vocab_size) for u in text.uniforms(n)] for text, n in zip(texts, depth, strict=True)]
        probs = torch.full((len(texts), max(depth), self.vocab_size), 1 / self.vocab_size, dtype=torch.float64)
        return Draft(tokens, probs)


class HostileDrafter(Drafter):
    """Knows the target's greedy text, and is right for just as many drafts as it is told, then wrong.

    Args:
        model: the target. n_right: for a text, how many of the drafts are right; more than there are: all.
    """

    def __init__(self, model, n_right):
        self.model, self.n_right = model, n_right
        # many tests ask for the next token of the same text: what is known of a model stays with it
        self.known = model.__dict__.setdefault("known_next_tokens", {})

    @torch.inference_mode()
    def best(self, tokens):
        text = tuple(tokens)
        if text not in self.known:
            self.known[text] = int(self.model(torch.tensor([tokens]))[0, -1].argmax())
        return self.known[text]

    def propose(self, texts, n_draft, hidden=None):
        drafts = []
        for text in texts:
            tokens, n_right = list(text.tokens), self.n_right(text)
            for i in range(min(n_draft, text.room)):
                best = self.best(tokens)
                tokens.append(best if i < n_right else (best + 1) % VOCAB)
            drafts.append(tokens[len(text.tokens) :])
        return Draft(drafts)


class HostileTree(HostileDrafter):
    """A tree whose right path lies between wrong siblings, some of which have children; the order is mixed."""

    def propose(self, texts, n_draft, hidden=None):
        drafts, parents = [], []
        for text in texts:
            n_right, row, tree = self.n_right(text), list[int](), list[int]()
            tokens, end = list(text.tokens), -1
            for depth in range(min(n_draft, text.room)):
                best = self.best(tokens)
                wrong = [(best + 1 + i) % VOCAB for i in numbers_of(tokens, 2, VOCAB - 1)]
                children = [*wrong, best] if depth < n_right else wrong
                place = len(text.tokens) % len(children)
                children = children[place:] + children[:place]
                first = len(row)
                row += children
                tree += [end] * len(children)
                if depth + 1 < min(n_draft, text.room):  # a wrong branch goes on, with what would be right elsewhere
                    row.append(best)
                    tree.append(first + children.index(wrong[0]))
                end = first + children.index(best if depth < n_right else wrong[0])
                tokens.append(row[end])
            drafts.append(row)
            parents.append(tree)
        return Draft(drafts, parents=parents)


def cycle(text):
    """Now none, now some, now all of four drafts right, by the length of the text."""
    n = len(text.tokens)
    return (n * n + 7 * n) % 13 % 5


def untrained(kind, model, *sizes):
    """Heads in fp64 that are right now and then: their start, disturbed a little, the same in every call."""
    torch.manual_seed(5)
    heads = kind(model, *sizes).double().eval()
    for parameter in heads.parameters():
        parameter.data.add_(torch.randn_like(parameter) * 0.03)
    return heads


# how to make each for a target and so many rows
DRAFTERS = {
    "draft model": lambda model, n: ModelDrafter(make_target(2, n_layers=1), n),
    "draft model with a shorter window": lambda model, n: ModelDrafter(make_target(2, 1, context=CONTEXT - 9), n),
    "the target itself": lambda model, n: ModelDrafter(model, n),
    "random": lambda model, n: RandomDrafter(),
    "always wrong": lambda model, n: HostileDrafter(model, lambda text: 0),
    "always right": lambda model, n: HostileDrafter(model, lambda text: 99),
    "none to all right": lambda model, n: HostileDrafter(model, cycle),
    "tree, none to all right": lambda model, n: HostileTree(model, cycle),
    "look-up": lambda model, n: LookupDrafter(3, 1),
    "skipped layers": lambda model, n: ModelDrafter(with_blocks(model, [1]), n),
    "early exit": lambda model, n: ModelDrafter(early_exit(model, untrained(ExitHeads, model, [1]), 1), n),
    "Medusa, chain": lambda model, n: MedusaDrafter(untrained(MedusaHeads, model, 3)),
    "Medusa, tree": lambda model, n: MedusaDrafter(untrained(MedusaHeads, model, 3), 11),
    "EAGLE, chain": lambda model, n: EagleDrafter(model, untrained(EagleHeads, model), n),
    "EAGLE, tree": lambda model, n: EagleDrafter(model, untrained(EagleHeads, model), n, 9, 3),
    "MTP": lambda model, n: MTPDrafter(model, untrained(MTPHeads, model, 3), n),
}

# of the target, without a text
CACHES = {
    "dynamic": lambda model, n: DynamicCache(model),
    "static": lambda model, n: StaticCache(model, n, CONTEXT, bucket=16),
    "paged": lambda model, n: PagedCache(model, 20 * n, 4),
    "paged, prefix caching": lambda model, n: PagedCache(model, 20 * n, 3, prefix_caching=True, pages_per_split=2),
}
