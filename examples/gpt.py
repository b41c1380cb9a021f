"""A small GPT learns to write Python from the source of Python's own library.

    python examples/gpt.py [--steps 1000]

Text becomes tokens, one a character, tokens become packed sequences, and the model predicts each
next one. `dlsys gpt train DIR` does the same with checkpoints, validation and samples.
"""

import argparse

from dlsys import nn, optim, train
from dlsys.data import text
from dlsys.runtime.device import best_context

parser = argparse.ArgumentParser()
parser.add_argument("--steps", type=int, default=1000)
options = parser.parse_args()
ctx = best_context()[0]

source = "\n".join(document.text for document in text.python_library(1_000_000))
tokenizer = text.CharTokenizer.of([source])
tokens = tokenizer.encode(source)

model = nn.GPT(
    vocabulary=tokenizer.vocabulary, context=64, layers=3, heads=4, features=96,
    positions="rotary", norm="rms", mlp="swiglu", bias=False, seed=0,
)  # fmt: skip
optimizer = optim.AdamW(
    optim.Warmup(optim.Cosine(2e-3, options.steps), 20), clip_norm=1.0, weight_decay=0.1
)
history = train.fit(
    model,
    text.TokenLoader(tokens, batch_size=12, length=64, steps=options.steps, shuffle=True),
    optimizer,
    parameters=nn.decay_groups(model, 0.1),
    metrics=(),
    ctx=ctx,
    quiet=True,
)
print(f"loss {history.curve[-1]['loss']:.2f}")

decoder = nn.Decoder(model, ctx)
prompt = "def "
written = decoder.generate(tokenizer.encode(prompt), 200, nn.Sampling(0.8, top_k=20), seed=0)
print(prompt, end="")
for piece in tokenizer.stream(written):
    print(piece, end="", flush=True)
print()
