"""The estimate as typed records: what `estimate` returns and `pack plan --json` prints (`docs/report.md`)."""

from typing import TypedDict


class SampleFigures(TypedDict):
    """What was read."""

    bytes: int
    corpus_bytes: int | None
    documents: int
    tokens: int
    seconds: float
    whole: bool
    rejected: int
    empty: int
    first_rejected: str | None
    unread_fields: dict[str, dict[str, int]]


class CorpusFigures(TypedDict):
    """What the whole corpus is estimated to hold."""

    documents: int
    tokens: int
    longest_seen: int


class BuildFigures(TypedDict):
    """What a build is estimated to take."""

    seconds: float
    workers: int
    disk_bytes: int


class Outcome(TypedDict):
    """What one packer would give at one `seq_len`."""

    seq_len: int
    packer: str
    packs: int
    fill: float
    documents_cut: float
    tokens_lost: float
    relative_cost: float


class Recommendation(TypedDict):
    """The `seq_len` to build with, None where none fits, and why."""

    seq_len: int | None
    packer: str
    reason: str


class Estimate(TypedDict):
    """What a build of a corpus would give."""

    sample: SampleFigures
    corpus: CorpusFigures
    build: BuildFigures
    model: str
    outcomes: list[Outcome]
    recommendation: Recommendation
