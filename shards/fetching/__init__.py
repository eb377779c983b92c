"""Datasets that lie elsewhere: the transfer, the cache on this machine, and reading ahead."""
