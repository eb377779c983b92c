"""Build a dataset and look at its first pack: python examples/build_and_read.py CORPUS TOKENIZER OUT."""

import sys
from itertools import pairwise

from pipeline import BuildConfig, build
from shards import Dataset


def build_and_read(corpus: str, tokenizer: str, out: str, seq_len: int = 4096) -> list[int]:
    """Build, and return the lengths of the documents that share the first pack."""
    result = build(BuildConfig(sources=corpus, out=out, tokenizer=tokenizer, seq_len=seq_len))
    boundaries = Dataset(result.path)[0]["cu_seqlens"].tolist()
    return [stop - start for start, stop in pairwise(boundaries)]


if __name__ == "__main__":
    print(build_and_read(*sys.argv[1:4]))
