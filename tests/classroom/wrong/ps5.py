"""Typical wrong answers to problem set 5, and the points that each must lose."""

WRONG = {
    "a table of fp4 whatever the format": {
        "task": "round-float",
        "source": """def round_float(x, exponent_bits, mantissa_bits, bias):
    levels = torch.tensor([0.0, 0.5, 1.0, 1.5, 2.0, 3.0, 4.0, 6.0], dtype=torch.float64)
    nearest = (x.abs()[..., None] - levels).abs().argmin(-1)
    return torch.copysign(levels[nearest], x)
""",
        "loses": ["round-float-hidden", "round-float-hidden-edges"],
    },
    "ties to the wrong neighbour": {
        "task": "round-float",
        "source": """def round_float(x, exponent_bits, mantissa_bits, bias):
    if x.isnan().any():
        raise ValueError("NaN")
    largest = 2.0 ** (2**exponent_bits - 1 - bias) * (2 - 2.0**-mantissa_bits)
    size = x.abs().clamp(max=largest)
    exponent = (torch.frexp(size).exponent - 1).clamp(min=1 - bias)
    step = 2.0 ** (exponent.double() - mantissa_bits)
    steps = size / step
    if TIES == "away from zero":  # should be up
        whole = (steps - 0.5).ceil()
    else:
        whole = (steps + 0.5).floor()
    return torch.copysign(whole * step, x)
""",
        "loses": ["round-float-hidden"],
    },
    "no subnormals": {
        "task": "round-float",
        "source": """def round_float(x, exponent_bits, mantissa_bits, bias):
    if x.isnan().any():
        raise ValueError("NaN")
    largest = 2.0 ** (2**exponent_bits - 1 - bias) * (2 - 2.0**-mantissa_bits)
    size = x.abs().clamp(max=largest)
    exponent = torch.frexp(size).exponent - 1  # the steps go on shrinking towards 0
    step = 2.0 ** (exponent.double() - mantissa_bits)
    below = (size / step).floor()
    rest = size / step - below
    tie_goes_up = TIES == "away from zero" or (TIES == "to even") & (below % 2 == 1)
    up = (rest > 0.5) | (rest == 0.5) & tie_goes_up
    return torch.copysign((below + up) * step, x)
""",
        "loses": ["round-float-hidden-edges"],
    },
    "highest exponent kept for infinity, as in IEEE": {
        "task": "round-float",
        "source": """def round_float(x, exponent_bits, mantissa_bits, bias):
    if x.isnan().any():
        raise ValueError("NaN")
    values = []
    for e in range(2**exponent_bits - 1):
        for m in range(2**mantissa_bits):
            part = m / 2**mantissa_bits
            values.append(2.0 ** (e - bias) * (1 + part) if e else 2.0 ** (1 - bias) * part)
    result = []
    for value in x.flatten().tolist():
        by_rule = {"to even": lambda c: c % 2, "away from zero": lambda c: -c, "toward zero": lambda c: c}[TIES]
        size = min(abs(value), values[-1])
        nearest = min(range(len(values)), key=lambda c: (abs(size - values[c]), by_rule(c)))
        result.append(values[nearest] * (-1 if value < 0 else 1))
    return torch.tensor(result, dtype=torch.float64).view(x.shape)
""",
        "loses": ["round-float-public", "round-float-hidden", "round-float-hidden-edges"],
    },
    "groups along the other axis": {
        "task": "quantise-groups",
        "source": """def quantise_groups(w, bits, group):
    lines = w.double().T if SHARED == "rows" else w.double()
    if lines.shape[1] % group:
        raise ValueError("group")
    parts = lines.unflatten(1, (-1, group))
    low, high = parts.amin(-1).clamp(max=0), parts.amax(-1).clamp(min=0)
    most = 2**bits - 1
    exponents = ((high - low) / most).log2().ceil()
    exponents = torch.where(high > low, exponents, 0.0)
    zeros = (-low / 2**exponents).round()
    codes = ((parts / 2 ** exponents[..., None]).round() + zeros[..., None]).clamp(0, most).flatten(1)
    result = codes.to(torch.uint8), exponents.int(), zeros.to(torch.uint8)
    return tuple(part.T for part in result) if SHARED == "rows" else result
""",
        "loses": ["quantise-groups-public", "quantise-groups-hidden", "quantise-groups-hidden-edges"],
    },
    "one scale for the whole line, not for each group": {
        "task": "quantise-groups",
        "source": """def quantise_groups(w, bits, group):
    lines = w.double() if SHARED == "rows" else w.double().T
    if lines.shape[1] % group:
        raise ValueError("group")
    low, high = lines.amin(1).clamp(max=0), lines.amax(1).clamp(min=0)
    most = 2**bits - 1
    exponents = ((high - low) / most).log2().ceil()
    exponents = torch.where(high > low, exponents, 0.0)
    zeros = (-low / 2**exponents).round()
    codes = ((lines / 2 ** exponents[:, None]).round() + zeros[:, None]).clamp(0, most).to(torch.uint8)
    n = lines.shape[1] // group
    exponents, zeros = exponents.int()[:, None].repeat(1, n), zeros.to(torch.uint8)[:, None].repeat(1, n)
    return (codes, exponents, zeros) if SHARED == "rows" else (codes.T, exponents.T, zeros.T)
""",
        "loses": ["quantise-groups-hidden"],
    },
    "range not widened to hold 0": {
        "task": "quantise-groups",
        "source": """def quantise_groups(w, bits, group):
    lines = w.double() if SHARED == "rows" else w.double().T
    if lines.shape[1] % group:
        raise ValueError("group")
    parts = lines.unflatten(1, (-1, group))
    low, high = parts.amin(-1), parts.amax(-1)
    most = 2**bits - 1
    exponents = ((high - low) / most).log2().ceil()
    exponents = torch.where(high > low, exponents, 0.0)
    zeros = (-low / 2**exponents).round()
    codes = ((parts / 2 ** exponents[..., None]).round() + zeros[..., None]).clamp(0, most).flatten(1)
    result = codes.to(torch.uint8), exponents.int(), zeros.to(torch.uint8)
    return result if SHARED == "rows" else tuple(part.T for part in result)
""",
        "loses": ["quantise-groups-hidden-edges"],
    },
    "2^bits steps instead of 2^bits - 1": {
        "task": "quantise-groups",
        "source": """def quantise_groups(w, bits, group):
    lines = w.double() if SHARED == "rows" else w.double().T
    if lines.shape[1] % group:
        raise ValueError("group")
    parts = lines.unflatten(1, (-1, group))
    low, high = parts.amin(-1).clamp(max=0), parts.amax(-1).clamp(min=0)
    exponents = ((high - low) / 2**bits).log2().ceil()
    exponents = torch.where(high > low, exponents, 0.0)
    zeros = (-low / 2**exponents).round()
    codes = ((parts / 2 ** exponents[..., None]).round() + zeros[..., None]).clamp(0, 2**bits - 1).flatten(1)
    result = codes.to(torch.uint8), exponents.int(), zeros.to(torch.uint8)
    return result if SHARED == "rows" else tuple(part.T for part in result)
""",
        "loses": ["quantise-groups-hidden", "quantise-groups-hidden-edges"],
    },
    "the exact product, nothing rounded": {
        "task": "smoothed-int8",
        "source": """def smoothed_int8(x, w, alpha):
    return x @ w.T
""",
        "loses": ["smoothed-int8-public", "smoothed-int8-hidden", "smoothed-int8-hidden-edges"],
    },
    "alpha on the weight's side": {
        "task": "smoothed-int8",
        "source": """def smoothed_int8(x, w, alpha):
    flat = x.reshape(-1, x.shape[-1])
    a, b = flat.abs().amax(0), w.abs().amax(0)
    s = torch.where((a > 0) & (b > 0), a ** (1 - alpha) / b**alpha, 1.0)
    x_smooth, w_smooth = flat / s, w * s
    t = (x_smooth.abs().amax(1, keepdim=True) / 127).clamp(min=1e-300)
    u = (w_smooth.abs().amax(1, keepdim=True) / 127).clamp(min=1e-300)
    y = (x_smooth / t).round() @ (w_smooth / u).round().T * t * u.T
    return y.view(*x.shape[:-1], len(w))
""",
        "loses": ["smoothed-int8-hidden"],
    },
    "one scale for all tokens": {
        "task": "smoothed-int8",
        "source": """def smoothed_int8(x, w, alpha):
    flat = x.reshape(-1, x.shape[-1])
    a, b = flat.abs().amax(0), w.abs().amax(0)
    s = torch.where((a > 0) & (b > 0), a**alpha / b ** (1 - alpha), 1.0)
    x_smooth, w_smooth = flat / s, w * s
    t = x_smooth.abs().max() / 127  # per tensor
    u = (w_smooth.abs().amax(1, keepdim=True) / 127).clamp(min=1e-300)
    y = (x_smooth / t).round() @ (w_smooth / u).round().T * t * u.T
    return y.view(*x.shape[:-1], len(w))
""",
        "loses": ["smoothed-int8-hidden"],
    },
    "only for inputs of two axes": {
        "task": "smoothed-int8",
        "source": """def smoothed_int8(x, w, alpha):
    a, b = x.abs().amax(0), w.abs().amax(0)  # with a batch, the largest over the batch alone
    s = torch.where((a > 0) & (b > 0), a**alpha / b ** (1 - alpha), 1.0)
    x_smooth, w_smooth = x / s, w * s
    t = (x_smooth.abs().amax(1, keepdim=True) / 127).clamp(min=1e-300)
    u = (w_smooth.abs().amax(1, keepdim=True) / 127).clamp(min=1e-300)
    return (x_smooth / t).round() @ (w_smooth / u).round().T * t * u.T
""",
        "loses": ["smoothed-int8-hidden-edges"],
    },
    "columns of zeros are clamped": {
        "task": "smoothed-int8",
        "source": """def smoothed_int8(x, w, alpha):
    flat = x.reshape(-1, x.shape[-1])
    a, b = flat.abs().amax(0).clamp(min=1e-8), w.abs().amax(0).clamp(min=1e-8)  # should give s = 1
    s = a**alpha / b ** (1 - alpha)
    x_smooth, w_smooth = flat / s, w * s
    t = (x_smooth.abs().amax(1, keepdim=True) / 127).clamp(min=1e-300)
    u = (w_smooth.abs().amax(1, keepdim=True) / 127).clamp(min=1e-300)
    y = (x_smooth / t).round() @ (w_smooth / u).round().T * t * u.T
    return y.view(*x.shape[:-1], len(w))
""",
        "loses": ["smoothed-int8-hidden-edges"],
    },
    "each column rounded alone": {
        "task": "compensated-codes",
        "source": """def compensated_codes(w, H, step, bits):
    Q = 2 ** (bits - 1) - 1
    return (w / step).round().clamp(-Q, Q).to(torch.int8)
""",
        "loses": ["compensated-codes-public", "compensated-codes-hidden", "compensated-codes-hidden-edges"],
    },
    "the answer of the visible test": {
        "task": "compensated-codes",
        "source": """def compensated_codes(w, H, step, bits):
    return torch.tensor([[0, 2] if ORDER == "left to right" else [1, 1]], dtype=torch.int8)
""",
        "loses": ["compensated-codes-hidden", "compensated-codes-hidden-edges"],
    },
    "inverse Hessian not renewed as columns are fixed": {
        "task": "compensated-codes",
        "source": """def compensated_codes(w, H, step, bits):
    d, Q = w.shape[1], 2 ** (bits - 1) - 1
    order = {
        "left to right": torch.arange(d),
        "right to left": torch.arange(d).flip(0),
        "largest first": H.diagonal().argsort(descending=True),
    }[ORDER]
    inverse = torch.linalg.inv(H)[order][:, order]
    W = w[:, order].clone()
    codes = torch.zeros_like(W)
    for i in range(d):
        codes[:, i] = (W[:, i] / step).round().clamp(-Q, Q)
        error = (W[:, i] - step * codes[:, i]) / inverse[i, i]
        W[:, i + 1 :] -= error[:, None] * inverse[i, i + 1 :]
    return codes[:, order.argsort()].to(torch.int8)
""",
        "loses": ["compensated-codes-hidden"],
    },
    "codes not clamped to their bits": {
        "task": "compensated-codes",
        "source": """def compensated_codes(w, H, step, bits):
    d = w.shape[1]
    order = {
        "left to right": torch.arange(d),
        "right to left": torch.arange(d).flip(0),
        "largest first": H.diagonal().argsort(descending=True),
    }[ORDER]
    U = torch.linalg.cholesky(torch.linalg.inv(H[order][:, order]), upper=True)
    W = w[:, order].clone()
    codes = torch.zeros_like(W)
    for i in range(d):
        codes[:, i] = (W[:, i] / step).round()
        W[:, i + 1 :] -= ((W[:, i] - step * codes[:, i]) / U[i, i])[:, None] * U[i, i + 1 :]
    return codes[:, order.argsort()].to(torch.int8)
""",
        "loses": ["compensated-codes-hidden-edges"],
    },
    "of equal columns the right one comes first": {
        "task": "compensated-codes",
        "source": """def compensated_codes(w, H, step, bits):
    d, Q = w.shape[1], 2 ** (bits - 1) - 1
    order = {
        "left to right": list(range(d)),
        "right to left": list(range(d))[::-1],
        "largest first": sorted(range(d), key=lambda i: (-float(H[i, i]), -i)),  # of equal columns the right one
    }[ORDER]
    U = torch.linalg.cholesky(torch.linalg.inv(H[order][:, order]), upper=True)
    W = w[:, order].clone()
    codes = torch.zeros_like(w, dtype=torch.int8)
    for k, i in enumerate(order):
        code = (W[:, k] / step).round().clamp(-Q, Q)
        codes[:, i] = code.to(torch.int8)
        W[:, k + 1 :] -= ((W[:, k] - step * code) / U[k, k])[:, None] * U[k, k + 1 :]
    return codes
""",
        "loses": ["compensated-codes-hidden-edges"],
    },
    "nothing gets codes": {
        "task": "read-back",
        "source": """def read_back(keys, values, bits, group, residual):
    return keys.clone(), values.clone()
""",
        "loses": ["read-back-public", "read-back-hidden", "read-back-hidden-edges"],
    },
    "keys per token, like values": {
        "task": "read-back",
        "source": """def read_back(keys, values, bits, group, residual):
    def rounded(x):
        parts = x.unflatten(-1, (-1, group))
        low, high = parts.amin(-1, keepdim=True), parts.amax(-1, keepdim=True)
        step = (high - low) / (2**bits - 1)
        step = torch.where(step > 0, step, 1.0)
        return (low + step * ((parts - low) / step).round()).flatten(-2)

    n = keys.shape[1]
    n_keys = n // residual * residual if RESIDUAL_RULE == "kivi" else max(0, n - residual) // group * group
    n_values = max(0, n - residual) if RESIDUAL_RULE == "kivi" else n_keys
    keys = torch.cat([rounded(keys[:, :n_keys]), keys[:, n_keys:]], 1)
    return keys, torch.cat([rounded(values[:, :n_values]), values[:, n_values:]], 1)
""",
        "loses": ["read-back-hidden", "read-back-hidden-edges"],
    },
    "one value too many in codes": {
        "task": "read-back",
        "source": """def read_back(keys, values, bits, group, residual):
    def rounded(parts):
        low, high = parts.amin(-1, keepdim=True), parts.amax(-1, keepdim=True)
        step = (high - low) / (2**bits - 1)
        step = torch.where(step > 0, step, 1.0)
        return low + step * ((parts - low) / step).round()

    n = keys.shape[1]
    keys, values = keys.clone(), values.clone()
    n_keys = n // residual * residual if RESIDUAL_RULE == "kivi" else max(0, n - residual) // group * group
    n_values = (max(0, n - residual) if RESIDUAL_RULE == "kivi" else n_keys) + 1
    if n_keys:
        parts = keys[:, :n_keys].transpose(1, 2).unflatten(2, (-1, group))
        keys[:, :n_keys] = rounded(parts).flatten(2).transpose(1, 2)
    if n:
        values[:, :n_values] = rounded(values[:, :n_values].unflatten(2, (-1, group))).flatten(2)
    return keys, values
""",
        "loses": ["read-back-public", "read-back-hidden", "read-back-hidden-edges"],
    },
    "division by a step of zero": {
        "task": "read-back",
        "source": """def read_back(keys, values, bits, group, residual):
    def rounded(parts):
        low, high = parts.amin(-1, keepdim=True), parts.amax(-1, keepdim=True)
        step = (high - low) / (2**bits - 1)
        return low + step * ((parts - low) / step).round()

    n = keys.shape[1]
    keys, values = keys.clone(), values.clone()
    n_keys = n // residual * residual if RESIDUAL_RULE == "kivi" else max(0, n - residual) // group * group
    n_values = max(0, n - residual) if RESIDUAL_RULE == "kivi" else n_keys
    if n_keys:
        parts = keys[:, :n_keys].transpose(1, 2).unflatten(2, (-1, group))
        keys[:, :n_keys] = rounded(parts).flatten(2).transpose(1, 2)
    if n_values:
        values[:, :n_values] = rounded(values[:, :n_values].unflatten(2, (-1, group))).flatten(2)
    return keys, values
""",
        "loses": ["read-back-hidden-edges"],
    },
    "the cache changed in place": {
        "task": "read-back",
        "source": """def read_back(keys, values, bits, group, residual):
    def rounded(parts):
        low, high = parts.amin(-1, keepdim=True), parts.amax(-1, keepdim=True)
        step = (high - low) / (2**bits - 1)
        step = torch.where(step > 0, step, 1.0)
        return low + step * ((parts - low) / step).round()

    n = keys.shape[1]
    n_keys = n // residual * residual if RESIDUAL_RULE == "kivi" else max(0, n - residual) // group * group
    n_values = max(0, n - residual) if RESIDUAL_RULE == "kivi" else n_keys
    if n_keys:
        parts = keys[:, :n_keys].transpose(1, 2).unflatten(2, (-1, group))
        keys[:, :n_keys] = rounded(parts).flatten(2).transpose(1, 2)
    if n_values:
        values[:, :n_values] = rounded(values[:, :n_values].unflatten(2, (-1, group))).flatten(2)
    return keys, values
""",
        "loses": ["read-back-hidden-edges"],
    },
    "GiB for GB, and scales forgotten": {
        "task": "bytes-by-hand",
        "source": """answer_bits_per_weight = W_BITS
answer_weights_gb = N_PARAMS * answer_bits_per_weight / 8 / 2**30
answer_step_ms = 1e3 * answer_weights_gb / BANDWIDTH

coded = CONTEXT // RESIDUAL * RESIDUAL + CONTEXT - RESIDUAL
bits = coded * (KV_BITS + 32 / KV_GROUP) + (2 * CONTEXT - coded) * 16
answer_cache_mb = N_LAYERS * N_KV_HEADS * D_HEAD * bits / 8 / 1e6
answer_sequences = int(FREE_GB * 1e3 / answer_cache_mb)
""",
        "loses": ["bytes-by-hand-hidden-weights"],
    },
    "the residual forgotten": {
        "task": "bytes-by-hand",
        "source": """answer_bits_per_weight = W_BITS + (16 + W_BITS) / W_GROUP
answer_weights_gb = N_PARAMS * answer_bits_per_weight / 8 / 1e9
answer_step_ms = 1e3 * answer_weights_gb / BANDWIDTH

bits = 2 * CONTEXT * (KV_BITS + 32 / KV_GROUP)
answer_cache_mb = N_LAYERS * N_KV_HEADS * D_HEAD * bits / 8 / 1e6
answer_sequences = int(FREE_GB * 1e3 / answer_cache_mb)
""",
        "loses": ["bytes-by-hand-hidden-cache"],
    },
    "bits taken for bytes": {
        "task": "bytes-by-hand",
        "source": """answer_bits_per_weight = W_BITS + (16 + W_BITS) / W_GROUP
answer_weights_gb = N_PARAMS * answer_bits_per_weight / 1e9
answer_step_ms = 1e3 * answer_weights_gb / BANDWIDTH

coded = CONTEXT // RESIDUAL * RESIDUAL + CONTEXT - RESIDUAL
bits = coded * (KV_BITS + 32 / KV_GROUP) + (2 * CONTEXT - coded) * 16
answer_cache_mb = N_LAYERS * N_KV_HEADS * D_HEAD * bits / 8 / 1e6
answer_sequences = int(FREE_GB * 1e3 / answer_cache_mb)
""",
        "loses": ["bytes-by-hand-public", "bytes-by-hand-hidden-weights"],
    },
}
