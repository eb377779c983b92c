"""The names for ways of feeding documents to a model, one list for `pack inspect` and `pack bench`.

Imports nothing, so that the command line can show the names at once. What each way computes is in `padding.py`, how it
is run in `trainer/bench/strategies.py`.
"""

BATCH = 16  # documents of a padded batch, as people run them

FEEDINGS = {
    "padded-max": "every document padded to seq_len",
    "padded-longest": f"random batches of {BATCH}, padded to their longest document",
    "length-bucketed": f"batches of {BATCH} neighbours by length, padded to their longest document",
    "packed-dense": "packs as rows of seq_len, documents kept apart by a dense mask of all pairs",
    "packed-varlen": "packs end to end, documents kept apart by cu_seqlens; nothing is padded",
}
"What each way does, by name."
