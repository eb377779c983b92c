"""The report as typed records: what `inspect` returns and `pack inspect --json` prints (`docs/report.md`).

Shares are between 0 and 1, lengths in tokens. A histogram is a list of `[lower edge, how many]`, or of
`[lower edge, how many, tokens]` where lengths are counted.
"""

from typing import Any, NotRequired, TypedDict

from shards.counts import DocumentCounts, TokenCounts
from shards.manifest import Facts

Histogram = list[list[int]]


class FillFigures(TypedDict):
    """How full packs are."""

    rate: float
    min_packs: int
    min_packs_of_windows: int
    above_min: float
    histogram: list[list[float]]


class LengthFigures(TypedDict):
    """Lengths of documents and of segments: `count`, `mean`, percentiles, `max`, `histogram`."""

    documents: dict[str, Any]
    segments: dict[str, Any]


class SegmentsPerPack(TypedDict):
    """How many segments share a pack."""

    mean: float
    max: int
    histogram: Histogram


class StragglerFigures(TypedDict):
    """How long ranks wait for the slowest, by order of the steps; None where there are too few packs."""

    ranks: int
    orders: dict[str, float | None]


class CostFigures(TypedDict):
    """The spread of attention work over packs."""

    attention_pairs: int
    octaves: Histogram
    straggler: list[StragglerFigures]


class FeedingFigures(TypedDict):
    """What one way of feeding computes."""

    name: str
    slots: int
    padding: float
    attention_pairs: int
    relative_cost: float


class LongDocument(TypedDict):
    """A document longer than `seq_len`."""

    doc_id: int
    tokens: int


class SourceFigures(TypedDict):
    """One source's balance sheet."""

    name: str
    documents: DocumentCounts
    tokens: TokenCounts
    targets: TokenCounts
    segments: int
    packs: int
    share_of_tokens: float
    share_of_targets: float
    lengths: dict[str, Any]
    longest: list[LongDocument]


class MixFigures(TypedDict):
    """How often a mix goes through one source."""

    source: str
    weight: float
    passes: float


class ModelFigures(TypedDict):
    """The model whose FLOPs weigh tokens against attention pairs."""

    name: str
    vocab_size: int | None
    max_positions: int | None


class StepFigures(TypedDict):
    """Optimizer steps of an epoch."""

    packs_per_step: int
    per_epoch: int
    left_over_packs: int


class DiskFigures(TypedDict):
    """What the shards take."""

    bytes: int
    shards: int


class RowStatistics(TypedDict):
    """What only the rows tell."""

    lengths: Histogram
    feedings: list[FeedingFigures]
    distinct_tokens: int
    duplicate_segments: int
    duplicate_tokens: int
    segments_without_target: int
    tokens_without_target: int


class FillAtLength(TypedDict):
    """How the documents would pack at another `seq_len`."""

    seq_len: int
    fill: float
    documents_cut: float


class BlockShuffle(TypedDict):
    """How far the order block-shuffled is from a full shuffle."""

    block_shards: int
    meeting_share: float
    "Share of the pairs of packs that can meet in a step of an epoch."
    by_source: dict[str, float]
    "The same among the packs of each source, where sources are mixed: each has blocks of its own then."


class DatasetReport(TypedDict):
    """Every figure of a dataset."""

    report: int
    path: str
    dataset_id: str
    plan_id: str
    plan: dict[str, Any]
    documents: DocumentCounts
    tokens: TokenCounts
    targets: TokenCounts
    segments: int
    packs: int
    fill: FillFigures
    lengths: LengthFigures
    segments_per_pack: SegmentsPerPack
    cost: CostFigures
    feedings: list[FeedingFigures]
    model: ModelFigures
    steps: StepFigures
    block_shuffle: BlockShuffle
    sources: list[SourceFigures]
    mix: list[MixFigures]
    disk: DiskFigures
    build: Facts
    warnings: list[str]
    row_statistics: NotRequired[RowStatistics]
    fill_by_seq_len: NotRequired[list[FillAtLength]]
