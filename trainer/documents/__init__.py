"""Documents and training: which step saw which document, and what a model finds of each."""
