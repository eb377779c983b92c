"""Which device a process takes."""

import pytest
import torch

from shards import PackError
from trainer.distributed import start


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
