"""A permutation of any number of things from a key alone: no table, any place at once.

A Feistel network of four rounds permutes the numbers below the next power of four; places that land outside are sent
through again until they land inside (cycle walking, fewer than four passes on average). After Luby and Rackoff 1988;
Black and Rogaway 2002 for the walk. A million places take about 0.2 s.
"""

import numpy as np

ROUNDS = 4
_MIX = (np.uint64(0x9E3779B97F4A7C15), np.uint64(0xBF58476D1CE4E5B9), np.uint64(0x94D049BB133111EB))  # splitmix64


class KeyedPermutation:
    """A pseudorandom order of the numbers from 0 to `size` - 1.

    Args:
        size: How many numbers, at least 0.
        key: Any numbers of 0 or more; another key gives another order.
    """

    def __init__(self, size: int, key: tuple[int, ...]) -> None:
        self.size = size
        self._half_bits = max(1, (max(size - 1, 1).bit_length() + 1) // 2)
        state = np.random.SeedSequence(key).generate_state(ROUNDS, np.uint64)
        self._keys = [np.uint64(word) for word in state]

    def __call__(self, places: np.ndarray) -> np.ndarray:
        """Return the numbers at some places of the order; int64, same shape.

        Args:
            places: Places in the order, each in [0, size).
        """
        numbers = self._scramble(np.asarray(places).astype(np.uint64))
        outside = numbers >= self.size
        while outside.any():
            numbers[outside] = self._scramble(numbers[outside])
            outside = numbers >= self.size
        return numbers.astype(np.int64)

    def _scramble(self, numbers: np.ndarray) -> np.ndarray:
        bits = np.uint64(self._half_bits)
        mask = np.uint64((1 << self._half_bits) - 1)
        left, right = numbers >> bits, numbers & mask
        for key in self._keys:
            left, right = right, left ^ (scatter(right + key) & mask)
        return (left << bits) | right


def scatter(values: np.ndarray) -> np.ndarray:
    """Return numbers that look random, the same ones for the same values; uint64, same shape (splitmix64's mixer)."""
    values = values * _MIX[0]
    values = (values ^ (values >> np.uint64(30))) * _MIX[1]
    values = (values ^ (values >> np.uint64(27))) * _MIX[2]
    mixed: np.ndarray = values ^ (values >> np.uint64(31))
    return mixed
