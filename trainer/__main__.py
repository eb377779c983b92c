"""`python -m trainer DATASET …` is `pack train DATASET …`; torchrun starts it this way."""

from trainer.cli import main

main()
