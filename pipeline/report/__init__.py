"""What a person sees of a dataset or a run: figures, warnings, pages."""
