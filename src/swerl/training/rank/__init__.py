"""One rank of the trainer: the model under every split, and the optimizer step."""
