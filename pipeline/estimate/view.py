"""What `pack plan` shows on a terminal."""

from rich.console import Group, RenderableType

from pipeline.estimate.records import Estimate, SampleFigures
from pipeline.formatting import describe_unread, format_bytes, format_count, format_duration, format_share
from pipeline.report.terminal import TableRows, join_with_blank_lines, label_table, make_table, safe_text
from shards.errors import counted


def estimate_view(estimate: Estimate) -> Group:
    """Return an estimate, for people."""
    sample, corpus, build = estimate["sample"], estimate["corpus"], estimate["build"]
    seen = "everything"
    if not sample["whole"]:
        of = f" of {format_bytes(sample['corpus_bytes'])}" if sample["corpus_bytes"] else ""
        seen = f"{counted(sample['documents'], 'document')}, {format_bytes(sample['bytes'])}{of}"
    about = "" if sample["whole"] else "about "
    workers = counted(build["workers"], "worker")
    rows = [
        ["seen", f"{seen} in {format_duration(sample['seconds'])}"],
        ["corpus", f"{about}{counted(corpus['documents'], 'document')}, {corpus['tokens']:,} tokens"],
        [
            "estimated build",
            f"{format_duration(build['seconds'])} with {workers}, {format_bytes(build['disk_bytes'])} on disk",
        ],
    ]
    if sample["rejected"] + sample["empty"]:
        rows.append(["left out", f"{sample['rejected']:,} unreadable, {sample['empty']:,} empty"])
    best = estimate["recommendation"]
    advice = f"--seq-len {best['seq_len']}: {best['reason']}" if best["seq_len"] else best["reason"]
    seq_lens = ["seq_len", "packs", "full", "documents cut", "tokens lost", "cost a token"]
    packers = ["seq_len", *dict.fromkeys(row["packer"] for row in estimate["outcomes"])]
    parts: list[RenderableType] = [label_table(rows)]
    if sample["rejected"]:
        parts.append(safe_text(_rejection(sample), "yellow"))
    parts += [safe_text(f"! {describe_unread(*entry)}.", "yellow") for entry in sample["unread_fields"].items()]
    parts += [
        make_table(seq_lens, list(_by_seq_len(estimate)), "With the default packer"),
        make_table(packers, list(_by_packer(estimate)), "How full each packer fills packs"),
        safe_text(f"cost: training FLOPs a token against the cheapest row, {estimate['model']}", "dim"),
        safe_text(f"→ {advice}", "bold"),
    ]
    return join_with_blank_lines(parts)


def _rejection(sample: SampleFigures) -> str:
    """Say why records are unreadable, and what a build does about it."""
    share = sample["rejected"] / (sample["rejected"] + sample["empty"] + sample["documents"])
    return (
        f"! {sample['first_rejected']}. A build stops there unless --on-error skip leaves such records out: "
        f"{format_share(share)} of those seen, where --max-rejected allows 1% if it is not raised."
    )


def _by_seq_len(estimate: Estimate) -> TableRows:
    for row in estimate["outcomes"]:
        if row["packer"] == "auto":
            figures = map(format_share, (row["fill"], row["documents_cut"], row["tokens_lost"]))
            yield [f"{row['seq_len']:,}", format_count(row["packs"]), *figures, f"{row['relative_cost']:.2f} x"]


def _by_packer(estimate: Estimate) -> TableRows:
    for seq_len in dict.fromkeys(row["seq_len"] for row in estimate["outcomes"]):
        yield [
            f"{seq_len:,}",
            *[format_share(row["fill"]) for row in estimate["outcomes"] if row["seq_len"] == seq_len],
        ]
