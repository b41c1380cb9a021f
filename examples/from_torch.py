"""Weights of a PyTorch model in a model here, and back.

python examples/from_torch.py
"""

import sys

import numpy as np

import dlsys as dl
from dlsys import nn

try:
    import torch
except ImportError:
    sys.exit("this example needs PyTorch: pip install torch")

torch.manual_seed(0)
theirs = torch.nn.Sequential(
    torch.nn.Conv2d(1, 4, 3, padding=1), torch.nn.ReLU(),
    torch.nn.Flatten(), torch.nn.Linear(4 * 8 * 8, 10),
)  # fmt: skip
# The same layers in the same order have the same names and shapes: 0.weight, 0.bias, 3.weight …
ours = nn.Sequential(nn.Conv2d(1, 4, 3, padding=1), nn.ReLU(), nn.Flatten(), nn.Linear(256, 10))

# Strict: a name or a shape that does not fit raises, with all that differs.
nn.load_torch_state_dict(ours, theirs.state_dict())

images = np.random.default_rng(0).normal(size=(5, 1, 8, 8)).astype(np.float32)
expected = theirs(torch.tensor(images)).detach().numpy()
found = ours(dl.tensor(images)).numpy()
print(f"largest difference of the outputs: {np.abs(found - expected).max():.1e}")

# And back, into PyTorch, after what was learned here.
theirs.load_state_dict(nn.to_torch_state_dict(ours))
print(
    "back in PyTorch:", np.allclose(theirs(torch.tensor(images)).detach().numpy(), found, atol=1e-5)
)
