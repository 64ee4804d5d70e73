"""The cell of a checkpoint: known by its weights, configured as the checkpoint is."""

import json
from pathlib import Path

import pytest
from hydra import compose, initialize_config_dir

from baselines.model_check import require_runnable
from sweeps import auto
from sweeps.config import Cell, cell_from
from sweeps.identity import digest, hashed, published
from tests.baselines.test_checkpoint import NORM, made, saved

pytestmark = pytest.mark.slow


def composed(folder: Path, *overrides: str) -> Cell:
    auto.register("cpu")
    given = ["model=checkpoint", f"model.checkpoint={folder}", "machine.device=cpu"]
    try:
        with initialize_config_dir(str(auto.CONF), version_base="1.3"):
            return cell_from(
                auto.resolve(compose("config", [*given, "shape.seq_len=32", *overrides]))
            )
    finally:
        auto.register()


def test_a_cell_is_known_by_its_weights_and_not_by_where_they_lie(tmp_path: Path):
    for number, (place, limit) in enumerate([("a", "1GB"), ("b", "20KB"), ("c", "1GB")]):
        model = made("llama")
        model.get_parameter(NORM).data[0] += number // 2
        model.save_pretrained(tmp_path / place / "mine", max_shard_size=limit)
    a, b, c = (composed(tmp_path / place / "mine") for place in "abc")
    assert a.model.name == "mine"
    assert a.hash == b.hash
    assert len({a.hash, c.hash, composed(tmp_path / "a" / "mine", "seed=1").hash}) == 3
    row = json.loads(json.dumps(published(a.config)))
    assert str(tmp_path) not in json.dumps(row)
    assert digest(hashed(row)) == a.hash == cell_from(row).hash


def test_a_setting_lies_over_the_checkpoint_s(tmp_path: Path):
    saved(tmp_path)
    cell = composed(
        tmp_path,
        "model.name=mine",
        "model.attn_implementation=eager",
        "+model.config.rope_parameters.rope_theta=77.0",
    )
    assert (cell.model.name, cell.model.attn_implementation) == ("mine", "eager")
    assert cell.model.config["rope_parameters"] == {"rope_type": "default", "rope_theta": 77.0}
    assert cell.model.config["hidden_size"] == 32
    with pytest.raises(ValueError, match=r"^model\.model_type: got 'llama', allowed qwen2"):
        composed(tmp_path, "+model.model_type=llama")
    with pytest.raises(ValueError, match=r"^model\.config\.hiden_size: got 3, allowed the keys"):
        require_runnable(composed(tmp_path, "+model.config.hiden_size=3").model)
