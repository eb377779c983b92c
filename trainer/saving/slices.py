"""Tensors on disk as slices: each process writes the part that it holds, and reads the parts that it needs.

A file is plain safetensors, so reading one runs no code. Beside its tensors it says where each slice lies in the whole:
`{"model.norm.weight": {"offset": [512], "shape": [1024]}}` is the second half of 1,024 numbers. torch's own writer of
such files (`torch.distributed.checkpoint.hf_storage`) builds every file as one string of bytes first, a second copy of
the state in memory; this one streams.
"""

import json
from collections.abc import Iterable, Mapping
from pathlib import Path
from typing import Any, NamedTuple

from safetensors import SafetensorError, safe_open
from safetensors.torch import save_file
from torch import Tensor
from torch.distributed.tensor import DTensor

from shards.errors import PackError, reason_of

PLACES = "slices"  # key of a file's metadata


class Part(NamedTuple):
    """What one process holds of a tensor."""

    local: Tensor
    offset: tuple[int, ...]
    "Index of its first element in the whole tensor."


def part_of(tensor: Tensor) -> Part:
    """Return the part of a tensor that this process holds: all of it, but for a DTensor that is sharded."""
    if isinstance(tensor, DTensor):
        (chunk,) = tensor.__create_chunk_list__()  # type: ignore[no-untyped-call]  # what torch's own checkpoints ask
        return Part(tensor.to_local(), tuple(chunk.offsets))
    return Part(tensor, (0,) * tensor.ndim)


class Staged(NamedTuple):
    """Slices in host memory, ready to be written."""

    tensors: dict[str, Tensor]
    places: dict[str, dict[str, list[int]]]


def stage(tensors: Mapping[str, Tensor], rank: int = 0, world_size: int = 1) -> Staged:
    """Copy this process's slices to host memory; tensors that all processes hold are shared out among them."""
    copies, places = {}, {}
    for number, (name, tensor) in enumerate(tensors.items()):
        if not isinstance(tensor, DTensor) and number % world_size != rank:
            continue
        local, offset = part_of(tensor.detach())
        if local.numel() or not tensor.numel():  # a small tensor has no part on some processes
            copies[name] = local.to("cpu", copy=True).contiguous()
            places[name] = {"offset": list(offset), "shape": list(tensor.shape)}
    return Staged(copies, places)


def write(staged: Staged, path: Path) -> None:
    """Write slices to a safetensors file, with the access rights of any new file."""
    path.touch()
    mode = path.stat().st_mode & 0o777
    save_file(staged.tensors, path, {PLACES: json.dumps(staged.places)})
    path.chmod(mode)  # safetensors gives 600


class SliceReader:
    """Reads any part of tensors that lie in slices.

    Args:
        paths: The files that together hold the tensors.

    Raises:
        PackError: A file is not safetensors, or does not say where its slices lie.
    """

    def __init__(self, paths: Iterable[Path]) -> None:
        self._slices: dict[str, list[tuple[Any, Path, tuple[int, ...]]]] = {}
        self._shapes: dict[str, tuple[int, ...]] = {}
        for path in paths:
            try:
                file: Any = safe_open(path, framework="pt")
                places = json.loads((file.metadata() or {})[PLACES])
                for name in file.keys():  # noqa: SIM118  # a safe_open is no dict
                    offset, shape = tuple(places[name]["offset"]), tuple(places[name]["shape"])
                    size = tuple(file.get_slice(name).get_shape())
                    if not _fits(offset, size, shape) or self._shapes.setdefault(name, shape) != shape:
                        raise PackError(f"{path}: the slice of {name} lies outside of its tensor. Use another file.")
                    self._slices.setdefault(name, []).append((file, path, offset))
            except (SafetensorError, OSError, KeyError, TypeError, ValueError) as error:
                reason = reason_of(error)
                raise PackError(f"{path}: not slices of tensors ({reason}). Restore the file, or delete it.") from error

    def read_into(self, name: str, tensor: Tensor) -> None:
        """Fill this process's part of a tensor, in place.

        Raises:
            PackError: The files do not hold this tensor in this shape and type, or not all of it.
        """
        local, start = part_of(tensor)
        if self._shapes.get(name) != tuple(tensor.shape):
            found = f"of shape {list(self._shapes[name])}" if name in self._shapes else "missing"
            raise PackError(f"tensor {name}: is {found}; expected shape {list(tensor.shape)}. Use the same model.")
        seen = 0
        for file, path, offset in self._slices[name]:
            stored = file.get_slice(name)
            overlap = _overlap(start, tuple(local.shape), offset, tuple(stored.get_shape()))
            if overlap is None:
                continue
            there, here = overlap
            part = stored[there] if there else file.get_tensor(name)
            if part.dtype != local.dtype:
                raise PackError(f"{path}: {name} is {part.dtype}; expected {local.dtype}. Use the same `dtype`.")
            (local[here] if here else local).copy_(part)
            seen += part.numel()
        if seen != local.numel():
            raise PackError(f"tensor {name}: only {seen:,} of {local.numel():,} numbers are there. Restore the files.")


def _fits(offset: tuple[Any, ...], size: tuple[int, ...], shape: tuple[Any, ...]) -> bool:
    """Whether a slice of this size at this place lies inside a tensor of this shape."""
    whole = all(type(number) is int and number >= 0 for number in (*offset, *shape))
    return (
        whole
        and len(offset) == len(size) == len(shape)
        and all(at + length <= full for at, length, full in zip(offset, size, shape, strict=True))
    )


def _overlap(
    start: tuple[int, ...], size: tuple[int, ...], other: tuple[int, ...], other_size: tuple[int, ...]
) -> tuple[tuple[slice, ...], tuple[slice, ...]] | None:
    """Return what two parts of a tensor share: as indices into the second, and into the first; None for nothing.

    Rows 4 to 8 wanted (start 4, size 4), rows 6 to 12 stored (start 6, size 6): they share rows 6 and 7, which are
    0 to 2 of the stored part and 2 to 4 of the wanted one.
    """
    there, here = [], []
    for a, length, b, stored in zip(start, size, other, other_size, strict=True):
        low, high = max(a, b), min(a + length, b + stored)
        if low >= high:
            return None
        there.append(slice(low - b, high - b))
        here.append(slice(low - a, high - a))
    return tuple(there), tuple(here)
