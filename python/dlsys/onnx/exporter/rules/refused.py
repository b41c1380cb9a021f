"""Operators without an ONNX form, and why; `registry.refusal_of` has those of state and
random numbers.
"""

from __future__ import annotations

from ..registry import refuse

refuse(
    "shuffled_index shuffled_batch shuffled_rows take_batch step_of_draw",
    "it serves training with a data set on the device, by the step of training",
)
refuse("prod_others_change", "it is a second derivative of a product, for which there is no rule")
refuse(
    "dropout",
    "in inference form it is gone; with training=True its numbers are a function of seed and step, "
    "and those of ONNX's operators are not",
)
refuse("soft_nms", "ONNX has no Soft-NMS")
