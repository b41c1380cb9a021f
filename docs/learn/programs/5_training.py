"""Chapter 5: data, optimizers, and a run that is interrupted and goes on with the same bits.

python docs/learn/programs/5_training.py
"""

import tempfile
from pathlib import Path

import numpy as np

from dlsys import nn, optim, train
from dlsys.data import DeviceLoader, Loader, mnist_sets
from dlsys.runtime.device import best_context

ctx = best_context()[0]
ROOT = Path(__file__).resolve().parents[3]
sets = mnist_sets(ROOT / "data" / "mnist")  # uint8 images (n, 1, 28, 28) and labels
known, unseen = sets.train.subset(slice(5000)), sets.validation.subset(slice(1000))
BATCH, EPOCHS = 100, 3


def fitted(optimizer, **options):
    """An MLP after some epochs, and what was measured; always the same start and batches."""
    model = nn.MLP((784, 64, 10), seed=0)
    # The set lies on the device, and a step gathers and normalizes its batch there.
    data = DeviceLoader(known, BATCH, shuffle=True, seed=0)
    history = train.fit(model, data, optimizer, epochs=options.pop("epochs", EPOCHS), ctx=ctx,
                        validation=Loader(unseen, 500), quiet=True, **options)  # fmt: skip
    return model, history


steps = EPOCHS * len(known.labels) // BATCH
print(f"{steps} steps of {BATCH} images; loss and accuracy on {len(unseen.labels)} others")
for name, optimizer in {
    "SGD 0.1": optim.SGD(0.1),
    "momentum 0.9": optim.SGD(0.1, momentum=0.9),
    "Adam 0.002": optim.Adam(0.002),
    "one cycle to 0.2": optim.SGD(optim.OneCycle(0.2, steps), momentum=0.9, nesterov=True),
}.items():
    last = fitted(optimizer)[1].epochs[-1]
    print(f"  {name:16} {last['val_loss']:.2f}  {last['val_accuracy']:.2f}")

# A schedule is a function of the step, in the graph: the rate costs no copy to the device.
cycle = optim.OneCycle(0.2, 100)
print("one cycle at steps 0, 30, 60, 99:", " ".join(f"{cycle(k):.4f}" for k in (0, 30, 60, 99)))

# Stopped after an epoch, and resumed in a new model: weights, slots, step and draws are all there.
with tempfile.TemporaryDirectory() as folder:
    checkpoint = train.Checkpoint(folder)
    straight, _ = fitted(optim.Adam(0.002), epochs=2)
    fitted(optim.Adam(0.002), epochs=1, callbacks=[checkpoint])
    resumed, _ = fitted(optim.Adam(0.002), epochs=2, resume=folder)
    same = all(
        np.array_equal(a, b)
        for a, b in zip(straight.state_dict().values(), resumed.state_dict().values())
    )
    print("resumed with the bits of a run that was never stopped:", same)
    path = Path(folder) / "model.safetensors"
    train.save(path, straight)
    scores = train.predict(train.load_model(path), unseen, ctx=ctx)
    print(f"saved, loaded, accuracy {(scores.argmax(1) == unseen.labels[:]).mean():.2f}")
