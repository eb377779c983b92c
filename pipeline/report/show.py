"""Packs decoded, so that a person sees what a model will see: segments, positions, targets, special tokens, cuts.

`decode_pack` turns a row into plain data (runs of tokens that are alike, decoded), which the terminal and the HTML page
both print.
"""

import json
from collections.abc import Iterable, Iterator
from itertools import islice, pairwise
from shlex import quote
from typing import Any

import numpy as np
from rich.console import Console
from rich.text import Text

from pipeline.formatting import format_share
from pipeline.report.decoding import AnyDecoder, decoder_of
from pipeline.report.terminal import safe_text
from shards.errors import PackError, counted
from shards.fetching.cache import Cache
from shards.plan import Plan
from shards.reader import Dataset
from shards.schema import split_doc_id
from shards.sidecar import Sidecar
from shards.tables.provenance import Provenance, name_part, parts_of, read_sidecar, spans_of
from shards.tables.scores import Scores, read_scores
from shards.tables.shard_list import ShardEntry
from shards.text import printable

UNITS = {
    "parquet": "row groups",
    "arrow": "rows",
    "npy": "tokens",
    "bin": "tokens",
    "megatron": "documents",
}  # of slices
DecodedPack = dict[str, Any]


def decode_pack(
    dataset: Dataset, row: int, decoder: AnyDecoder, *, tokens: int | None = None, scores: Scores | None = None
) -> DecodedPack:
    """Return one pack as plain data.

    Args:
        dataset: An open dataset.
        row: Number of the pack.
        decoder: Of this dataset.
        tokens: Most tokens of each segment that are decoded; None for all.
        scores: Losses of documents, which are then shown.

    Returns:
        row, source, shard, tokens, targets, fill and `segments`, each with its place in the pack and in its document,
        its record, and `runs` of tokens that are alike: text, trained, special, tokens.

    Raises:
        PackError: There is no such pack.
    """
    if not 0 <= row < len(dataset):
        raise PackError(f"{dataset.path}: no pack {row}; it has {len(dataset):,}, counted from 0.")
    pack, (shard, local) = dataset[row], dataset.shard_of(row)
    bounds = pack["cu_seqlens"].tolist()
    sidecar, spans = read_sidecar(dataset, shard["window"]), spans_of(dataset, shard["window"])
    parts = parts_of(dataset, shard["window"], set(pack["doc_ids"].tolist()))
    segments = [
        {
            "document": int(document),
            "part": int(part),
            "part_name": name_part(dataset.plan, shard["source"], int(part)),
            **({} if scores is None else {"loss": scores.loss_of(int(document), int(part))}),
            "record": record_of(dataset.plan, shard, spans, int(document)),
            "start": start,
            "tokens": stop - start,
            "document_offset": int(offset),
            **find_neighbours(parts[document, part], int(offset), None if part else _whole(sidecar, int(document))),
            "targets": int(pack["loss_mask"][start:stop].sum()),
            "hidden_tokens": max(0, stop - start - tokens) if tokens is not None else 0,
            "runs": list(_runs(pack, start, stop if tokens is None else min(stop, start + tokens), decoder)),
        }
        for start, stop, document, part, offset in zip(
            bounds[:-1],
            bounds[1:],
            pack["doc_ids"].tolist(),
            pack["doc_parts"].tolist(),
            pack["doc_offsets"],
            strict=True,
        )
    ]
    return {
        "row": row,
        "source": shard["source"],
        "shard": shard["file"],
        "shard_row": local,
        "tokens": bounds[-1],
        "targets": pack["num_targets"],
        "fill": bounds[-1] / dataset.seq_len,
        "attention_pairs": pack["attention_pairs"],
        "segments": segments,
    }


def _runs(pack: DecodedPack, start: int, stop: int, decoder: AnyDecoder) -> Iterator[dict[str, Any]]:
    """Yield stretches of tokens that are all targets or all not, every special token by itself."""
    ids, mask = pack["input_ids"][start:stop].astype(np.int64), pack["loss_mask"][start:stop]
    special = np.isin(ids, np.fromiter(decoder.special_ids, np.int64, len(decoder.special_ids)))
    cuts = np.flatnonzero((np.diff(mask.astype(np.int8)) != 0) | special[1:] | special[:-1]) + 1
    for first, last in zip([0, *cuts.tolist()], [*cuts.tolist(), len(ids)], strict=True):
        text = decoder.text(ids[first:last], ids[max(0, first - 4) : first])
        yield {"text": text, "trained": bool(mask[first]), "special": bool(special[first]), "tokens": last - first}


def record_of(plan: Plan, shard: ShardEntry, spans: list[list[int]], document: int) -> str:
    """Return where a document came from: file, and its place among the records of its slice."""
    window, index = split_doc_id(document)
    files = next(source["files"] for source in plan["sources"] if source["name"] == shard["source"])
    for number, start, stop, first, count in spans:
        if first <= index < first + count:
            file = files[number]
            if shard["window"] < len(plan["windows"]):
                unit = UNITS.get(file["format"], "bytes")
            else:  # cut while it was read
                unit = "lines" if file["format"] == "jsonl" else "records"
            return f"{file['name']}, record {index - first + 1} of {unit} {start}:{stop}"
    return f"window {window}, record {index}"  # as `--doc` takes it: {window}:{index}


def find_neighbours(parts: list[tuple[int, int, int]], offset: int, whole: int | None) -> dict[str, int | None]:
    """Return what stands before and after the segment at `offset` of a document, and how many tokens are in no pack.

    Args:
        parts: The document's segments, from `parts_of`.
        offset: First token of the segment in question.
        whole: Tokens of the whole document, None where nobody noted it.

    Returns:
        `previous_pack` and `next_pack`, or None; `lost_before` and `lost_after`, up to the neighbour or the end.
    """
    here = [part[0] for part in parts].index(offset)
    before, after = parts[here - 1] if here else None, parts[here + 1] if here + 1 < len(parts) else None
    end = after[0] if after else whole
    return {
        "previous_pack": before[2] if before else None,
        "next_pack": after[2] if after else None,
        "lost_before": offset - (before[0] + before[1] if before else 0),
        "lost_after": end - offset - parts[here][1] if end is not None else 0,
    }


def _whole(sidecar: Sidecar | None, document: int) -> int | None:
    longest = sidecar["longest"] if sidecar else []
    return next((entry["tokens"] for entry in longest if entry["doc_id"] == document), None)


def rows_of_document(dataset: Dataset, document: int) -> list[int]:
    """Return the packs that hold segments of a document, in the order of its tokens.

    Raises:
        PackError: No pack holds any of it.
    """
    window, record = split_doc_id(document)
    documents = parts_of(dataset, window, {document})
    parts = [segment for key in sorted(documents) for segment in documents[key]]
    if not parts:
        raise PackError(
            f"`doc`: {window}:{record}; no pack holds any token of it, it was dropped or does not exist. "
            f"See pack inspect {quote(str(dataset.path))}."
        )
    return list(dict.fromkeys(row for _, _, row in parts))


def rows_with_text(dataset: Dataset, text: str, decoder: AnyDecoder) -> Iterator[int]:
    """Yield the packs with `text` inside one segment, in order."""
    for row in range(len(dataset)):
        pack = dataset[row]
        bounds = pack["cu_seqlens"]
        ids = pack["input_ids"]
        if any(text in decoder.text(ids[a:b], ids[:0]) for a, b in pairwise(bounds)):
            yield row


def pack_title(pack: DecodedPack) -> str:
    """Return one line about a pack."""
    return (
        f"pack {pack['row']}: {counted(pack['tokens'], 'token')}, {counted(len(pack['segments']), 'segment')}, "
        f"{counted(pack['targets'], 'target')}, {format_share(pack['fill'])} full, source {pack['source']}"
    )


def segment_title(segment: DecodedPack, number: int) -> str:
    """Return one line about a segment."""
    cuts = []
    for lost, neighbour, where in (("lost_before", "previous_pack", "before"), ("lost_after", "next_pack", "after")):
        if segment[neighbour] is not None:
            cuts.append(f"its document goes on {where} it in pack {segment[neighbour]}")
        if segment[lost]:
            cuts.append(f"{counted(segment[lost], 'token')} {where} it LOST")
    first, last = segment["start"], segment["start"] + segment["tokens"] - 1
    place = f"tokens {first:,} to {last:,} (positions 0 to {last - first:,}), {counted(segment['targets'], 'target')}"
    record = ", ".join(filter(None, (segment["record"], segment["part_name"])))
    if segment.get("loss") is not None:
        record += f", loss {segment['loss']:.3f}"
    return f"segment {number}: {place}, {'; '.join([record, *cuts])}"


def pack_view(pack: DecodedPack, *, colour: bool) -> Iterator[Text]:
    """Yield the lines of a pack; where there is no colour, brackets stand around targets."""
    yield safe_text(pack_title(pack), "bold")
    for number, segment in enumerate(pack["segments"]):
        yield safe_text(f"── {segment_title(segment, number)}", "cyan")
        line, inside = Text(), False
        for run in segment["runs"]:
            style = "bold magenta" if run["special"] else ("green" if run["trained"] else "dim")
            if not colour and run["trained"] != inside:
                line.append("⟦" if run["trained"] else "⟧")
            inside = run["trained"]
            text = printable(run["text"], lines=True)
            line.append(text, style=style + (" underline" if run["special"] and run["trained"] else ""))
        if not colour and inside:
            line.append("⟧")
        if segment["hidden_tokens"]:
            line.append(f" … {counted(segment['hidden_tokens'], 'more token')}", style="dim italic")
        yield line


def mark_legend(*, colour: bool) -> Text:
    """Return what the marks mean."""
    if not colour:
        return Text("⟦ ⟧ targets, as the loss sees them; everything else is only read")
    marks = {
        "target": "green",
        "only read": "dim",
        "special": "bold magenta",
        "special target": "bold magenta underline",
    }
    return Text("  ").join(Text(name, style=style) for name, style in marks.items())


def show_packs(
    path: str,
    *,
    row: int,
    doc: str | None,
    grep: str | None,
    limit: int,
    tokens: int | None,
    as_json: bool,
    scores: str | None = None,
    worst: bool = False,
    cache: Cache | None = None,
) -> Iterator[str]:
    """Yield what `pack show` prints, styled where stdout is a terminal that wants it.

    Raises:
        PackError: No such pack, document or text, or scores of another dataset.
    """
    dataset, console = Dataset(path, cache=cache), Console()
    decoder = decoder_of(dataset)
    losses = None if scores is None else read_scores(scores, dataset.dataset_id)
    rows = [row]
    if worst:
        if losses is None:
            raise PackError("`worst`: there are no losses to go by; expected some. Add `scores`, from pack score.")
        found = [rows_of_document(dataset, document)[0] for document in losses.worst(limit)]
        rows = list(dict.fromkeys(found))
    elif doc is not None:
        found = [row for document in Provenance(dataset).find(doc) for row in rows_of_document(dataset, document)]
        rows = list(dict.fromkeys(found))
    elif grep is not None:
        rows = list(islice(rows_with_text(dataset, grep, decoder), limit))
        if not rows:
            raise PackError(f"`grep`: {grep!r}; no segment of {path} holds this text. Check spelling and white space.")
    colour = console.color_system is not None and not console.no_color
    for number in rows:
        pack = decode_pack(dataset, number, decoder, tokens=tokens, scores=losses)
        if as_json:
            yield json.dumps(pack)
            continue
        yield _printed(console, pack_view(pack, colour=colour))
    if not as_json:
        yield _printed(console, [mark_legend(colour=colour)]).rstrip("\n")


def _printed(console: Console, lines: Iterable[Text]) -> str:
    with console.capture() as capture:
        for line in lines:
            console.print(line, soft_wrap=True)
    return capture.get()
