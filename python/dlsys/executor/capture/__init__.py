"""CUDA graphs: a program captured once and replayed by one launch, its branches in streams."""
