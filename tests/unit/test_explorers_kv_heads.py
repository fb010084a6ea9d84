"""The charts of the chapter on fewer KV heads draw what the recordings and the arithmetic say."""

import pytest
from drawn import draw, marks, words

from gptlite.arithmetic import kv_bytes_per_token, shipped_models
from gptlite.notebook.explorers_kv_heads import best_runs, bytes_against_loss, cache_share, runs, step_times
from gptlite.record import Point, Recording

MODELS = list(shipped_models())


def run(kind: str, size: int, start: str, before: float, after: float | None, recipe: str = "lr=0.001"):
    """One run of `gptlite record kv-uptraining`: its data and its point."""
    losses = {"original": 1.41, "converted": before, "after": before if after is None else after}
    data = {
        "conversion": {"kind": kind, "size": size, "start": start},
        "settings": None if after is None else {"lr": 0.001},
        "losses": losses,
        "recovered": None if after is None else 0.9,
        "tokens_seen": 0 if after is None else 4096,
        "loss_curve": [],
    }
    return data, Point({"conversion": f"{kind}-{size}-{start}", "recipe": recipe}, [1.0])


def recording(*rows) -> Recording:
    return Recording(
        "kv-uptraining", {}, points=[point for _, point in rows], data={"runs": [data for data, _ in rows]}
    )


ROWS = recording(
    run("grouped", 2, "mean", 4.05, 1.80),
    run("grouped", 2, "mean", 4.05, 1.75, "lr=0.003"),
    run("grouped", 2, "random", 5.30, None),
    run("latent", 128, "data", 1.413, 1.412),
    run("latent", 32, "weights", 1.95, 1.60),
)


def test_the_best_run_of_each_conversion_is_kept() -> None:
    assert len(runs([ROWS])) == 5
    best = best_runs([ROWS])
    assert [(row["kind"], row["size"], row["start"], row["after"]) for row in best] == [
        ("grouped", 2, "mean", 1.75),
        ("grouped", 2, "random", None),
        ("latent", 128, "data", 1.412),
        ("latent", 32, "weights", 1.60),
    ]
    assert [row["share"] for row in best] == [0.25, 0.25, 0.25, 1 / 16]  # of 2 * 8 * 32 values per token and layer


@pytest.mark.parametrize(
    ("stage", "start", "top", "diamonds", "circles", "hidden"),
    [(0, 0, 2.0, 2, 3, 2), (0, 0, 5.5, 4, 3, 0), (1, 0, 2.0, 2, 0, 2), (2, 0, 1.5, 0, 1, 2), (0, 1, 5.0, 1, 1, 0)],
)
def test_what_is_drawn_is_what_is_asked_for(stage, start, top, diamonds, circles, hidden) -> None:
    scene = draw(bytes_against_loss([ROWS]), stage=stage, start=start, top=top)
    assert len(marks(scene, "symbol", "layer_3")) == diamonds
    assert len(marks(scene, "symbol", "layer_4")) == circles
    said = [text for text in words(scene) if "above the top" in text]
    assert said == ([f"{hidden} above the top of the axis"] if hidden else [])


def test_the_menu_offers_only_weights_that_were_recorded() -> None:
    said = repr(bytes_against_loss([ROWS]))
    assert "New weights: one of all, mean of the heads, random, factors of the weights, factors for the data;" in said


def test_a_point_lies_where_its_loss_and_its_share_are() -> None:
    scene = draw(bytes_against_loss([ROWS]), stage=2, start=0, top=2.0)
    places = sorted((item["x"], item["y"]) for item in marks(scene, "symbol", "layer_4"))
    # y runs from 1.4 at the bottom to 2.0 over 360 px; x from 1/64 to 1.1 in logarithms over 1000 px
    heights = sorted(360 * (1 - (loss - 1.4) / 0.6) for loss in (1.75, 1.412, 1.60))
    assert sorted(y for _, y in places) == pytest.approx(heights, abs=0.1)
    assert places[0][0] < places[1][0] == places[2][0]


@pytest.mark.parametrize("name", ["Llama 3.1 8B", "DeepSeek-V2", "Llama 2 7B"])
def test_a_known_model_is_told_by_its_own_arithmetic(name: str) -> None:
    shape = shipped_models()[name]
    said = words(draw(bytes_against_loss([ROWS]), known=MODELS.index(name), context=4096, batch=10))
    token = kv_bytes_per_token(shape)
    share = cache_share(shape)
    size, whole = token * 4096 * 10 / 1e9, token / share * 4096 * 10 / 1e9
    assert said[:5] == [
        f"{name}: {token / 1024:,.1f} KiB per token",
        f"{'all' if share == 1 else f'1/{1 / share:.3g}'} of the multi-head cache",
        "10 sequences of 4,096 tokens:",
        f"{size:,.1f} GB in 16 bits",
        f"{whole:,.1f} GB with multi-head attention",
    ]
    assert max(map(len, said)) <= 45  # longer lines would leave no room for the plot on a phone


def test_shares_by_hand() -> None:
    models = shipped_models()
    assert cache_share(models["Llama 3.1 8B"]) == 8 / 32
    assert cache_share(models["Llama 3.1 70B"]) == 8 / 64
    assert cache_share(models["Llama 2 7B"]) == 1
    assert cache_share(models["DeepSeek-V2"]) == (512 + 64) / (2 * 128 * 128)


def test_step_times_are_those_of_the_recording() -> None:
    points = [
        Point({"attention": kind, "size": size, "batch": B, "context": 64, "cache_bytes": n}, [t, 2 * t, 3 * t])
        for kind, size, n, t in (("grouped", 4, 4096, 0.01), ("grouped", 1, 1024, 0.005), ("latent", 8, 2048, 0.006))
        for B in (1, 2)
    ]
    one = Recording("kv-heads", {"preset": "nano", "dtype": "float32"}, {"name": "a machine"}, points=points)
    scene = draw(step_times([one]), load=0)
    assert set(words(scene)) == {"G = 4", "G = 1", "r = 8"}
    heights = [item["y"] for item in marks(scene, "symbol", "layer_1")]
    assert len(heights) == 3
    two = step_times([one, one])
    assert "one of batch 1, context 64: nano in float32 on a machine, batch 2, context 64: nano in" in repr(two)
    assert "now batch 2, context 64" in repr(two)
