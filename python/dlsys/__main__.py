"""The command line as `python -m dlsys`; installed, it is also the program `dlsys`."""

import sys

from .apps.cli import main

if __name__ == "__main__":
    sys.exit(main())
