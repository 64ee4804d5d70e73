"""Which architectures the engine trains: every causal language model of the installed transformers.

    python -m sweeps.architectures               # all of them; writes docs/architectures.md
    python -m sweeps.architectures llama mamba2  # these alone, printed and not written

Each type is built tiny (`sweeps.tiny`) with random weights, in float32 and in bfloat16, and trained
for three steps by the engine (layers streamed and recomputed) and by the plain loop in here, which
knows nothing of the engine. Invariant: a type agrees, or is refused in one line when the engine is
made, or cannot be run by itself. Anything else is a failure: exit code 1, and no page is written.
"""

from __future__ import annotations

import argparse
import contextlib
import copy
import math
import multiprocessing
import os
import signal
import sys
import tempfile
import time
import warnings
from collections import Counter
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from multiprocessing.connection import Connection, wait
from multiprocessing.process import BaseProcess
from pathlib import Path
from typing import Any

import torch
from torch import nn
from torch.nn import functional as F

from engine import Batch, EngineConfig, MegaTrain, Recipe, clip_scale
from sweeps.tiny import VOCAB, causal_types, tiny_config

PAGE = Path(__file__).parents[1] / "docs" / "architectures.md"
TIME_LIMIT_S = 300.0
"""Seconds for one type in both dtypes; most take one."""
NUM_STEPS = 3
SHAPE = (2, 2, 23)
"""Micro-batches, rows, tokens; with `loss_chunk` a row's loss comes in two pieces of unlike
length."""
RECIPE = Recipe(lr=1e-3, weight_decay=0.1)
CONFIG = EngineConfig(checkpoint_interval=2, loss_chunk=17, num_threads=1)
DTYPES = (torch.float32, torch.bfloat16)
LOSS = {torch.float32: 1e-6, torch.bfloat16: 1e-3}
"""Largest relative difference of a loss that agrees."""
GRADIENT = {torch.float32: 3e-5, torch.bfloat16: 3e-2}
"""Largest norm of a difference of gradients that agrees, over the gradient's norm."""
FLOOR = 1e-3
"""Share of the largest gradient's norm that a parameter's is taken to have at least: the gradient
of a key's bias is zero but for rounding."""
AGREES, REFUSED, NOT_BUILT, FAILS = "agrees", "refused", "not built here", "FAILS"


@dataclass(frozen=True, kw_only=True)
class Trained:
    """What two runs are compared by."""

    losses: list[float]
    gradients: dict[str, torch.Tensor] = field(default_factory=dict)
    """Gradients of the first step, clipped, by name; without those of parameters that got none."""


@dataclass(frozen=True, kw_only=True)
class Verdict:
    """What was found of one type in one dtype."""

    kind: str
    """AGREES, REFUSED, NOT_BUILT or FAILS."""
    reason: str = ""
    loss: float = 0.0
    """Largest relative difference of a loss."""
    gradient: float = 0.0
    """Largest relative difference of a parameter's gradient."""

    def __str__(self) -> str:
        if self.kind == AGREES:
            return f"{AGREES}, losses to {self.loss:.0e}, gradients to {self.gradient:.0e}"
        return f"{self.kind}: {self.reason}"


def batches() -> Iterator[Batch]:
    """One a step. Token 0 pads and token 1 ends; neither is among them."""
    num_micro_batches, rows, seq_len = SHAPE
    for step in range(NUM_STEPS):
        generator = torch.Generator().manual_seed(step)
        shape = (num_micro_batches, rows, seq_len + 1)
        tokens = torch.randint(2, VOCAB, shape, generator=generator)
        yield Batch(tokens=tokens[..., :-1].contiguous(), labels=tokens[..., 1:].contiguous())


def make_model(config: Any, dtype: torch.dtype) -> nn.Module:
    """The library's model with its own random weights, exact in bfloat16; norms and biases
    differ."""
    from transformers import AutoModelForCausalLM

    torch.manual_seed(0)
    from_config: Callable[..., Any] = AutoModelForCausalLM.from_config
    model = from_config(config).float().train()
    with torch.no_grad():
        for parameter in model.parameters():
            if parameter.ndim == 1:
                parameter.add_(torch.randn_like(parameter) * 0.1)
            parameter.copy_(parameter.bfloat16())
    return model.to(dtype)  # type: ignore[no-any-return]


def train_plain(model: nn.Module) -> Trained:
    """AdamW on an fp32 master; gradients summed over micro-batches and clipped in fp32."""
    named = dict(model.named_parameters())
    masters = {name: parameter.detach().float().clone() for name, parameter in named.items()}
    adamw = torch.optim.AdamW(
        masters.values(),
        lr=RECIPE.lr,
        betas=(RECIPE.beta1, RECIPE.beta2),
        eps=RECIPE.eps,
        weight_decay=RECIPE.weight_decay,
    )
    losses: list[float] = []
    first: dict[str, torch.Tensor] = {}
    for batch in batches():
        loss, sums = _summed_gradients(model, batch)
        norms = [torch.linalg.vector_norm(gradient.double()) for gradient in sums.values()]
        scale = clip_scale(torch.linalg.vector_norm(torch.stack(norms)), RECIPE.clip_norm).float()
        for name, master in masters.items():
            master.grad = sums[name] * scale if name in sums else None
        first = first or {name: sums[name] * scale for name in sums}
        adamw.step()
        with torch.no_grad():
            for name, parameter in named.items():
                parameter.copy_(masters[name])
        losses.append(loss)
    return Trained(losses=losses, gradients=first)


def _summed_gradients(model: nn.Module, batch: Batch) -> tuple[float, dict[str, torch.Tensor]]:
    total = 0.0
    sums: dict[str, torch.Tensor] = {}
    for tokens, labels in zip(batch.tokens, batch.labels, strict=True):
        model.zero_grad()
        logits = model(input_ids=tokens, use_cache=False).logits.float().flatten(0, -2)
        loss = F.cross_entropy(logits, labels.flatten(), reduction="sum") / batch.num_tokens
        loss.backward()  # type: ignore[no-untyped-call]
        total += loss.item()
        for name, parameter in model.named_parameters():
            if parameter.grad is not None:
                gradient = parameter.grad.float()
                sums[name] = sums[name] + gradient if name in sums else gradient
    return total, sums


def make_engine(model: nn.Module, dtype: torch.dtype) -> MegaTrain:
    """The engine around `model`, which becomes its own."""
    num_micro_batches, rows, seq_len = SHAPE
    return MegaTrain(
        model,
        recipe=RECIPE,
        micro_batch_size=rows,
        seq_len=seq_len,
        num_micro_batches=num_micro_batches,
        dtype=dtype,
        config=CONFIG,
    )


def train_engine(engine: MegaTrain, weights: Mapping[str, torch.Tensor]) -> Trained:
    """The same steps by the engine; its gradients are read off the first moments."""
    engine.setup(weights.items())
    losses: list[float] = []
    first: dict[str, torch.Tensor] = {}
    for batch in batches():
        losses.append(engine.train_step(batch).item())
        first = first or {name: m / (1 - RECIPE.beta1) for name, m in engine.moments()}
    engine.close()
    return Trained(losses=losses, gradients=first)


def compare(found: Trained, expected: Trained, dtype: torch.dtype) -> Verdict:
    """AGREES or FAILS, with the largest differences."""
    pairs = zip(found.losses, expected.losses, strict=True)
    loss = _largest([abs(ours - plain) / abs(plain) for ours, plain in pairs])
    norms = {name: gradient.norm().item() for name, gradient in expected.gradients.items()}
    least, differences = FLOOR * max(norms.values()), {}
    for name, ours in found.gradients.items():
        plain = expected.gradients.get(name, torch.zeros_like(ours))
        differences[name] = (ours - plain).norm().item() / max(norms.get(name, 0.0), least)
    gradient = _largest(list(differences.values()))
    if loss <= LOSS[dtype] and gradient <= GRADIENT[dtype]:
        return Verdict(kind=AGREES, loss=loss, gradient=gradient)
    names = [name for name, value in differences.items() if not value <= GRADIENT[dtype]]
    reason = f"losses differ to {loss:.1e}, gradients to {gradient:.1e} ({', '.join(names[:3])})"
    return Verdict(kind=FAILS, reason=reason, loss=loss, gradient=gradient)


def _largest(values: Sequence[float]) -> float:
    """NaN where one is, which agrees with nothing."""
    return math.nan if any(map(math.isnan, values)) else max(values)


def judge(model_type: str, dtype: torch.dtype) -> Verdict:
    """Build, train twice, compare."""
    try:
        model = make_model(tiny_config(model_type), dtype)
        skeleton = copy.deepcopy(model)
        weights = {name: p.detach().clone() for name, p in model.named_parameters()}
        expected = train_plain(model)
        if not all(map(math.isfinite, expected.losses)):
            raise ValueError(f"its losses are {expected.losses}")
    except Exception as error:
        return Verdict(kind=NOT_BUILT, reason=_one_line(error))
    try:
        engine = make_engine(skeleton, dtype)
    except Exception as error:
        refused = isinstance(error, ValueError) and str(error).startswith("model")
        if refused and "\n" not in str(error):
            return Verdict(kind=REFUSED, reason=str(error))
        return Verdict(kind=FAILS, reason=_one_line(error))
    try:
        return compare(train_engine(engine, weights), expected, dtype)
    except Exception as error:
        return Verdict(kind=FAILS, reason=_one_line(error))


def _one_line(error: Exception) -> str:
    text = " ".join(str(error).split())
    return f"{type(error).__name__}: {text if len(text) <= 160 else text[:160].strip() + ' ...'}"


def _child(model_type: str, answers: Connection) -> None:
    """One type, in a process that whatever goes wrong in ends alone, and silently."""
    null = os.open(os.devnull, os.O_WRONLY)
    os.dup2(null, 1)
    os.dup2(null, 2)
    warnings.simplefilter("ignore")
    answers.send([judge(model_type, dtype) for dtype in DTYPES])
    answers.close()
    os._exit(0)  # without torch's and the library's own endings, which take longer than the work


@dataclass(frozen=True, kw_only=True)
class _Running:
    model_type: str
    process: BaseProcess
    deadline: float


def judge_all(types: Sequence[str], workers: int) -> Iterator[tuple[str, list[Verdict]]]:
    """(type, a verdict a dtype) as they come, `workers` types at a time."""
    _import_all()
    context, waiting = multiprocessing.get_context("fork"), list(reversed(types))
    running: dict[Connection, _Running] = {}
    try:
        while waiting or running:
            while waiting and len(running) < workers:
                receiver, sender = context.Pipe(duplex=False)
                process = context.Process(target=_child, args=(waiting[-1], sender))
                process.start()
                sender.close()
                limit = time.monotonic() + TIME_LIMIT_S
                running[receiver] = _Running(
                    model_type=waiting.pop(), process=process, deadline=limit
                )
            yield from _ended(running)
    finally:
        for one in running.values():
            one.process.kill()


def _import_all() -> None:
    """What every child needs is imported once, before the first is forked."""
    import transformers
    import transformers.modeling_layers
    import transformers.modeling_utils

    assert transformers.modeling_utils
    transformers.logging.set_verbosity_error()  # type: ignore[no-untyped-call]
    torch.set_num_threads(1)


def _ended(running: dict[Connection, _Running]) -> Iterator[tuple[str, list[Verdict]]]:
    """Those that answered, died or took too long; waits for one of them."""
    first = min(one.deadline for one in running.values())
    answered = wait(list(running), timeout=max(0.0, first - time.monotonic()))
    for receiver, one in list(running.items()):
        if receiver not in answered and time.monotonic() < one.deadline:
            continue
        del running[receiver]
        verdicts = None
        if receiver in answered:
            with contextlib.suppress(EOFError):
                verdicts = receiver.recv()
        if verdicts is None and receiver not in answered:
            one.process.kill()
        one.process.join()
        yield one.model_type, verdicts or [_death(one.process, receiver in answered)] * len(DTYPES)
        receiver.close()


def _death(process: BaseProcess, by_itself: bool) -> Verdict:
    code = process.exitcode or 0
    how = f"killed by {signal.Signals(-code).name}" if code < 0 else f"ended with exit code {code}"
    reason = how if by_itself else f"took more than {TIME_LIMIT_S:.0f} s"
    return Verdict(kind=FAILS, reason=reason)


def page(found: Mapping[str, Sequence[Verdict]], version: str) -> str:
    """docs/architectures.md: the same bytes wherever the same is found."""
    counts = [Counter(verdicts[i].kind for verdicts in found.values()) for i in range(len(DTYPES))]
    kinds = (AGREES, REFUSED, NOT_BUILT)
    summary = ["| | float32 | bfloat16 |", "|---|---:|---:|"]
    summary += [f"| {kind} | {' | '.join(str(c[kind]) for c in counts)} |" for kind in kinds]
    rows = ["| model type | float32 | bfloat16 |", "|---|---|---|"]
    rows += [_row(model_type, verdicts) for model_type, verdicts in sorted(found.items())]
    return "\n".join([_HEAD.format(version=version), *summary, "", _NOTES, *rows, ""])


def _row(model_type: str, verdicts: Sequence[Verdict]) -> str:
    cells = [_cell(verdict, dtype) for verdict, dtype in zip(verdicts, DTYPES, strict=True)]
    return f"| {model_type} | {cells[0]} | {'the same' if cells[1] == cells[0] else cells[1]} |"


def _cell(verdict: Verdict, dtype: torch.dtype) -> str:
    if verdict.kind == AGREES:
        return f"agrees, losses ≤ {LOSS[dtype]:.0e}, gradients ≤ {GRADIENT[dtype]:.0e}"
    reason = verdict.reason.removeprefix("model: ").replace("|", "\\|")
    return f"{verdict.kind}: {reason}"


_HEAD = """# Architectures

Every causal language model of transformers {version}, built tiny with random weights and trained
for three steps by the engine and by plain PyTorch. `python -m sweeps.architectures` tries them all
and writes this page; nothing in it is written by hand. A name after the command tries that type
alone and prints the differences themselves.
"""
_NOTES = f"""\
- *agrees*: every loss of the three steps, and every parameter's gradient in the first, is what
  plain training of the same model gives, up to the bound shown. Differences are relative; a
  gradient's is a norm over a norm.
- *refused*: `MegaTrain(model, ...)` raises this line before it allocates anything.
- *not built here*: the library's own model does not run by itself in this dtype with the tiny
  configuration (`sweeps/tiny.py`), so there is nothing to compare with.

Plain training is the cross-entropy of the logits. What a model would add to a loss of its own, such
as the auxiliary loss of a mixture's router, no system here trains; a configuration that asks for it
(`output_router_logits=true`) is refused. Types are tried with {VOCAB} tokens, dropout 0 and the
attention that the library chooses: another setting of a type may be refused where this one is not.
"""


def write_whole(path: Path, text: str) -> None:
    """The file appears whole or stays as it was."""
    with tempfile.NamedTemporaryFile(
        "w", dir=path.parent, prefix=f".{path.name}-", delete=False
    ) as new:
        new.write(text)
    os.chmod(new.name, 0o644)
    os.replace(new.name, path)


def main(arguments: Sequence[str] | None = None) -> int:
    """Print a verdict a line; 0 where nothing fails, 1 where something does, 2 for a wrong name."""
    parser = argparse.ArgumentParser(
        prog="python -m sweeps.architectures", description=(__doc__ or "").splitlines()[0]
    )
    parser.add_argument(
        "types", nargs="*", metavar="TYPE", help="model types; all, if none is given"
    )
    cores = len(os.sched_getaffinity(0))
    parser.add_argument("--workers", type=int, default=cores, help="types tried at a time")
    args = parser.parse_args(arguments)
    known = causal_types()
    for name in args.types:
        if name not in known:
            parser.error(
                f"TYPE: got {name!r}, allowed the {len(known)} causal types of transformers"
            )
    if args.workers < 1:
        parser.error(f"--workers: got {args.workers}, allowed an integer >= 1")
    found: dict[str, list[Verdict]] = {}
    for model_type, verdicts in judge_all(args.types or known, args.workers):
        found[model_type] = verdicts
        for dtype, verdict in zip(DTYPES, verdicts, strict=True):
            print(f"{model_type} {str(dtype).removeprefix('torch.')}: {verdict}", flush=True)
    failed = sorted(t for t, verdicts in found.items() if any(v.kind == FAILS for v in verdicts))
    if failed:
        print(f"{len(failed)} of {len(found)} fail: {', '.join(failed)}", file=sys.stderr)
        return 1
    if not args.types:
        import transformers

        write_whole(PAGE, page(found, transformers.__version__))
        print(f"wrote {os.path.relpath(PAGE)}")
    return 0


if __name__ == "__main__":
    sys.exit(main())
