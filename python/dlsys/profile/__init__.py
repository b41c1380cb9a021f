"""Profiles of time and memory.

    executor.recorder = profile.Profile()   # a table by operator: print(executor.recorder)
    executor.recorder = profile.Trace(ctx)  # a timeline: executor.recorder.write("trace.json")
    print(profile.counters(ctx))            # what the device's allocator holds and has done

DLSYS_NVTX=1 names every step of a run for NVIDIA's profilers, at no cost when it is not set.
"""

from .counters import Counters, counters
from .products import product_flops
from .table import Profile, Row
from .trace import Trace
