"""What the sidecars of a build say together, before its commit.

Bad records are counted against the limit; the windows that a fast engine tokenized are noted, so that they can be built
again if its ids ever differ; and a dataset with hardly anything to train on is refused with the likely cause.
"""

from collections.abc import Iterator, Sequence
from typing import Any, NamedTuple

from pipeline.documents.engines import REFERENCE
from pipeline.documents.make import explain_no_targets
from pipeline.formatting import format_reasons
from pipeline.sources.windows import Slice, Source
from shards.counts import Counts, add_counts, add_numbers, empty_counts
from shards.errors import PackError, counted
from shards.publish import Store
from shards.sidecar import Rejection, Sidecar, read_sidecar, sidecar_name

SETTLED = 10_000  # records after which the share of bad ones is taken seriously


class Tally:
    """Running count of bad records, and the share of them that stops a build."""

    def __init__(self, limit: float) -> None:
        self.limit = limit
        self.read = self.rejected = 0
        self.example = ""

    def add(self, counts: Counts, rejected: Sequence[Rejection] = ()) -> None:
        """Count a window; stop early where far too many records are bad."""
        if rejected and not self.example:
            self.example = f" (the first: {rejected[0]['where']}: {rejected[0]['reason'].removesuffix('.')})"
        self.read += counts["documents"]["read"]
        self.rejected += counts["documents"]["dropped"].get("rejected", 0)
        if self.read >= SETTLED:
            self.check()

    def check(self) -> None:
        """Raise PackError where the share of bad records is above the limit."""
        if self.rejected > self.limit * self.read:
            raise PackError(
                f"{self.rejected:,} bad of {counted(self.read, 'record')}, more than `max_rejected` {self.limit:g}"
                f"{self.example}; the sidecars in shards/ list them. "
                "Fix the corpus, or raise the limit and add `resume=True`."
            )


class CommittedWindow(NamedTuple):
    """What a sidecar says that continuing a build needs."""

    window: int
    source: str
    plan_id: str
    shard: str
    "Name of its file in shards/."
    shard_bytes: int
    counts: Counts
    raw_bytes: int
    input_xxh3: str
    "Hash of all that the window read."
    slices: tuple[Slice, ...]
    marks: list[list[int]]
    "[file, time of change in ns, inode] of the files as they were read."


def committed_window(sidecar: Sidecar) -> CommittedWindow:
    """Return what continuing a build needs of a sidecar."""
    return CommittedWindow(
        window=sidecar["window"],
        source=sidecar["source"],
        plan_id=sidecar["plan_id"],
        shard=sidecar["shard"]["file"].removeprefix("shards/"),
        shard_bytes=sidecar["shard"]["bytes"],
        counts=sidecar["counts"],
        raw_bytes=sidecar["raw_bytes"],
        input_xxh3=sidecar["input_xxh3"],
        slices=tuple(Slice(*span[:3]) for span in sidecar["spans"]),
        marks=sidecar["facts"].get("files", []),
    )


class SidecarSummary(NamedTuple):
    """What the sidecars of a build say together."""

    totals: Counts
    files: set[str]
    "Files in shards/ that belong to the dataset."
    fast_windows: set[int]
    "Windows that a fast tokenizer engine wrote."
    unproven: set[tuple[str, str]]
    "Fast engines, with their versions, that were compared with the reference on a sample of their windows only."
    engine_differed: bool
    "Whether it gave other ids than the reference in any window."
    trained_end_ids: set[int]
    "End marks that answers and documents were trained to end in: where a model made of them will stop."
    unrolled: dict[str, int]
    "Conversations that became several documents, see `DocumentMaker.unrolled`; empty where none did."
    unread_fields: dict[str, dict[str, int]]
    "For each source, how many of its records have fields that look as if they mattered and that no option reads."
    spelled_controls: dict[str, Any]
    "How many `texts` spell a control token without becoming one, and an `example`; empty where none does."
    windows: list[CommittedWindow]


def summarize_sidecars(store: Store, plan_id: str, num_windows: int, max_rejected: float) -> SidecarSummary:
    """Read every sidecar.

    Raises:
        PackError: A window is missing or of another plan, or too many records are bad.
    """
    files: set[str] = set()
    fast_windows: set[int] = set()
    unproven: set[tuple[str, str]] = set()
    trained_end_ids: set[int] = set()
    unrolled: dict[str, int] = {}
    unread_fields: dict[str, dict[str, int]] = {}
    spelled_controls: dict[str, Any] = {}
    windows: list[CommittedWindow] = []
    totals, tally, engine_differed = empty_counts(), Tally(max_rejected), False
    for sidecar in all_sidecars(store, plan_id, num_windows):
        files |= {sidecar["shard"]["file"], sidecar_name(sidecar["window"])}
        totals = add_counts(totals, sidecar["counts"])
        tally.add(sidecar["counts"], sidecar["rejected"])
        trained_end_ids |= set(sidecar["facts"].get("trained_end_ids", ()))
        unrolled = add_numbers(unrolled, {**sidecar["facts"].get("unrolled", {})})
        if unread := sidecar["facts"].get("unread_fields"):
            unread_fields = add_numbers(unread_fields, {sidecar["source"]: unread})
        if spelled := sidecar["facts"].get("spelled_controls"):
            texts = spelled_controls.get("texts", 0) + spelled.get("texts", 0)
            spelled_controls = {**spelled, **spelled_controls, "texts": texts}
        windows.append(committed_window(sidecar))
        fact = sidecar["facts"].get("tokenizer")
        engine_differed |= fact is not None and fact["guard"]["result"] == "differs"
        if fact is not None and fact["engine"] != REFERENCE:
            fast_windows.add(sidecar["window"])
            if not fact["guard"].get("compares_all"):
                unproven.add((fact["engine"], fact["version"]))
    tally.check()
    return SidecarSummary(
        totals,
        files,
        fast_windows,
        unproven,
        engine_differed,
        trained_end_ids,
        unrolled,
        unread_fields,
        spelled_controls,
        windows,
    )


def all_sidecars(store: Store, plan_id: str, num_windows: int) -> Iterator[Sidecar]:
    """Yield the sidecars in window order.

    Raises:
        PackError: A window is missing, or of another plan.
    """
    for window in range(num_windows):
        sidecar = read_sidecar(store, window)
        if sidecar is None:
            raise PackError(
                f"{store.location}: window {window} of {num_windows} is missing. Run the build again with "
                f"`resume=True`, or in a job array the part that has it (--windows i::n, where i is {window} modulo n)."
            )
        if sidecar["plan_id"] != plan_id:
            raise PackError(
                f"{store.location}: window {window} is of plan {sidecar['plan_id'][:12]}; expected {plan_id[:12]}. "
                "Another build wrote there. Run the build again with `resume=True`, and one build at a time."
            )
        yield sidecar


class NothingToTrainError(PackError):
    """A build whose dataset nobody could train on."""


def check_totals(totals: Counts, sources: list[Source]) -> None:
    """Stop where nothing is left to train on, or hardly anything has a target.

    Raises:
        NothingToTrainError: With the likely cause.
    """
    documents, dropped = totals["documents"], totals["documents"]["dropped"]
    without = dropped.get("no_target", 0)
    if without * 2 > documents["read"] - dropped.get("empty", 0) - dropped.get("rejected", 0):
        causes = {explain_no_targets(source.options) for source in sources}
        raise NothingToTrainError(
            f"no target in {without:,} of {counted(documents['read'], 'document')}; expected one in most of them. "
            f"{' '.join(sorted(causes))} (`keep_no_target=True` packs them all the same.)"
        )
    if not documents["packed"]:
        names, why = ", ".join(source.name for source in sources), format_reasons(dropped)
        too_long = "Raise `seq_len`, or choose another `overlong`."
        remedy = too_long if "overlong" in dropped else "Check the files and the field names."
        raise NothingToTrainError(
            f"{names}: no document to pack ({counted(documents['read'], 'record')} read{why and ': '}{why}); "
            f"expected at least one. {remedy}"
        )
