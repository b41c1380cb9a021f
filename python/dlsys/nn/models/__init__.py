"""Ready models. Each takes a `seed`, by which all its weights are drawn."""
