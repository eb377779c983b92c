"""What a run leaves on disk: checkpoints, slices of tensors, and the exported model."""
