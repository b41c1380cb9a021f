"""A network that writes, letter by letter: an RNN or an LSTM learns a text and goes on with it.

python examples/char_rnn.py [--cell lstm|rnn] [--steps 150] [--text FILE]
"""

import argparse
from pathlib import Path

import numpy as np

import dlsys as dl
from dlsys import functional as F
from dlsys import nn, optim

parser = argparse.ArgumentParser()
parser.add_argument("--cell", choices=("lstm", "rnn"), default="lstm")
parser.add_argument("--steps", type=int, default=150)
parser.add_argument("--text", type=Path)
options = parser.parse_args()

text = options.text.read_text() if options.text else "she sells sea shells by the sea shore. " * 20
letters = sorted(set(text))
codes = np.array([letters.index(c) for c in text])
LENGTH, BATCH, UNITS = 16, 16, 48


class Writer(nn.Module):
    """Letters (steps, N) to the scores of the next one (steps, N, letters)."""

    def __init__(self) -> None:
        self.embedding = nn.Embedding(len(letters), UNITS, rng=0)
        layer = nn.LSTM if options.cell == "lstm" else nn.RNN
        self.recurrent = layer(UNITS, UNITS, rng=1)
        self.head = nn.Linear(UNITS, len(letters), rng=2)

    def forward(self, x, state=None):
        y, state = self.recurrent(self.embedding(x), state)
        return self.head(y), state


model, rng = Writer(), np.random.default_rng(0)
optimizer = optim.Adam(0.01, params=model.parameters())
for _ in range(options.steps):
    # Each column is a piece of the text, its targets the same piece one letter later.
    starts = rng.integers(0, len(codes) - LENGTH - 1, BATCH)
    pieces = codes[starts + np.arange(LENGTH + 1)[:, None]]
    scores, _ = model(dl.tensor(pieces[:-1]))
    loss = F.cross_entropy(scores.reshape(-1, len(letters)), dl.tensor(pieces[1:].ravel()))
    loss.backward()
    optimizer.step()
    optimizer.zero_grad()

written, state = text[:1], None
with dl.no_grad():
    for _ in range(60):  # one letter at a time; the state remembers those before
        scores, state = model(dl.tensor([[letters.index(written[-1])]]), state)
        written += letters[int(scores.argmax())]
print(f"loss {loss:.2f}: {written}")
