"""`python -m dlsys.apps.superres` is `dlsys superres`."""

import sys

from ..cli import main

if __name__ == "__main__":
    sys.exit(main(command="superres", program="superres"))
