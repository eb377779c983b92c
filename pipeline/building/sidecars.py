"""What the sidecars of a build say together, before its commit.

Bad records are tallied against the limit; windows that a fast tokenizer engine wrote are named, lest it lied anywhere;
and a dataset that would have hardly anything to train on is refused with the likely cause.
"""

from collections.abc import Iterator, Sequence
from typing import Any, NamedTuple

from pipeline.documents.encoder import REFERENCE
from pipeline.documents.make import explain_no_targets
from pipeline.formatting import format_reasons
from pipeline.sources.windows import Source
from shards.counts import Counts, add_counts, empty_counts
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
                f"{self.rejected:,} bad of {counted(self.read, 'record')}, more than --max-rejected {self.limit:g}"
                f"{self.example}; the sidecars in shards/ list them. Mend the corpus, or raise the limit and --resume."
            )


class Survey(NamedTuple):
    """What the sidecars of a build say together."""

    totals: Counts
    kept: set[str]
    "Files in shards/ that belong to the dataset."
    suspects: set[int]
    "Windows that a fast tokenizer engine wrote."
    lied: bool
    "Whether it gave other ids than the reference in any window."
    trained_end_ids: set[int]
    "End marks that answers and documents were trained to end in: where a model made of them will stop."
    spelled_controls: dict[str, Any]
    "How many `texts` spell a control token without becoming one, and an `example`; empty where none does."


def take_survey(store: Store, num_windows: int, max_rejected: float) -> Survey:
    """Read every sidecar.

    Raises:
        PackError: A window is missing, or too many records are bad.
    """
    kept: set[str] = set()
    suspects: set[int] = set()
    trained_end_ids: set[int] = set()
    spelled_controls: dict[str, Any] = {}
    totals, tally, lied = empty_counts(), Tally(max_rejected), False
    for sidecar in all_sidecars(store, num_windows):
        kept |= {sidecar["shard"]["file"], sidecar_name(sidecar["window"])}
        totals = add_counts(totals, sidecar["counts"])
        tally.add(sidecar["counts"], sidecar["rejected"])
        trained_end_ids |= set(sidecar["facts"].get("trained_end_ids", ()))
        if spelled := sidecar["facts"].get("spelled_controls"):
            texts = spelled_controls.get("texts", 0) + spelled["texts"]
            spelled_controls = {"example": spelled["example"], **spelled_controls, "texts": texts}
        fact = sidecar["facts"]["tokenizer"]
        lied |= fact["guard"]["result"] == "differs"
        if fact["engine"] != REFERENCE:
            suspects.add(sidecar["window"])
    tally.check()
    return Survey(totals, kept, suspects, lied, trained_end_ids, spelled_controls)


def all_sidecars(store: Store, num_windows: int) -> Iterator[Sidecar]:
    """Yield the sidecars in window order.

    Raises:
        PackError: A window is missing.
    """
    for window in range(num_windows):
        sidecar = read_sidecar(store, window)
        if sidecar is None:
            raise PackError(
                f"{store.location}: window {window} of {num_windows} is missing. Run the build again with --resume, or "
                f"in a job array the part that has it (--windows i::n, where i is {window} modulo n)."
            )
        yield sidecar


def check_totals(totals: Counts, sources: list[Source]) -> None:
    """Stop where nothing is left to train on, or hardly anything has a target."""
    documents, dropped = totals["documents"], totals["documents"]["dropped"]
    without = dropped.get("no_target", 0)
    if without * 2 > documents["read"] - dropped.get("empty", 0) - dropped.get("rejected", 0):
        causes = {explain_no_targets(source.options) for source in sources}
        raise PackError(
            f"no target in {without:,} of {counted(documents['read'], 'document')}; expected one in most of them. "
            f"{' '.join(sorted(causes))} (--keep-no-target packs them all the same.)"
        )
    if not documents["packed"]:
        names, why = ", ".join(source.name for source in sources), format_reasons(dropped)
        too_long = "Raise --seq-len, or choose another --overlong."
        remedy = too_long if "overlong" in dropped else "Check the files and the field names."
        raise PackError(
            f"{names}: no document to pack ({counted(documents['read'], 'record')} read{why and ': '}{why}); "
            f"expected at least one. {remedy}"
        )
