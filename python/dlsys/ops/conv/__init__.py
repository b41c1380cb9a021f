"""Convolution and pooling: operators, the functions that people call, and their geometry."""
