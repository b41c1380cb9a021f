"""Dropout as a layer."""

from __future__ import annotations

from .. import autodiff as ad
from .. import functional as F
from ..arguments.signature import declared
from ..autodiff import Node, Parameter
from ..init import RNG, Rng, generator
from ..ops.random.sampling import PROBABILITY
from .module import Module


class Dropout(Module):
    """In training mode each element is 0 with the given probability, else divided by 1 minus it;
    in inference mode x itself. Srivastava et al. (2014).

    Which elements, is a function of two buffers: `key`, the seed and the node number that the layer
    draws when it is made, and `step`, which training steps advance; runs that do not train draw by
    the executor's count of them besides (`Executor.draws`). So graphs built twice draw
    alike, and a loaded state goes on where the saved one was; a graph has the key that was there
    when it was built, so load first. Used twice in one graph, the layer draws one mask for both.
    GraphError unless 0 <= probability < 1.

    >>> nn.Dropout(0.5).eval()(dl.ones(3))
    Tensor([1., 1., 1.], device=numpy)
    """

    torch_lacks = ("key", "step")

    @declared(probability=PROBABILITY, rng=RNG)
    def __init__(self, probability: float = 0.5, *, rng: Rng = None) -> None:
        self.probability = probability
        key = generator(rng).integers((2**63, 2**31))
        self.key = Parameter(key, "key", trainable=False)
        self.source = _OneNode(self.key)
        self.step = self.source.step

    def forward(self, x: Node) -> Node:
        return F.dropout(x, self.probability, self.training, self.source)

    def options(self) -> str:
        return f"{self.probability}"


class _OneNode(ad.Generator):
    """A random source whose nodes all share the id that a key gives."""

    def __init__(self, key: Parameter) -> None:
        super().__init__()
        self._key = key

    def attrs(self) -> dict[str, int]:
        seed, node = self._key.asnumpy()
        return {"seed": int(seed), "node": int(node)}
