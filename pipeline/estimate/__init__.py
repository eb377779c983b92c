"""What a build would give, from a sample."""
