"""Ways of feeding a model, timed side by side."""
