"""The symbolic graph: nodes, operators, gradients, shapes, text. Knows no device and no array."""
