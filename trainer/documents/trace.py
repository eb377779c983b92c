"""From a step of a run to its documents, and from a document to the steps that saw it.

No log is kept: which packs make which step is a function of the dataset, the settings in `train.json` and the seed, so
the order is made again, in a tenth of a second for a million packs.
"""

from __future__ import annotations

import json
from collections.abc import Iterable, Iterator
from dataclasses import fields
from functools import cached_property
from pathlib import Path
from typing import TYPE_CHECKING, NamedTuple, TypedDict

import numpy as np

from shards import Dataset
from shards.errors import PackError, reason_of
from shards.ordering.block_order import BlockOrder
from shards.ordering.of_dataset import order_of
from shards.ordering.step_order import StepOrder
from shards.schema import split_doc_id
from shards.tables.provenance import Provenance, name_part, parts_of
from shards.tables.scores import Scores, read_scores
from trainer.config import TrainConfig
from trainer.saving.metric_lines import last_step

if TYPE_CHECKING:
    from trainer.feeding.redraw import RedrawnPacks


class DocumentName(TypedDict):
    """Which document, and the record that gave it; None where the dataset does not tell."""

    doc_id: int
    doc_part: int
    part_name: str
    "Which of its record's documents it is, in words; empty for the only one."
    source: str
    file: str | None
    record: int | None
    loss: float | None
    "Where it was scored."


class SeenSegment(DocumentName):
    """Part of a document in a step."""

    pack: int
    tokens: int
    targets: int


class StepTrace(TypedDict):
    """What one step saw, in the order of its packs."""

    step: int
    epoch: int
    taken: bool
    "Whether the run has taken it."
    packs: int
    tokens: int
    targets: int
    segments: list[SeenSegment]


class Sighting(TypedDict):
    """A step that sees a document."""

    step: int
    epoch: int
    taken: bool
    packs: list[int]
    tokens: int


class DocumentTrace(TypedDict):
    """The steps of a run that see one document."""

    document: DocumentName
    tokens: int
    "Of the document, in all packs."
    packs: list[int]
    steps: list[Sighting]


class Served(NamedTuple):
    """Tokens of a document that a step takes from one pack of the dataset."""

    pack: int
    tokens: int


class _Order(NamedTuple):
    """What decides the order of a run."""

    config: TrainConfig
    packs_per_step: int | None
    dataset_id: str | None


class RunTrace:
    """The order of a run, made again.

    Args:
        run: Run directory.
        dataset: Where its dataset has moved to; None for where the run found it.
        scores: What `pack score` wrote of the dataset, for losses.

    Raises:
        PackError: No run, or its dataset is not there or is another one.
    """

    def __init__(self, run: str | Path, *, dataset: str | Path | None = None, scores: str | Path | None = None) -> None:
        self.run = Path(run)
        order = _read_order(self.run)
        self.dataset = order.config.open_dataset(dataset or order.config.dataset)
        if order.dataset_id is not None and order.dataset_id != self.dataset.dataset_id:
            raise PackError(
                f"{self.dataset.path}: is dataset {self.dataset.dataset_id[:12]}; expected {order.dataset_id[:12]}, "
                f"which {self.run} was trained on. Name that one with `dataset`."
            )
        self.drawn: RedrawnPacks | None = None
        if order.config.repack:
            from trainer.feeding.redraw import RedrawnPacks  # compiled code, which no other trace needs

            self.drawn = RedrawnPacks(self.dataset, order.config.seed)
        self.order = _remake(order, self.dataset, self.drawn)
        "Which packs make which step."
        self.num_steps = order.config.steps or max(1, round(order.config.epochs * self.order.steps_per_epoch))
        "Steps of the whole run."
        self.steps_taken = last_step(self.run / "metrics.jsonl")
        "Steps that its metrics tell of."
        self.provenance = Provenance(self.dataset)
        self._scores_file = scores

    @cached_property
    def scores(self) -> Scores | None:
        """Losses of documents, where they were given."""
        return None if self._scores_file is None else read_scores(self._scores_file, self.dataset.dataset_id)

    def step(self, number: int) -> StepTrace:
        """Return what a step saw.

        Args:
            number: Counted from 1, as in the metrics.

        Raises:
            PackError: The run has no such step.
        """
        if not 1 <= number <= self.num_steps:
            raise PackError(
                f"`step`: {number:,}; expected 1 to {self.num_steps:,}, the steps of {self.run}. Choose one of them."
            )
        segments: list[SeenSegment] = []
        packs = self._packs_of(number - 1)
        for pack in packs.tolist():
            for stored, places in self._stored_in(pack):
                row = self.dataset[stored]
                bounds = row["cu_seqlens"]
                for place in places:
                    begin, end = bounds.item(place), bounds.item(place + 1)
                    name = self._name(row["doc_ids"].item(place), row["doc_parts"].item(place))
                    targets = int(row["loss_mask"][begin:end].sum())
                    segments.append({**name, "pack": stored, "tokens": end - begin, "targets": targets})
        return {
            "step": number,
            "epoch": (number - 1) // self.order.steps_per_epoch + 1,
            "taken": number <= self.steps_taken,
            "packs": len(packs),
            "tokens": sum(segment["tokens"] for segment in segments),
            "targets": sum(segment["targets"] for segment in segments),
            "segments": segments,
        }

    def document(self, text: str) -> list[DocumentTrace]:
        """Return the steps that see the documents of one record, over the whole run.

        Args:
            text: As for `Provenance.find`.

        Raises:
            PackError: There is no such record, or no pack holds any of it.
        """
        documents = self.provenance.find(text)
        traces = [trace for document in documents for trace in self._documents(document)]
        if not traces:
            reason = self.provenance.reason_of_absence(documents[0])
            raise PackError(f"`doc`: {text}; no pack holds any token of it: {reason}. See pack inspect.")
        return traces

    def _packs_of(self, number: int) -> np.ndarray:
        return self.order.step_packs(*divmod(number, self.order.steps_per_epoch))

    def _stored_in(self, pack: int) -> Iterator[tuple[int, Iterable[int]]]:
        """Yield which segments a pack of the run holds: packs of the dataset, and places of segments there."""
        if self.drawn is None:
            yield pack, range(int(self.dataset.index.num_segments[pack]))
            return
        for segment in self.drawn.segments(pack).tolist():
            stored, place = self.drawn.stored(segment)
            yield stored, [place]

    def _documents(self, document: int) -> list[DocumentTrace]:
        traces: list[DocumentTrace] = []
        for (_, part), segments in sorted(parts_of(self.dataset, split_doc_id(document)[0], {document}).items()):
            tokens_in: dict[int, int] = {}
            for _, tokens, pack in segments:
                tokens_in[pack] = tokens_in.get(pack, 0) + tokens
            traces.append(
                {
                    "document": self._name(document, part),
                    "tokens": sum(tokens_in.values()),
                    "packs": list(tokens_in),
                    "steps": self._sightings(document, part, tokens_in),
                }
            )
        return traces

    def _served(self, document: int, part: int, tokens_in: dict[int, int], epoch: int) -> dict[int, list[Served]]:
        """Return, by pack of the run, what it holds of a document in an epoch."""
        if self.drawn is None or isinstance(self.order, BlockOrder):
            return {pack: [Served(pack, tokens)] for pack, tokens in tokens_in.items()}
        served: dict[int, list[Served]] = {}
        for pack in tokens_in:
            row = self.dataset[pack]
            here = (row["doc_ids"] == document) & (row["doc_parts"] == part)
            for place in np.flatnonzero(here).tolist():
                tokens = int(row["cu_seqlens"][place + 1] - row["cu_seqlens"][place])
                for number in self.order.passes_of(epoch):
                    drawn = self.drawn.pack_with(self.drawn.segment_at(pack, place), number)
                    served.setdefault(drawn, []).append(Served(pack, tokens))
        return served

    def _sightings(self, document: int, part: int, tokens_in: dict[int, int]) -> list[Sighting]:
        steps_per_epoch = self.order.steps_per_epoch
        sightings: list[Sighting] = []
        for epoch in range(-(-self.num_steps // steps_per_epoch)):
            held = self._served(document, part, tokens_in, epoch)
            for step in self.order.steps_of(epoch, np.array(list(held))).tolist():
                number = epoch * steps_per_epoch + step
                if number >= self.num_steps:
                    break
                here = self._packs_of(number).tolist()
                served = [one for pack in here for one in held.get(pack, ())]  # a mix may serve a pack twice in a step
                sightings.append(
                    {
                        "step": number + 1,
                        "epoch": epoch + 1,
                        "taken": number < self.steps_taken,
                        "packs": [one.pack for one in served],
                        "tokens": sum(one.tokens for one in served),
                    }
                )
        return sightings

    def _name(self, document: int, part: int) -> DocumentName:
        record = self.provenance.record_of(document)
        return {
            "doc_id": document,
            "doc_part": part,
            "part_name": name_part(self.dataset.plan, self.dataset.shards[split_doc_id(document)[0]]["source"], part),
            "source": self.dataset.shards[split_doc_id(document)[0]]["source"],
            "file": record.file if record else None,
            "record": record.number if record else None,
            "loss": self.scores.loss_of(document, part) if self.scores else None,
        }


def _remake(order: _Order, dataset: Dataset, drawn: RedrawnPacks | None) -> StepOrder | BlockOrder:
    config = order.config
    tokens_per_batch = config.tokens_per_batch or dataset.seq_len
    return order_of(
        dataset,
        order=str(config.order),
        packs_per_step=order.packs_per_step or tokens_per_batch // dataset.seq_len,
        tokens_per_batch=tokens_per_batch,
        shuffle_block_shards=config.shuffle_block_shards,
        largest_first=config.largest_first,
        drawn=drawn,
        seed=config.seed,
        last_step=config.last_step,
        mix=config.mix,
        mix_by=config.mix_by,
        mix_stop=config.mix_stop,
    )


def _read_order(run: Path) -> _Order:
    """Read what decides the order of a run: its newest checkpoint, and its settings, also where there is none yet.

    Raises:
        PackError: No run is there.
    """
    file = run / "train.json"
    try:
        settings = json.loads(file.read_bytes())
        known = {each.name for each in fields(TrainConfig)}
        config = TrainConfig(**{name: value for name, value in settings.items() if name in known})
        file = max((run / "checkpoints").glob("step-*/checkpoint.json"), default=run)
        if file == run:
            return _Order(config, config.packs_per_step, None)
        state = json.loads(file.read_bytes())["facts"]["loader"]
        return _Order(config, int(state["packs_per_step"]), str(state["dataset_id"]))
    except FileNotFoundError as error:
        raise PackError(f"{run}: holds no run; expected train.json. Name a directory that pack train wrote.") from error
    except (OSError, ValueError, TypeError, KeyError, AttributeError) as error:
        raise PackError(f"{file}: cannot be read as part of a run ({reason_of(error)}). Restore it.") from error
