"""What is asked of the engine, held against the model and the ranks that it is asked for.

Invariant: what cannot be is a ValueError of one line, before anything is built.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import fields
from pathlib import Path

import torch

from engine.blocks import Blocks
from engine.config import ALL, ATTENTION, PLACED, EngineConfig
from engine.ranks import Ranks


def asked_of(config: EngineConfig, *, num_layers: int, clip: bool) -> Blocks:
    """What `config` asks for, AUTO where it leaves a choice. ValueError where it is more than there
    is."""
    names = {f.name for f in fields(Blocks)} & {f.name for f in fields(config)}
    chosen = {name: getattr(config, name) for name in names}
    if config.disk_blocks == ALL:
        chosen["disk_blocks"] = num_layers + 2 - max(0, config.device_optimizer)
    blocks = Blocks(num_layers=num_layers, clip=clip, **chosen)
    limits = dict.fromkeys((*PLACED, *ATTENTION), num_layers)
    limits |= {"device_optimizer": blocks.num_blocks, "reload_weights": 1}
    for name, most in limits.items():
        if chosen[name] > most:
            raise ValueError(
                f"system.{name}: got {chosen[name]}, allowed 0 to {most} with {num_layers} layers; "
                "lower it"
            )
    if max(0, blocks.device_optimizer) + blocks.disk_blocks > blocks.num_blocks:
        raise ValueError(
            f"system.disk_blocks: got {blocks.disk_blocks}, allowed 0 to "
            f"{blocks.num_blocks - max(0, blocks.device_optimizer)} where system.device_optimizer "
            f"is {blocks.device_optimizer} of {blocks.num_blocks} blocks; lower one of the two"
        )
    if blocks.keep_activations + blocks.offload_activations > num_layers:
        raise ValueError(
            f"system.offload_activations: got {blocks.offload_activations}, allowed 0 to "
            f"{num_layers - blocks.keep_activations} where system.keep_activations is "
            f"{blocks.keep_activations} of {num_layers} layers; lower one of the two"
        )
    return blocks


def require_folders(config: EngineConfig, folders: Sequence[Path]) -> None:
    """ValueError where there is to be state on disk and no folder for it."""
    missing = [str(folder) for folder in folders if not folder.is_dir()]
    if config.disk_blocks and (missing or not folders):
        got = f"{missing[0]}, which is no folder" if missing else "nothing"
        raise ValueError(
            f"machine.nvme_path: got {got}, allowed a folder on a local disk with "
            f"system.disk_blocks={config.disk_blocks}; make one and give machine.nvme_path=PATH"
        )


def rows_of(micro_batch_size: int, ranks: Ranks) -> int:
    """Rows of a micro-batch that each rank has. ValueError where they are not equally many."""
    if micro_batch_size % ranks.count:
        raise ValueError(
            f"ranks: got {ranks.count}, allowed a divisor of the {micro_batch_size} rows of a "
            "micro-batch; change one of them"
        )
    return micro_batch_size // ranks.count


def check_work(dtype: torch.dtype, **shape: int) -> None:
    """ValueError, one line, for a dtype or a size that is not supported."""
    if dtype not in (torch.bfloat16, torch.float32):
        raise ValueError(
            f"system.dtype: got {dtype}, allowed bfloat16, float32; bfloat16 keeps an fp32 master "
            "beside it"
        )
    for name, value in shape.items():
        if type(value) is not int or value < 1:
            raise ValueError(
                f"shape.{name}: got {value!r}, allowed an integer >= 1; give at least one"
            )
