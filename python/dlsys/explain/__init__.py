"""Explanations: which pixels of an image speak for a class, as a map and as a picture.

    from dlsys import explain
    explained = explain.grad_cam(model, images)  # images as the model was trained on them
    picture = explain.overlay(images[0], explained.maps[0])

A map says where the evidence lies that the model uses, not whether it is right to use it.
"""

from .explainer import (
    METHODS,
    Explainer,
    Explanation,
    grad_cam,
    grad_cam_plus_plus,
    integrated_gradients,
    occlusion,
    saliency,
)
from .overlay import overlay

__all__ = [
    "METHODS", "Explainer", "Explanation", "grad_cam", "grad_cam_plus_plus", "integrated_gradients",
    "occlusion", "overlay", "saliency",
]  # fmt: skip
