"""The compact MegaTrain engine: parameters and optimizer state live on the host, the GPU only
computes.

The names below are all that another room may import; the only dependencies are torch and
safetensors. Start reading at `step.py`, the order of one step, and `executor.py`, which runs it.
"""

from engine.activations import Widths, layer_activation_bytes, logits_bytes
from engine.adamw import clip_scale, norm_of
from engine.blocks import Fate
from engine.config import FLOAT8, PLAIN, PRODUCTS, EngineConfig, RefusedError
from engine.kernel import KernelError, cache_directory, native
from engine.layers.decoder import find_layers
from engine.layers.float8 import multiplies_in_float8, require_float8
from engine.layers.packing import document_numbers, is_packed, packed, refuse_mixing
from engine.layers.template import KEEP_BUDGET
from engine.megatrain import MegaTrain
from engine.planner.placement import USABLE_DEVICE, USABLE_HOST
from engine.planner.planner import HOST_OVERHEAD, Machine
from engine.planner.rates import Rates
from engine.ranks import Group, Ranks
from engine.recipe import IGNORE_INDEX, Batch, NonFiniteLossError, Recipe
from engine.saving import require_sealed, seal, sync, whole_directory
from engine.sizes import Masks, Plan, dtype_name, pinned_rounding
from engine.swap import SwapFolder, free_bytes, left_behind
from engine.timeline import Timeline

__all__ = [
    "FLOAT8",
    "HOST_OVERHEAD",
    "IGNORE_INDEX",
    "KEEP_BUDGET",
    "PLAIN",
    "PRODUCTS",
    "USABLE_DEVICE",
    "USABLE_HOST",
    "Batch",
    "EngineConfig",
    "Fate",
    "Group",
    "KernelError",
    "Machine",
    "Masks",
    "MegaTrain",
    "NonFiniteLossError",
    "Plan",
    "Ranks",
    "Rates",
    "Recipe",
    "RefusedError",
    "SwapFolder",
    "Timeline",
    "Widths",
    "cache_directory",
    "clip_scale",
    "document_numbers",
    "dtype_name",
    "find_layers",
    "free_bytes",
    "is_packed",
    "layer_activation_bytes",
    "left_behind",
    "logits_bytes",
    "multiplies_in_float8",
    "native",
    "norm_of",
    "packed",
    "pinned_rounding",
    "refuse_mixing",
    "require_float8",
    "require_sealed",
    "seal",
    "sync",
    "whole_directory",
]
