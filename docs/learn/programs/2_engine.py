"""Chapter 2: automatic differentiation of one's own, and a network that it trains.

python docs/learn/programs/2_engine.py
"""

import math
import random


class Value:
    """A number that knows what it was computed from: pairs of a Value and the derivative by it."""

    def __init__(self, data, parents=()):
        self.data, self.parents, self.grad = data, parents, 0.0

    def __add__(self, other):
        other = other if isinstance(other, Value) else Value(other)
        return Value(self.data + other.data, ((self, 1.0), (other, 1.0)))

    def __mul__(self, other):
        other = other if isinstance(other, Value) else Value(other)
        return Value(self.data * other.data, ((self, other.data), (other, self.data)))

    def __sub__(self, other):
        return self + Value(-1.0) * other

    def tanh(self):
        y = math.tanh(self.data)
        return Value(y, ((self, 1 - y * y),))

    def backward(self):
        """Adds d self / d value to the `grad` of every value that this one depends on."""
        for value in self.order():
            value.grad = 0.0
        self.grad = 1.0
        for value in reversed(self.order()):  # each after all that use it
            for parent, derivative in value.parents:
                parent.grad += derivative * value.grad  # the chain rule; uses add up

    def order(self):
        """All values behind this one, each after its parents: a topological order."""
        order, seen = [], set()

        def visit(value):
            if value not in seen:
                seen.add(value)
                for parent, _ in value.parents:
                    visit(parent)
                order.append(value)

        visit(self)
        return order


def layer(inputs, weights, biases):
    """tanh(W x + b), a number at a time."""
    return [sum((w * x for w, x in zip(row, inputs)), b).tanh() for row, b in zip(weights, biases)]


if __name__ == "__main__":
    a, b = Value(2.0), Value(-3.0)
    y = a * b + a * a
    y.backward()
    print(f"y = {y.data}, dy/da = b + 2 a = {a.grad}, dy/db = a = {b.grad}")

    random.seed(0)
    sizes = (2, 4, 1)
    network = [
        ([[Value(random.uniform(-1, 1)) for _ in range(m)] for _ in range(n)],
         [Value(0.0) for _ in range(n)])
        for m, n in zip(sizes, sizes[1:])
    ]  # fmt: skip
    parameters = [v for rows, biases in network for v in [*sum(rows, []), *biases]]
    points = [((0.0, 0.0), -1.0), ((0.0, 1.0), 1.0), ((1.0, 0.0), 1.0), ((1.0, 1.0), -1.0)]
    for step in range(301):
        loss = Value(0.0)
        for inputs, wanted in points:  # exclusive or
            for weights, biases in network:
                inputs = layer(inputs, weights, biases)
            loss = loss + (inputs[0] - wanted) * (inputs[0] - wanted)
        loss.backward()
        for p in parameters:
            p.data -= 0.1 * p.grad
        if step % 100 == 0:
            print(f"step {step:3}: loss {loss.data:.4f}, of {len(loss.order())} numbers")
