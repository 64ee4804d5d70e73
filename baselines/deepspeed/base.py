"""DeepSpeed with the optimizer offloaded, in one process or several: what all its systems share.

Invariant: the mathematics is the recipe's (fp32 master, AdamW on the CPU, fp32 accumulation,
clipping set and not left to DeepSpeed's default), and every knob that costs speed is set as an
expert would set it, so losing is not our doing.
"""

from __future__ import annotations

from collections.abc import Iterable, Iterator
from pathlib import Path
from typing import Any

import torch
from torch.nn import functional as F

from baselines import distributed, footprint
from baselines.deepspeed.options import DeepSpeedOptions, accumulation_dtype
from baselines.deepspeed.setup import import_deepspeed, require_deepspeed, setup_phase, sole_builder
from baselines.loss import CausalLMLoss, loss_of
from baselines.model import materialise
from baselines.rival import (
    NOT_TAKEN,
    Rival,
    adamw_groups,
    adamw_settings,
    evaluated,
    micro_batches,
    raise_unless_finite,
    set_lr,
)
from baselines.system import SystemSpec, Unsupported
from engine import (
    Batch,
    NonFiniteLossError,
    Plan,
    dtype_name,
    require_sealed,
    seal,
    whole_directory,
)

TAG = "step"
"""The name of the one checkpoint in a directory, as DeepSpeed counts them."""


class DeepSpeed(Rival):
    """A DeepSpeed system without its plan. Raises Unsupported where DeepSpeed cannot run."""

    options: DeepSpeedOptions

    def __init__(self, spec: SystemSpec) -> None:
        super().__init__(spec)
        require_deepspeed()
        self._engine: Any = None
        self._adam: Any = None
        self._outcome = NOT_TAKEN

    @property
    def setup_phase(self) -> str:
        """What the bench is to call its setup, which may take minutes once."""
        return setup_phase()

    def plan(self) -> Plan:
        """Closed-form bytes on device and host, by kind."""
        return footprint.plan_on(self.spec.device, self._device_plan(), self._host_plan())

    def _device_plan(self) -> dict[str, int]:
        raise NotImplementedError

    def _host_plan(self) -> dict[str, int]:
        raise NotImplementedError

    def dtypes(self) -> dict[str, str]:
        """Gradients are accumulated over micro-batches, if there are several."""
        return super().dtypes() | {"gradients": dtype_name(accumulation_dtype(self.spec))}

    def setup(self, weights: Iterable[tuple[str, torch.Tensor]]) -> None:
        """Build the module on the host as it is, then let DeepSpeed take it apart.

        A bare zero.Init would change the weights.
        """
        spec = self.spec
        deepspeed = import_deepspeed(spec.device)
        self._join("nccl" if spec.device.type == "cuda" else "gloo")
        model = materialise(spec.model, spec.dtype, torch.device("cpu"), weights)
        self._named = list(model.named_parameters())
        loss = loss_of(model, self.options)
        self._prepare(deepspeed, loss)
        self._linear = F.linear
        from deepspeed.comm.torch import build_shm_op

        with sole_builder():
            optimizer = self._optimizer(deepspeed)
            # What ranks on a CPU share memory through: `initialize` would build or load it outside.
            build_shm_op()
        self._engine, *_ = deepspeed.initialize(
            model=loss, config=self.options.config(spec), dist_init_required=False, **optimizer
        )
        self._engine.train()

    def _prepare(self, deepspeed: Any, loss: CausalLMLoss) -> None:
        """What DeepSpeed must know of the module before it takes it apart."""

    def _optimizer(self, deepspeed: Any) -> dict[str, Any]:
        """What `deepspeed.initialize` gets to optimize with; builds the CPU operator."""
        self._adam = optimizer = deepspeed.ops.adam.DeepSpeedCPUAdam(
            adamw_groups(
                self.spec.recipe, [param for _, param in self._named if param.requires_grad]
            ),
            **adamw_settings(self.spec.recipe),
            adamw_mode=True,
        )
        return {"optimizer": optimizer}

    def _set_lr(self) -> None:
        """Set it before the backward, for there SuperOffload and ZenFlow already update.

        Twin-Flow and ZenFlow have a second optimizer.
        """
        optimizer, lr = self._engine.optimizer, self.spec.recipe.lr_at(self._step)
        others = ("backup_optimizer", "selective_optimizer")
        for each in (optimizer, *(getattr(optimizer, name, None) for name in others)):
            if each is not None:
                set_lr(each, lr)

    def train_step(self, batch: Batch) -> torch.Tensor:
        """One optimizer step; the loss is read before DeepSpeed's, which waits for the device."""
        engine = self._engine
        assert engine is not None, "setup comes first"
        total = torch.zeros((), dtype=torch.float32, device=self.spec.device)
        num_tokens = batch.num_tokens
        self._set_lr()
        mine = distributed.part_of(batch)
        for index, given in enumerate(micro_batches(mine, self.spec.device)):
            engine.set_gradient_accumulation_boundary(index == batch.num_micro_batches - 1)
            tokens, labels, mask, places = given
            loss = engine(tokens, labels, mask, num_tokens, places)
            # Our losses are already shares of the whole step: DeepSpeed must not divide them again,
            # by micro-batches or by ranks.
            engine.backward(loss * self.spec.num_ranks, scale_wrt_gas=False)
            total += loss.detach()
        distributed.summed(total)
        try:
            raise_unless_finite(total, "the loss", self._step, self._outcome)
        except NonFiniteLossError:
            engine.optimizer.zero_grad()
            raise
        self._update()
        return total

    def evaluate(self, batch: Batch) -> torch.Tensor:
        """Mean loss per label token of a batch that is not trained on; changes nothing.

        ZeRO-3 learns the order of its weights anew where this comes before the first step.
        """
        assert self._engine is not None, "setup comes first"
        return evaluated(self._engine, batch, self.spec.device)

    def _update(self) -> None:
        """DeepSpeed's step: norm, clipping, CPU AdamW, weights back. Nothing overlaps it."""
        with self._optimizing():
            self._engine.step()
            norm = self._engine.get_global_grad_norm()
            if self._outcome == NOT_TAKEN and norm is not None:  # no update came before it
                self.gradient_norm = torch.as_tensor(norm, dtype=torch.float32)
            if self._engine.optimizer.overflow:
                raise NonFiniteLossError(
                    f"step {self._step}: the gradient norm is not finite; {self._outcome}, lower "
                    "recipe.lr or check the data"
                )

    def parameters(self) -> Iterator[tuple[str, torch.Tensor]]:
        """(name, fp32 master on the host), one at a time."""
        from deepspeed.runtime.zero import GatheredParameters
        from deepspeed.utils import safe_get_full_fp32_param

        for name, param in self._named:
            master = safe_get_full_fp32_param(param)
            if master is None:  # frozen: it has none
                with GatheredParameters(param):
                    master = param.detach().float().clone()
            shape = getattr(param, "ds_shape", param.shape)
            yield name, master.detach().to("cpu", copy=True).view(shape)

    def _unsaved(self) -> str | None:
        """What DeepSpeed's checkpoint would lack."""
        return None

    def save(self, directory: Path) -> None:
        """DeepSpeed's own checkpoint, in `directory`; Unsupported where it would lack something."""
        self._require_alone("save")
        if unsaved := self._unsaved():
            raise Unsupported(
                f"save: DeepSpeed's checkpoint lacks {unsaved}, so nothing was written; train with "
                "system=zero3"
            )
        self.drain()
        with whole_directory(directory) as partial:
            self._engine.save_checkpoint(str(partial), tag=TAG, client_state={"step": self._step})
            seal(partial)

    def resume(self, directory: Path) -> None:
        """Continue where `save` was called; DeepSpeed wants a system that was just set up."""
        self._require_alone("resume")
        if not (Path(directory) / TAG).is_dir():
            raise ValueError(
                f"resume: got {directory}, allowed a directory that save() wrote; give that of the "
                "same system"
            )
        require_sealed(Path(directory))
        _, state = self._engine.load_checkpoint(
            str(directory), tag=TAG, load_lr_scheduler_states=False
        )
        self._step = state["step"]
        self._count_steps()

    def _count_steps(self) -> None:
        """Have the CPU's AdamW go through the steps that were taken, on one element of its own.

        It keeps the powers of both betas as running products, and takes `pow` where a step does not
        follow the last one: that rounds otherwise, after 2, 5 or 18 steps for one (IncrementStep of
        csrc/includes/cpu_adam.h, DeepSpeed 0.19.8).
        """
        if self._adam is None:  # DeepSpeed made its own
            return
        recipe, one = self.spec.recipe, [torch.zeros(1) for _ in range(4)]
        settings = (recipe.lr, recipe.beta1, recipe.beta2, recipe.eps, recipe.weight_decay, True)
        for step in range(1, self._step + 1):
            self._adam.ds_opt_adam.adam_update(self._adam.opt_id, step, *settings, *one)

    def close(self) -> None:
        """Release pinned memory and the process group; idempotent."""
        if self._engine is not None:
            self._engine.destroy()
            engine, self._engine, self._adam = self._engine, None, None
            _let_go(engine, [param for _, param in self._named])
            del self._named
            # DeepSpeed replaced it, for whatever else this process may train.
            F.linear = self._linear
        super().close()


def _let_go(engine: Any, params: list[torch.nn.Parameter]) -> None:
    """Have a destroyed engine hold nothing: hooks of ZeRO-3 on parameters, through which no
    collector sees, hold its optimizer. The model would stay, and the process group, whose thread
    wakes a hundred times a second.

    Where the optimizer's state is on a disk, all stays: writes may be on their way, and DeepSpeed
    aborts the process if their handle goes before they end.
    """
    optimizer = engine.optimizer
    if getattr(optimizer, "swap_optimizer", False):
        return
    offload = getattr(optimizer, "parameter_offload", None)
    for each in (offload, optimizer, *params):
        if each is not None:
            vars(each).clear()
    engine.data_parallel_group = engine.seq_data_parallel_group = None
