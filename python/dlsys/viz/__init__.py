"""Pictures of networks, training and plans.

Pictures of data are matplotlib Figures (`pip install matplotlib`), made without pyplot and its
global state; those of graphs, plans and profiles are SVG text, for which nothing is needed. `save`
writes either; `viz.report` puts all of them on one page.
"""

from . import notebook, report
from .classification import confusion_matrix, decision_boundary
from .curves import curves
from .figure import save
from .graph.drawing import graph_dot, graph_svg
from .images import activations, filters, mistakes
from .layers import layer_activations
from .memory import memory_plan
from .times import operator_times
