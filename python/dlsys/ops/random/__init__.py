"""Random numbers as operators, by a counter-based generator."""
