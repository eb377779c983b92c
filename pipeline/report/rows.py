"""What only the rows themselves tell: exact lengths, duplicates, how much of the vocabulary is used.

Reads every shard once through its map. Pieces of a cut document count by themselves where duplicates are looked for.
"""

from collections import Counter

import numpy as np
import xxhash

from pipeline.report.flops import DEFAULT_SHAPE, ModelShape
from pipeline.report.padding import LengthHistogram, compare_feedings
from pipeline.report.records import RowStatistics
from shards.reader import Dataset


def row_statistics(dataset: Dataset, shape: ModelShape = DEFAULT_SHAPE) -> RowStatistics:
    """Read every row of a dataset.

    Args:
        dataset: An open dataset.
        shape: The model whose FLOPs weigh tokens against attention pairs.

    Returns:
        `lengths` (exact [tokens, segments]), `feedings` (as in a report, exact), `distinct_tokens`, segments and tokens
        that are duplicates (beyond the first of each) and that hold no target.
    """
    used = np.zeros(dataset.max_token_id + 1, bool)
    seen: Counter[int] = Counter()
    lengths: Counter[int] = Counter()
    duplicate_segments = duplicate_tokens = segments_without_target = tokens_without_target = 0
    for row in range(len(dataset)):
        pack = dataset.pack(row)
        ids, mask, bounds = pack.input_ids, pack.loss_mask, pack.cu_seqlens
        used[ids] = True
        trained = np.add.reduceat(mask, bounds[:-1], dtype=np.int64) > 0
        for start, stop, target in zip(bounds[:-1].tolist(), bounds[1:].tolist(), trained.tolist(), strict=True):
            digest = xxhash.xxh3_64_intdigest(ids[start:stop].data)
            seen[digest] += 1
            lengths[stop - start] += 1
            duplicate_segments += seen[digest] > 1
            duplicate_tokens += (stop - start) * (seen[digest] > 1)
            segments_without_target += not target
            tokens_without_target += (stop - start) * (not target)
    histogram = sorted(lengths.items())
    table = np.array(histogram, np.float64).reshape(-1, 2)
    return {
        "lengths": [list(entry) for entry in histogram],
        "feedings": compare_feedings(
            LengthHistogram(table[:, 0], table[:, 1]), dataset.seq_len, shape, dataset.packer, len(dataset)
        ),
        "distinct_tokens": int(used.sum()),
        "duplicate_segments": duplicate_segments,
        "duplicate_tokens": duplicate_tokens,
        "segments_without_target": segments_without_target,
        "tokens_without_target": tokens_without_target,
    }
