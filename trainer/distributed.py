"""Processes and devices: one process per device, started by torchrun or alone.

DDP keeps a full copy on each device; FSDP2 (`shard="full"`) keeps a slice of every layer and gathers a layer when it
runs. Both average gradients over processes, so the loop multiplies its loss by the number of processes. Checkpoints use
a process group of their own: their collectives run in a thread beside the training step.
"""

from __future__ import annotations

import os
from collections.abc import Callable, Iterable, Iterator
from contextlib import AbstractContextManager, contextmanager, nullcontext
from dataclasses import dataclass
from datetime import timedelta
from typing import Any, TypeVar

import torch
import torch.distributed as dist
from torch import nn
from torch.distributed.device_mesh import DeviceMesh, init_device_mesh

from shards.errors import PackError
from trainer.model.loss import unwrap

T = TypeVar("T")


@dataclass(frozen=True, kw_only=True)
class World:
    """This process among all processes of the run."""

    rank: int = 0
    size: int = 1
    device: torch.device
    num_nodes: int = 1
    "Machines that the processes run on, as many on each, one machine's ranks after another's."
    started: bool = False
    "Whether `start` made the process group, so that `stop` ends it."

    @property
    def is_main(self) -> bool:
        """Whether this process writes metrics and prints."""
        return self.rank == 0


def start(device: str | None) -> World:
    """Join the processes that torchrun started, or run alone.

    Args:
        device: "cuda", "cuda:1", "cpu", or None for cuda where there is one.

    Raises:
        PackError: cuda is asked for and there is none.
    """
    kind = device or ("cuda" if torch.cuda.is_available() else "cpu")
    family, _, index = kind.partition(":")
    if family == "mps":
        raise PackError(
            "`device`: 'mps': losses are summed in float64, which Apple's GPU does not have; expected cuda, cuda:N or "
            "cpu. Use cpu."
        )
    if family not in ("cuda", "cpu") or (index and not index.isdecimal()):
        raise PackError(f"`device`: {kind!r}; expected cuda, cuda:N or cpu. Choose one.")
    if family == "cuda" and not torch.cuda.is_available():
        raise PackError(
            f"`device`: {kind!r}, and this torch sees no CUDA device; expected one. Use cpu, or install torch for CUDA."
        )
    size = int(os.environ.get("WORLD_SIZE", "1"))  # torchrun speaks through these
    if index and max(size, dist.get_world_size() if dist.is_initialized() else 1) > 1:
        raise PackError(
            f"`device`: {kind!r} is one device for all processes; expected cuda, which gives each its own. "
            "Leave the number out."
        )
    if family == "cuda":
        kind = f"cuda:{index or int(os.environ.get('LOCAL_RANK', '0'))}"
        torch.cuda.set_device(kind)
    if size == 1 and not dist.is_initialized():
        return World(device=torch.device(kind))
    started = not dist.is_initialized()
    if started:
        dist.init_process_group("cpu:gloo,cuda:nccl" if kind.startswith("cuda") else "gloo")
    size, local = dist.get_world_size(), int(os.environ.get("LOCAL_WORLD_SIZE", "0"))
    num_nodes = size // local if local and size % local == 0 else 1
    return World(rank=dist.get_rank(), size=size, device=torch.device(kind), num_nodes=num_nodes, started=started)


def stop(world: World) -> None:
    """Leave the process group that `start` made."""
    if world.started:
        dist.destroy_process_group()


def total(values: Iterable[float | torch.Tensor], world: World) -> list[float]:
    """Sum figures over all processes; waits for the device."""
    stacked = torch.stack([torch.as_tensor(v, dtype=torch.float64, device=world.device) for v in values])
    if world.size > 1:
        dist.all_reduce(stacked)
    return [float(v) for v in stacked.tolist()]


def gather(value: T, world: World) -> list[T]:
    """Return what each process holds, in the order of ranks, on all of them."""
    values: list[Any] = [value] * world.size
    if world.size > 1:
        dist.all_gather_object(values, value)
    return values


def layers_of(model: nn.Module) -> list[nn.Module]:
    """Return the repeated layers of a transformers model, in order."""
    base = unwrap(model)
    names = set(getattr(base, "_no_split_modules", None) or ())
    return [module for module in base.modules() if type(module).__name__ in names]


@dataclass(frozen=True)
class Parallel:
    """A model as the loop runs it."""

    module: nn.Module
    "What to call."
    accumulate: Callable[[], AbstractContextManager[Any]]
    "Context of a micro-batch whose gradients wait for the next one."


def make_mesh(world: World) -> DeviceMesh:
    """Return the mesh over which FSDP2 slices a model.

    Raises:
        PackError: There is one process.
    """
    if not dist.is_initialized():
        raise PackError(
            '`shard="full"`: there is one process; expected several. Start it with torchrun --nproc-per-node N.'
        )
    return init_device_mesh(world.device.type, (world.size,))


@contextmanager
def in_turn(world: World) -> Iterator[None]:
    """Let the processes of one machine do something one after another, so that its memory holds what it takes once.

    With three processes the second waits at one barrier, works, and waits at two: the first has worked before its
    first barrier, the third works after its second.
    """
    size = int(os.environ.get("LOCAL_WORLD_SIZE", world.size))
    turn = int(os.environ.get("LOCAL_RANK", world.rank)) % size
    group = dist.new_group(backend="gloo", timeout=timedelta(hours=12))
    for _ in range(turn):
        dist.barrier(group)
    yield
    for _ in range(turn, size):
        dist.barrier(group)


def parallelize(module: nn.Module, model: nn.Module, world: World, mesh: DeviceMesh | None, dtype: str) -> Parallel:
    """Spread a model over the processes.

    Args:
        module: What the loop calls; holds `model`.
        model: The transformers model inside; with a mesh it may be in host memory, and goes to the device layer by
            layer, each process keeping its slice.
        mesh: For FSDP2; None for DDP.
        dtype: The run's dtype: under "bf16" FSDP2 casts each layer as it gathers it, and reduces in fp32.
    """
    if mesh is not None:
        return _fully_sharded(module, model, dtype, mesh)
    if world.size == 1:
        return Parallel(module, nullcontext)
    from torch.nn.parallel import DistributedDataParallel

    ids = [world.device.index] if world.device.type == "cuda" else None
    ddp = DistributedDataParallel(module, device_ids=ids, gradient_as_bucket_view=True)
    return Parallel(ddp, ddp.no_sync)


def _fully_sharded(module: nn.Module, model: nn.Module, dtype: str, mesh: DeviceMesh) -> Parallel:
    from torch.distributed.fsdp import MixedPrecisionPolicy, fully_shard

    policy = MixedPrecisionPolicy(
        param_dtype=torch.bfloat16 if dtype == "bf16" else None, reduce_dtype=torch.float32, cast_forward_inputs=False
    )
    for layer in layers_of(model):
        fully_shard(layer, mesh=mesh, mp_policy=policy)
    # the root keeps embeddings and head gathered until the end of the backward pass: the chunked loss reads the head
    root = fully_shard(module, mesh=mesh, mp_policy=policy)

    @contextmanager
    def accumulate() -> Iterator[None]:
        root.set_requires_gradient_sync(False)
        yield
        root.set_requires_gradient_sync(True)

    return Parallel(module, accumulate)
