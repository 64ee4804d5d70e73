"""A model tried without values or memory, before anything is allocated: can it be trained by
layers, and how many bytes does a layer take?

`rehearse` does on fake tensors (torch's FakeTensorMode: shapes, dtypes and graphs) what a step will
do: the model's way into its layers, one layer of each kind, and its tail. What cannot be taken
apart is refused here, in one line, for what it does and not by its name. `count_layers` counts what
is alive while one layer of each kind runs and is differentiated. Invariant: nothing that trains
runs in here; a copy is tried.
"""

from __future__ import annotations

import contextlib
import copy
import logging
from collections.abc import Iterator, Sequence
from dataclasses import replace
from typing import Any

import torch
from torch import nn
from torch._subclasses import fake_tensor
from torch.utils._python_dispatch import TorchDispatchMode
from torch.utils._pytree import tree_flatten, tree_unflatten

from engine.config import RefusedError
from engine.layers.decoder import Decoder, Recording
from engine.layers.live import LiveBytes
from engine.layers.randomness import refusal
from engine.layers.template import KEEPING, Call, Template

ROWS, TOKENS = 2, 16
"""Most that is tried: a model that walks through the tokens in Python would take long over more."""
CHUNKS = 64
"""Most chunks of a micro-batch that are counted; of more, what each takes is taken to be the same.
"""
UNTRIED = (
    fake_tensor.DataDependentOutputException,
    fake_tensor.DynamicOutputShapeException,
    fake_tensor.UnsupportedFakeTensorException,
    fake_tensor.UnsupportedOperatorException,
    NotImplementedError,
    ImportError,
)
"""What says that fake tensors cannot do it, not that the model cannot: the first step will tell."""
INPUTS = (ValueError, TypeError)
"""What a model raises that wants other inputs than tokens, whole or not."""


def rehearse(
    decoder: Decoder, *, dtype: torch.dtype, device: torch.device, micro_batch: tuple[int, int]
) -> None:
    """Try the model, and tell `decoder` what its layers return, which chunked MLPs' outputs their
    recomputations need, and which parameters are used before them, or on both sides.

    micro_batch: (rows, seq_len). Raises RefusedError, one line, where the engine would train
    another model or none.
    """
    device = device if torch.cuda.is_available() else torch.device("cpu")
    mode = fake_tensor.FakeTensorMode(allow_non_fake_inputs=True)
    twin = copy.deepcopy(decoder, _fakes(decoder, mode, dtype, device))
    twin.expect_no_random_numbers()
    quiet = _silent(fake_tensor.__name__)
    with quiet, mode, torch.enable_grad(), torch.autograd.set_multithreading_enabled(False):
        tokens = torch.zeros(
            min(micro_batch[0], ROWS), min(micro_batch[1], TOKENS), dtype=torch.int64, device=device
        )
        for index in _first_of_each_kind(twin):
            with _trying(twin, "on the way into its layers"):
                recording = _enter(twin, tokens, last=index)
                with _trying(twin, f"in layer {index}"):
                    _try_layer(twin, recording, index)
        with _trying(twin, "on the way into its layers"):
            hidden = _enter(twin, tokens).hidden
            decoder.assign(_used(twin, hidden))
            with _trying(twin, "after its layers"):
                decoder.tied = not decoder.blocks[0].keys().isdisjoint(_leave(twin, hidden))
    for template, tried in zip(decoder.templates, twin.templates, strict=True):
        template.num_outputs = tried.num_outputs
        if template.mlp is not None and tried.mlp is not None:
            template.mlp.only_added = tried.mlp.only_added


def count_layers(
    decoder: Decoder,
    *,
    dtype: torch.dtype,
    micro_batch: tuple[int, int],
    chunk: int = 0,
    compiled: bool = False,
) -> tuple[int, int]:
    """Bytes that a layer takes, the most of any kind: what its graph holds, its output too; and
    what its recomputation and backward take at their peak, but for the gradients of weights.
    Counted on fake tensors, without masks; 0 for what these cannot say, as a compiled backward's
    peak.

    micro_batch: (rows, seq_len). chunk: tokens that its MLP and norms take at a time, 0 all.
    """
    (rows, seq_len), cpu = micro_batch, torch.device("cpu")
    mode = fake_tensor.FakeTensorMode(allow_non_fake_inputs=True)
    twin = copy.deepcopy(decoder, _fakes(decoder, mode, dtype, cpu))
    twin.expect_no_random_numbers()
    length = min(seq_len, -(-CHUNKS * chunk // rows)) if chunk else seq_len
    found, quiet = [(0, 0)], _silent(fake_tensor.__name__)
    with quiet, mode, torch.enable_grad(), torch.autograd.set_multithreading_enabled(False):
        tokens = torch.zeros(rows, length, dtype=torch.int64)
        for index in _first_of_each_kind(twin):
            with contextlib.suppress(Exception):  # the closed form is left
                recording, template = _enter(twin, tokens, last=index), twin.templates[index]
                call = _without_mask(recording.calls[index])
                given = (recording.hidden.detach(), call, index)
                whole = compiled and not chunk
                found.append((_compiled_bytes if whole else _eager_bytes)(template, *given))
    held, peak = (max(counts) * seq_len // length for counts in zip(*found, strict=True))
    return held, peak


def _without_mask(call: Call) -> Call:
    """Of fake tensors transformers makes a mask of the whole square, which a real call goes
    without."""
    kwargs = {name: None if name == "attention_mask" else v for name, v in call.kwargs.items()}
    return replace(call, kwargs=kwargs)


def _eager_bytes(
    template: Template, hidden: torch.Tensor, call: Call, index: int
) -> tuple[int, int]:
    weights, grad = dict(template.module.named_parameters()), torch.empty_like(hidden)
    existing = (hidden, grad, weights, call.args, dict(call.kwargs))
    with LiveBytes(existing) as live:
        _, grads = template.backward(weights, hidden, call, index, grad)
    peak = live.most - sum(given.nbytes for given in grads if given is not None)
    del grads
    with LiveBytes(existing) as live:
        graph = template.forward_with_graph(weights, hidden, call, index)
        held = live.now
    del graph
    return held, peak


def _compiled_bytes(
    template: Template, hidden: torch.Tensor, call: Call, index: int
) -> tuple[int, int]:
    """By the graph that torch.compile would cut the layer's forward to."""
    # with these the compiler would be imported by every command, in a second
    from torch._functorch.aot_autograd import aot_function
    from torch._functorch.partitioners import min_cut_rematerialization_partition
    from torch._inductor.decomposition import select_decomp_table

    weights = dict(template.module.named_parameters())
    given, tree = tree_flatten((weights, call.args, dict(call.kwargs)))
    tensors = [leaf for leaf in given if isinstance(leaf, torch.Tensor)]

    def forward(hidden: torch.Tensor, *tensors: torch.Tensor) -> torch.Tensor:
        left = iter(tensors)
        leaves = [next(left) if isinstance(leaf, torch.Tensor) else leaf for leaf in given]
        weights, args, kwargs = tree_unflatten(leaves, tree)
        return template.forward(weights, hidden, Call(args=args, kwargs=kwargs), index)

    held = [0]

    def count(gm: torch.fx.GraphModule, example_inputs: Sequence[Any]) -> Any:
        with LiveBytes(example_inputs) as live:
            outputs = gm(*example_inputs)
            held[0] = live.now
        del outputs
        return gm

    traced = aot_function(
        forward,
        fw_compiler=count,
        bw_compiler=lambda gm, example_inputs: gm,
        partition_fn=min_cut_rematerialization_partition,
        decompositions=select_decomp_table(),
    )
    with KEEPING:
        traced(hidden.requires_grad_(), *tensors)
    return held[0], 0


def _fakes(
    decoder: Decoder, mode: fake_tensor.FakeTensorMode, dtype: torch.dtype, device: torch.device
) -> dict[int, Any]:
    """What `copy.deepcopy` takes for each parameter and buffer."""
    modules = [decoder.model, *(template.module for template in decoder.templates)]
    found: dict[int, Any] = {}
    with mode:
        for module in dict.fromkeys(modules):  # layers share templates, and templates a module
            for parameter in module.parameters():
                found[id(parameter)] = nn.Parameter(
                    torch.empty(parameter.shape, dtype=dtype, device=device)
                )
            for buffer in module.buffers():
                found[id(buffer)] = mode.from_tensor(buffer).to(device)
    return found


@contextlib.contextmanager
def _trying(twin: Decoder, where: str) -> Iterator[None]:
    """Whatever the model raises is a refusal, but for what fake tensors cannot do, whole or
    apart."""
    try:
        yield
    except RefusedError:
        raise
    except UNTRIED:
        pass
    except Exception as error:
        if not isinstance(error, INPUTS) and _one_line(error) == _fails_whole(twin):
            return
        raise RefusedError(
            f"model: {type(twin.model).__name__} cannot be run apart {where} ({_one_line(error)}), "
            "allowed decoder-only models "
            "that take tokens alone and whose layers only the hidden states connect; choose "
            "another model"
        ) from error


def _fails_whole(twin: Decoder) -> str:
    """What the whole model raises on fake tensors, where some kernels accept less than they do."""
    recorders = [layer.__dict__.pop("forward") for layer in twin.layers]
    tokens = torch.zeros(
        ROWS, TOKENS, dtype=torch.int64, device=next(twin.model.parameters()).device
    )
    try:
        twin.model(input_ids=tokens, use_cache=False)
    except Exception as error:
        return _one_line(error)
    finally:
        for layer, recorder in zip(twin.layers, recorders, strict=True):
            layer.forward = recorder
    return ""


def _one_line(error: Exception) -> str:
    return f"{type(error).__name__}: {' '.join(str(error).split())}"[:200]


@contextlib.contextmanager
def _silent(name: str) -> Iterator[None]:
    """torch logs what a kernel's shapes refuse, which is what is asked."""
    logger = logging.getLogger(name)
    level = logger.level
    logger.setLevel(logging.CRITICAL + 1)
    try:
        yield
    finally:
        logger.setLevel(level)


def _first_of_each_kind(twin: Decoder) -> list[int]:
    """The first layer of each template; of those that differ in settings alone the first."""
    found: dict[Any, int] = {}
    for index, template in enumerate(twin.templates):
        modules = tuple((path, type(module)) for path, module in template.module.named_modules())
        found.setdefault((modules, tuple(twin.blocks[index + 1].items())), index)
    return list(found.values())


class _NothingAtRandom(TorchDispatchMode):  # type: ignore[no-untyped-call]
    """A random number drawn alone is 0: what is left out with some probability is left out."""

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        result = func(*args, **(kwargs or {}))
        drawn = torch.Tag.nondeterministic_seeded in func.tags and isinstance(result, torch.Tensor)
        return torch.tensor(0.0, dtype=result.dtype) if drawn and not result.ndim else result


class _Drawing(TorchDispatchMode):  # type: ignore[no-untyped-call]
    """Notes whether random numbers are drawn for a tensor. Attention kernels, which may and need
    not, are left to the first step, and so is a number drawn alone."""

    found = False

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        result = func(*args, **(kwargs or {}))
        random = torch.Tag.nondeterministic_seeded in func.tags and "attention" not in str(func)
        self.found |= random and isinstance(result, torch.Tensor) and result.ndim > 0
        return result


def _enter(twin: Decoder, tokens: torch.Tensor, last: int = -1) -> Recording:
    with _NothingAtRandom():  # type: ignore[no-untyped-call]
        return twin.record(tokens, None, last=last)


def _try_layer(twin: Decoder, recording: Recording, index: int) -> None:
    """One forward; every template of the same class learns what it returns."""
    template, call = twin.templates[index], recording.calls[index]
    hidden = recording.hidden.detach().requires_grad_()
    parameters = dict(template.module.named_parameters())
    drawing = _Drawing()  # type: ignore[no-untyped-call]
    try:
        with drawing:
            output = template.learn_outputs(parameters, hidden, call, index)
    finally:  # whatever fake tensors cannot do after it
        if drawing.found:
            raise RefusedError(refusal(template.module))
    if id(hidden) not in _leaves(output):
        raise RefusedError(
            f"model: what {type(template.module).__name__} returns has no gradient, allowed layers "
            "that can be differentiated; choose another model"
        )
    for other in twin.templates:
        if type(other.module) is type(template.module):
            other.num_outputs = template.num_outputs


def _used(twin: Decoder, output: torch.Tensor) -> set[str]:
    """Names of the outer parameters that the output depends on."""
    found = _leaves(output)
    return {name for name, parameter in twin.outer_parameters().items() if id(parameter) in found}


def _leave(twin: Decoder, hidden: torch.Tensor) -> set[str]:
    """What the logits of some hidden states depend on; it may be nothing that was before these."""
    hidden, given = (
        torch.empty_like(like).requires_grad_() for like in (hidden, twin.embeds_like(hidden))
    )
    logits, name = twin.logits(hidden, given), type(twin.model).__name__
    if logits.shape[:-1] != hidden.shape[:2]:
        raise RefusedError(
            f"model: {name} gives logits of shape {list(logits.shape)} for hidden states of shape "
            f"{list(hidden.shape)}, allowed one row a token; choose another model"
        )
    found = _leaves(logits)
    if id(hidden) not in found or id(given) in found:
        raise RefusedError(
            f"model: the logits of {name} depend on more than what its last layer gives, allowed "
            "that alone; choose another model"
        )
    return _used(twin, logits)


def _leaves(output: torch.Tensor) -> set[int]:
    """Identities of the tensors that a gradient of `output` would reach."""
    found, seen, todo = set(), set(), [output.grad_fn]
    while todo:
        node = todo.pop()
        if node is None or node in seen:
            continue
        seen.add(node)
        found.add(id(getattr(node, "variable", None)))
        todo.extend(below for below, _ in node.next_functions)
    return found
