"""What a layer's graph holds, moved to the host and back: the same gradients, whatever the saved
tensors are views of."""

from collections.abc import Callable

import pytest
import torch

from engine.layers.offload import ALIGNMENT, Offloaded


@pytest.fixture(autouse=True)
def everything_moves(monkeypatch):
    monkeypatch.setattr("engine.layers.offload.SMALL", 0)


Work = Callable[[torch.Tensor], torch.Tensor]


Graph = tuple[torch.Tensor, torch.Tensor]


def kept_by(work: Work, value: torch.Tensor, room: int = 1 << 20) -> tuple[Offloaded, Graph]:
    """What the graph of work(value) holds, and (value, work(value)). room: bytes of the host
    slab."""
    kept = Offloaded(weights={}, home=torch.zeros(1), shared=set(), capacity=room)
    with kept.hooks():
        return kept, (value, work(value))


def moved_there_and_back(kept: Offloaded, graph: Graph) -> torch.Tensor:
    """The gradient of the graph's input, after the device memory was given up and filled anew."""
    slab = torch.zeros(kept.num_bytes, dtype=torch.uint8)
    for source, target in kept.copies(slab):
        target.copy_(source)
    kept.drop()
    kept.stage()
    for part in range(3):
        for target, source in kept.copies(slab, part, 3):
            target.copy_(source)
    value, output = graph
    gradient: torch.Tensor = torch.autograd.grad(output.sum(), value)[0]
    return gradient


WORKS: dict[str, Work] = {
    "a view and its longer base": lambda x: _view_and_base(x + 1),
    "a base and its shorter view": lambda x: _view_and_base(x.exp()),  # which saves its result
    "transposed": lambda x: (x.exp().T @ x.exp()).square(),
    "every other column": lambda x: x.exp()[:, ::2].square(),
    "every other column of what nothing saves": lambda x: (x + 1)[:, ::2].square(),
    "the last columns": lambda x: x.exp()[:, 3:].square(),
    "expanded": lambda x: x.exp()[:, :1].expand(-1, 7).square(),
}


def _view_and_base(base: torch.Tensor) -> torch.Tensor:
    return base[:2].square().sum() + base.square()


@pytest.mark.parametrize("name", WORKS)
def test_saved_tensors_come_back_as_they_were(name):
    torch.manual_seed(0)
    value = torch.randn(6, 8, requires_grad=True)
    kept, graph = kept_by(WORKS[name], value)
    assert kept.num_bytes > 0
    expected = torch.autograd.grad(WORKS[name](value).sum(), value)[0]
    assert torch.equal(moved_there_and_back(kept, graph), expected)


def test_a_view_of_what_moves_does_not_move_again():
    kept, _ = kept_by(lambda x: _view_and_base(x.exp()), torch.randn(6, 8, requires_grad=True))
    assert kept.num_bytes == ALIGNMENT


def test_a_saved_tensor_that_the_layer_writes_in_place_is_found():
    """What leaves for the host would not be what autograd saved."""

    def writes(value: torch.Tensor) -> torch.Tensor:
        saved = value.exp()
        saved.add_(1)
        return saved

    kept, _ = kept_by(writes, torch.randn(6, 8, requires_grad=True))
    with pytest.raises(AssertionError, match="written in place"):
        kept.drop()


def test_what_has_no_room_stays_and_is_right():
    value = torch.randn(6, 8, requires_grad=True)
    expected = torch.autograd.grad(value.exp().sin().exp().sum(), value)[0]
    kept, graph = kept_by(lambda x: x.exp().sin().exp(), value, room=value.nbytes)
    assert kept.num_bytes == ALIGNMENT, "the first of two tensors"
    assert torch.equal(moved_there_and_back(kept, graph), expected)
