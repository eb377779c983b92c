"""Slices of tensors: written by any number of processes, read by any other, and refused where they are not whole."""

import json
from pathlib import Path

import pytest
import torch
from safetensors.torch import save_file

from shards import PackError
from trainer.saving import slices
from trainer.saving.slices import PLACES, Part, SliceReader, part_of, stage, write


def write_part(path: Path, name: str, part: torch.Tensor, offset: list[int], shape: list[int]) -> None:
    save_file({name: part.contiguous()}, path, {PLACES: json.dumps({name: {"offset": offset, "shape": shape}})})


@pytest.mark.parametrize("kind", [torch.float32, torch.bfloat16, torch.uint8, torch.int64])
def test_what_two_processes_wrote_is_read_back_whole(tmp_path, kind):
    tensors = {
        "a": torch.arange(12).reshape(3, 4).to(kind),
        "b": torch.tensor(7).to(kind),
        "c": torch.ones(5, dtype=kind),
    }
    for rank in (0, 1):
        write(stage(tensors, rank, 2), tmp_path / f"state-{rank}.safetensors")
    reader = SliceReader(tmp_path.glob("*.safetensors"))
    for name, tensor in tensors.items():
        read = torch.zeros_like(tensor)
        reader.read_into(name, read)
        assert torch.equal(read, tensor)


@pytest.mark.parametrize("readers", [1, 2, 3, 7])
def test_any_part_of_a_tensor_is_put_together_from_the_slices_it_touches(tmp_path, monkeypatch, readers):
    whole = torch.randn(10, 4)
    for number, (start, stop) in enumerate([(0, 4), (4, 5), (5, 10)]):
        write_part(tmp_path / f"{number}.safetensors", "w", whole[start:stop], [start, 0], [10, 4])
    reader = SliceReader(tmp_path.glob("*.safetensors"))
    seen = 0
    for part in whole.chunk(readers):
        wanted = torch.zeros(10, 4)
        local = torch.zeros_like(part)
        monkeypatch.setattr(slices, "part_of", lambda tensor, local=local, at=seen: Part(local, (at, 0)))
        reader.read_into("w", wanted)
        assert torch.equal(local, part)
        seen += len(part)
    assert seen == 10


def test_a_new_file_has_the_access_rights_of_any_other(tmp_path):
    write(stage({"a": torch.ones(2)}), tmp_path / "state-0.safetensors")
    (tmp_path / "other").touch()
    assert (tmp_path / "state-0.safetensors").stat().st_mode == (tmp_path / "other").stat().st_mode


@pytest.mark.parametrize(
    ("offset", "shape", "message"),
    [
        ([8, 0], [10, 4], "lies outside of its tensor"),
        ([-1, 0], [10, 4], "lies outside of its tensor"),
        ([0], [10, 4], "lies outside of its tensor"),
        (["0", 0], [10, 4], "lies outside of its tensor"),
        ([0, 0], [20, 4], r"is of shape \[20, 4\]; expected shape \[10, 4\]"),
        ([4, 0], [10, 4], "only 16 of 40 numbers are there"),
    ],
)
def test_slices_that_do_not_make_the_tensor_are_refused(tmp_path, offset, shape, message):
    write_part(tmp_path / "one.safetensors", "w", torch.ones(4, 4), offset, shape)
    with pytest.raises(PackError, match=message):
        SliceReader([tmp_path / "one.safetensors"]).read_into("w", torch.zeros(10, 4))


def test_another_type_and_a_missing_tensor_are_refused(tmp_path):
    write_part(tmp_path / "one.safetensors", "w", torch.ones(4), [0], [4])
    reader = SliceReader([tmp_path / "one.safetensors"])
    with pytest.raises(PackError, match=r"w is torch\.float32; expected torch\.bfloat16"):
        reader.read_into("w", torch.zeros(4, dtype=torch.bfloat16))
    with pytest.raises(PackError, match="tensor v: is missing"):
        reader.read_into("v", torch.zeros(4))


@pytest.mark.parametrize("content", [b"", b"\x80\x02}q\x00.", b"\x08\0\0\0\0\0\0\0{}      "])
def test_files_of_another_kind_are_refused(tmp_path, content):
    (tmp_path / "one.safetensors").write_bytes(content)
    with pytest.raises(PackError, match=r"one\.safetensors: not slices of tensors"):
        SliceReader([tmp_path / "one.safetensors"])


def test_a_plain_tensor_is_held_whole():
    tensor = torch.ones(2, 3)
    assert part_of(tensor) == Part(tensor, (0, 0))
