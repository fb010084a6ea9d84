"""The explorers of the chapter on prefix caching: a recorded chat in both stores, and what a hit saves."""

from typing import Any

import altair as alt

from gptlite.arithmetic import ModelShape, kv_bytes_per_token, prefill_costs, step_bound, step_costs, total
from gptlite.config import preset
from gptlite.hardware import gpu, gpus
from gptlite.notebook.chart import BLUE, GREEN, ORANGE, SKY, VERMILION, Explorer, menu, slider
from gptlite.record import Recording

# state of a run of tokens -> colour; each has a word in the legend
STATES = {"kept": SKY, "found": GREEN, "new": ORANGE, "evicted": VERMILION}
STORES = ("chain of blocks", "radix tree")
# lanes times rate times the code's share, in GB/s; the first copies nothing
LINKS = {"GPU memory": 0.0, "CPU memory, PCIe 5.0 x16": 63.0, "a disk, PCIe 4.0 x4": 7.88, "network, 10 Gbit/s": 1.25}


def chat_trace(recording: Recording) -> Explorer:
    """What the stores hold while a chat goes on, step by step, as the package's own stores recorded it.

    Args:
        recording: of the sweep `prefix-trace`.
    """
    rows, words, facts = [], [], []
    people = list(recording.data["texts"])
    for i, store in enumerate(STORES):
        frames = recording.data[store]
        for step, frame in enumerate(frames, 1):
            said = frame_in_words(frame, step, len(frames))
            held = sum(run["end"] - run["begin"] for run in frame["runs"] if run["state"] != "evicted")
            words += [
                {"store": i, "step": step, "line": j, "words": line}
                for j, line in enumerate([*said, f"{held} tokens in the store"])
            ]
            for run in frame["runs"]:
                if run["row"] >= 0:
                    rows.append(
                        {"store": i, "step": step, "who": people[run["row"]], "n": run["end"] - run["begin"]} | run
                    )
        read = sum(frame["prompt"] - frame["cached"] for frame in frames if frame["event"] == "begin")
        asked = sum(frame["prompt"] for frame in frames if frame["event"] == "begin")
        gone = sum(frame["evicted"] for frame in frames)
        facts.append(f"{store}: of {asked} prompt tokens {read} are read, {asked - read} are found; {gone} evicted")
    n_steps = len(recording.data[STORES[0]])
    longest = max(run["end"] for run in rows)
    controls = [menu("store", "Store", STORES, STORES[1]), slider("step", "Step", 5, 1, n_steps, 1)]
    now = "datum.store == store && datum.step == step"
    x = alt.X(
        "begin:Q",
        title="Position in the text, tokens",
        scale=alt.Scale(domain=[0, longest + 4], nice=False),
        axis=alt.Axis(grid=False),
    )
    y = alt.Y("who:N", title=None, sort=people, scale=alt.Scale(domain=people, range=[76, 236], paddingInner=0.35))
    colour = alt.Color(
        "state:N",
        scale=alt.Scale(domain=list(STATES), range=list(STATES.values())),
        legend=alt.Legend(orient="bottom", title=None, symbolType="square"),
    )
    bars = (
        alt.Chart(alt.Data(values=rows))
        .transform_filter(now)
        .mark_bar(stroke="currentColor", strokeWidth=1.5, height={"band": 1})
        .encode(
            x=x,
            x2="end:Q",
            y=y,
            color=colour,
            fillOpacity=alt.condition("datum.state == 'evicted'", alt.value(0.15), alt.value(0.85)),
            strokeDash=alt.condition("datum.state == 'evicted'", alt.value([4, 3]), alt.value([1, 0])),
        )
    )
    lengths = (
        alt.Chart(alt.Data(values=rows))
        .transform_filter(f"{now} && datum.n >= 10")
        .transform_calculate(middle="(datum.begin + datum.end) / 2")
        .mark_text(baseline="middle")
        .encode(x=alt.X("middle:Q"), y=y, text="n:Q")
    )
    lines = [
        alt.Chart(alt.Data(values=words))
        .transform_filter(f"{now} && datum.line == {i}")
        .mark_text(align="left", baseline="top")
        .encode(x=alt.value(0), y=alt.value(19 * i), text="words:N")
        for i in range(3)
    ]
    return Explorer(
        name="chat-trace",
        chart=alt.layer(bars, lengths, *lines).add_params(*controls).properties(width="container", height=240),
        alt_text="Bars on an axis of token positions, one row for each of three people: the runs of tokens that the"
        " store holds of their talk. The opening that all share stands once, in the first row; a person's later turns"
        " follow the earlier ones. Colours tell what the request found, what it left behind, what was kept and what was"
        " evicted (dashed). A menu chooses the chain of blocks or the radix tree, a slider the recorded step.",
        caption="Three people chat with GPTlite: what the store holds after each step, as recorded, in tokens.",
        facts=tuple(facts),
    )


def frame_in_words(frame: dict[str, Any], step: int, n_steps: int) -> list[str]:
    """What happens in a frame of the recorded chat, in two lines that a phone has room for."""
    who, line = frame["who"].capitalize(), frame["line"]
    if frame["event"] == "begin":
        read = frame["prompt"] - frame["cached"]
        return [
            f"step {step} of {n_steps}, {who}: “{line}”",
            f"prompt of {frame['prompt']} tokens: {frame['cached']} found, {read} read",
        ]
    gone = f"handed over, and {frame['evicted']} tokens are evicted" if frame["evicted"] else ""
    return [f"step {step} of {n_steps}, {who} has the answer", gone or "what was read and written is handed over"]


def saved_ttft(
    shape: ModelShape, card: str, n_tokens: int, n_cached: int, link: float = 0.0
) -> tuple[float, float, float]:
    """The least times of a prompt in 16 bits: (read whole, read after the cached part, the cached part fetched).

    Args:
        shape: the model's. card: a GPU by the book's name.
        n_tokens: of the prompt. n_cached: of them in the store, fewer.
        link: bytes per second between the store and the GPU; 0 when the keys and values lie there already.
    Returns: seconds.
    """
    peak, bandwidth = gpu(card).peak_flops, gpu(card).bandwidth
    whole = step_bound(total(prefill_costs(shape, 1, n_tokens)), peak, bandwidth)[0]
    rest = step_bound(total(step_costs(shape, 1, n_tokens - n_cached, n_cached)), peak, bandwidth)[0]
    return whole, rest, n_cached * kv_bytes_per_token(shape) / link if link else 0.0


def prefix_saving(presets: tuple[str, ...] = ("gpt2", "1b", "7b"), card: str = "H100 SXM") -> Explorer:
    """The least time to the first token of a prompt whose beginning is cached, by where its keys and values lie.

    Args:
        presets: models to choose from; the last is shown first. card: the GPU at first, by the book's name.
    """
    cards = list(gpus().values())
    rows = []
    for i, name in enumerate(presets):
        shape = ModelShape.of(preset(name))
        one, two = (total(prefill_costs(shape, 1, n)) for n in (1, 2))
        head = prefill_costs(shape, 1, 1)["head"].flops
        # reading 2 tokens is twice the matrices, the head once and 3 pairs; 1 token has 1 pair
        pair = total(step_costs(shape, 1, 1, 1)).flops - one.flops
        rows.append(
            {"model": i, "token": one.flops - pair - head, "head": head, "pair": pair}
            | {"weights": one.weight_bytes, "key": one.kv_bytes}
        )
        assert abs(two.flops - 2 * rows[-1]["token"] - head - 3 * pair) < 1e-6 * two.flops
    links = list(LINKS)
    controls = [
        menu("model", "Model", presets, presets[-1]),
        menu("card", "GPU", list(gpus()), card),
        menu("link", "The prefix lies in", links, links[0]),
        slider("prompt", "Prompt, tokens", 8192, 256, 32_768, 256),
        slider("share", "Cached, %", 90, 0, 99, 1),
        alt.param(name="peak", expr=f"{[c.peak_flops for c in cards]}[card]"),
        alt.param(name="bandwidth", expr=f"{[c.bandwidth for c in cards]}[card]"),
        alt.param(name="rate", expr=f"{[1e9 * rate for rate in LINKS.values()]}[link]"),
    ]
    step = (
        "max(({n} * datum.token + datum.head + ({n} * {past} + {n} * ({n} + 1) / 2) * datum.pair) / peak,"
        " (datum.weights + ({n} + {past}) * datum.key) / bandwidth)"
    )
    whole, rest = step.format(n="prompt", past="0"), step.format(n="(prompt - datum.cached)", past="datum.cached")
    chosen = (
        alt.Chart(alt.Data(values=rows))
        .transform_filter("datum.model == model")
        .transform_calculate(cached="floor(prompt * share / 100)")
        .transform_calculate(whole=whole, rest=rest)
        .transform_calculate(fetch="rate > 0 ? datum.cached * datum.key / rate : 0")
    )
    bars = (
        chosen.transform_calculate(a="datum.whole", b="datum.rest", c="datum.fetch")
        .transform_fold(["a", "b", "c"], as_=["which", "seconds"])
        .transform_calculate(
            case="datum.which == 'a' ? 'a miss' : 'a hit'",
            part="datum.which == 'c' ? 'fetch the prefix' : 'read tokens'",
        )
        .mark_bar()
        .encode(
            y=alt.Y("case:N", title=None, sort=["a miss", "a hit"], scale=alt.Scale(range=[88, 208], paddingInner=0.3)),
            x=alt.X(
                "seconds:Q",
                title="Time to first token, s",
                stack=True,
                axis=alt.Axis(format=",~f", tickCount=5, grid=False),
            ),
            color=alt.Color(
                "part:N",
                scale=alt.Scale(domain=["read tokens", "fetch the prefix"], range=[BLUE, ORANGE]),
                legend=alt.Legend(orient="bottom", title=None, symbolType="square"),
            ),
        )
    )
    time = "(({0}) < 1 ? format(1000 * ({0}), '.3r') + ' ms' : format({0}, ',.3r') + ' s')"
    lines = [
        f"'a miss: ' + {time.format('datum.whole')} + ' for ' + format(prompt, ',') + ' tokens'",
        f"'a hit: ' + {time.format('(datum.rest + datum.fetch)')}"
        " + ' for the last ' + format(prompt - datum.cached, ',')"
        " + ','",
        "format(datum.whole / (datum.rest + datum.fetch), '.3~r') + ' times shorter for '"
        " + format(datum.cached * datum.key / 1e9, '.3~r') + ' GB kept'",
        "'fetching pays above ' + (datum.whole > datum.rest ?"
        " format(datum.cached * datum.key / (datum.whole - datum.rest) / 1e9, '.3~r') + ' GB/s' : 'no rate')",
    ]
    texts = [
        chosen.transform_calculate(words=words)
        .mark_text(align="left", baseline="top")
        .encode(x=alt.value(0), y=alt.value(19 * i), text="words:N")
        for i, words in enumerate(lines)
    ]
    return Explorer(
        name="prefix-saving",
        chart=alt.layer(bars, *texts).add_params(*controls).properties(width="container", height=210),
        alt_text="Two bars, the least time to the first token of a prompt that is read whole, and of one whose"
        " beginning is cached; the second has a part for fetching keys and values. Above them the times, their ratio,"
        " the bytes of the prefix and the rate above which fetching is faster than reading again. Menus choose model,"
        " GPU and where the prefix lies, sliders the length of the prompt and the share that is cached.",
        caption="The least time to the first token by arithmetic, in 16 bits, with and without a cached prefix.",
        facts=tuple(saving_in_words(presets[-1], card, 8192, 90, link) for link in links),
    )


def saving_in_words(name: str, card: str, n_tokens: int, share: int, link: str) -> str:
    """One setting of `prefix_saving` as a line of numbers."""
    shape, n_cached = ModelShape.of(preset(name)), n_tokens * share // 100
    whole, rest, fetch = saved_ttft(shape, card, n_tokens, n_cached, 1e9 * LINKS[link])
    return (
        f"{name} on {card}, {n_cached:,} of {n_tokens:,} tokens cached in {link}: {1e3 * whole:.4g} ms whole,"
        f" {1e3 * (rest + fetch):.4g} ms with the hit"
    )
