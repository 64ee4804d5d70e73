"""Trainer: sets up what a step needs and runs steps.

Invariant: constructing one allocates nothing that grows with the model; setup allocates once; a
step pins nothing but its batch and constants, through torch's cache, and after the first looks at a
model waits for nothing that the schedule does not name.
"""

from __future__ import annotations

import os
from collections.abc import Iterable, Sequence
from functools import partial
from pathlib import Path

import torch

from engine.adamw import AdamW
from engine.blocks import Blocks
from engine.config import EngineConfig
from engine.cores import cores_of, on_cores
from engine.executor import Executor
from engine.lanes import CudaLanes, Lanes, SerialLanes
from engine.layers.decoder import Decoder
from engine.loading import load
from engine.ranks import Ranks
from engine.recipe import Batch, Recipe
from engine.sizes import StoreSpec, Work
from engine.state import Saver
from engine.step import LANES, READ, WRITE
from engine.store import Store, free_pinned_cache


class Trainer:
    """Trains a model whose parameters and optimizer state stay in host memory, as `blocks` says."""

    def __init__(
        self,
        decoder: Decoder,
        work: Work,
        blocks: Blocks,
        *,
        recipe: Recipe,
        config: EngineConfig,
        device: torch.device,
        lanes: Lanes | None = None,
        ranks: Ranks | None = None,
        folders: Sequence[Path] = (),
    ) -> None:
        """lanes: None takes CUDA streams and a worker on a GPU, the serial stand-in on the CPU.
        ranks: those that train together; None is one alone. folders: one a drive, for state on
        disk."""
        self.folders = list(folders)
        self.work, self.blocks, self.ranks = work, blocks, ranks or Ranks()
        self.recipe, self.config, self.device = recipe, config, device
        self.cores: list[int] = []
        """Of one of several ranks, once it is set up, those that its optimizer is kept to."""
        self._decoder, self._lanes = decoder, lanes
        self._store: Store | None = None
        self._executor: Executor | None = None
        self._saver: Saver | None = None
        self._next_step = 0
        self._untidied = work.compiled and device.type == "cuda"
        """Whether the compiler, in the first step here, leaves pinned memory behind."""
        self._trained = False

    def setup(self, weights: Iterable[tuple[str, torch.Tensor]]) -> None:
        """Allocate host and device memory and load `weights`: (name, tensor) pairs, each once.

        Raises ValueError where a name or a shape is not the model's, or a parameter is missing;
        OSError where a drive has no room for the state that is to lie there;
        KernelError, before it allocates, where AdamW's kernel can be neither found nor built and
        `torch_adamw` does not ask for torch's.
        """
        if self.ranks.count > 1:
            self.cores = cores_of(self.ranks, self.device)
        num_threads = self.config.num_threads or default_threads(self.device, len(self.cores))
        use_native = not self.config.torch_adamw
        optimizer = AdamW(self.recipe, num_threads=num_threads, use_native=use_native)
        spec = StoreSpec.of(self.blocks, self.work, self.config, self.device)
        make = partial(Store, spec, device=self.device, ranks=self.ranks, folders=self.folders)
        self._store = on_cores(self.cores, make) if self.cores else make()
        if self.device.type == "cuda" and spec.on_device:
            optimizer.prepare(self._store.states[0])
            torch.cuda.synchronize(self.device)
            free_pinned_cache()
        load(self._store, self._decoder, weights)
        self._store.spread()
        self._saver = Saver(self._store)
        if self._lanes is None:
            disks = (READ, WRITE) if self.blocks.disk_blocks else ()
            names = list(dict.fromkeys((*LANES[self.blocks.streams].values(), *disks)))
            cuda = self.device.type == "cuda"
            self._lanes = CudaLanes(self.device, names, self.cores) if cuda else SerialLanes()
        parts = self.blocks, self.work, self._decoder, self._store
        self._executor = Executor(
            *parts, optimizer, self._lanes, self.device, before=self._saver.before
        )

    @property
    def store(self) -> Store:
        """Every parameter and all optimizer state; there from setup to close."""
        assert self._store is not None, "call setup first"
        return self._store

    @property
    def executor(self) -> Executor:
        """What runs the operations; there from setup to close."""
        assert self._executor is not None, "call setup first"
        return self._executor

    @property
    def saver(self) -> Saver:
        """What writes the training state to disk; there from setup to close."""
        assert self._saver is not None, "call setup first"
        return self._saver

    def train_step(self, batch: Batch) -> torch.Tensor:
        """Enqueue one optimizer step over all micro-batches; the mean loss, fp32, 0-dim,
        unsynchronised.

        Raises ValueError where the batch is not of the shape that the engine was made for.

        Raises NonFiniteLossError, once, here, in a later call or in drain, where a loss or a
        gradient norm was not finite: that step changed no parameter and no moment, and training can
        go on. Where a later call raises it, as on CUDA, that call's batch is not trained on either,
        and the bad step keeps its place in the learning-rate schedule; `resume` takes it back. With
        `clip_norm=0` there is no norm: a gradient that is not finite is applied, and the next loss
        tells.

        After any other error updates may be half done: `resume` a checkpoint, in a new engine where
        the CPU lane's error is raised again.
        """
        batch.require(self.shape)
        # autograd's own thread would keep gradients longer
        with torch.autograd.set_multithreading_enabled(False):
            loss = self.executor.run(batch, self._next_step)
        self._next_step += 1
        self._trained = True
        return loss

    @property
    def shape(self) -> tuple[int, int, int]:
        """A batch's tokens are (number of micro-batches, rows of all ranks, seq_len)."""
        num_micro_batches, rows, seq_len = self.work.shape
        return num_micro_batches, rows * self.ranks.count, seq_len

    @property
    def gradient_norm(self) -> torch.Tensor | None:
        """Global 2-norm of the gradients of the last step that was enqueued, before clipping, fp32,
        0-dim, unsynchronised; None where `clip_norm` is 0."""
        return None if self._executor is None else self._executor.gradient_norm

    def evaluate(self, batch: Batch) -> torch.Tensor:
        """Mean loss per label token of a batch that is not trained on, fp32, 0-dim; waits for the
        steps before it and changes nothing.

        The batch may have any number of micro-batches. Raises what `train_step` does of them.
        """
        batch.require((max(1, batch.num_micro_batches), *self.shape[1:]))
        self.drain()
        try:
            return self.executor.evaluate(batch)
        finally:
            self.drain()

    def drain(self) -> None:
        """Return when every lane is idle and every update applied; raise what went wrong on the CPU
        lane, as `train_step` does."""
        self.executor.lanes.drain()
        if self._trained and self._untidied:
            self._untidied = False
            free_pinned_cache()

    def close(self) -> None:
        """Stop the worker and unpin the host arena; idempotent. Waits for a state that is being
        written, and raises what went wrong with it."""
        if self._lanes is not None:
            self._lanes.close()
        store, saver = self._store, self._saver
        self._store = self._executor = self._saver = None
        try:
            if saver is not None:
                saver.close()  # it still reads what lies on drives
        finally:
            if store is not None:
                store.close()


def default_threads(device: torch.device, num_cores: int = 0) -> int:
    """So many cores, all of this process where it is 0, but two beside a GPU."""
    num_cores = num_cores or len(os.sched_getaffinity(0))
    return max(1, num_cores - (2 if device.type == "cuda" else 0))
