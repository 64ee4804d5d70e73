"""The one rule for a model's decoder layers, which the engine and every baseline go by."""

from __future__ import annotations

import pytest
import torch
from transformers import AutoModelForCausalLM

from engine import RefusedError, find_layers, pinned_rounding
from sweeps.tiny import tiny_config

WHERE = {
    "qwen2": "model.layers",
    "opt": "model.decoder.layers",
    "moss_transcribe_diarize": "model.language_model.layers",  # though the layers that hear are more
    "modernbert-decoder": "model.layers",  # though it calls a part of its head the decoder
}


@pytest.mark.parametrize("model_type", WHERE)
def test_the_layers_are_those_that_decode_text(model_type):
    model = AutoModelForCausalLM.from_config(tiny_config(model_type))
    path, layers = find_layers(model)
    assert path == WHERE[model_type]
    assert layers == list(model.get_submodule(path))


def test_a_model_without_layers_is_refused_in_one_line():
    with pytest.raises(
        RefusedError, match=r"^model: Linear has no list of decoder layers; allowed [^\n]*$"
    ):
        find_layers(torch.nn.Linear(2, 2))


@pytest.mark.parametrize(
    ("num_bytes", "added"),
    [(0, 0), (1, 0), (2, 0), (3, 1), (4, 0), (5, 3), (1 << 40, 0), ((1 << 40) + 1, (1 << 40) - 1)],
)
def test_a_pinned_block_is_a_power_of_two(num_bytes, added):
    assert pinned_rounding(num_bytes) == added
