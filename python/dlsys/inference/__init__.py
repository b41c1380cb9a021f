"""Inference programs: a trained model with its weights as they are, folded."""

from .program import InferenceProgram, infer
from .quantize import QuantizedModel, quantize
