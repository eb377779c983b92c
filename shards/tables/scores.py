"""What a model finds of each document: the Parquet file that `pack score` writes.

    doc_id  doc_part  source  file          record  tokens  targets  weight  loss
    0       0         web     a/00.jsonl    1       812     811      811.0   2.31

`loss` is the mean over the document's targets in nats, weighted where targets have weights (`weight` is their sum, or
the number of targets); null where it has none. The schema's metadata names the dataset, its corpus
(`shards.plan.corpus_id`) and the model.
"""

from pathlib import Path
from typing import NamedTuple

import numpy as np
import pyarrow as pa

from shards.errors import PackError, reason_of

SCHEMA = pa.schema(
    [
        pa.field("doc_id", pa.int64(), nullable=False),
        pa.field("doc_part", pa.int32(), nullable=False),
        pa.field("source", pa.dictionary(pa.int32(), pa.string())),
        pa.field("file", pa.dictionary(pa.int32(), pa.string())),
        pa.field("record", pa.int64()),
        pa.field("tokens", pa.int64(), nullable=False),
        pa.field("targets", pa.int64(), nullable=False),
        pa.field("weight", pa.float64(), nullable=False),
        pa.field("loss", pa.float32()),
    ]
)


class Scores(NamedTuple):
    """Losses of documents, ascending by document."""

    doc_ids: np.ndarray
    "int64 (documents,)"
    doc_parts: np.ndarray
    "int32 (documents,)"
    losses: np.ndarray
    "float32 (documents,), NaN where there is no target"

    def loss_of(self, document: int, part: int) -> float | None:
        """Return the loss of a document; None where it was not scored or has no target."""
        first, last = np.searchsorted(self.doc_ids, [document, document + 1])
        place = first + int(np.searchsorted(self.doc_parts[first:last], part))
        if place == last or self.doc_parts[place] != part or np.isnan(self.losses[place]):
            return None
        return float(self.losses[place])

    def worst(self, number: int) -> list[int]:
        """Return the `doc_id` of the documents of highest loss, the highest first."""
        order = np.argsort(-self.losses, kind="stable")  # NaN comes last
        scored = order[: int(np.count_nonzero(~np.isnan(self.losses)))]
        documents: list[int] = self.doc_ids[scored[:number]].tolist()
        return documents


def read_scores(path: str | Path, dataset_id: str) -> Scores:
    """Read the losses of a dataset's documents.

    Raises:
        PackError: The file cannot be read, is of another kind, or of another dataset.
    """
    import pyarrow.parquet as pq

    try:
        table = pq.read_table(path, columns=["doc_id", "doc_part", "loss"])
    except (OSError, pa.ArrowException) as error:
        raise PackError(
            f"{path}: cannot be read as scores ({reason_of(error)}); expected what pack score wrote. Check the path."
        ) from error
    told = (table.schema.metadata or {}).get(b"dataset_id", b"").decode()
    if told != dataset_id:
        raise PackError(
            f"{path}: holds scores of dataset {told[:12] or 'without a name'}; expected those of {dataset_id[:12]}. "
            "Score this dataset with pack score."
        )
    losses = table["loss"]
    numbers = all(pa.types.is_integer(table.schema.field(name).type) for name in ("doc_id", "doc_part"))
    if (
        not numbers
        or not pa.types.is_floating(losses.type)
        or table["doc_id"].null_count
        or table["doc_part"].null_count
    ):
        raise PackError(
            f"{path}: doc_id, doc_part and loss are {', '.join(str(field.type) for field in table.schema)}; expected "
            "whole numbers and a number, as pack score writes them. Score the dataset again."
        )
    ids, parts = table["doc_id"].to_numpy(), table["doc_part"].to_numpy()
    order = np.lexsort((parts, ids))
    return Scores(ids[order], parts[order], losses.to_numpy().astype(np.float32)[order])
