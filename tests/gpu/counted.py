"""Runs a Python program and writes how often it called CUDA.

    python tests/gpu/counted.py COUNTER.so OUT.json PROGRAM [ARGUMENTS...]

OUT.json gets `cupti`, the counts of cupti_counter.py for the whole life of the program, and
`library`, the counters of the native library's own allocator on the GPU.
"""

from __future__ import annotations

import json
import runpy
import sys
from pathlib import Path

HERE = Path(__file__).resolve().parent
sys.path.insert(0, str(HERE))

import cupti_counter  # noqa: E402


def main(counter_path: str, out: str, program: str, *arguments: str) -> int:
    """Returns the program's exit status."""
    counter = cupti_counter.Counter(Path(counter_path))
    sys.path[0:1] = [str(HERE.parents[1] / "python"), str(Path(program).resolve().parent)]
    sys.argv = [program, *arguments]
    status = 0
    try:
        runpy.run_path(program, run_name="__main__")
    except SystemExit as end:
        status = end.code if isinstance(end.code, int) else int(end.code is not None)
    from dlsys.runtime.device import gpu, memory_stats

    counts = {"cupti": counter.read(), "library": memory_stats(gpu(0))._asdict()}
    Path(out).write_text(json.dumps(counts))
    return status


if __name__ == "__main__":
    sys.exit(main(*sys.argv[1:]))
