"""What `pack trace` and `pack score` show on a terminal."""

from __future__ import annotations

from typing import TYPE_CHECKING, Literal

from rich.text import Text

from pipeline.report.terminal import make_table, print_view, safe_text
from shards.errors import counted
from trainer.documents.trace import DocumentName, DocumentTrace, StepTrace

if TYPE_CHECKING:
    from trainer.documents.score import ScoreSummary

FIGURES: tuple[Literal["pack", "tokens", "targets"], ...] = ("pack", "tokens", "targets")


def print_step(seen: StepTrace, limit: int) -> None:
    """Print the documents of a step, one line for each part of one."""
    head = (
        f"step {seen['step']:,}, epoch {seen['epoch']}: {counted(seen['packs'], 'pack')}, "
        f"{counted(len(seen['segments']), 'segment')}, {counted(seen['tokens'], 'token')}, "
        f"{counted(seen['targets'], 'target')}{'' if seen['taken'] else '; not taken yet'}"
    )
    with_loss = any(segment["loss"] is not None for segment in seen["segments"])
    rows = [
        [
            _place(segment),
            segment["source"],
            f"{segment['pack']:,}",
            f"{segment['tokens']:,}",
            f"{segment['targets']:,}",
        ]
        + ([_loss(segment)] if with_loss else [])
        for segment in seen["segments"][:limit]
    ]
    columns = ["record", "source", "pack", "tokens", "targets", *(["loss"] if with_loss else [])]
    print_view(safe_text(head, "bold"), make_table(columns, rows), *_more(len(seen["segments"]), limit))


def print_document(trace: DocumentTrace, steps_taken: int, limit: int) -> None:
    """Print the steps that see a document."""
    document = trace["document"]
    loss = f", loss {_loss(document)}" if document["loss"] is not None else ""
    packs = ", ".join(f"{pack:,}" for pack in trace["packs"])
    head = (
        f"{_place(document)}, source {document['source']}: {counted(trace['tokens'], 'token')} in "
        f"{'pack' if len(trace['packs']) == 1 else 'packs'} {packs}{loss}"
    )
    rows = [
        [f"{seen['step']:,}", f"{seen['epoch']}", ", ".join(f"{pack:,}" for pack in seen["packs"]),
         f"{seen['tokens']:,}", "" if seen["taken"] else "not yet"]
        for seen in trace["steps"][:limit]
    ]  # fmt: skip
    if not rows:
        print_view(safe_text(head, "bold"), safe_text("no step of the run sees it"))
        return
    taken = f"the run's metrics tell of {counted(steps_taken, 'step')}"
    table = make_table(["step", "epoch", "packs", "tokens", "taken"], rows)
    print_view(safe_text(head, "bold"), table, *_more(len(trace["steps"]), limit), safe_text(taken, "dim"))


def print_summary(summary: ScoreSummary, out: str) -> None:
    """Print what was found of all documents, and those of highest loss."""
    without = summary["without_targets"]
    head = (
        f"{out}: {counted(summary['documents'], 'document')}, loss {summary['loss']:.4f} over "
        f"{counted(summary['targets'], 'target')}{f'; {without:,} without a target' if without else ''}"
    )
    quantiles = make_table(
        ["", *summary["quantiles"]], [["loss of documents", *(f"{loss:.3f}" for loss in summary["quantiles"].values())]]
    )
    rows = [[_place(row), row["source"] or "", f"{row['tokens']:,}", f"{row['loss']:.3f}"] for row in summary["worst"]]
    print_view(safe_text(head, "bold"), quantiles, make_table(["highest", "source", "tokens", "loss"], rows))


def _place(document: DocumentName) -> str:
    """Return a name that `pack trace --doc` and `pack show --doc` take."""
    name = f"{document['doc_id'] >> 32}:{document['doc_id'] & 0xFFFFFFFF}"
    if document["file"] is not None:
        name = f"{document['file']}:{document['record']}"
    return name + (f" ({document['part_name']})" if document["part_name"] else "")


def _loss(document: DocumentName) -> str:
    return "" if document["loss"] is None else f"{document['loss']:.3f}"


def _more(number: int, limit: int) -> list[Text]:
    return [safe_text(f"… and {number - limit:,} more (--limit)", "dim")] if number > limit else []
