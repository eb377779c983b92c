"""Which documents a dataset keeps: without those of a list, exact duplicates, and what is held out.

A record is all documents of one `doc_id`, in the order of their parts. Its digest is the xxh3_128 of their ids (int32,
little endian) end to end, so it is the same however the documents are packed, whatever comes before and after them, and
however large the corpus grows: a duplicate falls on the same side of a hold-out as its first copy. A second hold-out,
out of the first or of its rest, takes another seed of the digest, or it would find all records on one side.

First the list, then duplicates (the first in corpus order stays), then the hold-out.
"""

from collections.abc import Iterable, Sequence
from itertools import pairwise
from typing import Any, NamedTuple

import numpy as np
import xxhash

from pipeline.building.drop_list import DropList
from pipeline.building.repacking.joining import StoredWindow

REASONS = ("", "listed", "duplicate", "held_out", "not_held_out")  # why documents are set aside, as counts name it
LISTED, DUPLICATE, HELD_OUT, NOT_HELD_OUT = range(1, 5)


class Records(NamedTuple):
    """The records of a window."""

    number: np.ndarray
    "Place among the window's records of each document's record; int64 (num_documents,)."
    digests: np.ndarray
    "uint64 (num_records, 2), big-endian order: comparing rows compares digests."


def records_of(stored: StoredWindow, seed: int = 0) -> Records:
    """Return the records of a window's documents, which lie sorted by `doc_id` and part."""
    documents = stored.documents
    new = np.diff(documents.doc_ids, prepend=-1) != 0
    number = np.cumsum(new) - 1
    bounds = np.append(documents.offsets[:-1][new], documents.offsets[-1]).tolist()
    ids = documents.input_ids.astype("<i4", copy=False)
    digests = b"".join(xxhash.xxh3_128_digest(ids[a:b].data, seed) for a, b in pairwise(bounds))
    return Records(number, np.frombuffer(digests, ">u8").reshape(-1, 2))


class Selection:
    """What is kept.

    Args:
        drop: Documents that are left out.
        dedup: Whether of records with equal ids only the first stays.
        holdout: Share of records that is held out, by their digest; None for no hold-out.
        held_out: Whether this is the dataset of what is held out.
        before: What was selected of the documents before, as the plan lists it.
    """

    def __init__(
        self,
        *,
        drop: DropList | None = None,
        dedup: bool = False,
        holdout: float | None = None,
        held_out: bool = False,
        before: Sequence[dict[str, Any]] = (),
    ) -> None:
        self.drop, self.dedup, self.holdout, self.held_out = drop, dedup, holdout, held_out
        self._seed = sum("holdout" in entry for entry in before)
        self._duplicates: dict[int, np.ndarray] = {}

    def plan_entry(self) -> dict[str, Any]:
        """Return what a plan says of it; empty where everything stays."""
        entry: dict[str, Any] = {}
        if self.drop is not None:
            entry["drop"] = {"documents": len(self.drop.doc_ids), "digest": self.drop.digest}
        if self.dedup:
            entry["dedup"] = "exact"
        if self.holdout is not None:
            entry["holdout"] = {"share": self.holdout, "side": "held_out" if self.held_out else "rest"}
        return entry

    def find_duplicates(self, windows: Iterable[tuple[int, StoredWindow]]) -> None:
        """Read all windows once, in order, and note which records repeat an earlier one; 16 B a record meanwhile."""
        digests, numbers = [np.zeros((0, 2), np.uint64)], list[tuple[int, int]]()
        for window, stored in windows:
            records = records_of(stored)
            listed = self._listed(stored, window)
            free = np.ones(len(records.digests), bool)
            free[records.number[listed]] = False  # a record that is on the list is no first copy
            digests.append(np.where(free[:, None], records.digests, 0).astype(np.uint64))
            numbers.append((window, len(free)))
        joined = np.concatenate(digests)
        order = np.lexsort((joined[:, 1], joined[:, 0]))  # stable: of equal ones the first comes first
        ordered = joined[order]
        repeats = np.zeros(len(joined), bool)
        repeats[order[1:]] = (ordered[1:] == ordered[:-1]).all(axis=1) & ordered[1:].any(axis=1)
        done = 0
        for window, count in numbers:
            self._duplicates[window] = repeats[done : done + count]
            done += count

    def reasons(self, stored: StoredWindow, window: int) -> np.ndarray:
        """Return why each document of a window is set aside, as its place in `REASONS`; 0 stays.

        Needs `find_duplicates` first, where duplicates are left out.

        Returns:
            uint8 (num_documents,)
        """
        reasons = np.where(self._listed(stored, window), LISTED, 0).astype(np.uint8)
        if not (self.dedup or self.holdout is not None):
            return reasons
        records = records_of(stored, self._seed)
        if self.dedup:
            reasons[(reasons == 0) & self._duplicates[window][records.number]] = DUPLICATE
        if self.holdout is not None:
            below = records.digests[:, 0] < np.uint64(min(self.holdout * 2.0**64, 2.0**64 - 1025))
            wrong = ~below if self.held_out else below
            reasons[(reasons == 0) & wrong[records.number]] = NOT_HELD_OUT if self.held_out else HELD_OUT
        return reasons

    def _listed(self, stored: StoredWindow, window: int) -> np.ndarray:
        documents = stored.documents
        if self.drop is None:
            return np.zeros(len(documents.doc_ids), bool)
        return self.drop.holds(documents.doc_ids, documents.doc_parts, window)
