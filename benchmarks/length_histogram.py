"""Count how many documents of a corpus have how many tokens, for `bench_packing.py`: real lengths beside drawn ones.

python benchmarks/corpora.py prose
python benchmarks/length_histogram.py .corpora/prose-60mb.jsonl --tokenizer ./tokenizer > benchmarks/lengths.json
"""

import argparse
import json
from pathlib import Path

import numpy as np
from peer_builds import BATCH, texts_of

from pipeline.documents.encoder import Encoder


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("corpus", help="JSONL file with a field text or messages")
    parser.add_argument("--tokenizer", required=True, help="tokenizer directory")
    arguments = parser.parse_args()
    encoder, texts = Encoder(arguments.tokenizer), texts_of([arguments.corpus], 0, 1)
    lengths = [np.diff(encoder.encode(texts[at : at + BATCH])[1]) + 1 for at in range(0, len(texts), BATCH)]  # and EOS
    values, counts = np.unique(np.concatenate(lengths), return_counts=True)
    made = {
        "corpus": Path(arguments.corpus).name,
        "vocabulary": encoder.spec.vocab_size,
        "lengths": values.tolist(),
        "documents": counts.tolist(),
    }
    print(json.dumps(made, separators=(",", ":")))


if __name__ == "__main__":
    main()
