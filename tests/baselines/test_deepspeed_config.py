"""What DeepSpeed is told by every DeepSpeed system of conf/system: rows that were measured with it
mean nothing else.

Invariant: deepspeed_configs.json has the configuration on a GPU; a change of it needs a reason, and
another name.
"""

from __future__ import annotations

import dataclasses
import json
from pathlib import Path

import pytest

from baselines.deepspeed.options import DeepSpeedOptions
from baselines.registry import build
from tests.baselines.test_rivals import make_spec
from tests.baselines.test_systems import QWEN_14B
from tests.sweeps.test_config import GROUPS, composed

EXPECTED = json.loads((Path(__file__).parent / "deepspeed_configs.json").read_text())
PRESETS = [
    name
    for name in GROUPS["system"]
    if name.startswith(("zero", "superoffload", "zenflow"))
    and not name.endswith(("_compiled", "_kept"))
]


@pytest.mark.parametrize("preset", PRESETS)
def test_deepspeed_is_told_what_it_always_was(preset, tmp_path):
    cell = composed(f"system={preset}")
    path = {"nvme_path": str(tmp_path)} if preset == "zero_infinity" else {}
    spec = make_spec(QWEN_14B | {"num_hidden_layers": 4}, **{**cell.options, **path})
    system = build(cell.system, dataclasses.replace(spec, device_memory=30 * 10**9))
    assert isinstance(system.options, DeepSpeedOptions)
    config = json.loads(
        json.dumps(system.options.config(spec)).replace(json.dumps(str(tmp_path)), '"FOLDER"')
    )
    assert config == merged(EXPECTED["common"], EXPECTED[preset])


def merged(common, own):
    """`common` with what differs."""
    both = {
        key: merged(common[key], own[key])
        for key in common.keys() & own.keys()
        if isinstance(own[key], dict)
    }
    return {**common, **own, **both}
