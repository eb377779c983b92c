"""The model side of a step: attention that honours boundaries, the loss, how a model is loaded and checked."""
