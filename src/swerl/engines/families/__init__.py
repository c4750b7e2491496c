"""Model families; the file name is `model.family`."""
