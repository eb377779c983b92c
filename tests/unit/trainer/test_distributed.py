"""Which device a process takes, and when processes wait for each other."""

import threading

import pytest
import torch
import torch.distributed as dist

from shards import Dataset, PackError
from trainer import TrainConfig, run
from trainer.distributed import World, in_turn, parallelize, start
from trainer.model.loading import load_model
from trainer.model.loss import PackedLM


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


def test_apples_gpu_is_refused_with_what_it_lacks():
    with pytest.raises(PackError, match="'mps': losses are summed in float64, which Apple's GPU does not have"):
        start("mps")


@pytest.mark.parametrize(("shard", "host"), [("full", True), ("none", False)])
def test_a_model_to_be_sliced_is_loaded_in_host_memory(dataset: Dataset, model_config, monkeypatch, shard, host):
    asked = []
    monkeypatch.setattr(run, "load_model", lambda *args, **fields: asked.append(fields) or load_model(*args, **fields))
    config = TrainConfig(dataset=dataset.path, model=model_config(), out="out", dtype="fp32", shard=shard)
    run.build_model(config, World(device=torch.device("cpu")), [dataset])
    assert [fields["host"] for fields in asked] == [host]


@pytest.mark.parametrize("dtype", ["fp32", "bf16"])
def test_each_of_two_processes_keeps_half_of_every_weight_on_its_device(model_config, dtype):
    from torch.distributed.device_mesh import init_device_mesh
    from torch.distributed.tensor import DTensor
    from torch.testing._internal.distributed.fake_pg import FakeStore

    model = load_model(model_config(), device="cpu", host=True).model
    whole = {name: weight.shape for name, weight in model.named_parameters()}
    dist.init_process_group("fake", rank=0, world_size=2, store=FakeStore())
    try:
        mesh = init_device_mesh("cpu", (2,))
        module = PackedLM(model, backend="cpu", plain_head=True)
        parallelize(module, model, World(rank=0, size=2, device=torch.device("cpu")), mesh, dtype)
        for name, weight in model.named_parameters():
            assert isinstance(weight, DTensor), name
            rows, *rest = whole[name]
            assert tuple(weight.to_local().shape) == (-(-rows // 2), *rest)
    finally:
        dist.destroy_process_group()
    assert len(whole) > 10
