"""What the baselines share: their options, the walk over a step's micro-batches, whole checkpoints, finite losses.

Invariant: a mistake in an option is one line that names its config path, and a checkpoint directory is whole or absent.
"""

from __future__ import annotations

import contextlib
import dataclasses
import os
import shutil
from collections.abc import Iterator, Mapping
from pathlib import Path
from typing import Any, TypeVar

import torch

from baselines.system import Unsupported
from engine import Batch, NonFiniteLossError, Recipe

T = TypeVar("T")
AS_MANY_AS_FIT = -1
"""`keep_activations` that stands for the largest number that has room."""


def at_least(least: int, default: int) -> Any:
    """A field of options that is an integer >= `least`."""
    return dataclasses.field(default=default, metadata={"least": least})


def share(default: float, *, whole: bool = True, chosen: bool = False) -> Any:
    """A field of options that is a number above 0 and up to 1; below 1 unless `whole`. `chosen`: or 0, which leaves the choice."""
    return dataclasses.field(default=default, metadata={"whole": whole, "chosen": chosen})


def word(what: str) -> Any:
    """A field of options that is text, `what` in words, or null."""
    return dataclasses.field(default=None, metadata={"word": what})


@dataclasses.dataclass(frozen=True, kw_only=True)
class CommonOptions:
    """Options of every baseline: bools, counts (>= 1, or `at_least`), shares (`share`), words or null (`word`)."""

    preset: str | None = word("a word")
    """Label of the settings in rows and figures; it changes nothing."""
    activation_checkpointing: bool = True
    """Keep each decoder layer's input only and recompute the layer in the backward; false keeps the activations of all layers."""
    keep_activations: int = at_least(AS_MANY_AS_FIT, 0)
    """Last decoder layers whose activations are kept all the same: their graphs are the first to be freed, before any layer is
    recomputed. -1 is as many as the plan has room for on the device. No effect without activation_checkpointing."""
    loss_chunk: int = 4096
    """Tokens whose logits are alive at a time."""
    compile: bool = False
    """Run each decoder layer and the loss through torch.compile, as `baselines.loss` says."""

    def num_kept(self, num_layers: int) -> int:
        """Layers, of `num_layers`, that are not recomputed; none while -1 stands for a number that is still to be chosen."""
        return max(0, self.keep_activations) if self.activation_checkpointing else num_layers


def parse_options(cls: type[T], options: Mapping[str, Any]) -> T:
    """`options` as the frozen dataclass `cls`, whose defaults and metadata say what is allowed; ValueError names `system.<key>`."""
    fields = {field.name: field for field in dataclasses.fields(cls)}  # type: ignore[arg-type]
    for key, value in options.items():
        if key not in fields:
            raise ValueError(f"system.{key}: got {value!r}, allowed {', '.join(fields)}; remove it or choose one of these")
        wrong = _refusal(fields[key], value)
        if wrong:
            raise ValueError(f"system.{key}: got {value!r}, allowed {wrong}")
    return cls(**options)


def _refusal(field: Any, value: Any) -> str | None:
    """What is allowed and what to do, where `value` is not; None where it is."""
    number = isinstance(value, (int, float)) and not isinstance(value, bool)
    if field.default is None:
        allowed = f"{field.metadata['word']} or null; put it in quotes or remove it"
        return None if value is None or isinstance(value, str) else allowed
    if isinstance(field.default, bool):
        return None if isinstance(value, bool) else "true or false; choose one of these"
    if isinstance(field.default, float):
        whole, chosen = field.metadata["whole"], field.metadata["chosen"]
        fine = number and (0 < value < 1 or (whole and value == 1) or (chosen and value == 0))
        first = "0, or a" if chosen else "a"
        return None if fine else f"{first} number above 0 and {'up to' if whole else 'below'} 1; the default is {field.default}"
    least = field.metadata.get("least", 1)
    fine = number and isinstance(value, int) and value >= least
    return None if fine else f"an integer >= {least}; the default is {field.default}"


def check_dtype(dtype: torch.dtype) -> None:
    """ValueError for a compute dtype that the baselines have no master copy scheme for."""
    if dtype not in (torch.bfloat16, torch.float32):
        raise ValueError(f"system.dtype: got {dtype}, allowed bfloat16, float32; choose one of these")


def require_cuda(device: torch.device, name: str) -> None:
    """Unsupported, in one line, for a system that has no way to run on the CPU."""
    if device.type != "cuda":
        raise Unsupported(f"{name} runs on NVIDIA GPUs alone, and machine.device is {device.type}; leave it out here")


def adamw_settings(recipe: Recipe) -> dict[str, Any]:
    """The recipe as the keyword arguments that torch's AdamW and DeepSpeed's share."""
    return {
        "lr": recipe.lr,
        "betas": (recipe.beta1, recipe.beta2),
        "eps": recipe.eps,
        "weight_decay": recipe.weight_decay,
    }


def dtype_name(dtype: torch.dtype) -> str:
    """`bfloat16` for torch.bfloat16."""
    return str(dtype).removeprefix("torch.")


def micro_batches(batch: Batch, device: torch.device) -> Iterator[tuple[torch.Tensor, torch.Tensor, torch.Tensor | None]]:
    """(tokens, labels, attention_mask or None) of each micro-batch on `device`, [micro_batch_size, seq_len] each."""
    for index in range(batch.num_micro_batches):
        mask = None if batch.attention_mask is None else batch.attention_mask[index].to(device, non_blocking=True)
        yield batch.tokens[index].to(device, non_blocking=True), batch.labels[index].to(device, non_blocking=True), mask


NOT_TAKEN = "no optimizer step was taken"


def raise_unless_finite(value: torch.Tensor | float, what: str, step: int, outcome: str = NOT_TAKEN) -> None:
    """NonFiniteLossError when `value` (read on the host: this synchronises) is NaN or infinite; `outcome`: what the step did."""
    number = float(value)
    if number != number or abs(number) == float("inf"):
        raise NonFiniteLossError(f"step {step}: {what} is {number}; {outcome}, lower recipe.lr or check the data")


class FiniteFlag:
    """A step's verdict, finite or not, brought to the host behind the work that follows it."""

    def __init__(self, device: torch.device) -> None:
        on_cuda = device.type == "cuda"
        self._host = torch.zeros((), dtype=torch.float32, pin_memory=on_cuda)
        self._copied = torch.cuda.Event() if on_cuda else None
        self._step = -1

    def record(self, not_finite: torch.Tensor, step: int) -> None:
        """Remember `not_finite` (0-dim fp32, 1.0 for a bad step) of `step`; enqueues one copy."""
        self._host.copy_(not_finite, non_blocking=True)
        if self._copied is not None:
            self._copied.record()
        self._step = step

    def raise_if_bad(self) -> None:
        """NonFiniteLossError, once, if the last recorded step was bad; waits for that step only."""
        if self._step < 0:
            return
        if self._copied is not None:
            self._copied.synchronize()
        step, self._step = self._step, -1
        if float(self._host):
            raise NonFiniteLossError(
                f"step {step}: the loss or the gradient norm is not finite; no optimizer step was taken, "
                "lower recipe.lr or check the data"
            )


@contextlib.contextmanager
def whole_directory(directory: Path) -> Iterator[Path]:
    """A sibling to write in, renamed to `directory` when the block ends well, removed when it does not.

    ValueError where `directory` exists.
    """
    directory = Path(directory).absolute()
    if directory.exists():
        raise ValueError(f"save: {directory} exists, allowed a new directory; choose another name or remove it")
    directory.parent.mkdir(parents=True, exist_ok=True)
    partial = directory.with_name(f".{directory.name}.partial-{os.getpid()}")
    shutil.rmtree(partial, ignore_errors=True)
    partial.mkdir()
    try:
        yield partial
        partial.rename(directory)
    finally:
        shutil.rmtree(partial, ignore_errors=True)


def load_state(directory: Path, num_params: int) -> dict[str, Any]:
    """`state.pt` of a checkpoint directory; ValueError where it is missing or is of another model."""
    path = Path(directory) / "state.pt"
    if not path.is_file():
        raise ValueError(f"resume: got {directory}, allowed a directory that save() wrote; give that of the same system")
    state: dict[str, Any] = torch.load(path, map_location="cpu", weights_only=True, mmap=True)
    if len(state["master"]) != num_params:
        raise ValueError(
            f"resume: got {len(state['master'])} parameters in {directory}, allowed {num_params}; "
            "give a checkpoint of the same model"
        )
    return state
