"""Earlier versions of the format, read only to be upgraded."""
