"""The batch contract: ids, positions, shifted labels and boundaries of packs laid end to end."""

import numpy as np
import pytest
import torch

from shards import Pack
from trainer.batch import HostBuffers, Shape, next_power_of_two

CPU = torch.device("cpu")


def pack_of(*segments, dtype=np.uint16):
    """A pack of segments, each a list of (id, is_target)."""
    lengths = [len(segment) for segment in segments]
    flat = [token for segment in segments for token in segment]
    return Pack(
        np.array([i for i, _ in flat], dtype),
        np.concatenate([np.arange(n) for n in lengths]).astype(dtype),
        np.array([m for _, m in flat], np.uint8),
        np.concatenate([[0], np.cumsum(lengths)]).astype(np.int32),
    )


A = [(11, 0), (12, 1), (13, 1)]
B = [(21, 0), (22, 1)]
C = [(31, 0), (32, 0), (33, 1)]


def batch_of(packs, shape=None, dtype=np.uint16, rows=1, capacity=64, masked=None):
    buffers = HostBuffers(capacity, 16, np.dtype(dtype), np.dtype(dtype), pin=False)
    longest = max(int(np.diff(pack.cu_seqlens).max()) for pack in packs)
    buffers.fill(packs, longest, shape or Shape(), masked)
    return buffers.to_device(CPU, rows)


@pytest.mark.parametrize("dtype", [np.uint16, np.int32])
def test_no_target_crosses_a_segment(dtype):
    batch = batch_of([pack_of(A, B, dtype=dtype), pack_of(C, dtype=dtype)], dtype=dtype)
    assert batch["input_ids"].tolist() == [[11, 12, 13, 21, 22, 31, 32, 33]]
    assert batch["position_ids"].tolist() == [[0, 1, 2, 0, 1, 0, 1, 2]]
    assert batch["shift_labels"].tolist() == [[12, 13, -100, 22, -100, -100, 33, -100]]
    assert batch["cu_seqlens"].tolist() == [0, 3, 5, 8]
    assert batch["max_seqlen"] == 3
    assert [batch[k].dtype for k in ("input_ids", "position_ids", "shift_labels", "cu_seqlens")] == [
        torch.int64, torch.int64, torch.int64, torch.int32,
    ]  # fmt: skip


def test_ids_above_32767_survive_16_bits():
    batch = batch_of([pack_of([(65_535, 0), (40_000, 1)])])
    assert batch["input_ids"].tolist() == [[65_535, 40_000]]
    assert batch["shift_labels"].tolist() == [[40_000, -100]]


def test_filling_up_is_one_masked_segment_whose_positions_restart():
    batch = batch_of([pack_of(A, B)], Shape(fill_to=12, longest=3))
    assert batch["input_ids"].shape == (1, 12)
    assert batch["shift_labels"][0, 5:].unique().tolist() == [-100]
    assert batch["position_ids"][0, 5:].tolist() == [0, 1, 2, 2, 2, 2, 2]  # none beyond the position table
    assert batch["cu_seqlens"].tolist() == [0, 3, 5, 12, 12]  # padded to a power of two with empty segments
    assert batch["max_seqlen"] == 8  # 7 padding tokens, up to a power of two


def test_a_full_batch_gets_no_padding_segment():
    batch = batch_of([pack_of(A, B)], Shape(fill_to=5))
    assert batch["cu_seqlens"].tolist() == [0, 3, 5]
    assert batch["max_seqlen"] == 4


def test_rectangles_pad_each_row_behind_its_document():
    batch = batch_of([pack_of(A), pack_of(B)], Shape(row_len=4), rows=2)
    assert batch["input_ids"].tolist() == [[11, 12, 13, 0], [21, 22, 0, 0]]
    assert batch["position_ids"].tolist() == [[0, 1, 2, 3], [0, 1, 2, 3]]
    assert batch["shift_labels"].tolist() == [[12, 13, -100, -100], [22, -100, -100, -100]]
    assert batch["cu_seqlens"].tolist() == [0, 4, 8]
    assert batch["max_seqlen"] == 4


def test_a_masked_pack_has_no_target():
    batch = batch_of([pack_of(A), pack_of(C)], masked=[False, True])
    assert batch["shift_labels"].tolist() == [[12, 13, -100, -100, -100, -100]]


def test_a_batch_is_the_callers_own():
    buffers = HostBuffers(8, 4, np.dtype(np.uint16), np.dtype(np.uint16), pin=False)
    buffers.fill([pack_of(A)], 3, Shape())
    first = buffers.to_device(CPU)
    kept = {name: value.clone() for name, value in first.items() if isinstance(value, torch.Tensor)}
    buffers.fill([pack_of(C, B)], 3, Shape())
    buffers.to_device(CPU)
    for name, value in kept.items():
        assert torch.equal(first[name], value), name


def test_powers_of_two():
    assert [next_power_of_two(n) for n in (1, 2, 3, 4, 5, 1023, 1024, 1025)] == [1, 2, 4, 4, 8, 1024, 1024, 2048]


class OnItsWay:
    """A pinned tensor whose copy to a GPU is made up."""

    def __init__(self, tensor: torch.Tensor) -> None:
        self.tensor = tensor

    def __getitem__(self, index: slice) -> "OnItsWay":
        return OnItsWay(self.tensor[index])

    def to(self, *_: object, **__: object) -> torch.Tensor:
        return self.tensor.clone()


def test_the_end_of_a_copy_is_noted_on_the_stream_of_its_own_device(monkeypatch):
    """Noted elsewhere, the buffer would be filled again before it was copied."""
    noted = []

    class Event:
        def record(self, stream: str) -> None:
            noted.append(stream)

    monkeypatch.setattr(torch.cuda, "Event", Event)
    monkeypatch.setattr(torch.cuda, "current_stream", lambda device: f"stream of {device}")
    buffers = HostBuffers(8, 4, np.dtype(np.int32), np.dtype(np.int32), pin=False)
    ids = np.arange(5, dtype=np.int32)
    buffers.fill([Pack(ids, ids, np.ones(5, np.uint8), np.array([0, 5], np.int32))], 5, Shape())
    buffers.tensors = {name: OnItsWay(tensor) for name, tensor in buffers.tensors.items()}
    buffers.to_device(torch.device("cuda:1"))
    assert noted == ["stream of cuda:1"]
