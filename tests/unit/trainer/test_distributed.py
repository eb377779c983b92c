"""Which device a process takes, and when processes wait for each other."""

import threading

import pytest
import torch
import torch.distributed as dist

from shards import PackError
from trainer.distributed import World, in_turn, start


@pytest.fixture
def gpus(monkeypatch) -> list:
    """A machine that says it has GPUs; the devices that were made current."""
    chosen: list = []
    monkeypatch.setattr(torch.cuda, "is_available", lambda: True)
    monkeypatch.setattr(torch.cuda, "set_device", lambda device: chosen.append(str(device)))
    monkeypatch.delenv("WORLD_SIZE", raising=False)
    return chosen


@pytest.mark.parametrize(("device", "taken"), [("cuda:1", "cuda:1"), ("cuda", "cuda:0"), (None, "cuda:0")])
def test_the_device_that_is_asked_for_becomes_the_current_one(gpus, device, taken):
    assert str(start(device).device) == taken
    assert gpus == [taken]


def test_one_device_for_several_processes_is_refused(gpus, monkeypatch):
    monkeypatch.setenv("WORLD_SIZE", "2")
    with pytest.raises(PackError, match=r"`device`: 'cuda:0' is one device for all processes; expected cuda"):
        start("cuda:0")
    assert gpus == []


@pytest.mark.parametrize("device", ["tpu", "cuda:x", "cuda:-1", "gpu:0"])
def test_a_device_that_is_none_is_refused(gpus, device):
    with pytest.raises(PackError, match="expected cuda, cuda:N or cpu"):
        start(device)


def test_processes_of_a_machine_take_turns(monkeypatch):
    """What each needs of host memory is there once, not once for each."""
    size, inside, most, order = 4, 0, 0, []
    barrier = threading.Barrier(size, timeout=30)
    monkeypatch.delenv("LOCAL_RANK", raising=False)
    monkeypatch.delenv("LOCAL_WORLD_SIZE", raising=False)
    monkeypatch.setattr(dist, "new_group", lambda **_: None)
    monkeypatch.setattr(dist, "barrier", lambda _: barrier.wait())

    def process(rank: int) -> None:
        nonlocal inside, most
        with in_turn(World(rank=rank, size=size, device=torch.device("cpu"))):
            inside += 1
            most = max(most, inside)
            order.append(rank)
            inside -= 1

    threads = [threading.Thread(target=process, args=(rank,)) for rank in reversed(range(size))]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join(60)
    assert order == [0, 1, 2, 3]
    assert most == 1
