"""A graph written by hand, with an operator of one's own: x * sigmoid(x).

    python examples/own_operator.py

An operator says its shape, its values, and its gradient as a graph. It then runs in every graph on
every device; a faster kernel may be added later.
"""

import numpy as np

import dlsys as dl
from dlsys import autodiff as ad


class SwishOp(ad.Op):
    """x / (1 + exp(-x)), element by element."""

    def infer_shape(self, node, input_shapes):
        return input_shapes[0]

    def compute(self, node, input_vals, output_val, use_numpy=True):
        # On a native device the values are NDArrays, which go by way of the host here.
        x = input_vals[0] if use_numpy else input_vals[0].asnumpy()
        output_val[:] = x / (1 + np.exp(-x))

    def gradient(self, node, output_grad):
        # Built of other operators, so that it can be differentiated again.
        s = ad.sigmoid_op(node.inputs[0])
        return [output_grad * (s + node * (1 - s))]


swish = SwishOp()

# A Variable is fed at each run; nodes are what is to be computed.
x = ad.Variable("x")
loss = ad.reduce_sum_op(swish(x))
(gradient,) = ad.gradients(loss, [x])

# The executor plans once for the shapes that it is fed, then only runs.
run = ad.Executor([loss, gradient], ctx=None)
at = np.linspace(-2, 2, 5, dtype=np.float32)
value, slope = run.run({x: at})

step = 1e-2
between = [float(run.run({x: at + d * np.eye(5, dtype=np.float32)[3]})[0]) for d in (step, -step)]
print(f"sum of swish {float(value):.3f}, slopes {', '.join(f'{s:.3f}' for s in slope)}")
print(f"slope at 1: {slope[3]:.3f}, from differences {(between[0] - between[1]) / (2 * step):.3f}")

# The same operator on tensors, on the best device there is.
t = dl.tensor(at, requires_grad=True)
dl.apply(swish, t).sum().backward()
print(f"on {t.device} the same: {np.allclose(t.grad.numpy(), slope, atol=1e-6)}")
