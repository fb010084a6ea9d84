"""The model: its names and sizes, positions and holes as data, packed steps, and what it refuses."""

import math

import pytest
import torch
from torch.nn import functional
from torch.utils.flop_counter import FlopCounterMode

from gptlite.cache.contract import Segment
from gptlite.cache.dense import DynamicCache, StaticCache
from gptlite.config import GPTConfig
from gptlite.model import GPTlite

# n_heads * d_head is not d_model, and n_kv_heads is not n_heads
CONFIG = GPTConfig(vocab_size=13, context_length=16, n_layers=2, d_model=12, n_heads=4, d_head=5, n_kv_heads=2, d_ff=20)


def tiny(config=CONFIG, dtype=torch.float32):
    torch.manual_seed(0)
    model = GPTlite(config).to(dtype)
    with torch.no_grad():
        for parameter in model.parameters():  # far from the small values of the start, so that mistakes show
            parameter.add_(torch.randn_like(parameter) * 0.3)
    return model.eval()


def tokens(B, S, seed=0):
    return torch.randint(CONFIG.vocab_size, (B, S), generator=torch.Generator().manual_seed(seed))


def by_hand(model, row):
    """Logits [n, V] of one row of tokens [n], from the weights alone, with one plain loop per head and query."""
    w = model.state_dict()
    D = CONFIG.d_head

    def linear(name, x):
        return x @ w[f"{name}.weight"].T + w[f"{name}.bias"]

    def norm(name, x):
        centred = x - x.mean(-1, keepdim=True)
        return centred / (centred.pow(2).mean(-1, keepdim=True) + 1e-5).sqrt() * w[f"{name}.weight"] + w[f"{name}.bias"]

    x = w["token_embedding.weight"][row] + w["position_embedding.weight"][: len(row)]
    for layer in range(CONFIG.n_layers):
        block = f"blocks.{layer}"
        h = norm(f"{block}.ln1", x)
        q, k, v = (linear(f"{block}.mha.{name}_proj", h) for name in ("query", "key", "value"))
        heads = []
        for head in range(CONFIG.n_heads):
            kv = head * CONFIG.n_kv_heads // CONFIG.n_heads
            qh, kh, vh = q[:, head * D : (head + 1) * D], k[:, kv * D : (kv + 1) * D], v[:, kv * D : (kv + 1) * D]
            rows = []
            for i in range(len(row)):
                weights = torch.softmax(qh[i] @ kh[: i + 1].T / math.sqrt(D), -1)
                rows.append(weights @ vh[: i + 1])
            heads.append(torch.stack(rows))
        x = x + linear(f"{block}.mha.out_proj", torch.cat(heads, -1))
        x = x + linear(f"{block}.ffwd.net.2", linear(f"{block}.ffwd.net.0", norm(f"{block}.ln2", x)).clamp(min=0))
    return linear("fc_out", norm("ln", x))


def test_the_parameters_have_the_names_and_shapes_of_the_original():
    V, n, d, F, H, G, D = 13, 16, 12, 20, 4, 2, 5
    expected = {"token_embedding.weight": (V, d), "position_embedding.weight": (n, d)}
    for layer in range(2):
        block = f"blocks.{layer}"
        for norm in ("ln1", "ln2"):
            expected |= {f"{block}.{norm}.weight": (d,), f"{block}.{norm}.bias": (d,)}
        for name, shape in {
            "mha.query_proj": (H * D, d),
            "mha.key_proj": (G * D, d),
            "mha.value_proj": (G * D, d),
            "mha.out_proj": (d, H * D),
            "ffwd.net.0": (F, d),
            "ffwd.net.2": (d, F),
        }.items():
            expected |= {f"{block}.{name}.weight": shape, f"{block}.{name}.bias": shape[:1]}
    expected |= {"ln.weight": (d,), "ln.bias": (d,), "fc_out.weight": (V, d), "fc_out.bias": (V,)}
    model = tiny()
    assert {name: tuple(t.shape) for name, t in model.state_dict().items()} == expected
    assert [name for name, _ in model.named_parameters()] == list(model.state_dict())
    assert model.n_params == sum(math.prod(shape) for shape in expected.values())
    assert model.context_length == n


def test_the_number_of_parameters_is_the_formula():
    for config in (CONFIG, GPTConfig(vocab_size=7, context_length=9, n_layers=3, d_model=8, n_heads=2, d_head=4)):
        V, n, L, d = config.vocab_size, config.context_length, config.n_layers, config.d_model
        q, kv, F = config.n_heads * config.d_head, config.n_kv_heads * config.d_head, config.d_ff
        attention = (d + 1) * (q + 2 * kv) + (q + 1) * d
        feed_forward = (d + 1) * F + (F + 1) * d
        expected = (V + n) * d + L * (attention + feed_forward + 4 * d) + 2 * d + (d + 1) * V
        assert GPTlite(config).n_params == expected


def test_the_start_is_small_and_the_loss_is_that_of_a_guess():
    torch.manual_seed(0)
    model = GPTlite(GPTConfig(vocab_size=50, context_length=32, n_layers=4, d_model=64, n_heads=4, d_head=16))
    text = torch.randint(50, (4, 32))
    loss = functional.cross_entropy(model(text).flatten(0, 1), text.roll(-1, 1).flatten())
    assert loss.item() == pytest.approx(math.log(50), abs=0.1)
    last = model.blocks[3]
    assert last.mha.query_proj.weight.std().item() == pytest.approx(0.02, rel=0.05)
    # each block adds to the residual stream twice: std / sqrt(2 L)
    for weight in (last.mha.out_proj.weight, last.ffwd.net[2].weight):
        assert weight.std().item() == pytest.approx(0.02 / 8**0.5, rel=0.05)
    assert not last.mha.key_proj.bias.any()


def test_the_logits_are_those_of_plain_loops():
    model, text = tiny(dtype=torch.float64), tokens(3, 9)
    logits = model(text)
    assert logits.shape == (3, 9, 13)
    for b in range(3):
        torch.testing.assert_close(logits[b], by_hand(model, text[b]))


def test_a_token_does_not_see_those_after_it():
    model, text = tiny(), tokens(2, 10)
    changed = text.clone()
    changed[:, 6:] = (changed[:, 6:] + 1) % 13
    torch.testing.assert_close(model(text)[:, :6], model(changed)[:, :6])
    assert not torch.allclose(model(text)[:, 6:], model(changed)[:, 6:], atol=1e-3)


@pytest.mark.parametrize("make", [DynamicCache, lambda model: StaticCache(model, 2, 16, bucket=4)])
def test_all_at_once_one_by_one_and_random_chunks_give_the_same_logits(make):
    model, text = tiny(), tokens(2, 16)
    whole = model(text)
    generator = torch.Generator().manual_seed(1)
    plans = [[1] * 16, [16], [7, 9]]
    for _ in range(10):
        plan = []
        while sum(plan) < 16:
            plan.append(min(int(torch.randint(1, 6, (), generator=generator)), 16 - sum(plan)))
        plans.append(plan)
    for plan in plans:
        cache = make(model)
        parts = [model(part, cache=cache) for part in text.split(plan, dim=1)]
        torch.testing.assert_close(torch.cat(parts, 1), whole, atol=1e-5, rtol=1e-5)
        assert cache.next_position(0) == cache.next_position(1) == 16


@pytest.mark.parametrize("side", ["left", "right", "both"])
def test_padded_rows_of_a_batch_equal_the_rows_alone(side):
    model = tiny()
    lengths, width = (9, 4, 1, 0), 9
    batch, positions = torch.zeros(4, width, dtype=torch.int64), torch.full((4, width), -1)
    rows = [tokens(1, max(n, 1), seed=n)[0, :n] for n in lengths]
    for b, (n, row) in enumerate(zip(lengths, rows, strict=True)):
        start = {"left": width - n, "right": 0, "both": (width - n) // 2}[side]
        batch[b, start : start + n], positions[b, start : start + n] = row, torch.arange(n)
    for cache in (None, DynamicCache(model), StaticCache(model, 4, 16)):
        logits = model(batch, positions, cache)
        assert torch.isfinite(logits).all()  # the holes too
        for b, row in enumerate(rows):
            if len(row):
                torch.testing.assert_close(logits[b][positions[b] >= 0], model(row[None])[0], atol=1e-5, rtol=1e-5)
        if cache is not None:  # and the next token of each row, at its own position
            new = tokens(4, 1, seed=99)
            step = model(new, cache=cache)
            for b, row in enumerate(rows):
                alone = model(torch.cat([row, new[b]])[None])[0, -1]
                torch.testing.assert_close(step[b, 0], alone, atol=1e-5, rtol=1e-5)


def test_the_order_of_the_tokens_in_memory_does_not_matter_only_their_positions():
    model, text = tiny(), tokens(1, 8)
    order = torch.randperm(8, generator=torch.Generator().manual_seed(3))
    shuffled = model(text[:, order], order[None])
    torch.testing.assert_close(shuffled, model(text)[:, order], atol=1e-5, rtol=1e-5)


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16, torch.float64])
def test_a_batch_of_holes_alone_is_finite(dtype):
    model = tiny(dtype=dtype)
    holes = torch.full((2, 3), -1)
    assert torch.isfinite(model(tokens(2, 3), holes)).all()
    assert torch.isfinite(model(tokens(2, 3), holes, StaticCache(model, 2, 8))).all()


def packed(rows):
    """Rows of tokens [S_b] as one packed step and its segments, made here without a cache's help."""
    starts = torch.tensor([0, *(len(row) for row in rows)]).cumsum(0).tolist()
    segments = []
    for S in sorted({len(row) for row in rows}):
        members = [b for b, row in enumerate(rows) if len(row) == S]
        places = torch.tensor([starts[b] + i for b in members for i in range(S)])
        segments.append(Segment(places, torch.arange(S).expand(len(members), S)))
    return torch.cat(rows), segments, starts


def test_a_packed_step_of_unequal_rows_equals_each_row_alone():
    model = tiny()
    rows = [tokens(1, n, seed=n + i)[0] for i, n in enumerate((5, 1, 16, 1, 5, 3))]
    text, segments, starts = packed(rows)
    hidden = model.run(text, segments)
    assert hidden.shape == (31, 12)
    for row, start in zip(rows, starts, strict=False):
        alone = model(row[None])[0]
        torch.testing.assert_close(model.head(hidden[start : start + len(row)]), alone, atol=1e-5, rtol=1e-5)


def test_linear_layers_run_once_over_the_packed_tokens():
    model = tiny()
    text, segments, _ = packed([tokens(1, n)[0] for n in (5, 2, 7, 2)])
    calls = []
    for name, module in model.named_modules():
        if isinstance(module, torch.nn.Linear):
            module.register_forward_hook(lambda _m, args, _o, name=name: calls.append((name, args[0].shape[0])))
    with FlopCounterMode(display=False) as counter:
        model.run(text, segments)
    # every linear layer of the blocks once, over all 16 tokens; the head not at all
    blocks = [name for name, m in model.named_modules() if isinstance(m, torch.nn.Linear) and name != "fc_out"]
    assert sorted(calls) == sorted((name, 16) for name in blocks)
    matrices = sum(p.numel() for name, p in model.named_parameters() if p.dim() == 2 and name.startswith("blocks."))
    flops = counter.get_flop_counts()["Global"]
    assert flops[torch.ops.aten.addmm] == 2 * 16 * matrices


def test_window_and_sinks_are_read_from_the_layers():
    model, text = tiny(dtype=torch.float64), tokens(1, 12)
    plain = model(text)
    for block in model.blocks:
        block.mha.window, block.mha.sinks = 12, 0
    torch.testing.assert_close(model(text), plain)
    # with one layer, a window of w makes the last logits those of the last w tokens (with their positions)
    alone = tiny(GPTConfig(**{**CONFIG.to_dict(), "n_layers": 1}), torch.float64)
    alone.blocks[0].mha.window = 3
    seen = [9, 10, 11]
    torch.testing.assert_close(alone(text)[:, -1], alone(text[:, seen], torch.tensor([seen]))[:, -1])
    alone.blocks[0].mha.sinks = 2
    kept = [0, 1, *seen]
    windowed = alone(text)[:, -1]
    alone.blocks[0].mha.window = None
    torch.testing.assert_close(windowed, alone(text[:, kept], torch.tensor([kept]))[:, -1])
    assert not torch.allclose(windowed, alone(text)[:, -1])


def test_shapes_are_read_from_the_modules():
    """A head fewer (as after pruning), values of another size: the model and its caches follow the weights."""
    model = tiny()
    mha = model.blocks[1].mha
    mha.key_proj = torch.nn.Linear(12, 5)
    mha.value_proj = torch.nn.Linear(12, 7)
    mha.query_proj = torch.nn.Linear(12, 3 * 5)
    mha.out_proj = torch.nn.Linear(3 * 7, 12)
    assert model.blocks[0].mha.kv_shape == (2, 5, 5)
    assert mha.kv_shape == (1, 5, 7)
    text = tokens(2, 6)
    for cache in (DynamicCache(model), StaticCache(model, 2, 8)):
        parts = [model(part, cache=cache) for part in text.split([4, 1, 1], dim=1)]
        torch.testing.assert_close(torch.cat(parts, 1), model(text), atol=1e-5, rtol=1e-5)


def test_dropout_acts_in_training_alone():
    model = tiny(GPTConfig(**{**CONFIG.to_dict(), "dropout": 0.5}))
    text = tokens(1, 8)
    assert torch.equal(model(text), model(text))
    model.train()
    assert not torch.allclose(model(text), model(text))


def test_every_parameter_gets_a_gradient():
    model = tiny()
    model(tokens(2, 16)).square().sum().backward()
    for name, parameter in model.named_parameters():
        assert parameter.grad is not None
        assert parameter.grad.abs().sum() > 0 or name.endswith("key_proj.bias"), name  # softmax is blind to that one


def test_past_the_context_window_it_raises_with_and_without_a_cache():
    model = tiny()
    with pytest.raises(ValueError, match="position 16 is outside the context window of 16 tokens"):
        model(tokens(1, 17))
    for cache in (DynamicCache(model), StaticCache(model, 1, 20)):
        model(tokens(1, 16), cache=cache)
        with pytest.raises(ValueError, match="position 16 is outside"):
            model(tokens(1, 1), cache=cache)


@pytest.mark.parametrize(
    ("text", "positions", "message"),
    [
        (torch.zeros(4, dtype=torch.int64), None, r"tokens has shape \(4,\), it must be \[B, S\]"),
        (torch.zeros(1, 0, dtype=torch.int64), None, "at least one token"),
        (torch.tensor([[0, 13]]), None, "token 13 is outside the vocabulary of 13"),
        (torch.tensor([[-1, 3]]), None, "token -1 is outside"),
        (torch.tensor([[0, 1]]), torch.tensor([[0]]), r"positions has shape \(1, 1\), tokens \(1, 2\)"),
        (torch.tensor([[0, 1]]), torch.tensor([[-2, 0]]), "position -2 is outside"),
        (torch.tensor([[0, 1]]), torch.tensor([[0, 16]]), "position 16 is outside"),
    ],
)
def test_bad_input_is_named(text, positions, message):
    with pytest.raises(ValueError, match=message):
        tiny()(text, positions)
