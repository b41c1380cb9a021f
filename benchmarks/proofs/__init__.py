"""Proofs with their records: losses, accuracies, attacks, all tests on a GPU."""
