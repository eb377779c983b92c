"""Training steps on fake CUDA tensors: python rehearse.py < job.json, with the fake device in LD_PRELOAD.

The run is set up for real on the CPU, then its weights become fake tensors of device "cuda", and `take_step` of the
product runs on batches of the product's loader under `FakeTensorMode`. No kernel runs; what fails is a host tensor
among device tensors, a dtype that an operator does not take, and every read of a value (`.item()`, `.tolist()`, a
boolean index): each would make the host wait for the device. Takes {name: job}, prints {name: result} as JSON.
"""

import dataclasses
import inspect
import json
import sys
import traceback
from contextlib import closing
from pathlib import Path

import torch
from torch import nn
from torch._subclasses.fake_tensor import FakeTensorMode, unset_fake_temporarily

DEVICE = torch.device("cuda", 0)
READS = ("DataDependentOutputException", "DynamicOutputShapeException")


class Event:
    """A CUDA event that has always happened."""

    def record(self, stream=None) -> None: ...

    def synchronize(self) -> None: ...


def pretend() -> None:
    """Answer for the GPU what torch's CPU build cannot ask it."""
    cuda = torch.cuda
    cuda.is_available = lambda: True
    cuda.device_count = lambda: 1
    cuda.get_device_capability = lambda device=None: (9, 0)
    cuda.get_device_name = lambda device=None: "NVIDIA H200"
    cuda.is_bf16_supported = lambda *_, **__: True
    cuda.current_device = lambda: 0
    cuda.set_device = lambda device: None
    cuda.max_memory_allocated = lambda device=None: 0
    cuda.current_stream = lambda device=None: None
    cuda.Event = Event
    sys.modules["bitsandbytes"] = None  # its import looks for the CUDA library that this torch was built with
    make = torch.tensor  # it would write to the device's memory, which there is not
    torch.tensor = lambda data, *, device=None, **kwargs: make(data, **kwargs).to(device)


def real_and_unpinned(make):
    """Keep host buffers real, since numpy fills them, and unpinned, since pinning needs a driver."""

    def make_buffers(*args, **kwargs) -> None:
        bound = inspect.signature(make).bind(*args, **kwargs)
        bound.arguments["pin"] = False
        with unset_fake_temporarily():
            make(*bound.args, **bound.kwargs)

    return make_buffers


def move(module: nn.Module, mode: FakeTensorMode) -> None:
    """Replace every parameter and buffer by a fake one on the device; what is tied stays tied."""
    moved: dict[int, torch.Tensor] = {}

    def fake(tensor: torch.Tensor) -> torch.Tensor:
        if id(tensor) not in moved:
            with mode:
                new = torch.empty(tensor.shape, dtype=tensor.dtype, device=DEVICE)
                is_weight = isinstance(tensor, nn.Parameter)
                moved[id(tensor)] = nn.Parameter(new, tensor.requires_grad) if is_weight else new
        return moved[id(tensor)]

    for part in module.modules():
        for tensors in (part._parameters, part._buffers):
            for name, tensor in tensors.items():
                if tensor is not None:
                    tensors[name] = fake(tensor)
        for name, value in vars(part).items():  # plain attributes stay where `model.to(device)` leaves them
            if isinstance(value, torch.Tensor):
                setattr(part, name, mode.from_tensor(value))


def sabotage(how: str, model: nn.Module) -> None:
    """Break the step on purpose: each way must be noticed."""

    def hook(_, inputs, out):
        if how == "item":
            out.sum().item()
        elif how == "tolist":
            out[0, 0].tolist()
        elif how == "boolean index":
            out[out > 0].sum()
        elif how == "host tensor":
            with unset_fake_temporarily():
                other = torch.ones(1, out.shape[1], 1)
            return out + other
        elif how == "fp32 heads":
            torch.set_autocast_dtype("cuda", torch.float32)
        return None

    next(part for part in model.modules() if isinstance(part, nn.Linear)).register_forward_hook(hook)


def watch(model: nn.Module) -> tuple[set[str], set[str]]:
    """Note the types that linear layers and grouped products of experts compute in."""
    linear, grouped = set(), set()
    for layer in model.modules():
        if isinstance(layer, nn.Linear):
            layer.register_forward_hook(lambda _, inputs, out: linear.add(str(out.dtype)))
    for name in ("grouped_mm", "_grouped_mm"):
        for home in (torch, nn.functional):
            if function := getattr(home, name, None):

                def noting(*args, function=function, **kwargs):
                    grouped.add(str(args[0].dtype))
                    return function(*args, **kwargs)

                setattr(home, name, noting)
    return linear, grouped


def rehearse(job: dict) -> dict:
    """Take three steps of the run that a job describes."""
    from trainer.config import TrainConfig
    from trainer.distributed import World, parallelize
    from trainer.loop import LogInterval, take_step
    from trainer.optimizer import build_optimizer
    from trainer.run import set_up

    if job.get("eager"):  # the shapes of a compiled run, without its compiler
        nn.Module.compile = lambda *_, **__: None
    config = TrainConfig(**job["config"], device="cpu")
    run = set_up(config, World(device=torch.device("cpu")))
    mode, world = FakeTensorMode(allow_non_fake_inputs=True), World(device=DEVICE)
    move(run.lm, mode)
    linear, grouped = watch(run.model)
    if "sabotage" in job:
        sabotage(job["sabotage"], run.model)
    run.lm.backend = job["backend"]
    run.loader.device = DEVICE
    with mode:
        optimizer = build_optimizer(run.model, config)
        interval = LogInterval(torch.zeros((), device=DEVICE))
        run = dataclasses.replace(
            run, world=world, optimizer=optimizer, bad_step=torch.full((), -1, device=DEVICE),
            parallel=parallelize(run.lm, run.model, world, None, config.dtype),
        )  # fmt: skip
        with closing(run.loader.forever()) as batches:
            for _ in range(3):
                norm, _ = take_step(run, batches, interval)
                run.step += 1
    assert norm.device == interval.loss.device == DEVICE
    states = {str(value.device) for state in optimizer.state.values() for value in state.values()}
    return {
        "steps": run.step, "linear_dtypes": sorted(linear), "grouped_dtypes": sorted(grouped),
        "state_devices": sorted(states),
    }  # fmt: skip


def attempt(job: dict) -> dict:
    """Return what a job came to; whatever fails is the result."""
    try:
        return rehearse(job)
    except Exception as error:
        frames = [f for f in traceback.extract_tb(error.__traceback__) if "/torch/" not in f.filename]
        return {
            "failed": type(error).__name__, "read": type(error).__name__ in READS, "why": str(error)[:500],
            "at": f"{Path(frames[-1].filename).name}:{frames[-1].name}", "trace": traceback.format_exc(),
        }  # fmt: skip


if __name__ == "__main__":
    from trainer.batch import HostBuffers

    jobs = json.load(sys.stdin)
    HostBuffers.__init__ = real_and_unpinned(HostBuffers.__init__)
    pretend()
    print(json.dumps({name: attempt(job) for name, job in jobs.items()}))
