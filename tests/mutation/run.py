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
    ("model.py", "self.mask(segment, segment.positions)", "self.mask(segment, segment.positions.sort().values)", "model"),
    ("model.py", "segment.positions, segment.positions, mask)", "segment.positions + 1, segment.positions, mask)", "flash"),
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
    ("sampling.py", "(logits - highest[:, None]) / tau", "logits / tau", "sampling"),
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
    ("cache/dense.py", "row[:, real]", "row", "cache_contract model"),
    ("cache/dense.py", "max(widths) + chunk - 1", "max(widths)", "cache_contract generate"),
    ("cache/dense.py", "self.k_pos[self._lines[sequence]] = -1", "pass", "cache_contract generate"),
    ("cache/dense.py", "lines[self._lines[sequence]] = 0", "pass", "cache_contract"),
    ("cache/dense.py", "[-self.max_tokens :]", "", "generate"),
    ("cache/contract.py", "row.dim() != (2 if whole else 1) or row.is_floating_point()", "False", "cache_contract"),
    ("cache/tracked.py", "bool((k_pos < 0).any())", "False", "cache_contract"),
    ("generate.py", "held > cache.longest:", "False:", "generate"),
    ("cache/blocks.py", "            if not self.references[block]:\n                if", "            if True:\n                if", "paged"),
    ("cache/blocks.py", "for block in reversed(blocks):", "for block in blocks:", "paged"),
    ("cache/blocks.py", "            self._idle.pop(block, None)\n            self.references", "            self.references", "paged"),
    ("cache/blocks.py", "                self.forget(block)\n", "", "paged"),
    ("cache/blocks.py", "return self.index.find(key, parent, tokens) is not None", "return True", "paged"),
    ("cache/tables.py", "if self.pool.references[last] > 1:", "if self.pool.references[last] > 2:", "paged"),
    ("cache/tables.py", "                self.pool.forget(last)\n", "                pass\n", "paged"),
    ("cache/tables.py", "missing += left > 1", "missing += 0", "paged"),
    ("cache/tables.py", "sharers[table[-1]] -= 1", "pass", "paged"),
    ("cache/tables.py", "key in self._real and self._stored and row.written == row.before", "key in self._real and self._stored", "paged"),
    ("cache/tables.py", "key in self._real and self._stored and row.written == row.before", "key in self._real", "paged"),
    ("cache/tables.py", "if positions[begin : begin + size] != list(range(begin, begin + size)):", "if False:", "paged"),
    ("cache/tables.py", "n = max(0, min(len(blocks) * self.block_size, len(tokens) - 1))", "n = len(blocks) * self.block_size", "paged"),
    ("cache/tables.py", "        self.pool.share(row.table)\n", "", "paged"),
    ("cache/paged.py", "k_pos = self.k_pos[table].flatten(1).masked_fill(~inside, -1)", "k_pos = self.k_pos[table].flatten(1)", "paged"),
    ("cache/paged.py", "torch.full(positions.shape, spare * self.block_size)", "torch.full(positions.shape, 0)", "paged"),
    ("cache/paged.py", "for store in (*self.k, *self.v, self.k_pos):\n                store[new] = store[old]", "for store in (*self.k, self.k_pos):\n                store[new] = store[old]", "paged"),
    ("cache/paged.py", "        self.pool.release(row.table[self.blocks_for(n) :])\n", "", "paged"),
    ("cache/paged.py", "                store.index_fill_(0, rows, 0)\n", "                pass\n", "paged"),
    ("cache/splits.py", "[found[0] if found else spare]", "[spare]", "paged"),
    ("cache/splits.py", "if len(table) > page or not page]", "if len(table) > page + 1 or not page]", "paged"),
    ("cache/splits.py", "lse = lse.masked_fill(sight.blind, float(\"-inf\"))", "pass", "paged"),
    ("cache/splits.py", "elif any_key.any() or split.begin == 0:", "else:", "paged"),
    ("serving/beam.py", "            taken.add(parent)\n", "            pass\n", "beam"),
    ("serving/beam.py", "        if i not in parents:\n", "        if False:\n", "beam"),
    ("serving/beam.py", "(not beams or done[-1].score >= beams[0].score)", "True", "beam"),
    ("serving/beam.py", "dtype=wide, device=logits.device)", "device=logits.device)", "beam"),
    ("serving/waste.py", "reserved = sum(min(room[key], job.total - held[key]) for key, job in running)", "reserved = sum(room[key] for key, _ in running)", "waste"),
    ("serving/waste.py", "scattered = len(running) < batch and free >= size(queue[0])", "scattered = free >= size(queue[0])", "waste"),
    ("cache/prefix.py", "if entry is None or entry[0] != parent:", "if entry is None:", "prefix"),
    ("cache/prefix.py", "return entry[2] if entry[1] == (tokens if isinstance(tokens, bytes) else token_bytes(tokens)) else None", "return entry[2]", "prefix"),
    ("cache/prefix.py", "return b\"root:\" + salt.encode()", "return b\"root:\"", "prefix"),
    ("cache/prefix.py", "        parent = key\n", "        pass\n", "prefix"),
    ("cache/block_store.py", "for block in reversed(hit.held):", "for block in hit.held:", "prefix"),
    ("cache/block_store.py", "key, oldest = self._idle.popitem(last=False)", "key, oldest = self._idle.popitem()", "prefix"),
    ("cache/block_store.py", "            self._hold(found)\n            hit.held.append(found)\n        self.release(hit)", "        self.release(hit)", "prefix"),
    ("cache/block_store.py", "part[:, rows].clone()", "part[:, rows]", "prefix"),
    ("cache/radix.py", "upper.locks, upper.used = node.locks, node.used", "upper.used = node.used", "prefix"),
    ("cache/radix.py", "if not node.children and not node.locks]", "if not node.children]", "prefix"),
    ("cache/radix.py", "if not node.children and not node.locks]", "if not node.locks]", "prefix"),
    ("cache/radix.py", "(parent.used, parent.serial, parent))", "(0, 0, parent))", "prefix"),
    ("cache/radix.py", "leaf.used = self._clock", "leaf.used = 0", "prefix"),
    ("cache/radix.py", "        check_state(state, len(new))\n", "", "prefix"),
    ("cache/prefix.py", "values.dtype.kind not in \"iu\"", "False", "prefix"),
    ("cache/reuse.py", "n = min(hit.n_tokens, len(tokens) - 1)", "n = hit.n_tokens", "reuse"),
    ("cache/reuse.py", "if len(text) == before[key]:", "if True:", "reuse"),
    ("cache/reuse.py", "self._texts[key] = text[: begins[key]] + [text[place[i]] for i in self._real[key]]", "pass", "reuse"),
    ("cache/reuse.py", "self._salts[new] = self._salts.get(sequence, \"\")", "pass", "reuse"),
    ("cache/reuse.py", "n = next((i for i, p in enumerate(positions[: len(text)]) if i != p), len(text))", "n = len(text)", "reuse"),
    ("cache/offload.py", "if not isinstance(header, dict) or header.get(\"sha256\") != _checksum(header, tensors):", "if False:", "offload"),
    ("cache/offload.py", "if header.get(\"model\") != self.identity:", "if False:", "offload"),
    ("cache/offload.py", "if (block.parent, block.tokens) != (parent, tokens):", "if False:", "offload"),
    ("arithmetic_cache.py", "return n * (n + 1) * (n + 2) // 6", "return n * (n + 1) * (n + 1) // 6", "arithmetic_cache"),
    ("arithmetic_cache.py", "if cached and n_tokens > n_prompt else", "if cached else", "arithmetic_cache"),
    ("arithmetic_cache.py", "(max_tokens + 1) *", "max_tokens *", "arithmetic_cache"),
    ("arithmetic_cache.py", "- (n_prompt - 1) * n_prompt)", "- n_prompt * (n_prompt + 1))", "arithmetic_cache"),
    ("arithmetic_cache.py", "(layers - shape.n_sliding * shape.window)", "layers", "arithmetic_cache"),
    ("writes.py", '("cat", "stack", "constant_pad_nd")', '("cat",)', "writes"),
    ("writes.py", "args[2].nbytes", "result.nbytes", "writes"),
    ("writes.py", "isinstance(value, Tensor) and value.is_floating_point()", "isinstance(value, Tensor)", "writes"),
    ("sweeps/kv_cache.py", ".unflatten(0, (B, n))[:, -1])", ".unflatten(0, (B, n))[:, 0])", "sweeps_kv_cache"),
    ("sweeps/kv_cache.py", "filled_cache(model, batch, n - n_steps, n)", "filled_cache(model, batch, n - n_steps - 1, n)", "sweeps_kv_cache"),
    ("sweeps/kv_cache.py", 'grown(model, cache) if kind == "dynamic" else cache', "cache", "sweeps_kv_cache"),
    ("semantic/exact.py", "seed if params.temperature else None", "seed", "semantic_cache"),
    ("semantic/exact.py", "scope, n_new]", "scope]", "semantic_cache"),
    ("semantic/entries.py", "if key in self._held and self._held[key][0] == born:", "if key in self._held:", "semantic_cache"),
    ("semantic/entries.py", "insort(self._born, (born, key), key=lambda pair: pair[0])", "self._born.append((born, key))", "semantic_cache"),
    ("semantic/cache.py", "if similarity < self.threshold:", "if False:", "semantic_cache"),
    ("semantic/cache.py", "index = self._indexes.get(scope)\n", "index = next(iter(self._indexes.values()), None)\n", "semantic_cache"),
    ("semantic/cache.py", "if self._entries.get(key) is entry:", "if True:", "semantic_cache"),
    ("semantic/cache.py", "            index.remove(key)\n", "            pass\n", "semantic_cache"),
    ("semantic/cache.py", "if not self._entries.is_old(row[\"born\"]):", "if True:", "semantic_cache"),
    ("semantic/index.py", "            self._passed_over = None\n", "            pass\n", "semantic_index"),
    ("semantic/index.py", "if len(self._dead) > len(self._vectors):", "if False:", "semantic_index"),
    ("semantic/check.py", "if numbers[0] != numbers[1]:", "if False:", "semantic_check"),
    ("semantic/check.py", "if (negated[0] is None) != (negated[1] is None):", "if False:", "semantic_check"),
    ("semantic/evaluate.py", "if value >= threshold and", "if value > threshold and", "semantic_check"),
    ("variants/flash.py", "shrink = (m - safe).exp()", "shrink = (m - m).exp()", "flash"),
    ("variants/flash.py", "shrink = (m - safe).exp()", "shrink = (m - m_new).exp()", "flash"),
    ("variants/flash.py", "l.masked_fill(l == 0, 1.0)[..., None]", "l[..., None]", "flash"),
    ("variants/flash.py", "- grad_lse.masked_fill(empty, 0.0)", "", "flash"),
    ("variants/flash.py", "- shared[..., rows, None])", ")", "flash"),
    ("variants/flash.py", "(ds.mT @ q_tile).sum(2, keepdim=True)", "(ds.mT @ q_tile)[:, :, :1]", "flash"),
    ("variants/flash.py", "if kind != HIDDEN:", "if True:", "flash"),
    ("variants/flash.py", "self.kinds[i][j] == EDGE", "self.kinds[i][j] == WHOLE", "flash"),
    ("variants/flash.py", "scores.masked_fill(~self.mask[..., rows, columns], -INFINITY)", "scores", "flash"),
    ("variants/flash.py", "return segment.mask  #", "return super().mask(segment, k_pos)  #", "flash"),
    ("variants/mla.py", "mixed = attend(q_latent, c, c, mask, self.scale)", "mixed = attend(q_latent, c, c, mask)", "variants_mla"),
    ("variants/mla.py", "q.shape[2] == 1 if self.absorb is None", "q.shape[2] == 2 if self.absorb is None", "variants_mla"),
    ("variants/mla.py", "value_bias = value_bias + (stacked", "value_bias = value_bias - (stacked", "variants_mla"),
    ("variants/mla.py", ".repeat_interleave(H // G, dim=1)", ".repeat(1, H // G, 1, 1)", "variants_mla"),
    ("variants/mla.py", "@ constant + mha.out_proj.bias", "@ constant * 0 + mha.out_proj.bias", "variants_mla"),
    ("variants/low_rank.py", "values.clamp(min=floor).sqrt()", "values.clamp(min=floor)", "variants_mla"),
    ("variants/low_rank.py", " - mean.outer(mean)", "", "variants_mla"),
    ("variants/grouped.py", "heads.mean(1)", "heads.sum(1)", "variants_grouped"),
    ("variants/grouped.py", "queries[of_group] = heads.mT @ queries[of_group]", "pass", "variants_grouped"),
    ("variants/grouped.py", "target.bias[g * D : (g + 1) * D] = 0", "pass", "variants_grouped"),
    ("variants/swap.py", "new.window, new.sinks = old.window, old.sinks", "pass", "variants_grouped"),
    ("variants/stored.py", 'if hashlib.sha256(found.read_bytes()).hexdigest() != header["base_sha256"]:', "if False:", "variants_uptrain"),
    ("variants/uptrain.py", 'parts == "all" or', "True or", "variants_uptrain"),
    ("attention.py", "mask = mask.unflatten(1, (G, H // G)).flatten(2, 3)", "mask = mask[:, :G]", "attention"),
    ("variants/swap.py", "new._modules = dict(mha._modules)", "pass", None),  # the same until a variant adds a module
    ("variants/swap.py", "if type(mha).project is not kind.project:", "if False:", "flash"),
    ("variants/tiles.py", "visible(q_pos[:, :0], k_pos[..., :0], window, sinks)", "pass", "flash"),
    ("variants/flash.py", "if q_pos is None and window is not None:", "if False:", "flash"),
    ("variants/flash.py", "if x is not None and x.shape[-1] != n:", "if False:", "flash"),
    ("variants/tiles.py", "| (k_low > q_high)", "| (k_low >= q_high)", "flash"),
    ("variants/tiles.py", "(k_high <= q_low)", "(k_high <= q_high)", "flash"),
    ("variants/tiles.py", "(q_low - k_high >= window) & (k_low >= sinks)", "(q_low - k_high >= window)", "flash"),
    ("variants/tiles.py", "hidden.all(-1)", "hidden.any(-1)", "flash"),
    ("variants/tiles.py", "(q_any >= 0) & (k_any >= 0)", "(q_any >= 0)", "flash"),
    ("variants/split_kv.py", "split_attend(q, k, v, even_splits(k.shape[2], self.n_splits), mask, self.scale)", "super().mix(q, k, v, q_pos, k_pos, mask)", "split_kv"),
    ("variants/split_kv.py", "partial_states(q.to(wide), k, v", "partial_states(q, k, v", "split_kv"),
    ("variants/split_kv.py", "begin += size", "begin += 1", "split_kv"),
    ("variants/traffic.py", "if self.held > self.sram:", "if False:", "traffic"),
    ("variants/traffic.py", "2 * d_head + tile_k + 2)", "2 * d_head + tile_k)", "traffic"),
    ("variants/traffic.py", "streamed.loads + 2 * n * n", "streamed.loads + n * n", "traffic"),
    ("variants/backends.py", "with sdpa_kernel(BACKENDS[backend]):", "if True:", "backends"),
    ("variants/backends.py", "inside = text.lower().startswith(heading)", "inside = True", "backends"),
    ("variants/backends.py", "(k >= 0) & (k <= q)", "(k <= q)", "backends"),
    ("serving/routing.py", "max(loads) > self.ratio * min(loads)", "True", "routing"),
    ("serving/routing.py", "for block in reversed(chain):", "for block in chain:", "routing"),
    ("serving/routing.py", "return late + sorted(rest,", "return sorted(requests,", "routing"),
    ("serving/routing.py", "sum(key > sequence.key for key in begun)", "0", "routing"),
    ("serving/transfer.py", "n_body > self.body_limit", "False", "transfer"),
    ("serving/transfer.py", 'if not torch.equal(state["k_pos"], torch.arange(n_tokens)):', "if False:", "transfer"),
    ("serving/simulator.py", "job.n_prompt - 1)", "job.n_prompt)", "simulator"),
    ("serving/simulator.py", "self.kept.add(job.chain)", "pass", "simulator"),
    ("serving/simulator.py", "yield self.env.timeout(0)  # who arrives just now waits already", "pass", "simulator"),
    ("serving/jobs.py", "o.ttft <= ttft", "o.ttft < ttft", "simulator"),
    ("serving/step_time.py", "sum(new * past + ", "sum(", "simulator"),
    ("serving/sequence.py", "seed = self.request.seed + self.key[1]", "seed = self.request.seed", "serving_scheduler"),
    ("serving/sequence.py", "return self._uniforms[self.n_generated]", "return self._uniforms[0]", "serving_scheduler"),
    ("serving/sequence.py", "safe = len(self.text) - held", "safe = len(self.text)", "serving_scheduler"),
    ("serving/sequence.py", "max(0, len(self.text) - max(map(len, stops)) + 1)", "len(self.text)", "serving_scheduler"),
    ("serving/sequence.py", "safe = min(at for at, _ in found)", "safe = max(at for at, _ in found)", "serving_engine"),
    ("serving/scheduler.py", "insort(self.waiting, sequence, key=_age)\n\n    def schedule", "self.waiting.append(sequence)\n\n    def schedule", "serving_scheduler"),
    ("serving/scheduler.py", "sequence = self.running.pop()", "sequence = self.running.pop(0)", "serving_scheduler"),
    ("serving/scheduler.py", "return self.waiting[0]", "return self.waiting[-1]", "serving_scheduler"),
    ("serving/scheduler.py", "left - (len(running) - len(reading))", "left", "serving_scheduler"),
    ("serving/scheduler.py", "left = None if left is None else left - n\n", "left = left\n", "serving_scheduler"),
    ("serving/scheduler.py", "whole = self._piece(sequence, None)", "whole = n", "serving_scheduler serving_engine"),
    ("serving/scheduler.py", "end == len(sequence.tokens))", "True)", "serving_scheduler"),
    ("serving/scheduler.py", "if self.preemption == \"swap\" and sequence.n_computed:", "if False:", "serving_scheduler"),
    ("serving/scheduler.py", "sequence.n_computed = self.cache.begin(sequence.key, text, sequence.request.salt)", "pass", "serving_scheduler"),
    ("serving/scheduler.py", "            self.add(first)\n", "            pass\n", "serving_scheduler"),
    ("serving/scheduler.py", "new.n_computed = sequence.n_computed\n", "new.n_computed = 0\n", "serving_scheduler"),
    ("serving/engine.py", "self._drop()\n        plan", "plan", "serving_scheduler"),
    ("serving/engine.py", "last.append(begin + n - 1)", "last.append(begin + len(row.tokens) - 1)", "serving_static"),
    ("serving/engine.py", "needed = len(prompt) + request.n_new - 1", "needed = len(prompt) + request.n_new", "serving_engine"),
    ("serving/engine.py", "            self.cancel(sequence)\n", "            pass\n", "serving_scheduler"),
    ("serving/engine.py", "dtype=torch.float64)\n            chosen", "dtype=torch.float32)\n            chosen", "serving_engine"),
    ("serving/static.py", "[-1] * holes", "[0] * holes", "serving_static"),
    ("serving/static.py", "sequence.n_prompt + sequence.request.n_new - 1", "sequence.n_prompt", "serving_static"),
    ("serving/static.py", "elif all(other.finished for other in self.running):", "else:", "serving_static"),
    ("serving/metrics.py", "(n - 1) if n > 1", "n if n > 1", "serving_metrics"),
    ("serving/metrics.py", "/ (len(steps) * max_batch)", "/ len(steps)", "serving_metrics"),
    ("serving/arrivals.py", "self.time = max(self.time, when)", "self.time = when", "serving_metrics"),
    ("sweeps/batching.py", "\"idle\" if not real else", "", "labs_batching"),
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
