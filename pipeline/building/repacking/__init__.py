"""Datasets made of datasets: documents joined and packed anew, and versions upgraded; no corpus is read."""
