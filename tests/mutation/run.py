# ruff: noqa: E501 - a mutation a line
"""Breaks the package on purpose, one line at a time, and sees that a test notices.

    python tests/mutation/run.py [WORD]     only the mutations whose file or line holds WORD

A mutation is a file of the package, a piece of it that occurs once, what it becomes, and the tests that must fail.
"""

import multiprocessing
import os
import shutil
import sys
import tempfile
from pathlib import Path

import hypothesis  # noqa: F401 - what is imported here, no fork imports again
import pytest
import safetensors.torch  # noqa: F401
import torch
import torch._dynamo  # what optimizers import

ROOT = Path(__file__).parents[2]

MUTATIONS = [
    ("config.py", "if self.n_heads % self.n_kv_heads:", "if False:", "config"),
    ("config.py", '"d_ff": None, **follow', "**follow", "config"),
    ("config.py", "isinstance(value, bool) or not isinstance(value, int) or", "not isinstance(value, int) or", "config"),
    ("attention.py", "(k >= 0) & (k <= q)", "(k <= q)", "attention"),
    ("attention.py", "(k >= 0) & (k <= q)", "(k >= 0) & (k < q + 2)", "attention"),
    ("attention.py", "q - k < window", "q - k <= window", "attention"),
    ("attention.py", "k < sinks", "k <= sinks", "attention"),
    ("attention.py", "return out if mask is None else out.masked_fill(~mask.any(-1, keepdim=True), 0.0)", "return out.nan_to_num(1.0)", "attention"),
    ("attention.py", ".mT * scale).flatten(1, 2)", ".mT).flatten(1, 2)", "attention"),
    ("attention.py", "if q.requires_grad and q.dtype == torch.bfloat16 and q.device.type == \"cpu\":", "if True:", "attention"),
    ("attention.py", "never = torch.finfo(scores.dtype).min / 2", "never = -float(\"inf\")", "attention"),
    ("attention.py", "wide = torch.promote_types(q.dtype, torch.float32)", "wide = q.dtype", "attention"),
    ("attention.py", "mask.repeat_interleave(H // mask.shape[1], dim=1)", "mask.repeat(1, H // mask.shape[1], 1, 1)", "attention"),
    ("attention.py", "lse = torch.logaddexp(lse1, lse2)", "lse = torch.maximum(lse1, lse2)", "attention"),
    ("attention.py", "(lse2 - safe).exp()[..., None]", "(lse2 - lse).exp()[..., None]", "attention"),
    ("model.py", "self.window, self.sinks)", "None, 0)", "model"),
    ("model.py", "segment.positions, segment.positions, segment.mask)", "segment.positions.sort().values, segment.positions, segment.mask)", "model"),
    ("model.py", "positions.clamp(min=0)", "positions.clamp(min=1)", "model"),
    ("model.py", "out[segment.rows] = part", "out[: len(part)] = part", "model"),
    ("model.py", "x = x + self.mha(self.ln1(x)", "x = self.mha(self.ln1(x)", "model"),
    ("model.py", "self.ffwd(self.ln2(x))", "self.ffwd(self.ln1(x))", "model"),
    ("model.py", "positions.max() >= self.context_length", "positions.max() > self.context_length", "model"),
    ("model.py", "(2 * config.n_layers) ** 0.5", "config.n_layers ** 0.5", "model"),
    ("model.py", "return n_kv_heads, self.d_head, self.value_proj.out_features // n_kv_heads", "return n_kv_heads, self.d_head, self.d_head", "model"),
    ("sampling.py", "before < p", "before <= p", "sampling"),
    ("sampling.py", "before = ordered.cumsum(-1) - ordered", "before = ordered.cumsum(-1)", "sampling"),
    ("sampling.py", "torch.where(p < 1, nucleus / nucleus.sum(-1, keepdim=True), probs)", "nucleus / nucleus.sum(-1, keepdim=True)", "sampling"),
    ("sampling.py", "descending=True, stable=True", "descending=True", None),  # the same where sort happens to be stable
    ("sampling.py", "scaled < least", "scaled <= least", "sampling"),
    ("sampling.py", "(logits - logits.amax(-1, keepdim=True)) / tau", "logits / tau", "sampling"),
    ("sampling.py", "return torch.where(tau == 0,", "return torch.where(tau < 0.3,", "sampling"),
    ("sampling.py", "[:, None], right=True)", "[:, None], right=False)", "sampling"),
    ("sampling.py", "return torch.minimum(tokens, last)", "return tokens.clamp(max=probs.shape[-1] - 1)", "sampling"),
    ("sampling.py", "cdf = probs.double().cumsum(-1)", "cdf = probs.half().cumsum(-1).double()", "sampling"),
    ("generate.py", "manual_seed(seed + b)", "manual_seed(seed)", "generate"),
    ("generate.py", "if step == n_new - 1:", "if step == n_new:", "generate"),
    ("generate.py", "needed = tokens.shape[1] + max(n_new - 1, 0)", "needed = tokens.shape[1] + n_new", "generate"),
    ("generate.py", "elif n <= window:", "elif n < window:", "generate"),
    ("generate.py", "keep=window - 1)", "keep=window - 2)", "generate"),
    ("generate.py", "position=window - 1)", "position=window - 2)", "generate"),
    ("generate.py", "t[:, -keep:]", "t[:, :keep]", "generate"),
    ("generate.py", "any(cache.next_position(b) for b in range(len(tokens)))", "False", "generate"),
    ("data.py", "return windows[:, :-1], windows[:, 1:]", "return windows[:, :-1], windows[:, :-1]", "data"),
    ("data.py", "torch.randint(len(tokens) - context,", "torch.randint(len(tokens) - context - 1,", "data"),
    ("data.py", "manual_seed(seed * 1_000_003 + step)", "manual_seed(seed * 1_000_003)", "data"),
    ("data.py", "if found != sha256:", "if False:", "data"),
    ("data.py", "if not path.exists():", "if True:", "data"),
    ("data.py", '.replace("sha$l", "shall")', "", "data"),
    ("data.py", '"--no-deps", ', "", "data"),
    ("data.py", "cut = len(text) * 9 // 10", "cut = len(text) * 8 // 10", "data"),
    ("checkpoint.py", "weights_only=True", "weights_only=False", "checkpoint"),
    ("checkpoint.py", "os.fsync(file.fileno())", "pass", "checkpoint"),
    ("checkpoint.py", 'part = path.with_name(f".{path.name}.part")', "part = path", "checkpoint"),
    ("checkpoint.py", "part.unlink()", "pass", "checkpoint"),
    ("checkpoint.py", ", copy=True)", ")", "checkpoint"),
    ("checkpoint.py", "return model.eval(), tokenizer", "return model, tokenizer", "checkpoint"),
    ("checkpoint.py", 'not name.endswith((".mask", ".tril"))', "True", "checkpoint"),
    ("train.py", "torch.manual_seed(settings.seed * 1_000_003 + step)", "pass", "train"),
    ("train.py", "optimizer.load_state_dict(", "dict(", "train"),
    ("train.py", "group[\"peak_lr\"] * settings.rate(step)", "group[\"peak_lr\"] * settings.rate(step + 1)", "train"),
    ("train.py", "recent = []\n", "pass\n", "train"),
    ("train.py", "if step > limit:", "if step > limit + 1:", "train"),
    ("train.py", "limit = min(", "limit = max(", "train"),
    ("train.py", 'if name != "steps" and old.get(name) != value:', "if False:", "train"),
    ("train.py", '("config", "corpus", "teacher")', '("config", "corpus")', "train"),
    ("train.py", 'reduction="batchmean"', 'reduction="mean"', "train"),
    ("train.py", "teacher.eval()", "pass", "train"),
    ("train.py", "stored, _ = load_checkpoint(out, device)", "stored = model", "train"),
    ("train.py", "optimizer.zero_grad()", "pass", "train"),
    ("train.py", "rise = min(1.0, (step + 1) / (self.warmup + 1))", "rise = 1.0", "train"),
    ("progress.py", "max(done - self.begun, 1)", "max(done, 1)", "progress"),
    ("progress.py", "and done < self.total:", ":", "progress"),
    ("cache/tracked.py", "[held[begin + i] for i in path]", "[held[i] for i in path]", "cache_contract"),
    ("cache/tracked.py", "tree_mask(tree)[:, self._real[key]]", "torch.ones(S, len(slots[b]), dtype=torch.bool)", "cache_contract"),
    ("cache/dense.py", "self.k_pos[line, slots] = -1", "pass", "cache_contract"),
    ("cache/dense.py", "torch.full(pos.shape, self.max_tokens)", "torch.full(pos.shape, 0)", "cache_contract model"),
    ("cache/dense.py", "row[:, self._real[key]]", "row", "cache_contract model"),
    ("cache/dense.py", "max(widths) + chunk - 1", "max(widths)", "cache_contract generate"),
    ("cache/dense.py", "self.k_pos[self._lines[sequence]] = -1", "pass", "cache_contract generate"),
]  # fmt: skip


def survives(file: str, old: str, new: str, tests: str) -> bool:
    """Whether the tests pass on a copy of the package with that change."""
    with tempfile.TemporaryDirectory() as folder:
        shutil.copytree(ROOT / "src" / "gptlite", Path(folder) / "gptlite")
        path = Path(folder) / "gptlite" / file
        text = path.read_text(encoding="utf-8")
        if text.count(old) != 1:
            raise SystemExit(f"{file} holds {old!r} {text.count(old)} times, a mutation needs it once")
        path.write_text(text.replace(old, new), encoding="utf-8")
        files = [str(ROOT / "tests" / "unit" / f"test_{name}.py") for name in tests.split()]
        # a fork of this process, which has imported torch and nothing of the package
        child = multiprocessing.get_context("fork").Process(target=run_tests, args=(folder, files))
        child.start()
        child.join(300)
        child.kill()  # endless is noticed too
        child.join()
        return child.exitcode == 0


def run_tests(folder: str, files: list[str]) -> None:
    os.environ |= {"PYTHONPATH": folder, "PYTEST_DISABLE_PLUGIN_AUTOLOAD": "1"}
    sys.path.insert(0, folder)
    os.chdir(ROOT)
    nowhere = os.open(os.devnull, os.O_WRONLY)
    for stream in (1, 2):
        os.dup2(nowhere, stream)
    sys.exit(int(pytest.main(["-x", "-q", "-p", "no:cacheprovider", *files])))


def main() -> None:
    word = sys.argv[1] if len(sys.argv) > 1 else ""
    chosen = [m for m in MUTATIONS if m[3] and (word in m[0] or word in m[1])]
    torch.set_num_threads(1)
    for file, old, tests in {tests: (file, old, tests) for file, old, _, tests in chosen}.values():
        if not survives(file, old, old, tests):
            raise SystemExit(f"the tests of {tests} fail on the package as it is")
    survivors = []
    for i, (file, old, new, tests) in enumerate(chosen, start=1):
        alive = survives(file, old, new, tests)
        print(f"{i}/{len(chosen)}  {'SURVIVES' if alive else 'noticed'}  {file}: {old!r} -> {new!r}", flush=True)
        survivors += [old] if alive else []
    sys.exit(f"{len(survivors)} of {len(chosen)} mutations survive" if survivors else 0)


if __name__ == "__main__":
    main()
