"""`python -m dlsys.apps.detect` is `dlsys detect`."""

import sys

from ..cli import main

if __name__ == "__main__":
    sys.exit(main(command="detect", program="detect"))
