"""Proofs with their records: attacks, long runs, services under load, all tests on a GPU."""
