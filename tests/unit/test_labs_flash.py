"""The lab on FlashAttention measures what its inputs ask for, and says what did not run."""

import subprocess
import sys

import pytest

from gptlite import hardware
from gptlite.notebook.checks_flash import check_computed_tiles, check_merge_parts, check_sdpa_arguments
from gptlite.notebook.labs_flash import AttentionLab


def lab(**settings):
    one = AttentionLab("cpu")
    for name, value in {"longest": 256, "n_heads": 1, "d_head": 16, "repeats": 1, **settings}.items():
        one.inputs[name].value = value
    return one


@pytest.mark.parametrize(("shown", "axis"), [("time", "Time (ms)"), ("peak memory", "Peak memory (MB)")])
def test_it_measures_every_context_by_every_back_end(shown, axis):
    one = lab(shown=shown).run()
    assert one.state == "done", one.message
    assert [(point.at["context"], point.at["backend"]) for point in one.recording.points] == [
        (n, backend) for n in (128, 256) for backend in ("math", "flash", "tiled")
    ]
    html = one._repr_html_()
    assert f"{axis} against Context (tokens)" in html
    assert all(text in html for text in ("efficient", "cudnn", "PyTorch has no such kernel for tensors on cpu"))
    rows = one.rows(one.recording)
    assert rows[1]["Kernel, or why not"] == "_scaled_dot_product_flash_attention_for_cpu"
    assert rows[1]["Peak memory (MB)"] == pytest.approx(one.recording.points[1].peak_bytes / 1e6, rel=5e-3)
    assert rows[-1] == {
        "Back end": "cudnn",
        "Context (tokens)": "any",
        "Kernel, or why not": "PyTorch has no such kernel for tensors on cpu",
        "Median (ms)": "",
        "Peak memory (MB)": "",
    }


@pytest.mark.slow
def test_a_run_writes_nothing_to_stderr():
    """In a process of its own: the profiler is set up by the first use of a process, and a lab runs on a thread."""
    code = (
        "from gptlite.notebook.labs_flash import AttentionLab\n"
        "lab = AttentionLab('cpu')\n"
        "for name, value in {'longest': 128, 'n_heads': 1, 'd_head': 16, 'repeats': 1}.items():\n"
        "    lab.inputs[name].value = value\n"
        "print(lab.run().state)"
    )
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=True)
    assert (done.stdout, done.stderr) == ("done\n", "")


def test_a_matrix_that_does_not_fit_is_left_out_and_the_others_go_on(monkeypatch):
    matrix = 3 * 256 * 256 * 4
    monkeypatch.setattr(hardware, "free_bytes", lambda device: matrix)
    one = lab().run()
    assert one.state == "done", one.message
    left = [left["at"] for left in one.recording.left_out if "context" in left["at"]]
    assert left == [{"backend": "math", "context": 256}]
    assert one.recording.points[-1].at == {"backend": "tiled", "context": 256}


def test_too_little_memory_names_the_largest_context_that_fits(monkeypatch):
    one = lab(longest=1024)
    free = one.needed_bytes({**one.settings, "longest": 512})
    monkeypatch.setattr(hardware, "free_bytes", lambda device: free)
    one.run()
    assert one.state == "failed" and one.message.endswith("the largest Longest context (tokens) that fits is 512")


def without_a_maximum(outs, lses):
    import torch

    weights = torch.tensor(lses).double().exp()
    return (weights[:, None] * torch.stack(outs)).sum(0) / weights.sum()


def square(S, T, tile):
    t = -(-S // tile)
    return t * (t + 1) // 2


def aligned_to_the_top_left(S, T, tile):
    return sum(min(i + tile, S) and -(-min(i + tile, S) // tile) for i in range(0, S, tile))


def always_a_mask(S, T):
    import torch

    return {"attn_mask": torch.ones(S, T, dtype=torch.bool).tril(T - S)}


def mask_at_the_top_left(S, T):
    import torch

    if S in (1, T):
        return {"is_causal": S == T}
    return {"attn_mask": torch.ones(S, T, dtype=torch.bool).tril()}


@pytest.mark.parametrize(
    ("check", "wrong", "said"),
    [
        (check_merge_parts, without_a_maximum, "log-sum-exps of 1,000 and 1,000"),
        (check_merge_parts, lambda outs, lses: sum(outs) / len(outs), "weights of one to three"),
        (check_computed_tiles, square, "S = 1, T = 64"),
        (check_computed_tiles, aligned_to_the_top_left, "S = 1, T = 64"),
        (check_computed_tiles, lambda S, T, tile: -(-S // tile) * -(-T // tile), "S = 64, T = 64"),
        (check_sdpa_arguments, lambda S, T: {"is_causal": True}, "S = 1, T = 8 gives 'keys 1 to 1, without a mask'"),
        (check_sdpa_arguments, lambda S, T: {"is_causal": S == T}, "S = 3, T = 8 gives 'keys 1 to 8, 1 to 8, 1 to 8"),
        (check_sdpa_arguments, lambda S, T: {}, "S = 5, T = 5"),
        (check_sdpa_arguments, always_a_mask, "S = 5, T = 5"),
        (check_sdpa_arguments, mask_at_the_top_left, "S = 3, T = 8 gives 'keys 1 to 1, 1 to 2, 1 to 3, with a mask'"),
    ],
)
def test_wrong_answers_get_a_counterexample(capsys, check, wrong, said):
    check(wrong)
    out = capsys.readouterr().out
    assert out.startswith("not yet: ") and said in out
