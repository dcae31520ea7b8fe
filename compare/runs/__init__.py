"""A run on disk: `record` writes it, `Run` reads it as whole sequences."""
