"""MNIST in 25 lines: the data on the device, a convolutional network, its accuracy.

python examples/mnist.py [--epochs 3] [--data FOLDER]
"""

import argparse

import dlsys as dl
from dlsys import functional as F
from dlsys import nn, optim
from dlsys.data import mnist_sets

parser = argparse.ArgumentParser()
parser.add_argument("--epochs", type=int, default=3)
parser.add_argument("--data", help="folder of the four files; downloaded where it is left out")
options = parser.parse_args()

sets = mnist_sets(options.data)
images = dl.tensor(sets.train.images[:], dtype="float32") / 255  # (n, 1, 28, 28) in [0, 1]
labels = dl.tensor(sets.train.labels)
model = nn.LeNet5(seed=0)
optimizer = optim.Adam(1e-3, params=model.parameters())

for epoch in range(options.epochs):
    for start in range(0, len(images), 100):
        batch = slice(start, start + 100)
        loss = F.cross_entropy(model(images[batch]), labels[batch])
        loss.backward()
        optimizer.step()
        optimizer.zero_grad()
    print(f"epoch {epoch + 1}: loss {loss:.3f}")

model.eval()
test = dl.tensor(sets.test.images[:], dtype="float32") / 255
right = model(test).argmax(axis=1) == dl.tensor(sets.test.labels)
print(f"test accuracy {right.mean():.3f}")
