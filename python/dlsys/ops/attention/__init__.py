"""Attention: the operator and its gradient, their numpy forms, and the composition of other
operators that computes the same.
"""
