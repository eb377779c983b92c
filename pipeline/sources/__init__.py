"""From SOURCE arguments to records: discovery, windows, streams, parsing."""
