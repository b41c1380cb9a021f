"""Lasting attacks: generators of inputs for which the system has to hold, for any length of time.

python tests/fuzz --help says how they are run; docs/reliability.md what they found.
"""
