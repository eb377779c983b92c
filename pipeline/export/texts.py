"""JSONL: documents decoded, with the places of what is trained, in characters.

    {"text": "<user>Hi<bot>Hello<end>", "targets": [[13, 23]], "source": "chats", "doc_id": 4294967296, "doc_part": 0}

A character whose bytes are spread over several tokens belongs to the token that completes it. Control tokens are
spelled out, since a model reads them as much as anything else.
"""

from itertools import pairwise
from pathlib import Path
from typing import Any

import numpy as np
import orjson

from pipeline.building.progress import Progress
from pipeline.building.repacking.joining import join_documents
from pipeline.export.naming import file_stems
from pipeline.export.samples import windows_by_source
from pipeline.report.decoding import Decoder
from pipeline.tokens import Documents
from shards.errors import PackError
from shards.reader import Dataset

DOCUMENTS_AT_ONCE = 1000


def write_jsonl(dataset: Dataset, out: Path, progress: Progress) -> None:
    """Write `<source>.jsonl` for every source, one document a line.

    Raises:
        PackError: The dataset has no tokenizer that decodes.
    """
    if "tokenizer.json" not in dataset.manifest["tokenizer_files"]:
        raise PackError(
            f'{dataset.path}: has no tokenizer.json, so `to="jsonl"` cannot decode it; expected a dataset that was '
            "built with a tokenizer. Choose another format."
        )
    decoder = Decoder(dataset.path / "tokenizer")
    by_source = windows_by_source(dataset)
    for source, stem in file_stems(by_source).items():
        with (out / f"{stem}.jsonl").open("wb") as file:
            for window in by_source[source]:
                documents = join_documents(dataset, window).documents
                for start in range(0, len(documents.doc_ids), DOCUMENTS_AT_ONCE):
                    stop = min(start + DOCUMENTS_AT_ONCE, len(documents.doc_ids))
                    for record in decode(documents, range(start, stop), decoder):
                        file.write(orjson.dumps(record | {"source": source}, option=orjson.OPT_APPEND_NEWLINE))
                    tokens = int(documents.offsets[stop] - documents.offsets[start])
                    progress.on_progress(stop - start, tokens, 0)


def decode(documents: Documents, chosen: range, decoder: Decoder) -> list[dict[str, Any]]:
    """Return some documents as text, each with the character spans of its targets and, where there are, their weights.

    Args:
        documents: Joined documents; the first token of one is never a target.
        chosen: Which of them.
        decoder: Of the dataset.
    """
    bounds = [(int(documents.offsets[k]), int(documents.offsets[k + 1])) for k in chosen]
    cuts = [_cuts(documents, start, stop) for start, stop in bounds]
    ids = [documents.input_ids[start:stop].tolist() for start, stop in bounds]
    texts = decoder.decode_batch(ids)
    pieces = decoder.decode_batch(
        [tokens[begin:end] for tokens, places in zip(ids, cuts, strict=True) for begin, end in pairwise(places)]
    )
    records, used = [], 0
    for k, (start, _), places, tokens, text in zip(chosen, bounds, cuts, ids, texts, strict=True):
        parts = pieces[used : used + len(places) - 1]
        used += len(parts)
        ends = _ends(parts, places, tokens, text, decoder)
        record: dict[str, Any] = {"text": text, **_targets(documents, start, places, ends)}
        part = 0 if documents.doc_parts is None else int(documents.doc_parts[k])
        records.append(record | {"doc_id": int(documents.doc_ids[k]), "doc_part": part})
    return records


def _cuts(documents: Documents, start: int, stop: int) -> list[int]:
    """Return the places in a document where targets begin or end or weigh otherwise, its start and its end among them.

    Example:
        The mask [0, 0, 1, 1, 0] gives [0, 2, 4, 5]; without a mask 5 tokens give [0, 1, 5].
    """
    if documents.loss_mask is None:
        return sorted({0, min(1, stop - start), stop - start})
    value = documents.loss_mask if documents.loss_weights is None else documents.loss_weights
    inner = np.flatnonzero(np.diff(value[start:stop])) + 1
    return [0, *inner.tolist(), stop - start]


def _ends(parts: list[str], places: list[int], tokens: list[int], text: str, decoder: Decoder) -> list[int]:
    """Return how many characters are complete after the tokens up to each of `places`."""
    if "".join(parts) == text:
        return np.cumsum([0, *map(len, parts)]).tolist()  # type: ignore[no-any-return]
    # a character is cut in two, or this decoder joins tokens in other ways: what a beginning shares with the whole
    heads = decoder.decode_batch([tokens[:place] for place in places])
    shared = [_shared(head, text) for head in heads[:-1]]
    return np.maximum.accumulate([*shared, len(text)]).tolist()  # type: ignore[no-any-return]


def _shared(head: str, text: str) -> int:
    """Return how many characters two texts begin with alike."""
    pairs = zip(head, text, strict=False)
    return next((place for place, (one, other) in enumerate(pairs) if one != other), min(len(head), len(text)))


def _targets(documents: Documents, start: int, places: list[int], ends: list[int]) -> dict[str, Any]:
    """Return the spans of targets in characters, and the weight of each where the dataset has weights."""
    mask, weights = documents.loss_mask, documents.loss_weights
    spans, values = [], []
    for number, place in enumerate(places[:-1]):
        trained = place > 0 if mask is None else bool(mask[start + place])
        if trained:
            spans.append([ends[number], ends[number + 1]])
            values.append(None if weights is None else float(weights[start + place]))
    return {"targets": spans} | ({} if weights is None else {"weights": values})
