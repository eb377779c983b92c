"""Prove that a dataset holds its corpus: tokenize the sources again and look for every document.

For each window the records are read and tokenized afresh with the reference engine. Every document must then be there
exactly once, its tokens in order without a gap, with the same mask and weights; a document that is absent must have a
reason that the plan names, and a document cut short must have been cut by its policy. Packing is not repeated, so this
does not trust the packer, the gathering or the writer.
"""

from collections.abc import Iterator
from typing import Any, NamedTuple

import numpy as np

from pipeline.building.stages import Stages
from pipeline.building.tasks import all_tasks
from pipeline.building.window import read_documents
from pipeline.config import RecordOptions
from pipeline.documents.encoder import Encoder
from pipeline.documents.make import DocumentMaker
from pipeline.documents.tokenizer import no_text_image, spec_of_size
from pipeline.packing.packers import PACKERS
from pipeline.sources.discovery import resolve_sources
from pipeline.sources.reader import WindowReader
from pipeline.sources.windows import Source
from pipeline.tokens import Documents
from shards.counts import SET_ASIDE
from shards.errors import counted
from shards.plan import Plan
from shards.publish import LocalStore
from shards.reader import Dataset
from shards.schema import split_doc_id
from shards.sidecar import read_sidecar
from shards.verification import VerifyReport

CHANGED = "The corpus changed since the build. Give the files as they were, or build again."


class _Piece(NamedTuple):
    """Some tokens of a document, as they were packed or as the source gives them."""

    offset: int
    ids: Any
    mask: Any
    weights: Any
    "The weight of each token; its mask in a dataset without weights."
    hidden: Any
    "The weight of the first token, which is no target behind a cut."


def audit_sources(path: str, specs: tuple[str, ...], report: VerifyReport) -> None:
    """Look for every document of the sources in a dataset, and add what is wrong to `report`.

    Args:
        path: The dataset.
        specs: The SOURCE arguments that it was built from.
        report: Gets a problem for the first document of each window that is not right, and a summary.
    """
    dataset = Dataset(path)
    plan = dataset.plan
    options = {source["name"]: RecordOptions(**source["records"]) for source in plan["sources"]}
    sources = resolve_sources(specs, next(iter(options.values())), options)
    found = [[file.as_plan() for file in source.files] for source in sources]
    for planned, files in zip(plan["sources"], found, strict=False):
        for old, new in zip(planned["files"], files, strict=False):
            if old != new:
                other = new["name"] != old["name"]
                named = f"{new['name']} is not the file that was packed ({old['name']})"
                what = named if other else f"{new['name']} is not what was packed: it has changed since"
                report.add("F2", f"source {planned['name']!r}", what, CHANGED)
                return
    packed = [len(source["files"]) for source in plan["sources"]]
    if packed != [len(files) for files in found]:
        what = f"was built from {counted(sum(packed), 'file')}, found {sum(map(len, found)):,}"
        report.add("F2", path, what, CHANGED)
        return
    store = LocalStore(path)
    without = no_text_image(spec_of_size(plan["tokenizer"]["vocab_size"]))
    tokenizer = f"{path}/tokenizer" if dataset.manifest["tokenizer_files"] else without
    encoders = {
        special: Encoder(tokenizer, engine="tokenizers", parse_special=special)
        for special in {option.parse_special for option in options.values()}
    }
    makers = [DocumentMaker(encoders[source.options.parse_special], source.options) for source in sources]
    starts = [*dataset.shards.columns["first_pack"].tolist(), len(dataset)]
    documents = seen = 0
    for seen, task in enumerate(all_tasks(plan, sources), 1):
        if seen == len(starts):
            break
        source = sources[task.source]
        reader = WindowReader(source, task.slices, on_error="skip", payloads=task.payloads)
        tokens, _ = read_documents(reader, makers[task.source], task.window, Stages())
        documents += len(tokens.doc_ids)
        sidecar = read_sidecar(store, task.window)
        if sidecar is not None and sidecar["input_xxh3"] != reader.input_xxh3:
            names = ", ".join(sorted({source.files[slice_.file].name for slice_ in task.slices})[:3])
            report.add("F2", f"window {task.window}", f"{names} holds other bytes than were packed", CHANGED)
            continue
        packs = range(starts[task.window], starts[task.window + 1])
        dropped = {} if sidecar is None else sidecar["counts"]["documents"]["dropped"]
        aside = sum(dropped.get(reason, 0) for reason in SET_ASIDE) if plan.get("select") else 0
        for where, what in _window_problems(dataset, packs, tokens, source, plan, aside):
            report.add("F12", where, what)
            break
    if seen != len(starts) - 1:  # standard input has no fingerprint that would have told
        gave = "more" if seen == len(starts) else f"{seen:,}"
        report.add("F2", path, f"holds {counted(len(starts) - 1, 'window')}, the sources give {gave}")
    again = f"{counted(documents, 'document')} of {counted(seen, 'window')} tokenized again"
    report.against = f"{again}: each is there once, or left out for its reason"


def _window_problems(
    dataset: Dataset, packs: range, tokens: Documents, source: Source, plan: Plan, aside: int
) -> Iterator[tuple[str, str]]:
    """Yield the document and the fault of all that is not right; `aside` documents may be absent as a whole."""
    pieces: dict[tuple[int, int], list[_Piece]] = {}
    weighted = dataset.layout.loss_weights
    for number in packs:
        row = dataset[number]
        begins = row["cu_seqlens"][:-1]
        ends = begins + row.get("segment_lens", np.diff(row["cu_seqlens"]))
        for segment, document in enumerate(zip(row["doc_ids"].tolist(), row["doc_parts"].tolist(), strict=True)):
            begin, end = begins[segment], ends[segment]
            mask = row["loss_mask"][begin:end]
            piece = _Piece(
                int(row["doc_offsets"][segment]), row["input_ids"][begin:end], mask,
                row["loss_weights"][begin:end] if weighted else mask,
                row["start_weights"][segment] if weighted else row["start_targets"][segment],
            )  # fmt: skip
            pieces.setdefault(document, []).append(piece)
    trained = np.ones(len(tokens.input_ids), np.uint8) if tokens.loss_mask is None else tokens.loss_mask
    weights = trained if tokens.loss_weights is None else tokens.loss_weights
    parts = np.zeros(len(tokens.doc_ids), np.int32) if tokens.doc_parts is None else tokens.doc_parts
    for number, document in enumerate(zip(tokens.doc_ids.tolist(), parts.tolist(), strict=True)):
        begin, end = tokens.offsets[number : number + 2]
        source_piece = _Piece(0, tokens.input_ids[begin:end], trained[begin:end], weights[begin:end], 0)
        found = pieces.pop(document, [])
        wrong = _document_problem(found, source_piece, source.options, plan)
        if wrong and not found and aside:
            aside -= 1
        elif wrong:
            yield _name(document), wrong
    for document in pieces:
        yield _name(document), "is packed, but the sources have no such record"


def _name(document: tuple[int, int]) -> str:
    window, record = split_doc_id(document[0])
    part = f", part {document[1]}" if document[1] else ""
    return f"document {document[0]} (window {window}, record {record}{part})"


def _document_problem(pieces: list[_Piece], whole: _Piece, options: RecordOptions, plan: Plan) -> str | None:
    """Return what is wrong with the packed pieces of one document, or None."""
    ids, mask, weights = whole.ids, whole.mask, whole.weights
    policy = PACKERS[plan["packer"]["name"]].cut_policy or options.overlong_policy
    overlong = len(ids) > plan["seq_len"]
    if not pieces:
        if not mask[1:].any() and not options.keep_no_target:
            return None
        may_vanish = overlong and policy in ("drop", "truncate", "truncate-turns", "split")
        return None if may_vanish else f"has {len(ids)} tokens and is not packed"
    place = first = min(piece.offset for piece in pieces)
    for piece in sorted(pieces, key=lambda piece: piece.offset):
        offset = piece.offset
        if offset != place:
            return f"has token {min(offset, place)} {'twice' if offset < place else 'missing'}"
        place += len(piece.ids)
        if not np.array_equal(piece.ids, ids[offset:place]):
            return f"has other tokens in {offset}:{place} than the source gives"
        if piece.mask[0] or not np.array_equal(piece.mask[1:], mask[offset + 1 : place]):
            return f"has another loss mask in {offset}:{place} than the source gives"
        hidden = weights[offset] if offset else 0
        if piece.hidden != hidden or not np.array_equal(piece.weights[1:], weights[offset + 1 : place]):
            return f"has other loss weights in {offset}:{place} than the source gives"
    if (first or place != len(ids)) and not (overlong and policy in ("truncate", "truncate-turns")):
        return f"has tokens {first}:{place} packed of {len(ids)}"
    return None
