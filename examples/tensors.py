"""Tensors: print them, index them, differentiate them, train with them.

python examples/tensors.py
"""

import dlsys as dl

# A tensor lives on the best device there is; device="numpy", "cpu" or "gpu" asks for one.
x = dl.tensor([[1.0, 2.0], [3.0, 4.0]])
print(x, "on", x.device)

# Nothing is computed until somebody looks, so that a whole expression runs as one program.
y = (x @ x.T - 1).tanh().sum(axis=1)
print("sum of each row:", y.tolist())

# Slices are views: a change in one shows in the other.
x[0] = 10.0
print("the first column now:", x[:, 0].tolist())

# `requires_grad` asks for gradients, which `backward` leaves in `grad`.
w = dl.tensor([2.0, 3.0], requires_grad=True)
loss = (w**3).sum()
loss.backward()
print("3 w² =", w.grad.tolist())

# `grad` makes the gradient a function, which has a gradient itself.
cube = lambda t: (t**3).sum()  # noqa: E731
second = dl.grad(lambda t: dl.grad(cube)(t).sum())
print("6 w =", second(w.detach()).tolist())
