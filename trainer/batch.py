"""Packs of a dataset -> one micro-batch: rows copied end to end into reusable host buffers, widened on the device.

The host only copies, in the narrow types the shards hold (5 bytes a token), so that a batch costs about as much as
memcpy; int64 ids, shifted labels and everything else that is twice as wide is made where it is used. A micro-batch is
one row of T tokens (`cu_seqlens` ends exactly at T: varlen kernels never write past it). Two variants: with `fill_to`
one masked segment fills T up to a constant, for compiled models; with `row_len` every pack is padded to the same length
and the batch is a rectangle, for bucketed datasets.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

import numpy as np
import torch

from shards.reader import Pack

IGNORED = -100
Batch = dict[str, Any]


def next_power_of_two(value: int) -> int:
    """Return the smallest power of two that is at least `value`."""
    return 1 << max(0, value - 1).bit_length()


@dataclass(frozen=True, kw_only=True)
class Shape:
    """The form of one micro-batch."""

    fill_to: int | None = None
    "Tokens up to which one masked segment fills the batch; None leaves it as long as its packs."
    row_len: int | None = None
    "Tokens to which each pack is padded; None lays packs end to end."
    longest: int = 1 << 30
    "Positions stay below this in padding, since learned position tables end there."


class HostBuffers:
    """One set of reusable host buffers, pinned so that the copy to the device does not wait.

    Args:
        capacity: Maximum tokens of a micro-batch, padding included.
        max_segments: Maximum segments of a micro-batch, padding included.
        ids_dtype: Type of the stored ids: uint16 or int32.
        position_dtype: Type of the stored position ids: uint16 or int32.
        sources: Whether batches say which source each token comes from.
        with_weights: Whether the packs have weights.
    """

    def __init__(
        self, capacity: int, max_segments: int, ids_dtype: np.dtype[Any], position_dtype: np.dtype[Any], pin: bool,
        sources: bool = False, with_weights: bool = False,
    ) -> None:  # fmt: skip
        def buffer(size: int, dtype: np.dtype[Any]) -> torch.Tensor:
            # uint16 stays bits of int16 on its way: torch has few kernels for unsigned types
            kind = torch.int16 if dtype == np.uint16 else getattr(torch, dtype.name)
            return torch.zeros(size, dtype=kind, pin_memory=pin)

        self.tensors = {
            "input_ids": buffer(capacity, np.dtype(ids_dtype)),
            "position_ids": buffer(capacity, np.dtype(position_dtype)),
            "loss_mask": buffer(capacity, np.dtype(np.uint8)),
            "cu_seqlens": buffer(next_power_of_two(max_segments) + 2, np.dtype(np.int32)),
        }
        if with_weights:
            self.tensors["loss_weights"] = buffer(capacity, np.dtype(np.float16))
        self.weights = self.tensors["loss_weights"].numpy() if with_weights else None
        self.ids = self.tensors["input_ids"].numpy().view(ids_dtype)
        self.positions = self.tensors["position_ids"].numpy().view(position_dtype)
        self.mask = self.tensors["loss_mask"].numpy()
        self.cu = self.tensors["cu_seqlens"].numpy()
        if sources:
            self.tensors["sources"] = buffer(capacity, np.dtype(np.uint16))
        self.length = self.num_offsets = self.max_seqlen = 0
        self.copied: torch.cuda.Event | None = None

    def fill(
        self, packs: Sequence[Pack], max_seqlen: int, shape: Shape, masked: Sequence[bool] | np.ndarray | None = None,
        sources: np.ndarray | None = None,
    ) -> None:  # fmt: skip
        """Copy packs into the buffers.

        Args:
            packs: The packs.
            max_seqlen: Longest segment of these packs.
            shape: Form of the micro-batch.
            masked: Packs that fill up a step and carry no target.
            sources: Number of each pack's source, for buffers that keep it.
        """
        if self.copied is not None:
            self.copied.synchronize()  # of the thread that fills, not of the training loop
        at, n = 0, 0
        for i, pack in enumerate(packs):
            ids, mask, cu = pack.input_ids, pack.loss_mask, pack.cu_seqlens
            stop = at + len(ids)
            self.ids[at:stop] = ids
            self.positions[at:stop] = pack.position_ids
            hidden = masked is not None and masked[i]
            self.mask[at:stop] = 0 if hidden else mask
            if self.weights is not None:
                self.weights[at:stop] = 0 if hidden else pack.loss_weights
            if shape.row_len is not None:  # one segment per row, its padding included
                self._pad(stop, at + shape.row_len, len(ids), shape.longest)
                stop = at + shape.row_len
                self.cu[n + 1] = stop
                n += 1
            else:
                np.add(cu[1:], at, out=self.cu[n + 1 : n + len(cu)])
                n += len(cu) - 1
            if sources is not None:
                self.tensors["sources"][at:stop] = int(sources[i])
            at = stop
        self.max_seqlen = shape.row_len or max_seqlen
        if shape.fill_to is not None:
            if at < shape.fill_to:
                self._pad(at, shape.fill_to, 0, shape.longest)
                n += 1
                self.cu[n] = shape.fill_to
                self.max_seqlen = max(self.max_seqlen, shape.fill_to - at)
                at = shape.fill_to
            # few different sizes, so that compiled code and kernels are reused; empty segments cost nothing
            slots = next_power_of_two(n)
            self.cu[n + 1 : slots + 1] = at
            n = slots
            self.max_seqlen = next_power_of_two(self.max_seqlen)
        self.length, self.num_offsets = at, n + 1

    def _pad(self, start: int, stop: int, position: int, longest: int) -> None:
        self.ids[start:stop] = 0
        self.mask[start:stop] = 0
        if self.weights is not None:
            self.weights[start:stop] = 0
        np.minimum(
            np.arange(position, position + stop - start),
            longest - 1,
            out=self.positions[start:stop],
            casting="unsafe",
        )

    def to_device(self, device: torch.device, rows: int = 1) -> Batch:
        """Return the micro-batch on the device, in tensors of its own.

        Returns:
            `input_ids`, `position_ids`, `shift_labels`: int64 (rows, T / rows); `cu_seqlens`: int32 (segments + 1,);
            `max_seqlen`: int; `sources`, where the buffers keep them: int64 (T,). Slot i of `shift_labels` holds the id
            at i + 1 where that is a target, else -100; where packs have weights, slot i of `shift_weights`, float32
            (rows, T / rows), holds the weight of that target.
        """
        sizes = dict.fromkeys(self.tensors, self.length) | {"cu_seqlens": self.num_offsets}
        moved = {  # on a CPU the others are copied as they are widened
            name: tensor[: sizes[name]].to(device, non_blocking=True, copy=name == "cu_seqlens")
            for name, tensor in self.tensors.items()
        }
        if device.type == "cuda":
            self.copied = torch.cuda.Event()  # type: ignore[no-untyped-call]
            # on the stream that copies: the current device may be another one
            self.copied.record(torch.cuda.current_stream(device))
        ids, positions = _widen(moved["input_ids"]), _widen(moved["position_ids"])
        labels = torch.full_like(ids, IGNORED)
        torch.where(moved["loss_mask"][1:].bool(), ids[1:], labels[-1], out=labels[:-1])
        more: Batch = {"sources": _widen(moved["sources"])} if "sources" in moved else {}
        if "loss_weights" in moved:
            weights = torch.zeros(len(ids), dtype=torch.float32, device=ids.device)
            weights[:-1] = moved["loss_weights"][1:]
            more["shift_weights"] = weights.view(rows, -1)
        return more | {
            "input_ids": ids.view(rows, -1),
            "position_ids": positions.view(rows, -1),
            "shift_labels": labels.view(rows, -1),
            "cu_seqlens": moved["cu_seqlens"],
            "max_seqlen": self.max_seqlen,
        }


def _widen(stored: torch.Tensor) -> torch.Tensor:
    wide = stored.to(torch.int64)
    return wide.bitwise_and_(0xFFFF) if stored.dtype == torch.int16 else wide
