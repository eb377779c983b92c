"""What packs cost to train on: attention pairs, padded lengths, and the costs that are made of them.

Attention is causal and never crosses a segment, so a segment of L tokens has L (L + 1) / 2 pairs of a query and a key:
packs of equal tokens differ in pairs, which is why steps are balanced by cost and not by tokens.
"""

from dataclasses import dataclass

import numpy as np

PAD_MULTIPLE = 64  # granularity of padded lengths in `bucketed` datasets
PAIRS_PER_TOKEN = 12288
"Attention pairs that take as long as everything else of one token: cost = L + L^2 / 24576 (a model of about 1B)."

# quarter octaves of attention pairs; irrational bounds never lie near an integer, so the ceiling is the same everywhere
_CLASS_BOUNDS = np.array([int(np.ceil(2.0 ** (k / 4))) for k in range(1, 4 * 62)], dtype=np.int64)


def attention_pairs(lengths: np.ndarray, sliding_window: int | None = None) -> np.ndarray:
    """Count the causal (query, key) pairs inside segments.

    Three tokens have 1 + 2 + 3 = 6 pairs; with a sliding window of 2 they have 1 + 2 + 2 = 5.

    Args:
        lengths: Tokens of each segment, any shape; mean lengths, which are no integers, are allowed.
        sliding_window: Most keys a query sees, itself included; None for all before it.

    Returns:
        Pairs, same shape: int64 for integers, else float64.
    """
    whole = np.asarray(lengths).dtype.kind in "iu"
    lengths = np.asarray(lengths, np.int64 if whole else np.float64)
    inside = lengths if sliding_window is None else np.minimum(lengths, sliding_window)
    twice = inside * (inside + 1)
    pairs: np.ndarray = twice // 2 if whole else twice / 2
    return pairs if sliding_window is None else pairs + (lengths - inside) * sliding_window


def padded_length(lengths: np.ndarray, seq_len: int) -> np.ndarray:
    """Round lengths in tokens up to the multiple by which a `bucketed` dataset groups its rows; at most `seq_len`."""
    multiples = -(-np.asarray(lengths, np.int64) // PAD_MULTIPLE)
    return np.minimum(multiples * PAD_MULTIPLE, seq_len)


def cost_class(attention_pairs: np.ndarray) -> np.ndarray:
    """Return the number of quarter octaves in a number of attention pairs; int32, same shape."""
    return np.searchsorted(_CLASS_BOUNDS, attention_pairs, side="right").astype(np.int32)


def pack_costs(num_tokens: np.ndarray, attention_pairs: np.ndarray) -> np.ndarray:
    """Estimate the training time of packs, in tokens of a model without attention; float64, same shape."""
    costs: np.ndarray = num_tokens + attention_pairs / PAIRS_PER_TOKEN
    return costs


@dataclass(frozen=True, kw_only=True)
class ModelCost:
    """FLOPs that training takes of a model: forward and backward."""

    per_token: float
    "Matrix products, for each token."
    per_pair: float
    "The same for each attention pair, over all layers that see the whole segment."
    per_window_pair: float = 0.0
    "The same over the layers with a sliding window."
    sliding_window: int | None = None
    "Size of that window, in tokens; None where no layer has one."

    def flops(self, tokens: float, pairs: float, window_pairs: float) -> float:
        """Return the FLOPs of a step with these sums over its segments."""
        return self.per_token * tokens + self.per_pair * pairs + self.per_window_pair * window_pairs

    def flops_of(self, lengths: np.ndarray, counts: np.ndarray) -> float:
        """Return the FLOPs of `counts[i]` segments of `lengths[i]` tokens each; both shape (n,)."""
        pairs = float(np.dot(attention_pairs(lengths), counts))
        sliding = self.sliding_window
        windowed = pairs if sliding is None else float(np.dot(attention_pairs(lengths, sliding), counts))
        return self.flops(float(np.dot(lengths, counts)), pairs, windowed)
