"""Chapter 3: a convolution as a matrix product, both its gradients, and what the matrix costs.

python docs/learn/programs/3_convolution.py
"""

import numpy as np

import dlsys as dl
from dlsys import functional as F
from dlsys.runtime.device import best_context
from dlsys.runtime.library import load


def by_loops(x, f):
    """y[n, o, i, j] = Σ x[n, c, i + p, j + q] f[o, c, p, q]: the definition."""
    (n, _, h, w), (o, _, kh, kw) = x.shape, f.shape
    y = np.zeros((n, o, h - kh + 1, w - kw + 1))
    for i in range(y.shape[2]):
        for j in range(y.shape[3]):
            y[:, :, i, j] = np.einsum("ncpq,ocpq->no", x[:, :, i : i + kh, j : j + kw], f)
    return y


def im2col(x, kh, kw):
    """A row for each (channel, kernel offset), a column for each output position, an image each."""
    n, c, h, w = x.shape
    oh, ow = h - kh + 1, w - kw + 1
    columns = np.empty((n, c, kh, kw, oh, ow), x.dtype)
    for p in range(kh):
        for q in range(kw):
            columns[:, :, p, q] = x[:, :, p : p + oh, q : q + ow]
    return columns.reshape(n, c * kh * kw, oh * ow)


def col2im(columns, shape, kh, kw):
    """The transpose of im2col: what was copied several times is added up."""
    n, c, h, w = shape
    oh, ow = h - kh + 1, w - kw + 1
    columns = columns.reshape(n, c, kh, kw, oh, ow)
    x = np.zeros(shape)
    for p in range(kh):
        for q in range(kw):
            x[:, :, p : p + oh, q : q + ow] += columns[:, :, p, q]
    return x


rng = np.random.default_rng(0)
x, f = rng.normal(size=(4, 3, 12, 12)), rng.normal(size=(8, 3, 5, 5))
columns, matrix = im2col(x, 5, 5), f.reshape(8, -1)
y = (matrix @ columns).reshape(4, 8, 8, 8)  # a GEMM an image
print("im2col and GEMM give the definition:", np.allclose(y, by_loops(x, f)))

dy = rng.normal(size=y.shape)
flat = dy.reshape(4, 8, -1)
df = (flat @ columns.transpose(0, 2, 1)).sum(0).reshape(f.shape)  # dC Bᵀ
dx = col2im(matrix.T @ flat, x.shape, 5, 5)  # Aᵀ dC, folded back

images = dl.tensor(x, dtype="float32", requires_grad=True)
filters = dl.tensor(f, dtype="float32", requires_grad=True)
out = F.conv2d(images, filters)
(out * dl.tensor(dy, dtype="float32")).sum().backward()
for what, ours, found in (("y", y, out), ("df", df, filters.grad), ("dx", dx, images.grad)):
    print(f"{what:2} of dlsys on this device: {np.allclose(ours, found.numpy(), atol=1e-3)}")

# LeNet-5's second convolution, and one of ResNet-50's, at batch 128.
for name, c, o, size, kernel in (("LeNet-5", 6, 16, 14, 5), ("ResNet-50", 64, 64, 58, 3)):
    out_size = size - kernel + 1
    read, made = 128 * c * size**2 * 4, 128 * c * (kernel * out_size) ** 2 * 4
    flops = 2 * 128 * o * c * (kernel * out_size) ** 2
    print(f"{name}: {flops / 1e9:.2f} GFLOP, input {read / 1e6:.1f} MB, "
          f"columns {made / 1e6:.1f} MB, {made / read:.1f} times as much")  # fmt: skip
ctx = best_context()[0]
if ctx is not None:
    names = load().algorithms(ctx.kernel_device, "conv2d")
    print(f"algorithms of conv2d here: {', '.join(names) or 'one, im2col and GEMM'}")
