"""The benchmarks, each by its name, or all that this machine can run.

python benchmarks [--out FOLDER]     # overhead, cpu, …, then the tables: `make bench`
python benchmarks cpu --rounds 10
python benchmarks --help             # the names
"""

from __future__ import annotations

import argparse
import ast
import importlib
import importlib.util
import os
import subprocess
import sys
from pathlib import Path
from typing import Any

HERE = Path(__file__).resolve().parent
ROOMS = (
    "operators", "steps", "inference", "contestants", "proofs", "learning", "conversion",
    "versions", "tables",
)  # fmt: skip

# This checkout's package, unless PYTHONPATH names another one.
_NAMED = os.environ.get("PYTHONPATH", "").split(os.pathsep)
if not any((Path(folder) / "dlsys").is_dir() for folder in _NAMED if folder):
    sys.path.insert(1, str(HERE.parent / "python"))


def programs() -> dict[str, Path]:
    """The files of the rooms that have a `main`, by name."""
    files = (path for room in ROOMS for path in sorted((HERE / room).glob("*.py")))
    return {path.stem: path for path in files if "\ndef main(" in path.read_text()}


def overview() -> str:
    """Each room with its programs and their first sentences."""
    lines = [(__doc__ or "").strip()]
    for room in ROOMS:
        here = {name: path for name, path in programs().items() if path.parent.name == room}
        lines += ["", f"{room}/", *(f"  {name:<14} {_summary(p)}" for name, p in here.items())]
    return "\n".join(lines)


def _summary(path: Path) -> str:
    text = ast.get_docstring(ast.parse(path.read_text())) or ""
    return " ".join(text.split("\n\n")[0].split())


def everything() -> int:
    """Runs what can run here, then writes the tables; the status of the first that failed."""
    parser = argparse.ArgumentParser(prog="benchmarks")
    parser.add_argument("--out", type=Path, default=HERE / "results")
    out = str(parser.parse_args().out)
    from dlsys.runtime.device import gpu, unavailable

    names = ["overhead", "cpu", "eager"]
    if importlib.util.find_spec("torch"):
        names.append("operators")
    else:
        print("operators is left out: there is no PyTorch", flush=True)
    reason = unavailable(gpu(0))
    if reason is None:
        names += ["gpu", "overlap", "losses"]
    else:
        print(f"gpu, overlap and losses are left out: {reason}", flush=True)
    for name, option in [*((name, "--out") for name in names), ("table", "--results")]:
        print(f"benchmarks {name}", flush=True)
        status = subprocess.run([sys.executable, str(HERE), name, option, out]).returncode
        if status:
            return status
    return 0


def main() -> Any:
    """Runs what the command line names."""
    name = sys.argv[1] if len(sys.argv) > 1 else ""
    if name in ("-h", "--help"):
        print(overview())
        return 0
    if not name or name.startswith("-"):
        return everything()
    known = programs()
    if name not in known:
        return f"there is no benchmark {name}: {', '.join(known)}"
    sys.argv[:2] = [f"{sys.argv[0]} {name}"]
    return importlib.import_module(f"{known[name].parent.name}.{name}").main()


if __name__ == "__main__":
    sys.exit(main())
