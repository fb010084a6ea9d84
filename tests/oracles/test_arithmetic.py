"""Parameter counts and sliding layers of the shipped configs against transformers' own models, built without memory."""

import json

import pytest
import torch
from transformers import AutoConfig, AutoModelForCausalLM

from gptlite.arithmetic import FACTS, ModelShape, n_params


@pytest.mark.parametrize("path", sorted(FACTS.glob("*.json")), ids=lambda path: path.stem)
def test_transformers_counts_the_same_parameters(path):
    facts = json.loads(path.read_text())
    options = dict(facts["config"])
    config = AutoConfig.for_model(options.pop("model_type"), **options)
    with torch.device("meta"):
        model = AutoModelForCausalLM.from_config(config)
    shape = ModelShape.of(facts["config"])
    assert n_params(shape) == sum(parameter.numel() for parameter in model.parameters())
    layer_types = getattr(config, "layer_types", None)
    if layer_types:
        assert shape.n_sliding == layer_types.count("sliding_attention")
    assert facts["name"] and facts["source"].startswith("config.json of ")
