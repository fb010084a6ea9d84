"""The plain loop, against the shortest loop that could be right, and with every cache and overflow."""

import warnings

import pytest
import torch

from gptlite.cache.dense import DynamicCache, RingCache, StaticCache
from gptlite.config import GPTConfig
from gptlite.generate import decode_step, generate, prefill, stream
from gptlite.model import GPTlite
from gptlite.sampling import SamplingParams

CONFIG = GPTConfig(vocab_size=17, context_length=24, n_layers=2, d_model=12, n_heads=4, d_head=5, n_kv_heads=2)
PARAMS = [SamplingParams(0.0), SamplingParams(), SamplingParams(0.8, top_k=5), SamplingParams(1.5, top_p=0.7)]
CACHES = {
    "dynamic": DynamicCache,
    "static": lambda model: StaticCache(model, 4, CONFIG.context_length, bucket=4),
}


def tiny(dtype=torch.float64):
    torch.manual_seed(0)
    model = GPTlite(CONFIG).to(dtype)
    with torch.no_grad():
        for parameter in model.parameters():
            parameter.add_(torch.randn_like(parameter) * 0.3)
    return model.eval()


def prompts(B, n, seed=0):
    return torch.randint(CONFIG.vocab_size, (B, n), generator=torch.Generator().manual_seed(seed))


def filtered(logits, params):
    """The next token's distribution for one row of logits [V], written anew."""
    if params.temperature == 0:
        return torch.nn.functional.one_hot(logits.argmax(), len(logits)).double()
    probs = (logits / params.temperature).softmax(0)
    if params.top_k:
        probs[probs < probs.topk(params.top_k).values[-1]] = 0
        probs = probs / probs.sum()
    if params.top_p < 1:
        values, order = probs.sort(descending=True)
        n_kept = int((values.cumsum(0) < params.top_p).sum()) + 1
        probs[order[n_kept:]] = 0
    return probs / probs.sum()


def naive(model, tokens, n_new, params, seed=0, window=CONFIG.context_length):
    """Row by row, the whole text again for each token."""
    rows = []
    for b, row in enumerate(tokens):
        generator, text = torch.Generator().manual_seed(seed + b), row.tolist()
        for _ in range(n_new):
            with torch.no_grad():
                probs = filtered(model(torch.tensor([text[-window:]]))[0, -1], params)
            u = torch.rand((), generator=generator, dtype=torch.float64)
            text.append(int((probs.cumsum(0) <= u).sum()))
        rows.append(text)
    return torch.tensor(rows)


@pytest.mark.parametrize("params", PARAMS, ids=str)
def test_generate_is_the_naive_loop(params):
    model, text = tiny(), prompts(3, 5)
    assert torch.equal(generate(model, text, 15, params, seed=3), naive(model, text, 15, params, seed=3))


@pytest.mark.parametrize("params", PARAMS, ids=str)
@pytest.mark.parametrize("cache", CACHES)
def test_a_cache_gives_the_same_tokens(cache, params):
    model, text = tiny(), prompts(3, 6)
    plain = generate(model, text, 18, params, seed=5)
    assert torch.equal(generate(model, text, 18, params, CACHES[cache](model), seed=5), plain)


def test_plain_sampling_at_temperature_one_is_the_default():
    model, text = tiny(), prompts(2, 4)
    assert torch.equal(generate(model, text, 10), generate(model, text, 10, SamplingParams()))
    assert not torch.equal(generate(model, text, 10), generate(model, text, 10, seed=1))


def test_the_window_of_a_ring_is_that_of_the_model():
    model, text = tiny(), prompts(2, 9)
    for block in model.blocks:
        block.mha.window = 5
    plain = generate(model, text, 15)
    for chunk in (1, 2, 4, 9):
        assert torch.equal(generate(model, text, 15, cache=RingCache(model, 2, chunk)), plain)


@pytest.mark.parametrize("cache", [None, *CACHES])
def test_a_second_call_equals_the_first(cache):
    model, text = tiny(), prompts(2, 5)
    before = text.clone()
    first, second = (generate(model, text, 12, cache=CACHES[cache](model) if cache else None, seed=2) for _ in range(2))
    assert torch.equal(first, second)
    assert torch.equal(text, before)


@pytest.mark.parametrize("cache", [None, *CACHES])
def test_a_row_of_a_batch_is_that_row_alone(cache):
    model, text = tiny(), prompts(4, 5)

    def run(rows, seed):
        return generate(model, rows, 12, PARAMS[2], CACHES[cache](model) if cache else None, seed=seed)

    batch = run(text, 11)
    for b in range(4):
        assert torch.equal(batch[b : b + 1], run(text[b : b + 1], 11 + b))


def test_no_new_tokens():
    model, text = tiny(), prompts(2, 5)
    for cache in (None, DynamicCache(model)):
        assert torch.equal(generate(model, text, 0, cache=cache), text)
    assert torch.equal(generate(model, prompts(1, 24), 1)[:, :24], prompts(1, 24))


class Counted:
    """Counts the forward passes of a model and the tokens that they read."""

    def __init__(self, model):
        self.passes, self.tokens = 0, 0
        run = model.run

        def counted(tokens, *rest):
            self.passes, self.tokens = self.passes + 1, self.tokens + len(tokens)
            return run(tokens, *rest)

        model.run = counted


@pytest.mark.parametrize("cache", [None, *CACHES])
def test_forward_passes_and_tokens_read(cache):
    model = tiny()
    count = Counted(model)
    generate(model, prompts(2, 7), 9, cache=CACHES[cache](model) if cache else None)
    assert count.passes == 9  # the first token comes from the prompt, and the last one is never read
    per_row = 7 + 8 if cache else sum(range(7, 16))
    assert count.tokens == 2 * per_row


def test_a_stream_computes_a_token_only_when_asked_for_it():
    model = tiny()
    count = Counted(model)
    new = stream(model, prompts(2, 4), 6)
    assert count.passes == 0
    shown = []
    for i, token in enumerate(new, start=1):
        assert token.shape == (2,)
        assert count.passes == i
        shown.append(token)
    assert torch.equal(torch.stack(shown, 1), generate(tiny(), prompts(2, 4), 6)[:, 4:])


def test_a_stream_refuses_before_it_is_read():
    with pytest.raises(ValueError, match="n_new is -1"):
        stream(tiny(), prompts(1, 4), -1)


def test_a_prompt_in_chunks_has_the_same_logits():
    model, text = tiny(), prompts(2, 13)
    plain = prefill(model, text)
    torch.testing.assert_close(plain, model(text)[:, -1])
    for chunk in (None, 1, 4, 13, 50):
        torch.testing.assert_close(prefill(model, text, DynamicCache(model), chunk), plain)


def test_a_decode_step_reads_one_token_on_top_of_the_cache():
    model, text = tiny(), prompts(2, 8)
    cache = StaticCache(model, 2, 24)
    prefill(model, text[:, :7], cache)
    torch.testing.assert_close(decode_step(model, text[:, 7], cache), model(text)[:, -1])
    assert cache.next_position(1) == 8


def test_past_the_context_window_it_refuses_and_says_what_to_do():
    model = tiny()
    count = Counted(model)
    for cache in (None, DynamicCache(model)):
        with pytest.raises(ValueError, match=r"20 tokens and 6 new ones pass the context window of 24.*or 'clamp'"):
            generate(model, prompts(1, 20), 6, cache=cache)
    assert count.passes == 0
    assert generate(model, prompts(1, 20), 5).shape == (1, 25)  # the last token is never read, so it fits


@pytest.mark.parametrize("n", [20, 24, 30])
@pytest.mark.parametrize("cache", [None, *CACHES])
def test_slide_reads_the_last_window_again(cache, n):
    model, text = tiny(), prompts(2, n)
    found = generate(model, text, 12, PARAMS[1], CACHES[cache](model) if cache else None, overflow="slide")
    assert torch.equal(found, naive(model, text, 12, PARAMS[1]))


def clamped(model, text, n_new, generator):
    """One row, at temperature 1: keys and values stay as computed, the oldest go, new tokens get the last position.

    Written from the weights, with plain lists of keys and values per layer.
    """
    window, D, G = CONFIG.context_length, CONFIG.d_head, CONFIG.n_kv_heads
    kept = [[] for _ in model.blocks]  # per layer a list of (k [G, D], v [G, D])

    def read(token, position):
        x = model.token_embedding.weight[token] + model.position_embedding.weight[position]  # [d]
        for block, held in zip(model.blocks, kept, strict=True):
            h, mha = block.ln1(x), block.mha
            held.append((mha.key_proj(h).view(G, D), mha.value_proj(h).view(G, D)))
            del held[:-window]
            out = []
            for head, q in enumerate(mha.query_proj(h).view(-1, D)):
                g = head * G // CONFIG.n_heads
                weights = torch.stack([q @ k[g] for k, _ in held]).div(D**0.5).softmax(0)
                out.append(sum(w * v[g] for w, (_, v) in zip(weights, held, strict=True)))
            x = x + mha.out_proj(torch.cat(out))
            x = x + block.ffwd(block.ln2(x))
        return model.fc_out(model.ln(x))

    text = text.tolist()
    with torch.no_grad():
        for i, token in enumerate(text[-window:]):
            logits = read(token, i)
        for step in range(n_new):
            u = torch.rand((), generator=generator, dtype=torch.float64)
            text.append(int((logits.softmax(0).cumsum(0) <= u).sum()))
            if step < n_new - 1:
                logits = read(text[-1], min(len(text), window) - 1)
    return text


@pytest.mark.parametrize("n", [20, 24, 30])
@pytest.mark.parametrize("cache", CACHES)
def test_clamp_keeps_the_last_keys_and_says_that_it_differs(cache, n):
    model, text = tiny(), prompts(2, n)
    with pytest.warns(UserWarning, match=r"the output differs from the model's"):
        found = generate(model, text, 16, cache=CACHES[cache](model), overflow="clamp")
    rows = [clamped(model, row, 16, torch.Generator().manual_seed(b)) for b, row in enumerate(text)]
    assert found.tolist() == rows
    assert not torch.equal(found, naive(model, text, 16, SamplingParams()))


def test_within_the_context_window_the_choice_changes_nothing():
    model, text = tiny(), prompts(2, 10)
    plain = generate(model, text, 15)
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        for overflow in ("slide", "clamp"):
            assert torch.equal(generate(model, text, 15, cache=DynamicCache(model), overflow=overflow), plain)
    count = Counted(model)
    generate(model, text, 15, cache=DynamicCache(model), overflow="slide")
    assert count.tokens == 2 * (10 + 14)  # nothing is read twice, up to the last token of the window


@pytest.mark.parametrize(
    ("text", "n_new", "more", "message"),
    [
        (torch.zeros(3, dtype=torch.int64), 1, {}, r"tokens has shape \(3,\), it must be \[B, n\]"),
        (torch.zeros(2, 0, dtype=torch.int64), 1, {}, "at least one token per row"),
        (prompts(1, 3), -1, {}, "n_new is -1, it must be at least 0"),
        (prompts(1, 3), 1, {"overflow": "wrap"}, "overflow is 'wrap', it must be 'error', 'slide' or 'clamp'"),
        (prompts(1, 20), 20, {"overflow": "clamp"}, "needs a cache"),
        (torch.tensor([[0, 17]]), 1, {}, "token 17 is outside the vocabulary of 17"),
    ],
)
def test_bad_arguments_are_named(text, n_new, more, message):
    with pytest.raises(ValueError, match=message):
        generate(tiny(), text, n_new, **more)


def test_a_used_cache_is_refused():
    model = tiny()
    cache = DynamicCache(model)
    generate(model, prompts(1, 4), 3, cache=cache)
    with pytest.raises(ValueError, match="the cache already holds text"):
        generate(model, prompts(1, 4), 3, cache=cache)


@pytest.mark.parametrize(("n", "n_new", "overflow"), [(4, 5, "error"), (9, 0, "error"), (20, 20, "slide")])
def test_a_cache_that_is_too_small_is_refused_before_anything_is_computed(n, n_new, overflow):
    model = tiny()
    count = Counted(model)
    held = min(n + max(n_new - 1, 0), CONFIG.context_length)
    with pytest.raises(ValueError, match=f"needs room for {held} tokens, a sequence of the cache has {held - 1}"):
        generate(model, prompts(1, n), n_new, cache=StaticCache(model, 1, held - 1), overflow=overflow)
    assert count.passes == 0
    generate(model, prompts(1, n), n_new, cache=StaticCache(model, 1, held), overflow=overflow)


@pytest.mark.parametrize(("n", "chunk"), [(20, 1), (30, 1), (30, 4)])
def test_clamp_over_a_ring_sees_the_last_keys_of_its_window(n, chunk):
    """As `clamped`, with no more keys than the window: past the context a ring forgets nothing else."""
    model, text = tiny(), prompts(1, n)
    for block in model.blocks:
        block.mha.window = 5
    cache = RingCache(model, 1, chunk=chunk)
    with pytest.warns(UserWarning, match=r"the output differs from the model's"):
        found = generate(model, text, 16, cache=cache, overflow="clamp")
    positions = cache.export(0)["k_pos"].tolist()
    assert found.shape == (1, n + 16)
    # what the slots hold: the last tokens, each once; the newest all have the last position
    assert len(positions) == cache.max_tokens and positions == sorted(positions) and positions[-1] == 23


def test_the_cache_holds_the_text_afterwards():
    model, cache = tiny(), None
    cache = DynamicCache(model)
    text = generate(model, prompts(1, 4), 5, cache=cache)
    assert cache.export(0)["k_pos"].tolist() == list(range(8))  # all but the last token, which nothing has read
    torch.testing.assert_close(decode_step(model, text[:, -1], cache), model(text)[:, -1])
