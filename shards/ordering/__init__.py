"""Which packs make which step: orders over a whole dataset, and orders that know its shards."""
