"""The vocabulary: every function of nodes under the one name that users have for it.

    from dlsys import functional as F
    loss = F.cross_entropy(F.linear(x, weight, bias), labels)

Names are PyTorch's where its users expect them, axes numpy's (`axis`, `keepdims`). Where a node is
expected, a numpy array, a list or a number becomes a constant. `help(F.softmax)` says what one
takes. Many are methods of Tensors and nodes too: `x.sum(axis=0)`.
"""

from __future__ import annotations

from .activation import *
from .attention import *
from .boxes import *
from .compare import *
from .conv import *
from .index import *
from .linear import *
from .loss import *
from .math import *
from .norm import *
from .quantize import *
from .random import *
from .reduce import *
from .shape import *
