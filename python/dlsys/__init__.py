"""dlsys: symbolic graphs, their gradients, a memory plan made once, and native kernels that run it.

Start at `dlsys.autodiff`. Importing this package loads nothing else.
"""

__version__ = "0.1.0"
