"""Pack lengths without any files: python examples/pack_lengths.py SEQ_LEN LENGTH [LENGTH ...]."""

import sys
from itertools import pairwise

from pipeline import pack


def pack_lengths(lengths: list[int], seq_len: int) -> list[list[int]]:
    """Return the indices of the lengths that share each pack."""
    bins = pack(lengths, seq_len)
    return [bins.order[start:stop].tolist() for start, stop in pairwise(bins.offsets)]


if __name__ == "__main__":
    seq_len, *lengths = map(int, sys.argv[1:])
    for members in pack_lengths(lengths, seq_len):
        print(*(lengths[index] for index in members))
