"""Orders of packs that need memory for the shards at hand only."""
