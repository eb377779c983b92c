"""Token ids of a dataset back to text, by the tokenizer inside the dataset: no network, and never the wrong one."""

import json
from functools import cached_property
from pathlib import Path
from typing import Any

import numpy as np

from shards.errors import PackError
from shards.reader import Dataset


class Decoder:
    """Turns token ids of a dataset back into text.

    Args:
        directory: The dataset's `tokenizer/` folder.
    """

    def __init__(self, directory: Path) -> None:
        self.directory = directory

    @cached_property
    def _content(self) -> bytes:
        file = self.directory / "tokenizer.json"
        try:
            return file.read_bytes()
        except FileNotFoundError as error:
            raise PackError(f"{file}: is missing; expected the tokenizer of the build. See pack verify.") from error

    @cached_property
    def _tokenizer(self) -> Any:
        from tokenizers import Tokenizer

        return Tokenizer.from_str(self._content.decode("utf-8"))  # whatever the directory is called

    @cached_property
    def special_ids(self) -> frozenset[int]:
        """Ids of added tokens: those that steer a model rather than spell text."""
        content = json.loads(self._content)
        return frozenset(token["id"] for token in content.get("added_tokens") or ())

    def decode_batch(self, ids: list[list[int]]) -> list[str]:
        """Return the text of each list of ids, decoded by itself, control tokens spelled out."""
        texts: list[str] = self._tokenizer.decode_batch(ids, skip_special_tokens=False)
        return texts

    def text(self, ids: np.ndarray, before: np.ndarray) -> str:
        """Decode `ids`, which follow the ids `before`: decoders drop a space at the start of a text, not inside it."""
        head = self._tokenizer.decode(before.tolist(), skip_special_tokens=False) if len(before) else ""
        whole: str = self._tokenizer.decode(np.concatenate([before, ids]).tolist(), skip_special_tokens=False)
        if whole.startswith(head):
            return whole[len(head) :]
        return str(self._tokenizer.decode(ids.tolist(), skip_special_tokens=False))


class NumberDecoder:
    """Shows token ids as numbers, for a dataset of ids of which nobody brought the tokenizer."""

    special_ids: frozenset[int] = frozenset()

    def decode_batch(self, ids: list[list[int]]) -> list[str]:
        """Return each list of ids, a space before each id."""
        return ["".join(f" {token}" for token in each) for each in ids]

    def text(self, ids: np.ndarray, before: np.ndarray) -> str:  # noqa: ARG002
        """Return ids, a space before each."""
        return self.decode_batch([ids.tolist()])[0]


AnyDecoder = Decoder | NumberDecoder


def decoder_of(dataset: Dataset) -> AnyDecoder:
    """Return what shows the tokens of a dataset."""
    return Decoder(dataset.path / "tokenizer") if dataset.manifest["tokenizer_files"] else NumberDecoder()
