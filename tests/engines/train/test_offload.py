"""What moves when. The meta device stands in for a GPU: tensors know where they are, and nothing needs to be there."""

import pytest
import torch
from torch import nn

from grpo_dist.engines.train.offload import Offload, move_states, saved_in_cpu_memory

META = torch.device("meta")


class Recorder(nn.Linear):
    """Remembers where it was sent."""

    def __init__(self) -> None:
        super().__init__(2, 2)
        self.sent: list[str] = []

    def to(self, device: torch.device | str) -> "Recorder":  # type: ignore[override]
        self.sent.append(str(device))
        return self


def stepped(model: nn.Module) -> torch.optim.AdamW:
    """An optimizer that has states."""
    optimizer = torch.optim.AdamW(model.parameters())
    model(torch.ones(1, 2)).sum().backward()
    optimizer.step()
    return optimizer


def places(optimizer: torch.optim.Optimizer) -> set[str]:
    return {value.device.type for state in optimizer.state.values() for value in state.values()}


def test_weights_and_states_come_and_go() -> None:
    model = Recorder()
    optimizer = stepped(model)
    offload = Offload(model, optimizer, META, parameters=True, optimizer_states=True)
    with offload.on_device():
        assert model.sent == ["meta"]
        assert places(optimizer) == {"cpu"}, "only the update needs the states"
    assert model.sent == ["meta", "cpu"]
    move_states(optimizer, META)
    assert places(optimizer) == {"meta"}


def test_states_come_for_the_update_and_an_error_sends_them_away(monkeypatch: pytest.MonkeyPatch) -> None:
    model = Recorder()
    moves: list[torch.device] = []
    offload = Offload(model, stepped(model), META, optimizer_states=True)
    monkeypatch.setattr("grpo_dist.engines.train.offload.move_states", lambda optimizer, device: moves.append(device))
    with pytest.raises(ValueError, match="stop"), offload.on_device(optimizer=True):
        raise ValueError("stop")
    assert moves == [META, torch.device("cpu")]
    assert model.sent == []


def test_a_step_brings_the_states_alone_and_an_error_sends_them_away(monkeypatch: pytest.MonkeyPatch) -> None:
    model = Recorder()
    moves: list[torch.device] = []
    monkeypatch.setattr("grpo_dist.engines.train.offload.move_states", lambda optimizer, device: moves.append(device))
    offload = Offload(model, stepped(model), META, parameters=True, optimizer_states=True)
    with pytest.raises(ValueError, match="stop"), offload.states_on_device():
        raise ValueError("stop")
    assert moves == [META, torch.device("cpu")]
    assert model.sent == []
    with Offload(model, stepped(model), META, parameters=True).states_on_device():
        pass
    assert len(moves) == 2


def test_nothing_moves_on_cpu_or_unasked() -> None:
    model = Recorder()
    for offload in (
        Offload(model, stepped(model), torch.device("cpu"), parameters=True, optimizer_states=True),
        Offload(model, stepped(model), META),
        Offload(model, None, META, optimizer_states=True),
    ):
        with offload.on_device(optimizer=True):
            pass
    assert model.sent == []


def test_values_survive_the_move() -> None:
    model = nn.Linear(2, 2)
    optimizer = stepped(model)
    before = {name: value.clone() for name, value in optimizer.state[model.weight].items()}
    move_states(optimizer, torch.device("cpu"))
    for name, value in before.items():
        assert torch.equal(optimizer.state[model.weight][name], value)


@pytest.mark.parametrize("shares", [False, True])
def test_on_a_shared_gpu_what_is_free_is_given_back(monkeypatch: pytest.MonkeyPatch, *, shares: bool) -> None:
    """Also where nothing is offloaded."""
    given_back = []
    monkeypatch.setattr(torch.cuda, "empty_cache", lambda: given_back.append(True))
    with Offload(nn.Linear(2, 2), None, torch.device("cuda"), shares_device=shares).on_device():
        assert not given_back, "only at the end of a phase"
    assert given_back == [True] * shares


def test_on_cpu_what_autograd_saves_stays_and_on_gpus_it_is_copied() -> None:
    x = torch.ones(3, requires_grad=True)
    places = []
    for device in ("cpu", "cuda"):
        with saved_in_cpu_memory(device):
            y = x.exp()
        places.append(y.grad_fn._saved_result.data_ptr() == y.data_ptr())  # type: ignore[union-attr]
    assert places == [True, False], "without a GPU the copy is in memory that is not pinned"
    y.sum().backward()
    torch.testing.assert_close(x.grad, torch.ones(3).exp())
