"""The parts that benchmarks share: measuring, turns, the networks that are trained."""
