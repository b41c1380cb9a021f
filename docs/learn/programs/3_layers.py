"""Chapter 3: layers and their gradients in numpy, checked by differences and against dlsys.

python docs/learn/programs/3_layers.py
"""

import numpy as np

import dlsys as dl
from dlsys import functional as F


def relu(x):
    """max(x, 0), and the gradient of x from that of y."""
    y = np.maximum(x, 0)
    return y, lambda dy: dy * (y > 0)


def softmax_cross_entropy(x, labels):
    """The mean of -log softmax(x)[label] over the rows of x."""
    rows = np.arange(len(x))
    shifted = x - x.max(axis=1, keepdims=True)  # the same softmax, and exp cannot overflow
    p = np.exp(shifted)
    p /= p.sum(axis=1, keepdims=True)
    loss = -np.log(p[rows, labels]).mean()

    def gradient(dy):
        dx = p.copy()
        dx[rows, labels] -= 1  # softmax minus one-hot
        return dy * dx / len(x)

    return loss, gradient


def batch_norm(x, eps=1e-5):
    """Each column of x with mean 0 and variance 1. The statistics depend on x too."""
    deviation = np.sqrt(x.var(axis=0) + eps)
    y = (x - x.mean(axis=0)) / deviation
    return y, lambda dy: (dy - dy.mean(0) - y * (dy * y).mean(0)) / deviation


def max_pool(x):
    """The largest of each 2 × 2 window of x (H, W), and where it was: that alone gets gradient."""
    h, w = x.shape
    windows = x.reshape(h // 2, 2, w // 2, 2).transpose(0, 2, 1, 3).reshape(h // 2, w // 2, 4)
    at = windows.argmax(axis=2)

    def gradient(dy):
        dx = np.where(np.arange(4) == at[..., None], dy[..., None], 0.0)
        return dx.reshape(h // 2, w // 2, 2, 2).transpose(0, 2, 1, 3).reshape(h, w)

    return windows.max(axis=2), gradient


def by_differences(f, x, weights, step=1e-5):
    """The gradient of Σ weights · f(x) by x: two evaluations an element, error of order step²."""
    dx = np.zeros_like(x)
    for k in np.ndindex(x.shape):
        nudge = np.zeros_like(x)
        nudge[k] = step
        dx[k] = ((f(x + nudge)[0] - f(x - nudge)[0]) * weights).sum() / (2 * step)
    return dx


if __name__ == "__main__":
    rng = np.random.default_rng(0)
    x, labels = rng.normal(size=(8, 6)), rng.integers(0, 6, 8)
    wanted = dl.tensor(labels)
    cases = {  # name: ours, that of dlsys on Tensors
        "relu": (relu, F.relu),
        "softmax cross-entropy": (lambda x: softmax_cross_entropy(x, labels),
                                  lambda t: F.cross_entropy(t, wanted)),
        "batch norm": (batch_norm, lambda t: F.batch_norm(t, training=True)),
        "max pool": (max_pool, lambda t: F.max_pool2d(t.reshape(1, 1, 8, 6), 2)),
    }  # fmt: skip
    for name, (ours, theirs) in cases.items():
        y, gradient = ours(x)
        dy = rng.normal(size=np.shape(y))
        t = dl.tensor(x, dtype="float32", requires_grad=True)
        (theirs(t).reshape(dy.shape) * dl.tensor(dy, dtype="float32")).sum().backward()
        numeric = np.abs(gradient(dy) - by_differences(ours, x, dy)).max()
        native = np.abs(gradient(dy) - t.grad.numpy()).max()
        print(f"{name:22} differences agree: {numeric < 1e-8}, dlsys agrees: {native < 1e-6}")

    with np.errstate(over="ignore", invalid="ignore"):
        far = np.array([[1000.0, 0.0]])
        print("softmax of (1000, 0) as written:", (np.exp(far) / np.exp(far).sum()).tolist()[0])
    print("                      shifted:   ", F.softmax(dl.tensor(far)).tolist()[0])
    for step in (1e-1, 1e-3, 1e-5, 1e-7, 1e-9, 1e-11):
        error = np.abs(by_differences(cases["batch norm"][0], x, x, step) - batch_norm(x)[1](x))
        print(f"step {step:.0e}: the differences of batch norm are {error.max():.0e} off")
