"""Fusions, one file each: the pattern it looks for, and the fused operator with its body and
kernels.
"""
