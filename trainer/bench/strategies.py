"""Ways to feed the same documents to the same model: an optimizer step's documents -> micro-batches -> summed loss.

A step is given as packs; every strategy takes exactly its documents. What practice does once and offline (packing,
cutting into batches) happens in `cut`, outside the clock; `collate` makes tensors on the device, as a data loader does
in every step; `loss` runs the model. The strategies here share host buffers and loss, so that they differ in shape and
attention alone: padding gets the fastest collator there is, and no mask, since right padding under causal attention
needs none. A new strategy is an entry in `STRATEGIES`, with its name in `pipeline/report/feedings.py`; those of other
projects are in `benchmarks/references.py`.
"""

from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass, replace
from itertools import pairwise
from typing import Any, NamedTuple, Protocol

import numpy as np
import torch
from torch import Tensor

from shards.errors import ModelError, PackError, reason_of
from shards.reader import Pack
from trainer.batch import Batch, HostBuffers, Shape
from trainer.model.attention import IMPLEMENTATION
from trainer.model.backends.choice import pick_backend
from trainer.model.backends.interface import Backends
from trainer.model.backends.registry import ATTENTION_BACKENDS
from trainer.model.loading import LoadedModel
from trainer.model.loss import PackedLM

ROUND_TO = 8  # tokens: tensor cores want it, and the padding is small


class StepPacks(NamedTuple):
    """The documents of one optimizer step."""

    packs: list[Pack]
    "As packed: input_ids, position_ids, loss_mask, cu_seqlens of each row."
    documents: list[Pack]
    "The same segments one by one, in random order."


@dataclass(frozen=True, kw_only=True)
class Sizes:
    """How large micro-batches are."""

    seq_len: int
    "Capacity of a pack, in tokens."
    batch: int
    "Documents in a padded micro-batch."
    tokens_per_batch: int
    "Most tokens of every other micro-batch, padding included."
    longest: int
    "Longest document, in tokens; positions of padding stay below."

    @property
    def rows(self) -> int:
        """Rows of `seq_len` in a micro-batch."""
        return max(1, self.tokens_per_batch // self.seq_len)


class Strategy(Protocol):
    """One way of feeding."""

    name: str

    def cut(self, step: StepPacks) -> list[Any]:
        """Divide the documents of a step into micro-batches."""
        ...

    def collate(self, micro: Any) -> Batch:
        """Make the tensors of one micro-batch on the device; `num_tokens` counts those that are no padding."""
        ...

    def loss(self, batch: Batch, divisor: int) -> Tensor:
        """Return the summed loss of a micro-batch, divided by the targets of the step."""
        ...


class SkippedStrategy(NamedTuple):
    """A strategy that is not run, and why."""

    name: str
    reason: str


class MicroBatch(NamedTuple):
    """Rows of one batch of tensors."""

    rows: list[Pack]
    shape: Shape


class BufferedStrategy:
    """A strategy on this project's host buffers and chunked loss.

    Args:
        name: What it is called.
        loaded: The model to train.
        cut: Divides a step's documents.
        backend: Keys of `ATTENTION_BACKENDS` for packed rows; None for native attention.
        loss: What makes the loss of a micro-batch.
    """

    def __init__(
        self,
        name: str,
        loaded: LoadedModel,
        cut: Callable[[StepPacks], list[MicroBatch]],
        backend: Backends | None = None,
        loss: type[PackedLM] = PackedLM,
    ) -> None:
        self.name, self.cut, self._model = name, cut, loaded.model
        self._lm = loss(loaded.model, backend=backend, plain_head=loaded.report.plain_head).eval()
        self._attention = IMPLEMENTATION if backend is not None else native_attention(loaded.model)
        self._device = next(loaded.model.parameters()).device

    def collate(self, micro: MicroBatch) -> Batch:
        """Copy rows into host buffers and on to the device; int64 (rows, width), or (1, T) end to end."""
        padded = micro.shape.row_len
        slots = sum(padded or len(row.input_ids) for row in micro.rows)
        segments = sum(len(row.cu_seqlens) for row in micro.rows)
        ids, positions = micro.rows[0].input_ids, micro.rows[0].position_ids
        # torch keeps pinned memory for the next batch, and hands it out again when the copy from it is done
        buffers = HostBuffers(slots, segments, ids.dtype, positions.dtype, pin=self._device.type == "cuda")
        buffers.fill(micro.rows, max(int(np.diff(row.cu_seqlens).max()) for row in micro.rows), micro.shape)
        batch = buffers.to_device(self._device, 1 if padded is None else len(micro.rows))
        return batch | {"num_tokens": sum(len(row.input_ids) for row in micro.rows)}

    def loss(self, batch: Batch, divisor: int) -> Tensor:
        """Return the loss."""
        if self._model.config._attn_implementation != self._attention:
            self._model.set_attn_implementation(self._attention)
        loss: Tensor = self._lm(batch, divisor)
        return loss


class DenseLM(PackedLM):
    """Several documents in a row, kept apart by a mask of all pairs, on native attention."""

    def _native_inputs(self, batch: Mapping[str, Any]) -> dict[str, Any]:
        positions: Tensor = batch["position_ids"]
        document = (positions == 0).cumsum(1)
        causal = torch.ones(2 * positions.shape[1:], dtype=torch.bool, device=positions.device).tril()
        mask = (document[:, :, None] == document[:, None, :]) & causal
        return {"input_ids": batch["input_ids"], "position_ids": positions, "attention_mask": mask[:, None]}


def _width(longest: int, seq_len: int) -> int:
    return min(-(-longest // ROUND_TO) * ROUND_TO, seq_len)


def split_evenly(rows: Sequence[Pack], size: int) -> list[list[Pack]]:
    """Cut rows into the fewest batches of at most `size`, of almost equal numbers."""
    number = -(-len(rows) // size)
    return [list(rows[len(rows) * i // number : len(rows) * (i + 1) // number]) for i in range(number)]


def cut_padded_max(step: StepPacks, sizes: Sizes) -> list[MicroBatch]:
    """Pad every document to `seq_len`."""
    return [MicroBatch(rows, Shape(row_len=sizes.seq_len)) for rows in split_evenly(step.documents, sizes.batch)]


def cut_padded_longest(step: StepPacks, sizes: Sizes) -> list[MicroBatch]:
    """Pad random batches to their longest document."""
    batches = split_evenly(step.documents, sizes.batch)
    return [MicroBatch(rows, Shape(row_len=_width(max(len(r[0]) for r in rows), sizes.seq_len))) for rows in batches]


def cut_length_bucketed(step: StepPacks, sizes: Sizes) -> list[MicroBatch]:
    """Sort by length, then fill rectangles of neighbours up to the token budget, the longest first."""
    batches: list[MicroBatch] = []
    for document in sorted(step.documents, key=lambda row: -len(row[0])):
        if batches and (len(batches[-1].rows) + 1) * (batches[-1].shape.row_len or 0) <= sizes.tokens_per_batch:
            batches[-1].rows.append(document)
        else:
            batches.append(MicroBatch([document], Shape(row_len=_width(len(document[0]), sizes.seq_len))))
    return batches


def cut_dense(step: StepPacks, sizes: Sizes) -> list[MicroBatch]:
    """Take packs as rows of `seq_len`."""
    return [
        MicroBatch(rows, Shape(row_len=sizes.seq_len, longest=sizes.longest))
        for rows in split_evenly(step.packs, sizes.rows)
    ]


def cut_varlen(step: StepPacks, sizes: Sizes) -> list[MicroBatch]:
    """Lay packs end to end."""
    return [MicroBatch(rows, Shape()) for rows in split_evenly(step.packs, sizes.rows)]


def split_pack(row: Pack) -> list[Pack]:
    """Return the segments of a row as rows of their own; views."""
    bounds = row.cu_seqlens.tolist()
    return [
        Pack(row.input_ids[a:b], row.position_ids[a:b], row.loss_mask[a:b], np.array([0, b - a], np.int32))
        for a, b in pairwise(bounds)
    ]


def native_attention(model: Any) -> str:
    """Return the attention of transformers itself that a model runs with."""
    return "sdpa" if model._supports_sdpa else "eager"


def _rectangles(
    name: str, loaded: LoadedModel, sizes: Sizes, cut: Callable[[StepPacks, Sizes], list[MicroBatch]]
) -> Iterator[Strategy | SkippedStrategy]:
    limit = loaded.report.max_positions if loaded.report.position_limit else None
    if cut is cut_padded_max and limit and sizes.seq_len > limit:
        yield SkippedStrategy(name, f"rows of {sizes.seq_len} tokens, the model has {limit} positions")
        return
    yield BufferedStrategy(name, loaded, lambda step: cut(step, sizes))


def _dense(name: str, loaded: LoadedModel, sizes: Sizes) -> Iterator[Strategy | SkippedStrategy]:
    if reason := _cannot_pack(loaded):
        yield SkippedStrategy(name, reason)
    elif loaded.report.unflattening.modules:
        yield SkippedStrategy(name, "a dense mask says nothing to the model's layers that run one document a row")
    elif loaded.report.windows:
        yield SkippedStrategy(name, "one dense mask for all layers would drop the model's sliding window")
    else:
        yield BufferedStrategy(name, loaded, lambda step: cut_dense(step, sizes), loss=DenseLM)


def _varlen(name: str, loaded: LoadedModel, sizes: Sizes, dtype: torch.dtype) -> Iterator[Strategy | SkippedStrategy]:
    """Yield a strategy for each attention backend that can serve the model here."""
    if reason := _cannot_pack(loaded):
        yield SkippedStrategy(name, reason)
        return
    needs = [replace(each, dtype=dtype) for each in loaded.report.needs]
    if not needs:  # every layer runs on rectangles, one document a row
        yield BufferedStrategy(name, loaded, lambda step: cut_varlen(step, sizes), backend={})
        return
    for key, backend in ATTENTION_BACKENDS.items():
        if any(backend.unsupported_reason(each) for each in needs):
            continue
        if key == "cpu" and needs[0].device.type == "cuda":
            continue  # the segment loop is for machines without kernels
        try:
            pick_backend(key, *needs, prove=True)
        except ModelError as error:
            yield SkippedStrategy(f"{name} ({key})", str(error))
            continue
        yield BufferedStrategy(f"{name} ({key})", loaded, lambda step: cut_varlen(step, sizes), backend=key)


def _cannot_pack(loaded: LoadedModel) -> str | None:
    return None if loaded.report.accepted else f"the model {loaded.report.reason}"


MakeStrategy = Callable[[str, LoadedModel, Sizes, torch.dtype], Iterator[Strategy | SkippedStrategy]]
STRATEGIES: dict[str, MakeStrategy] = {
    "padded-max": lambda name, loaded, sizes, dtype: _rectangles(name, loaded, sizes, cut_padded_max),
    "padded-longest": lambda name, loaded, sizes, dtype: _rectangles(name, loaded, sizes, cut_padded_longest),
    "length-bucketed": lambda name, loaded, sizes, dtype: _rectangles(name, loaded, sizes, cut_length_bucketed),
    "packed-dense": lambda name, loaded, sizes, dtype: _dense(name, loaded, sizes),
    "packed-varlen": _varlen,
}


def check_names(names: Sequence[str]) -> None:
    """Raise PackError unless there are names, and all are keys of `STRATEGIES`."""
    wrong = [name for name in names if name not in STRATEGIES]
    if wrong or not names:
        found = repr(wrong[0]) if wrong else "none"
        raise PackError(f"`strategies`: {found}; expected some of {', '.join(STRATEGIES)}.")


def make_strategies(
    names: Sequence[str],
    loaded: LoadedModel,
    sizes: Sizes,
    dtype: torch.dtype,
    known: Mapping[str, MakeStrategy] = STRATEGIES,
) -> list[Strategy | SkippedStrategy]:
    """Return what the names stand for on this machine, in their order.

    Args:
        names: Keys of `known`.
        loaded: The model that all of them train.
        sizes: Of micro-batches.
        dtype: Type in which attention computes.
        known: What makes the strategies of each name.
    """
    made: list[Strategy | SkippedStrategy] = []
    for name in names:
        try:
            made += known[name](name, loaded, sizes, dtype)
        except (ImportError, OSError, RuntimeError) as error:  # a package that is installed but does not load
            made.append(SkippedStrategy(name, f"cannot be set up ({reason_of(error)})"))
    return made
