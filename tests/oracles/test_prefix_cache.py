"""A prefix hit against transformers, which reuses a prefix by its own cache: the same logits."""

import torch
from transformers import DynamicCache, OPTConfig, OPTForCausalLM

from gptlite.cache.block_store import BlockStore
from gptlite.cache.radix import RadixStore
from gptlite.cache.reuse import PrefixCache
from gptlite.config import GPTConfig
from gptlite.export import opt_config, opt_weights
from gptlite.generate import prefill
from gptlite.model import GPTlite


def test_a_hit_gives_the_logits_that_transformers_gives_after_its_own_prefix():
    torch.manual_seed(0)
    model = GPTlite(GPTConfig(29, 64, n_layers=3, d_model=32, n_heads=4, d_head=8)).eval().double()
    peer = OPTForCausalLM(OPTConfig(**opt_config(model))).eval().double()
    peer.load_state_dict(opt_weights(model), strict=True)
    prefix = torch.randint(29, (1, 40))
    prompts = [torch.cat([prefix, torch.randint(29, (1, 8))], dim=1) for _ in range(3)]
    for store, found in ((BlockStore(20, 8), [0, 40, 40]), (RadixStore(200), [0, 40, 40])):
        cache, cached = PrefixCache(model, 1, 64, store), []
        for prompt in prompts:
            cached.append(min(cache.begin(0, prompt[0]), 40))
            ours = prefill(model, prompt[:, cache.next_position(0) :], cache)
            cache.free(0)
            with torch.inference_mode():
                past = DynamicCache()
                peer(prefix, cache=past, use_cache=True)  # one shared prefix
                theirs = peer(prompt[:, 40:], cache=past, use_cache=True).logits[:, -1]
            torch.testing.assert_close(ours, theirs, rtol=0, atol=1e-10)
        assert cached == found
