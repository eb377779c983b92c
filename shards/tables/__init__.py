"""Tables beside the shards: the index (figures per pack) and the shard list, mapped as columns."""
