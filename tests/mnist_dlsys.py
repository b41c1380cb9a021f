"""The command line under its old path: python tests/mnist_dlsys.py -m mlp"""

import runpy
from pathlib import Path

if __name__ == "__main__":
    runpy.run_path(str(Path(__file__).parents[1] / "mnist_dlsys.py"), run_name="__main__")
