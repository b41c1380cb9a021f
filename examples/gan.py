"""A GAN with gradient penalty (Gulrajani et al., 2017): points on a circle from noise.

    python examples/gan.py [--steps 1500]

The penalty is on the length of the critic's gradient by its input, so that training needs the
gradient of a gradient: `dl.grad` makes the inner one, `backward` the outer one.
"""

import argparse

import numpy as np

import dlsys as dl
from dlsys import nn, optim

parser = argparse.ArgumentParser()
parser.add_argument("--steps", type=int, default=1500)
options = parser.parse_args()

dl.manual_seed(0)
BATCH, NOISE = 128, 4


def network(inputs: int, outputs: int, seed: int) -> nn.Module:
    """Two layers of 64 units."""
    return nn.Sequential(
        nn.Linear(inputs, 64, rng=seed), nn.LeakyReLU(),
        nn.Linear(64, 64, rng=seed + 1), nn.LeakyReLU(),
        nn.Linear(64, outputs, rng=seed + 2),
    )  # fmt: skip


generator, critic = network(NOISE, 2, 0), network(2, 1, 10)
of_generator = optim.Adam(1e-3, 0.5, 0.9, params=generator.parameters())
of_critic = optim.Adam(1e-3, 0.5, 0.9, params=critic.parameters())
slope = dl.grad(lambda points: critic(points).sum())

for _round in range(options.steps):
    for _ in range(3):  # the critic is kept ahead
        angle = dl.rand(BATCH, 1) * (2 * np.pi)
        real = dl.functional.concatenate([angle.cos(), angle.sin()], axis=1)
        fake = generator(dl.randn(BATCH, NOISE)).detach()
        # A critic of slope 1 between real and made points measures how far apart they are.
        mix = dl.rand(BATCH, 1)
        length = (slope(mix * real + (1 - mix) * fake) ** 2).sum(axis=1).sqrt()
        loss = critic(fake).mean() - critic(real).mean() + 10 * ((length - 1) ** 2).mean()
        loss.backward()
        of_critic.step()
        of_critic.zero_grad()
    (-critic(generator(dl.randn(BATCH, NOISE))).mean()).backward()
    of_generator.step()
    of_generator.zero_grad()
    critic.zero_grad()  # the generator's loss has left gradients there too

radius = np.linalg.norm(generator(dl.randn(1000, NOISE)).numpy(), axis=1)
print(f"radius of made points {radius.mean():.2f} ± {radius.std():.2f}, of real ones 1.00 ± 0.00")
