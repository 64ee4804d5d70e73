"""MegaTrain: the engine put together, behind the interface that every training system shares.

A model is taken apart, the planner decides what goes where, a Trainer runs it. Method: MegaTrain,
arXiv 2604.05091, with an exact fp32 master, one recomputation and exact clipping.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import replace
from pathlib import Path

import torch
from torch import nn

from engine.activations import Widths
from engine.asked import asked_of, check_work, require_folders, rows_of
from engine.config import FLOAT8, EngineConfig
from engine.disk import caveat_of
from engine.lanes import CudaLanes, Lanes
from engine.layers.decoder import Decoder, find_layers
from engine.layers.float8 import require_float8, use_float8
from engine.layers.rehearsal import count_layers, rehearse
from engine.planner.planner import Machine, Planner
from engine.planner.rates import Rates
from engine.ranks import Ranks
from engine.recipe import Batch, Recipe
from engine.resuming import resume
from engine.sizes import Masks, Plan, Work, dtype_name
from engine.timeline import Timeline, last_step
from engine.trainer import Trainer, default_threads


class MegaTrain(Trainer):
    """Trains a decoder-only transformers model whose parameters and optimizer state stay in host
    memory; what its config leaves open (-1), the planner chooses."""

    def __init__(
        self,
        model: nn.Module,
        *,
        recipe: Recipe,
        micro_batch_size: int,
        seq_len: int,
        num_micro_batches: int = 1,
        dtype: torch.dtype = torch.bfloat16,
        device: torch.device | str = "cpu",
        config: EngineConfig | None = None,
        lanes: Lanes | None = None,
        machine: Machine | None = None,
        packed: bool = False,
        ranks: Ranks | None = None,
        folders: Sequence[Path] = (),
    ) -> None:
        """model: a skeleton, parameters on the meta device or to be overwritten; it becomes the
        engine's own.

        machine: what to place and predict for; None is the machine at hand, without a limit on host
        memory. packed: whether to plan for several documents in a sequence. ranks: those that train
        together, each on its rows of a micro-batch; None is one alone. folders: one a drive, for
        state on disk. Raises ValueError where the model, the dtype or an option is not supported,
        ranks do not divide the rows, or there is to be state on disk and no folder.
        """
        check_work(
            dtype,
            num_micro_batches=num_micro_batches,
            micro_batch_size=micro_batch_size,
            seq_len=seq_len,
        )
        config, device = config or EngineConfig(), _with_index(torch.device(device))
        ranks = ranks or Ranks()
        rows = rows_of(micro_batch_size, ranks)
        if config.mlp_chunk >= rows * seq_len:
            config = replace(config, mlp_chunk=0)
        float8 = _use_float8(model, config, dtype, device, rows * seq_len)
        decoder = Decoder(model, mlp_chunk=config.mlp_chunk)
        rehearse(decoder, dtype=dtype, device=device, micro_batch=(rows, seq_len))
        asked = asked_of(config, num_layers=decoder.num_layers, clip=recipe.clip_norm > 0)
        asked = replace(asked, num_ranks=ranks.count)
        require_folders(config, folders)
        masks = Masks.of(model.config, rows, seq_len, dtype.itemsize) if packed else Masks()
        work = Work(
            layouts=[layout.in_parts(ranks.count) for layout in decoder.layouts()],
            widths=Widths.of(model.config),
            dtype=dtype,
            num_micro_batches=num_micro_batches,
            rows=rows,
            seq_len=seq_len,
            loss_chunk=config.loss_chunk,
            mlp_chunk=config.mlp_chunk,
            counted=_counted(decoder, config, dtype, device, (rows, seq_len)),
            compiled=config.compile,
            tied=decoder.tied,
            float8=float8 // decoder.num_layers,
            masks=masks,
        )
        self._planner = Planner(
            work=work,
            config=config,
            device=device,
            num_threads=config.num_threads * ranks.count or default_threads(device),
            machine=machine or Machine(),
            ranks=ranks,
            folders=folders,
        )
        blocks = self._planner.placed(asked)
        super().__init__(
            decoder,
            work,
            blocks,
            recipe=recipe,
            config=self._planner.chosen,
            device=device,
            lanes=lanes,
            ranks=ranks,
            folders=folders,
        )

    def counters(self) -> dict[str, float]:
        """Totals since setup: bytes moved each way, recomputed FLOPs, seconds the optimizer ran and
        the launching thread waited for it; on a GPU seconds that its computations waited for
        anything; once a state was saved, bytes and seconds of that."""
        lanes = self.executor.lanes
        waits = {"optimizer_wait_s": lanes.waited_s}
        if isinstance(lanes, CudaLanes):
            waits["device_idle_s"] = lanes.idle.seconds
        return self.executor.counters | waits | self.saver.counters

    @property
    def caveat(self) -> str | None:
        """What must be said beside a number of this configuration."""
        found = []
        if self.work.dtype == torch.bfloat16 and self.config.master == "bf16":
            found.append("bfloat16 weights are the master, as published: small updates are lost")
        if self.config.products == FLOAT8:
            numel = sum(layout.num_params for layout in self.work.layouts[1:-1])
            share = self.work.float8 * self.blocks.num_layers / numel
            found.append(
                f"the layers multiply in float8 ({share:.0%} of their parameters): another "
                "function than bf16's"
            )
        if self.blocks.disk_blocks and (said := caveat_of(self.folders)):
            found.append(said)
        if self.config.torch_adamw:
            found.append(
                "AdamW through torch, several times slower than its own: not the engine's speed, "
                "not ranked"
            )
        return "; ".join(found) or None

    def dtypes(self) -> dict[str, str]:
        """Dtypes of what is kept."""
        name = dtype_name(self.work.dtype)
        masters = {
            "split": "float32 (bfloat16 + int16 remainder)",
            "fp32": "float32",
            "bf16": "bfloat16",
        }
        master = name if name == "float32" else masters[self.config.master]
        found = {"weights": name, "master": master, "moments": "float32", "gradients": name}
        return found | ({"products": FLOAT8} if self.config.products == FLOAT8 else {})

    def parameters(self) -> Iterator[tuple[str, torch.Tensor]]:
        """(name, fp32 copy on the host) of every parameter."""
        self.drain()
        for block in range(self.blocks.num_blocks):
            for name, value in self.store.parameters(block):
                yield self._decoder.full_name(block, name), value

    def moments(self) -> Iterator[tuple[str, torch.Tensor]]:
        """(name, fp32 copy on the host) of every parameter's first moment.

        After one step it is 1 - beta1 times the gradient, as clipped.
        """
        self._settle()
        for block in range(self.blocks.num_blocks):
            for name, value in self.store.moments(block):
                yield self._decoder.full_name(block, name), value

    def save(self, directory: Path) -> None:
        """Write the training state to a directory, which appears whole or not at all."""
        self.save_beside(directory, room=0)
        self.saved()

    def reserve(self, *, room: int) -> None:
        """Take the memory of copies for `save_beside` now, after setup, not when the first state is
        saved, where training would wait for it. room: as there."""
        self.saver.reserve(room)

    def save_beside(self, directory: Path, *, room: int) -> None:
        """The same beside the steps that come next: this finishes the step before and returns.

        room: bytes of host memory that copies may take, and keep until `close`; where they need
        more, this copies the state itself and waits for the disk. ValueError where `directory`
        exists; `saved`, or the next call, raises what goes wrong later.
        """
        self._settle()
        self.saver.save(directory, self._next_step, self.recipe, room=room)

    def saved(self) -> None:
        """Return when the state that is being written, if one is, has its directory."""
        self.saver.finish()

    def resume(self, directory: Path) -> None:
        """Continue, after setup, from a state that `save` wrote; one whose files were changed
        changes nothing here.

        Raises ValueError where it does not fit. Warns where its recipe is another: this engine's
        own is what goes on.
        """
        self._settle()
        for block in range(self.blocks.num_blocks):
            self.saver.before(block)
        self._next_step = resume(self.store, directory, self.recipe)
        self.store.spread()

    def _settle(self) -> None:
        """Drain, and update the moments that would wait for the next step."""
        self.drain()
        self.executor.finish_moments()

    def record(self, batches: Sequence[Batch]) -> Timeline:
        """Train on `batches`, two or more, and return the last whole step as it ran. Timing marks
        slow it a little."""
        self.drain()
        self.executor.lanes.start_recording()
        try:
            for batch in batches:
                self.train_step(batch)
            self.drain()
        except BaseException:
            self.executor.lanes.stop_recording()
            raise
        return last_step(self.executor.lanes.recorded())

    def predict(self) -> Timeline:
        """One steady step as the schedule and the machine's rates (`rates`) have it; allocates
        nothing that stays."""
        return self._planner.predict(self.blocks)

    def predict_window(self, num_steps: int) -> float:
        """Seconds that `num_steps` steps take from one `drain` to the next, by the same means."""
        return self._planner.predict_window(self.blocks, num_steps)

    @property
    def rates(self) -> Rates:
        """What the machine does in a second, as given or probed."""
        return self._planner.rates

    @property
    def placement(self) -> dict[str, int]:
        """What was asked for or chosen, by the names that rows have: numbers of blocks on the
        device, of layers kept and offloaded, of layers between kept inputs; whether the weights of
        kept layers are loaded twice, and whether AdamW takes one pass where two were allowed."""
        return {
            "device_blocks": self.blocks.device_optimizer,
            "kept_layers": self.blocks.keep_activations,
            "offloaded_layers": self.blocks.offload_activations,
            "checkpoint_interval": self.blocks.checkpoint_interval,
            **({"kept_attention": n} if (n := len(self.blocks.attention_kept)) else {}),
            **({"offloaded_attention": n} if (n := len(self.blocks.attention_moved)) else {}),
            **({"reload_weights": 1} if self.blocks.reload_weights else {}),
            **({"late_moments": 0} if self.config.late_moments > self.blocks.late_moments else {}),
            **({"disk_blocks": self.blocks.disk_blocks} if self.blocks.disk_blocks else {}),
        }

    def most_layers(self) -> tuple[int, int]:
        """Layers of this model's width that there would be room for on this machine, streamed, with
        the device filled with the state of as many blocks as it holds; and bytes on disk."""
        asked = replace(
            self.blocks,
            disk_blocks=self.config.disk_blocks,
            checkpoint_interval=self.config.checkpoint_interval,
        )
        return self._planner.most_layers(asked)

    def plan(self) -> Plan:
        """Closed-form bytes by kind; allocates nothing."""
        return self._planner.plan(self.blocks)


def _use_float8(
    model: nn.Module, config: EngineConfig, dtype: torch.dtype, device: torch.device, num: int
) -> int:
    """Parameters of the layers that multiply in float8 from now on: none unless asked for. num:
    tokens that a layer is given."""
    if config.products != FLOAT8:
        return 0
    require_float8(dtype, device, num, chunk=config.mlp_chunk)
    return use_float8(find_layers(model)[1])


def _counted(
    decoder: Decoder,
    config: EngineConfig,
    dtype: torch.dtype,
    device: torch.device,
    micro_batch: tuple[int, int],
) -> tuple[int, int]:
    """Bytes of a layer as `count_layers` counts them, where memory decides what is placed; not of
    products in float8, which a plan counts apart."""
    if device.type != "cuda" or config.products == FLOAT8:
        return 0, 0
    return count_layers(
        decoder,
        dtype=dtype,
        micro_batch=micro_batch,
        chunk=config.mlp_chunk,
        compiled=config.compile,
    )


def _with_index(device: torch.device) -> torch.device:
    """`cuda` as the current `cuda:N`, which a worker thread must be given by number."""
    if device.type == "cuda" and device.index is None and torch.cuda.is_available():
        return torch.device("cuda", torch.cuda.current_device())
    return device
