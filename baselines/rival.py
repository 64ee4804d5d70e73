"""What rivals share: options, the walk over a step's micro-batches, finite losses, clocks,
checkpoints.

Invariant: a checkpoint directory is whole or absent, and a step that raises is not counted as
taken.
"""

from __future__ import annotations

import contextlib
import time
from collections.abc import Callable, Iterable, Iterator, Mapping
from pathlib import Path
from typing import Any, ClassVar

import torch

from baselines import distributed
from baselines.model import config_of
from baselines.options import CommonOptions, parse_options
from baselines.system import SystemSpec, Unsupported
from engine import (
    Batch,
    NonFiniteLossError,
    Recipe,
    dtype_name,
    require_sealed,
    seal,
    whole_directory,
)

NOT_TAKEN = "no optimizer step was taken"
STATE = "state.pt"
PLAIN_MODELS = ("llama", "qwen2", "qwen3")
"""Types whose layers take a hidden state and its rotation, and attend to all before them."""
CAUSAL_ALONE = ("sdpa", "flash_attention_2")
"""Attention that is causal where it is given no mask; eager then attends to all."""


class Rival:
    """A `TrainingSystem` without its plan, its setup and its step.

    Raises ValueError, in one line, for an option, a dtype or a model configuration that is not
    allowed.
    """

    options_class: ClassVar[type[Any]] = CommonOptions
    options: Any
    """An instance of `options_class`."""
    caveat: str | None = None
    gradient_norm: torch.Tensor | None = None
    """Of the last step, before clipping; None where nobody looks at it."""

    def __init__(self, spec: SystemSpec) -> None:
        if spec.dtype not in (torch.bfloat16, torch.float32):
            raise ValueError(
                f"system.dtype: got {spec.dtype}, allowed bfloat16, float32; choose one of these"
            )
        self.options = parse_options(self.options_class, spec.options)
        config_of(spec.model)
        self.spec = spec
        self._step = 0
        self._optimizer_s = 0.0
        self._joined = False

    def dtypes(self) -> dict[str, str]:
        """Dtypes of weights, master, moments and gradients (as they are accumulated)."""
        kinds = ("master", "moments", "gradients")
        return {"weights": dtype_name(self.spec.dtype), **dict.fromkeys(kinds, "float32")}

    def _join(self, backend: str) -> None:
        """Be in the process group, until `close`."""
        distributed.acquire(backend)
        self._joined = True

    def _require_alone(self, what: str) -> None:
        """Unsupported, in one line, for what several ranks cannot do."""
        if self.spec.num_ranks > 1:
            raise Unsupported(
                f"{what}: the state is spread over {self.spec.num_ranks} ranks, which write no "
                "checkpoint here; train with one"
            )

    @contextlib.contextmanager
    def _optimizing(self) -> Iterator[None]:
        """Time the block as the optimizer's and count a step, unless it raises."""
        started = time.perf_counter()
        yield
        self._optimizer_s += time.perf_counter() - started
        self._step += 1

    def evaluate(self, batch: Batch) -> torch.Tensor:
        """Unsupported, until a rival writes it."""
        raise Unsupported(
            f"evaluate: {type(self).__name__} has no forward without gradients; evaluate the "
            "weights that it exports"
        )

    def drain(self) -> None:
        """Wait for the device."""
        if self.spec.device.type == "cuda":
            torch.cuda.synchronize(self.spec.device)

    def counters(self) -> dict[str, float]:
        """optimizer_s: seconds of clipping, AdamW and copies around them; nothing overlaps them."""
        return {"optimizer_s": self._optimizer_s, "optimizer_wait_s": self._optimizer_s}

    def close(self) -> None:
        """Leave the process group and free the device's memory; idempotent."""
        if self._joined:
            self._joined = False
            distributed.release()
        if self.spec.device.type == "cuda":
            torch.cuda.empty_cache()


class TorchRival(Rival):
    """A rival with fp32 masters and a torch AdamW at hand: its parameters and checkpoints."""

    loss: Any = None
    """The module from tokens to the loss, from `setup` to `close`."""

    def evaluate(self, batch: Batch) -> torch.Tensor:
        """Mean loss per label token of a batch that is not trained on; changes nothing."""
        assert self.loss is not None, "setup comes first"
        return evaluated(self.loss, batch, self.spec.device)

    def _held(self) -> Iterator[tuple[str, torch.Tensor, Mapping[str, torch.Tensor]]]:
        """(name, fp32 master, AdamW's state of it, as plain tensors) of every parameter."""
        raise NotImplementedError

    def _hold(self, held: Mapping[str, tuple[torch.Tensor, Mapping[str, torch.Tensor]]]) -> None:
        """Take over (master, AdamW's state of it) by name; the weights follow the masters."""
        raise NotImplementedError

    def parameters(self) -> Iterator[tuple[str, torch.Tensor]]:
        """(name, fp32 master on the host), one at a time."""
        for name, master, _ in self._held():
            yield name, master.to("cpu", copy=True)

    def save(self, directory: Path) -> None:
        """Write master, moments and the step number to `directory`/state.pt, as plain tensors."""
        self._require_alone("save")
        self.drain()
        held = list(self._held())
        master = {name: tensor for name, tensor, _ in held}
        moments = {name: dict(state) for name, _, state in held}
        with whole_directory(directory) as partial:
            torch.save({"master": master, "moments": moments, "step": self._step}, partial / STATE)
            seal(partial)

    @torch.no_grad()
    def resume(self, directory: Path) -> None:
        """Continue bit for bit where `save` was called."""
        self._require_alone("resume")
        state = _load_state(directory, sum(1 for _ in self._held()))
        moments = state["moments"]
        self._hold({name: (master, moments[name]) for name, master in state["master"].items()})
        self._step = state["step"]


def _load_state(directory: Path, num_params: int) -> dict[str, Any]:
    """`state.pt` of a directory; ValueError where it is missing or is of another model."""
    path = Path(directory) / STATE
    if not path.is_file():
        raise ValueError(
            f"resume: got {directory}, allowed a directory that save() wrote; give that of the "
            "same system"
        )
    require_sealed(path.parent)
    state: dict[str, Any] = torch.load(path, map_location="cpu", weights_only=True, mmap=True)
    if len(state["master"]) != num_params:
        raise ValueError(
            f"resume: got {len(state['master'])} parameters in {directory}, allowed {num_params}; "
            "give a checkpoint of the same model"
        )
    return state


def require_cuda(device: torch.device, name: str) -> None:
    """Unsupported, in one line, for a system that has no way to run on the CPU."""
    if device.type != "cuda":
        raise Unsupported(
            f"{name} runs on NVIDIA GPUs alone, and machine.device is {device.type}; leave it out "
            "here"
        )


def require_plain_layers(spec: SystemSpec, name: str) -> None:
    """Unsupported, in one line, where layers need more than a hidden state and its rotation to
    attend to all that came before: a mask, or several documents in a sequence."""
    config = config_of(spec.model)
    kinds = set(getattr(config, "layer_types", None) or ["full_attention"])
    if spec.model.model_type not in PLAIN_MODELS or kinds != {"full_attention"}:
        raise Unsupported(
            f"model: got {spec.model.model_type} of {', '.join(sorted(kinds))}, allowed "
            f"{', '.join(PLAIN_MODELS)} of full_attention with {name} here; choose another model"
        )
    if (got := spec.model.attn_implementation) not in CAUSAL_ALONE:
        raise Unsupported(
            f"model.attn_implementation: got {got}, allowed {', '.join(CAUSAL_ALONE)} with {name} "
            "here, which gives its layers no mask; choose one of these"
        )
    if spec.packed:
        raise Unsupported(f"{name} takes no packed documents here; set data=stdlib")


def require_whole(batch: Batch, name: str) -> None:
    """Unsupported, in one line, for a batch with a mask or with positions of its own."""
    if batch.attention_mask is not None or batch.position_ids is not None:
        raise Unsupported(f"{name} takes whole sequences here, without a mask or positions")


def adamw_groups(recipe: Recipe, params: Iterable[torch.Tensor]) -> list[dict[str, Any]]:
    """Parameters as the groups that an AdamW with `adamw_settings` takes: one where all decay
    alike."""
    found = list(params)
    decayed = [param for param in found if recipe.decays(param.ndim)]
    others = [param for param in found if not recipe.decays(param.ndim)]
    groups: list[dict[str, Any]] = [{"params": decayed}, {"params": others, "weight_decay": 0.0}]
    return [group for group in groups if group["params"]]


def set_lr(optimizer: Any, lr: float) -> None:
    """The learning rate of every group."""
    for group in optimizer.param_groups:
        group["lr"] = lr


def adamw_settings(recipe: Recipe) -> dict[str, Any]:
    """The recipe as the keyword arguments that torch's AdamW and DeepSpeed's share."""
    return {
        "lr": recipe.lr,
        "betas": (recipe.beta1, recipe.beta2),
        "eps": recipe.eps,
        "weight_decay": recipe.weight_decay,
    }


def micro_batches(
    batch: Batch, device: torch.device
) -> Iterator[tuple[torch.Tensor, torch.Tensor, torch.Tensor | None, torch.Tensor | None]]:
    """(tokens, labels, attention_mask or None, position_ids or None) of each micro-batch:
    [micro_batch_size, seq_len]."""

    def moved(part: torch.Tensor) -> torch.Tensor:
        return part.to(device, non_blocking=True)

    masks, positions = batch.attention_mask, batch.position_ids
    for index in range(batch.num_micro_batches):
        mask = None if masks is None else moved(masks[index])
        places = None if positions is None else moved(positions[index])
        yield moved(batch.tokens[index]), moved(batch.labels[index]), mask, places


@torch.no_grad()
def evaluated(
    loss: Callable[..., torch.Tensor], batch: Batch, device: torch.device
) -> torch.Tensor:
    """The batch's mean loss per label token by `loss`, a module as `CausalLMLoss`, forward
    alone."""
    total = torch.zeros((), dtype=torch.float32, device=device)
    for tokens, labels, mask, places in micro_batches(distributed.part_of(batch), device):
        total += loss(tokens, labels, mask, batch.num_tokens, places)
    return distributed.summed(total)


def raise_unless_finite(
    value: torch.Tensor | float, what: str, step: int, outcome: str = NOT_TAKEN
) -> None:
    """NonFiniteLossError when `value` is NaN or infinite; `outcome` is what the step did.

    `value` is read on the host, so this synchronises.
    """
    number = float(value)
    if number != number or abs(number) == float("inf"):
        raise NonFiniteLossError(
            f"step {step}: {what} is {number}; {outcome}, lower recipe.lr or check the data"
        )


class FiniteFlag:
    """A step's verdict, finite or not, brought to the host behind the work that follows it."""

    def __init__(self, device: torch.device) -> None:
        on_cuda = device.type == "cuda"
        self._host = torch.zeros((), dtype=torch.float32, pin_memory=on_cuda)
        self._copied = torch.cuda.Event() if on_cuda else None  # type: ignore[no-untyped-call]
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
                f"step {step}: the loss or the gradient norm is not finite; {NOT_TAKEN}, lower "
                "recipe.lr or check the data"
            )
