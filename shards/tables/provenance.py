"""Where the documents of a dataset came from, and where their tokens are.

A document is (`doc_id`, `doc_part`): the window that read its record, the record's place in that window, and its place
among the documents of that record. The sidecar of a window lists the slices of files that it read with the records of
each (`spans`), so a record's place in its file is the sum of the records that windows before it read of the same file.
"""

from typing import NamedTuple

import numpy as np

from shards.errors import FormatError, PackError, counted
from shards.plan import Plan
from shards.reader import Dataset
from shards.schema import doc_id, split_doc_id
from shards.sidecar import Sidecar, parse_sidecar, sidecar_name

Parts = dict[tuple[int, int], list[tuple[int, int, int]]]


class Record(NamedTuple):
    """A record of the corpus."""

    source: str
    file: str
    number: int
    "Its place among the records of the file, counted from 1; that of its line, in files without empty lines."

    def __str__(self) -> str:
        """Return it as `Provenance.find` takes it."""
        return f"{self.file}:{self.number}"


class _Span(NamedTuple):
    """Records that one window read of one file."""

    window: int
    file: int
    first: int
    "Place in the window of the first one."
    records: int
    before: int
    "Records that windows before read of the file."


class Provenance:
    """Records of a dataset's documents, both ways.

    Reads the sidecars of a source once, when a record of it is first asked for.

    Args:
        dataset: Any dataset.
    """

    def __init__(self, dataset: Dataset) -> None:
        self.dataset = dataset
        self._spans: dict[str, list[_Span]] = {}
        self._by_window: dict[int, list[_Span]] = {}

    def record_of(self, document: int) -> Record | None:
        """Return the record that gave a document; None where its sidecar does not tell."""
        window, index = split_doc_id(document)
        source = self.dataset.shards[window]["source"]
        self._load(source)
        for span in self._by_window.get(window, ()):
            if span.first <= index < span.first + span.records:
                name = self._files(source)[span.file]
                return Record(source, name, span.before + index - span.first + 1)
        return None

    def find(self, text: str) -> list[int]:
        """Return the `doc_id` of a record: FILE:NUMBER, SOURCE=FILE:NUMBER, WINDOW:RECORD, or a doc_id itself.

        Files are named as in the plan, below their SOURCE argument; a part of the path from its end will do.

        Returns:
            One `doc_id` for each source that has such a record.

        Raises:
            PackError: It is none of these, or no file of the dataset has such a record.
        """
        place, colon, number = text.rpartition(":")
        if number.isdecimal() and (not colon or place.isdecimal()):
            return [parse_document_id(text)]
        if not (colon and number.isdecimal()):
            raise PackError(
                f"`doc`: {text}; expected FILE:RECORD such as corpus.jsonl:812, or a doc_id or window:record."
            )
        source, equals, name = place.rpartition("=")
        sources = [entry for entry in self.dataset.plan["sources"] if not equals or entry["name"] == source]
        found, seen = [], dict[str, int]()
        for entry in sources:
            self._load(entry["name"])
            for span in self._spans[entry["name"]]:
                file = entry["files"][span.file]["name"]
                if f"/{file}".endswith(f"/{name}"):
                    seen[file] = max(seen.get(file, 0), span.before + span.records)
                    if span.before < int(number) <= span.before + span.records:
                        found.append(doc_id(span.window, span.first + int(number) - span.before - 1))
        if found:
            return found
        if seen:
            file, most = next(iter(seen.items()))
            raise PackError(f"`doc`: {text}; {file} has {counted(most, 'record')}, counted from 1. Choose one of them.")
        files = [file["name"] for entry in sources for file in entry["files"]]
        more = f" and {len(files) - 3} more" if len(files) > 3 else ""
        raise PackError(f"`doc`: {text}; expected one of the files {', '.join(files[:3])}{more}. Choose one of them.")

    def reason_of_absence(self, document: int) -> str:
        """Say why no pack holds a document, as far as the dataset knows."""
        window, _ = split_doc_id(document)
        sidecar = read_sidecar(self.dataset, window)
        if sidecar is None:
            return "it does not exist"
        for entry in sidecar["rejected"]:
            if entry["doc_id"] == document:
                return f"it was rejected: {entry['reason'].rstrip('.')}"
        dropped = sidecar["counts"]["documents"]["dropped"]
        reasons = ", ".join(f"{name} {count:,}" for name, count in dropped.items() if count)
        return f"it was left out (left out of its window: {reasons})" if reasons else "it does not exist"

    def _load(self, source: str) -> None:
        if source in self._spans:
            return
        number, spans = self.dataset.shards.sources.index(source), list[_Span]()
        before: dict[int, int] = {}
        for window in np.flatnonzero(self.dataset.shards.columns["source"] == number).tolist():
            for file, _, _, first, count in spans_of(self.dataset, window):
                span = _Span(window, file, first, count, before.get(file, 0))
                before[file] = span.before + count
                spans.append(span)
                self._by_window.setdefault(window, []).append(span)
        self._spans[source] = spans

    def _files(self, source: str) -> list[str]:
        files = next(entry["files"] for entry in self.dataset.plan["sources"] if entry["name"] == source)
        return [file["name"] for file in files]


def read_sidecar(dataset: Dataset, window: int) -> Sidecar | None:
    """Return the sidecar of a window; None where it is not there.

    Raises:
        FormatError: It is damaged.
    """
    file = dataset.file(sidecar_name(window))
    return parse_sidecar(file.read_bytes(), str(file)) if file.exists() else None


def spans_of(dataset: Dataset, window: int) -> list[list[int]]:
    """Return which records of a window came from where: [file, start, stop, first record, number of records].

    Raises:
        FormatError: Its sidecar is damaged, or names a file that the plan does not have.
    """
    sidecar, source = read_sidecar(dataset, window), dataset.shards[window]["source"]
    spans = sidecar["spans"] if sidecar else []
    files = next(len(entry["files"]) for entry in dataset.plan["sources"] if entry["name"] == source)
    for span in spans:
        if span[0] >= files:
            raise FormatError(
                f"{dataset.path / sidecar_name(window)}: reads file {span[0]} of source {source}, of which the plan "
                f"has {files} (rule F5). Restore it, or build again.",
                "F5",
            )
    return spans


def parse_document_id(text: str) -> int:
    """Parse a document's number, or window:record.

    Raises:
        PackError: It is neither.
    """
    window, colon, record = text.rpartition(":")
    if not record.isdecimal() or (colon and not window.isdecimal()):
        raise PackError(f"`doc`: {text}; is no document, expected its doc_id, or window:record such as 0:17.")
    return doc_id(int(window), int(record)) if colon else int(record)


def name_part(plan: Plan, source: str, part: int) -> str:
    """Say which of the documents of its record one is; "" for the only one.

    A document of an unrolled conversation goes to one of its messages, one of a packed row has a place there.
    """
    kind = next(entry["records"].get("kind") for entry in plan["sources"] if entry["name"] == source)
    if not part:
        return ""
    return f"to its message {part + 1}" if kind == "chat" else f"document {part + 1} of it"


def parts_of(dataset: Dataset, window: int, records: set[int]) -> Parts:
    """Return the segments of the documents that some records of one window gave, each list in the document's order.

    Args:
        dataset: The dataset.
        window: The window of the records.
        records: Their `doc_ids`.

    Returns:
        For each document (`doc_id`, `doc_part`): first token, tokens, pack of each segment.
    """
    parts: Parts = {}
    if window >= len(dataset.shards):
        return parts
    wanted = np.fromiter(records, np.int64, len(records))
    for first, batch in dataset.batches(window):
        ids, bounds = batch.lists["doc_ids"]
        for place in np.flatnonzero(np.isin(ids, wanted)).tolist():
            row = int(np.searchsorted(bounds, place, side="right")) - 1
            lengths = batch.row("segment_lens", row) if "segment_lens" in batch.lists else None
            segment = place - int(bounds[row])
            cu_seqlens = batch.row("cu_seqlens", row)
            tokens = int(lengths[segment] if lengths is not None else cu_seqlens[segment + 1] - cu_seqlens[segment])
            part, offset = (int(batch.row(name, row)[segment]) for name in ("doc_parts", "doc_offsets"))
            parts.setdefault((int(ids[place]), part), []).append((offset, tokens, first + row))
    return {document: sorted(found) for document, found in parts.items()}
