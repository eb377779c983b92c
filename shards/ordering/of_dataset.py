"""The order of a dataset's packs in training, from the settings of a run."""

from collections.abc import Sequence
from typing import Any, Protocol

from shards.cost import padded_length
from shards.errors import OptionError
from shards.ordering.block_order import BlockOrder
from shards.ordering.step_order import BLOCK_ORDERS, StepOrder
from shards.reader import Dataset
from shards.tables.index import Index


class Drawn(Protocol):
    """Packs that are drawn anew in each pass over a dataset."""

    @property
    def index(self) -> Index:
        """Figures per pack of the first pass."""

    @property
    def sources(self) -> Sequence[tuple[str, int, int]]:
        """(name, first pack, stop pack) of every run of packs from one source."""


def order_of(
    dataset: Dataset,
    *,
    order: str,
    packs_per_step: int,
    tokens_per_batch: int,
    shuffle_block_shards: int,
    largest_first: bool,
    drawn: Drawn | None = None,
    **chosen: Any,
) -> StepOrder | BlockOrder:
    """Return which packs make which step.

    Args:
        dataset: What is trained on.
        order: One of `ORDERS` or `BLOCK_ORDERS`.
        packs_per_step: Packs in a step, over all ranks.
        tokens_per_batch: Tokens in a micro-batch, at least `dataset.seq_len`.
        shuffle_block_shards: Shards in a block of the block orders.
        largest_first: Whether each epoch begins with the costliest step; not for block orders.
        drawn: Packs that are drawn anew in each pass; None for those of the dataset.
        chosen: seed, last_step, mix, mix_by, mix_stop, as `StepOrder` takes them.

    Raises:
        OptionError: A setting is unknown or does not fit the dataset, or an epoch has no step.
    """
    bucketed = dataset.packer == "bucketed"
    sizes: dict[str, Any] = {"packs_per_step": packs_per_step, "packs_per_batch": tokens_per_batch // dataset.seq_len}
    if order in BLOCK_ORDERS:
        if bucketed or largest_first:
            what = "a bucketed dataset" if bucketed else "largest_first"
            raise OptionError("order", f"{order} does not go with {what}. Use the order shuffled or cost-grouped.")
        counts = [source["counts"] for source in dataset.manifest["sources"]]
        return BlockOrder(
            dataset.shards, dataset.index, counts, order=order, block_shards=shuffle_block_shards, **sizes, **chosen
        )
    return StepOrder(
        dataset.index if drawn is None else drawn.index,
        order=order,
        padded_len=padded_length(dataset.index.max_seqlen, dataset.seq_len) if bucketed else None,
        tokens_per_batch=tokens_per_batch,
        sources=dataset.sources if drawn is None else drawn.sources,
        largest_first=largest_first,
        drawn_anew=drawn is not None,
        **sizes,
        **chosen,
    )
