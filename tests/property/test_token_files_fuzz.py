"""Broken files of token ids: a named error of one line, or documents whose ids all lie in the file; never a crash."""

import io
import random
from pathlib import Path

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from pipeline.config import RecordOptions
from pipeline.sources.discovery import resolve_sources
from pipeline.sources.reader import WindowReader
from pipeline.sources.tokenized import TokenTable
from pipeline.sources.windows import cut_windows
from shards.errors import PackError

EOS = 2
DOCUMENTS = [[5, 6, 7, EOS], [9, EOS], [EOS], [11, 12, 13, 14, 15, EOS], [300, EOS]]
IDS = [token for document in DOCUMENTS for token in document]
OPTIONS = RecordOptions(kind="tokens", eos_id=EOS)


def numpy_file(ids: np.ndarray) -> bytes:
    sink = io.BytesIO()
    np.save(sink, ids)
    return sink.getvalue()


def index_of(documents: list[list[int]], width: int, code: int) -> bytes:
    """Megatron's index, written by the definition of its fields."""
    lengths = np.array([len(document) for document in documents], "<i4")
    pointers = (np.cumsum(lengths) - lengths).astype("<i8") * width
    bounds = np.arange(len(documents) + 1, dtype="<i8")
    head = b"MMIDIDX\0\0" + (1).to_bytes(8, "little") + bytes([code])
    numbers = len(lengths).to_bytes(8, "little") + len(bounds).to_bytes(8, "little")
    return head + numbers + lengths.tobytes() + pointers.tobytes() + bounds.tobytes()


FILES: dict[str, dict[str, bytes]] = {
    "stream.npy": {"npy": numpy_file(np.array(IDS, np.uint16))},
    "wide.npy": {"npy": numpy_file(np.array(IDS, np.int64))},
    "unsigned.npy": {"npy": numpy_file(np.array(IDS, np.uint64))},
    "pair.bin": {"idx": index_of(DOCUMENTS, 2, 8), "bin": np.array(IDS, np.uint16).tobytes()},
    "pair4.bin": {"idx": index_of(DOCUMENTS, 4, 4), "bin": np.array(IDS, np.int32).tobytes()},
    "raw.bin": {"bin": np.array(IDS, np.uint16).tobytes()},
}


def read(path: Path) -> list[list[int]]:
    """The documents of a file, read as a build does."""
    sources = resolve_sources([str(path)], OPTIONS)
    windows, _ = cut_windows(sources, 16)
    found: list[list[int]] = []
    for window in windows:
        reader = WindowReader(sources[window.source], window.slices, on_error="fail")
        for batch in reader:
            assert isinstance(batch.values, TokenTable)
            column = batch.values.columns[OPTIONS.ids_field]
            found += [column.row(row).tolist() for row in range(len(batch.values))]
    return found


def write(folder: Path, name: str, parts: dict[str, bytes]) -> Path:
    for suffix in ("idx", "bin", "npy"):
        (folder / name).with_suffix(f".{suffix}").unlink(missing_ok=True)
    for suffix, content in parts.items():
        (folder / name).with_suffix(f".{suffix}").write_bytes(content)
    return folder / name


@pytest.mark.parametrize("name", FILES)
def test_the_samples_themselves_give_their_documents(tmp_path, name):
    assert read(write(tmp_path, name, FILES[name])) == DOCUMENTS


def broken(data: bytes, draw: random.Random) -> bytes:
    """One of: bits flipped (in front most of all, where headers are), cut off, a hole, doubled, a number set."""
    kind, place = draw.randrange(6), min(draw.randrange(len(data)), draw.randrange(len(data)))
    if kind == 0:
        return data[:place]
    if kind == 1:
        return data[:place] + data[place + draw.randrange(1, 12) :]
    if kind == 2:
        return data + data[place:]
    if kind == 3:
        number = draw.choice([-1, 0, 1, 1 << 31, 1 << 40, (1 << 63) - 1])
        return data[:place] + (number & (1 << 64) - 1).to_bytes(8, "little") + data[place + 8 :]
    changed = bytearray(data)
    for _ in range(draw.choice([1, 1, 3, 20])):
        at = min(draw.randrange(len(changed)), draw.randrange(len(changed)))
        changed[at] ^= 1 << draw.randrange(8)
    return bytes(changed)


def check(folder: Path, name: str, seed: int) -> None:
    draw = random.Random(seed)
    parts = dict(FILES[name])
    target = draw.choice(sorted(parts))
    parts[target] = broken(parts[target], draw)
    path = write(folder, name, parts)
    fault = ""
    try:
        documents = read(path)
    except PackError as error:
        fault = str(error)
    if fault:
        assert path.stem in fault
        assert "\n" not in fault
        return
    content = parts[name[-3:]]
    assert sum(map(len, documents)) <= len(content)


@pytest.mark.parametrize("name", FILES)
@settings(max_examples=60, deadline=None)
@given(seed=st.integers(0, 1 << 30))
def test_a_broken_file_is_named_or_gives_ids_that_lie_in_it(tmp_path_factory, name, seed):
    check(tmp_path_factory.getbasetemp(), name, seed)


@pytest.mark.slow
@pytest.mark.parametrize("name", FILES)
def test_thousands_of_broken_files_are_named_or_give_ids_that_lie_in_them(tmp_path, name):
    for seed in range(3000):
        check(tmp_path, name, seed)
