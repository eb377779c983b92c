"""What `pack inspect` is asked for: datasets or training runs, as data, as a terminal view and as a page."""

import json
from collections.abc import Mapping
from pathlib import Path
from typing import Any

import numpy as np
from rich.console import RenderableType

from pipeline.report.dataset import fill_by_seq_len, inspect_dataset, to_histogram
from pipeline.report.decoding import decoder_of
from pipeline.report.flops import DEFAULT_SHAPE, ModelShape, load_shape
from pipeline.report.html import Page, write_page
from pipeline.report.pages import comparison_page, dataset_page
from pipeline.report.records import DatasetReport
from pipeline.report.rows import row_statistics
from pipeline.report.runs import is_run, parts_tables, read_run, runs_page, runs_table, summarize_run
from pipeline.report.show import decode_pack
from pipeline.report.terminal import comparison_view, dataset_view, join_with_blank_lines, make_table
from shards.errors import PackError
from shards.fetching.cache import Cache
from shards.reader import Dataset

SAMPLE_PACKS = 4
SAMPLE_TOKENS = 400  # of each segment, on a page
MAX_LENGTHS = 1_000_000  # documents that stand for all where other seq_len are tried


class Inspection:
    """One or several datasets, or one or several runs; never both.

    Args:
        paths: Dataset or run directories; a dataset may be a URL.
        packs_per_step: Packs that one optimizer step consumes.
        model: Directory, config JSON or hub name of the model whose shape and limits count; None for a usual shape.
        mix: Weight by source name.
        rows: Whether to read every row.
        cache: Where shards of a URL are kept; None for the usual place.

    Raises:
        PackError: A path is neither, or datasets and runs are mixed.
    """

    def __init__(
        self,
        paths: tuple[str, ...],
        *,
        packs_per_step: int,
        model: str | None,
        mix: dict[str, float],
        rows: bool,
        cache: Cache | None = None,
    ) -> None:
        kinds = {is_run(path) for path in paths}
        if len(kinds) > 1:
            raise PackError(f"{paths[0]}: datasets and training runs cannot be compared; name one kind.")
        shape = load_shape(model) if model else DEFAULT_SHAPE
        self.runs = [read_run(path) for path in paths] if kinds == {True} else []
        self.datasets = [] if self.runs else [Dataset(path, cache=cache) for path in paths]
        self.reports = [_report(dataset, packs_per_step, shape, mix, rows) for dataset in self.datasets]

    def json(self) -> str:
        """Return the figures; one object for one path, a list for several."""
        found: list[Any] = [summarize_run(run) for run in self.runs] or self.reports
        return json.dumps(found[0] if len(found) == 1 else found)

    def view(self) -> RenderableType:
        """Return what the terminal shows."""
        if self.runs:
            tables = [runs_table(self.runs), *parts_tables(self.runs)]
            return join_with_blank_lines([make_table(t.columns, t.rows, t.title or "Training runs") for t in tables])
        return dataset_view(self.reports[0]) if len(self.reports) == 1 else comparison_view(self.reports)

    def write_page(self, file: str) -> None:
        """Write the HTML page.

        Raises:
            PackError: The file cannot be written.
        """
        write_page(self._page(), file)

    def _page(self) -> Page:
        if self.runs:
            return runs_page(self.runs)
        if len(self.reports) > 1:
            return comparison_page(self.reports)
        report, dataset = self.reports[0], self.datasets[0]
        drawn = report.copy()
        drawn["fill_by_seq_len"] = fill_by_seq_len(typical_lengths(report))
        return dataset_page(drawn, sample_packs(dataset))


def inspect(
    path: str | Path,
    *,
    packs_per_step: int = 32,
    model: str | Path | None = None,
    mix: Mapping[str, float] | None = None,
    rows: bool = False,
) -> DatasetReport:
    """Report on a dataset: what was packed and lost, lengths, costs, warnings; the fields are in `docs/report.md`.

    Args:
        path: Dataset directory.
        packs_per_step: Packs that one optimizer step consumes.
        model: Directory, config JSON or hub name of the model whose shape and limits count; None for a usual shape.
        mix: Weight by source name, as training takes it.
        rows: Whether to read every row, for exact lengths and duplicates: `row_statistics`.

    Raises:
        PackError: There is no finished dataset, or `model` or `mix` do not fit.
    """
    shape = load_shape(str(model)) if model else DEFAULT_SHAPE
    return _report(Dataset(path), packs_per_step, shape, dict(mix or {}), rows)


def _report(
    dataset: Dataset, packs_per_step: int, shape: ModelShape, mix: dict[str, float], rows: bool
) -> DatasetReport:
    report = inspect_dataset(dataset, packs_per_step=packs_per_step, shape=shape, mix=mix)
    if rows:
        report["row_statistics"] = row_statistics(dataset, shape)
    return report


def typical_lengths(report: DatasetReport) -> np.ndarray:
    """Return document lengths from a report's histogram, at most a million that stand for all; int64."""
    lengths, documents = to_histogram(report["lengths"]["documents"]["histogram"])
    count = documents * min(1.0, MAX_LENGTHS / max(1.0, documents.sum()))
    return np.repeat(np.round(lengths).astype(np.int64), np.round(count).astype(np.int64))


def sample_packs(dataset: Dataset) -> list[dict[str, Any]]:
    """Return a few packs spread over a dataset, decoded."""
    decoder = decoder_of(dataset)
    rows = np.unique(np.linspace(0, len(dataset) - 1, SAMPLE_PACKS).astype(int)).tolist() if len(dataset) else []
    return [decode_pack(dataset, row, decoder, tokens=SAMPLE_TOKENS) for row in rows]
