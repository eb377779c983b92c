"""What a person should know before paying for a GPU, in plain words, from the figures of a report.

Each check reads the report and yields sentences: what is so, with the value, and what to do. Add one to `CHECKS`.
"""

from collections.abc import Callable, Iterator

from pipeline.formatting import balances, describe_unread, format_reasons, format_share, unasked
from pipeline.report.records import DatasetReport
from shards.errors import counted

Check = Callable[[DatasetReport], Iterator[str]]
LOSS_WARNING_SHARE = 0.10  # a share of tokens, targets or documents that nobody loses on purpose without knowing


def find_warnings(report: DatasetReport) -> list[str]:
    """Return every warning about a dataset."""
    return [sentence for check in CHECKS for sentence in check(report)]


def check_targets(report: DatasetReport) -> Iterator[str]:
    """Nothing to train on."""
    if not report["packs"]:
        yield "The dataset holds no pack. See what was dropped and why."
    elif not report["targets"]["packed"]:
        yield "No token is a target, so training would learn nothing. Check --train-on and the chat template."
    elif report["targets"]["packed"] < 0.05 * report["tokens"]["packed"]:
        share = report["targets"]["packed"] / report["tokens"]["packed"]
        yield f"Only {format_share(share)} of the tokens are targets; the rest is read but not learned from."


def check_packing(report: DatasetReport) -> Iterator[str]:
    """Packing without effect, or loose."""
    if not report["packs"]:
        return
    mean, packer, rate = report["segments_per_pack"]["mean"], report["plan"]["packer"], report["fill"]["rate"]
    if packer == "bucketed":
        yield "Packer bucketed puts one segment in a row, which training pads; other packers need no padding."
    elif packer == "unpacked":
        yield "Packer unpacked puts one segment in a row, which pack train refuses. Build with another --packer."
    elif mean < 1.05 and rate > 0.5 and _excess_of_packer(report) <= 0.01:  # emptier packs had nothing to share
        yield (
            f"Packing had little effect: {mean:.2f} segments a pack, since documents are about as long as seq_len. "
            "A larger --seq-len would share packs and cut fewer documents."
        )
    elif rate < 0.95:
        yield f"Packs are only {format_share(rate)} full{_reason_of_loose_packs(report)} See pack plan."


def _excess_of_packer(report: DatasetReport) -> float:
    return report["packs"] / max(1, report["fill"]["min_packs_of_windows"]) - 1.0


def _reason_of_loose_packs(report: DatasetReport) -> str:
    fill, shards = report["fill"], report["disk"]["shards"]
    packer = _excess_of_packer(report)
    windows = fill["min_packs_of_windows"] / max(1, fill["min_packs"]) - 1.0
    if packer > 0.01:
        return f": {format_share(packer)} more than the windows need; another --packer would fill them better."
    if windows > 0.01:
        tokens = report["tokens"]["packed"] // shards
        return (
            f": {counted(shards, 'window')} of {tokens:,} tokens on average are packed one by one, which takes "
            f"{format_share(windows)} more. Larger --window-bytes, or fewer and larger files, would fill them better."
        )
    return "; with these lengths no packer could do better, another --seq-len may."


def check_losses(report: DatasetReport) -> Iterator[str]:
    """Much lost, source by source."""
    for source in report["sources"]:
        for sheet in balances(source):
            lost = unasked(sheet.lost)
            share = sum(lost.values()) / sheet.read if sheet.read else 0.0
            if share >= LOSS_WARNING_SHARE:
                why = format_reasons(lost)
                yield f"Source {source['name']!r}: {format_share(share)} of its {sheet.thing} were lost ({why})."
        rejected = source["documents"]["dropped"].get("rejected", 0)
        if rejected:
            yield f"Source {source['name']!r}: {counted(rejected, 'record')} could not be read; see rejected.jsonl."
        cut = source["documents"]["split"] / source["documents"]["packed"] if source["documents"]["packed"] else 0.0
        if cut >= LOSS_WARNING_SHARE:
            yield (
                f"Source {source['name']!r}: {format_share(cut)} of its documents are split over several packs, and "
                "each part is trained without what came before. A larger --seq-len would keep them whole."
            )


def check_model(report: DatasetReport) -> Iterator[str]:
    """A model that the dataset does not fit."""
    largest, vocabulary = report["plan"]["tokenizer"]["max_id"], report["model"]["vocab_size"]
    if vocabulary is not None and largest >= vocabulary:
        yield (
            f"The tokenizer's largest id is {largest:,}, the model's vocabulary ends at {vocabulary - 1:,}. "
            "Use the model's own tokenizer, or enlarge its embedding."
        )
    longest, positions = report["lengths"]["segments"].get("max", 0), report["model"]["max_positions"]
    if positions is not None and longest > positions:
        yield (
            f"The longest segment has {longest:,} tokens, the model takes {positions:,} positions. "
            "Build with a smaller --seq-len."
        )


def check_mix(report: DatasetReport) -> Iterator[str]:
    """A mix that shows some source again and again, or never."""
    mixed = {entry["source"] for entry in report["mix"]}
    for source in report["sources"] if mixed else ():
        if source["name"] not in mixed:
            yield f"Source {source['name']!r} has no weight in --mix, so it would never be trained."
    for entry in report["mix"]:
        if entry["passes"] > 4.5:
            yield (
                f"Source {entry['source']!r} would be repeated {entry['passes']:.1f} times before every source "
                "was seen once."
            )


def check_engines(report: DatasetReport) -> Iterator[str]:
    """A fast tokenizer engine that was found to differ."""
    if any(entry["guard"]["result"] == "differs" for entry in report["build"].get("tokenizer", [])):
        yield "The fast tokenizer engine gave other ids than the reference; the windows were built with the reference."


def check_unread_fields(report: DatasetReport) -> Iterator[str]:
    """Fields of records that nobody read, though they look as if they mattered."""
    for source, counts in report["build"].get("unread_fields", {}).items():
        yield f"{describe_unread(source, counts)}. Name them with an option, or remove them."


CHECKS: tuple[Check, ...] = (
    check_targets, check_packing, check_losses, check_model, check_mix, check_engines, check_unread_fields,
)  # fmt: skip
