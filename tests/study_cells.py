"""Two cells of every study of conf/ablation, small enough for a CPU: overrides by what they set."""

from collections.abc import Mapping

TINY = {"model": "tiny"}
WIDTHS = "{hidden_size:64,num_attention_heads:1,num_key_value_heads:1},{hidden_size:128,num_attention_heads:2}"
STUDIES: dict[str, dict[str, str]] = {
    "batch_size": TINY | {"shape.batch_size": "2,4", "system": "megatrain"},
    "checkpoint_interval": TINY | {"system.checkpoint_interval": "1,4"},
    "context_length": TINY | {"shape.seq_len": "16,64"},
    "depth": TINY | {"model.config.num_hidden_layers": "1,2", "system": "megatrain"},
    "device_memory": TINY
    | {"machine.device_bytes": "16000000000,24000000000", "system": "megatrain"},
    "double_buffering": TINY | {"system.depth": "1,2", "system.streams": "3"},
    "float8": TINY | {"system.products": "plain,float8", "system": "megatrain"},
    "gradient_slabs": TINY | {"system.gradient_slabs": "0,2"},
    "ladder": TINY | {"+rung": "0_paper,4_recompute_once"},
    # The second has no room.
    "model_size": {
        "model": "tiny,qwen2.5-0.5b",
        "machine.host_bytes": "2000000000",
        "system": "megatrain",
    },
    "optimizer_overlap": TINY
    | {"system.optimizer_overlap": "true,false", "recipe.clip_norm": "1.0"},
    "pinned": TINY | {"system.pinned": "exact,none"},
    "placement": TINY
    | {
        "system.keep_activations": "0,-1",
        "system.device_optimizer": "0",
        "system.offload_activations": "0",
        "system.compile": "false",
    },
    "precision": TINY | {"system.master": "split,bf16"},
    "tier": TINY | {"system.disk_blocks": "0,3", "shape.batch_size": "2", "machine.nvme_path": "."},
    "ranks": TINY | {"system": "in_memory", "process.num_cpu_ranks": "1,2"},
    "ranks_weak": TINY | {"system": "in_memory", "process.num_cpu_ranks": "1,2"},
    "saving": TINY | {"measure.save": "false,true", "system": "megatrain"},
    "width": TINY | {"model.config": WIDTHS, "system": "megatrain"},
}


def overrides(name: str, others: Mapping[str, str] | None = None) -> list[str]:
    """Those of a study's two cells; `others` take the place of its own."""
    return [f"{key}={value}" for key, value in (STUDIES[name] | dict(others or {})).items()]
