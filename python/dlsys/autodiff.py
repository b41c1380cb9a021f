"""The face of dlsys: Variables, operators, gradients and the Executor.

>>> from dlsys import autodiff as ad
>>> x = ad.Variable("x", (2,))
>>> ad.Executor([2 * x]).run({x: [1.0, 2.0]})
[array([2., 4.], dtype=float32)]
"""

from __future__ import annotations

from .executor.debug.text import text
from .executor.executor import Executor
from .functional import methods as _methods  # nodes have them from here on
from .graph.gradients import gradients, sum_node_list
from .graph.node import Node, Op, find_topo_sort
from .graph.spec import Spec
from .ops.activation import *
from .ops.boxes import *
from .ops.comparison import *
from .ops.concat import *
from .ops.conv.convolution import *
from .ops.conv.pooling import *
from .ops.einsum import *
from .ops.elementwise import *
from .ops.grouped import *
from .ops.indexing import *
from .ops.leaf import *
from .ops.loss.classification import *
from .ops.loss.cross_entropy import *
from .ops.loss.likelihood import *
from .ops.loss.regression import *
from .ops.loss.softmax import *
from .ops.math.power import *
from .ops.math.rounding import *
from .ops.math.transcendental import *
from .ops.matmul import *
from .ops.movement import *
from .ops.norm.batch_norm import *
from .ops.norm.layer_norm import *
from .ops.optim.apply import *
from .ops.optim.assign import *
from .ops.pad import *
from .ops.quantize import *
from .ops.random.device_batch import *
from .ops.random.sampling import *
from .ops.reduce import *
from .ops.resize import *
from .ops.scan import *
from .ops.sorting import *
from .ops.triangle import *
