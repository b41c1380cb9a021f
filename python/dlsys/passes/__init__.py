"""Graph → graph rewrites, each one function. They see forward and backward together, with every
spec known.
"""
