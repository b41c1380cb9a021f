"""Softmax and losses. They keep the dtype of the logits, of 16 bits too: kernels compute in float32
or wider and round once, to the result.
"""
