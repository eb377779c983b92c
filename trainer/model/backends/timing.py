"""Which of several proven backends is fastest on a run's own lengths: timed once on a machine, then remembered.

An order that is right on one GPU is wrong on the next, and documents of 40 tokens ask for something else than ones of
4,000. What is timed is forward with backward, over the heads and the windows of the model, on one micro-batch of the
dataset. What is remembered is keyed by all that could change the answer: GPU, versions, heads, lengths.
"""

import functools
import hashlib
import json
import statistics
import time
from collections.abc import Callable, Mapping, Sequence
from importlib.metadata import PackageNotFoundError, version
from pathlib import Path
from typing import Any, cast

import numpy as np
import torch

from pipeline.caches import cache_directory
from trainer.model.backends.foreign import failure_of
from trainer.model.backends.interface import Backend, Needs
from trainer.model.backends.registry import ATTENTION_BACKENDS

_PACKAGES = ("torch", "flash-attn-4", "flash-attn-3", "flash-attn")
_WARM_UPS, _REPEATS = 2, 9

Measure = Callable[[Backend, Sequence[Needs], np.ndarray], float]


def device_seconds(device: torch.device, work: Callable[[], object], repeats: int = _REPEATS) -> float:
    """Return the median time that a piece of work takes on a device, in seconds, after two warm-ups."""
    for _ in range(_WARM_UPS):
        work()
    found: list[float] = []
    for _ in range(repeats):
        if device.type == "cuda":
            begin, end = (cast(Any, torch.cuda.Event)(enable_timing=True) for _ in range(2))
            begin.record()
            work()
            end.record()
            end.synchronize()
            found.append(begin.elapsed_time(end) / 1e3)
        else:
            started = time.perf_counter()
            work()
            found.append(time.perf_counter() - started)
    return statistics.median(found)


def measure(backend: Backend, needs: Sequence[Needs], cu_seqlens: np.ndarray) -> float:
    """Return the seconds of forward with backward over segments, one after another for each of the needs.

    Args:
        cu_seqlens: int32 (n + 1,), first 0.
    """
    return sum(_measure(backend, each, cu_seqlens) for each in needs)


def _measure(backend: Backend, needs: Needs, cu_seqlens: np.ndarray) -> float:
    total, longest = int(cu_seqlens[-1]), int(np.diff(cu_seqlens).max())
    shapes: list[tuple[int, ...]] = [
        (total, needs.num_heads, needs.head_dim),
        (total, needs.num_kv_heads, needs.head_dim),
        (total, needs.num_kv_heads, needs.value_dim),
        (total, needs.num_heads, needs.value_dim),
        (needs.num_heads,),
    ]
    q, k, v, upstream, sinks = (torch.randn(shape, device=needs.device, dtype=needs.dtype) for shape in shapes)
    leaves = [x.requires_grad_() for x in (q, k, v)]
    offsets, given = torch.from_numpy(cu_seqlens).to(needs.device), sinks if needs.sinks else None

    def both() -> object:
        scale = needs.head_dim**-0.5
        out = backend(q, k, v, offsets, longest, needs.sliding_window, scale, needs.softcap, given)
        return torch.autograd.grad(out, leaves, upstream)

    return device_seconds(needs.device, both)


def time_all(
    names: Sequence[str], needs: Sequence[Needs], cu_seqlens: np.ndarray, measure: Measure = measure
) -> dict[str, float]:
    """Return the seconds that each backend takes, remembered from an earlier run where nothing has changed since.

    Args:
        names: Keys of `ATTENTION_BACKENDS`; each serves these needs.
        needs: Heads of one width, as the layers have them.
        cu_seqlens: int32 (n + 1,): the segments of one micro-batch of the run.
        measure: What times one of them.

    Returns:
        Seconds by name, without those that failed.
    """
    file = _remembered(names, needs, cu_seqlens)
    if (known := _read(file, names)) is not None:
        return known
    found: dict[str, float] = {}

    def note(name: str) -> None:
        found[name] = measure(ATTENTION_BACKENDS[name], needs, cu_seqlens)

    for name in names:
        failure_of(functools.partial(note, name))  # one that fails is out
    if file is not None and found:
        beside = file.with_suffix(f".{time.time_ns()}")
        beside.write_text(json.dumps(found))
        beside.replace(file)
    return found


def describe(seconds: Mapping[str, float]) -> str:
    """Say what each backend took, the fastest first: "torch 1.21 ms, flash-attn-4 1.40 ms"."""
    return ", ".join(f"{name} {seconds[name] * 1e3:.3g} ms" for name in sorted(seconds, key=lambda name: seconds[name]))


def _remembered(names: Sequence[str], needs: Sequence[Needs], cu_seqlens: np.ndarray) -> Path | None:
    """Return the file that holds what was measured for exactly this; None where there is no place for one."""
    folder = cache_directory("attention")
    if folder is None:
        return None
    device = needs[0].device
    gpu = torch.cuda.get_device_name(device) if device.type == "cuda" else device.type
    shapes = sorted(str({**vars(each), "device": device.type}) for each in needs)
    key = json.dumps([gpu, [_version(package) for package in _PACKAGES], list(names), shapes, cu_seqlens.tolist()])
    return folder / f"{hashlib.sha256(key.encode()).hexdigest()[:32]}.json"


def _version(package: str) -> str | None:
    try:
        return version(package)
    except PackageNotFoundError:
        return None


def _read(file: Path | None, names: Sequence[str]) -> dict[str, float] | None:
    """Return what a file remembers; None where there is none, or what it holds is damaged."""
    try:
        known = json.loads(file.read_text()) if file is not None else None
    except (OSError, ValueError):
        return None
    if not isinstance(known, dict) or not known or not known.keys() <= set(names):
        return None
    return known if all(isinstance(value, float) for value in known.values()) else None
