"""`python -m dlsys.apps.cifar` is `dlsys cifar`."""

import sys

from ..cli import main

if __name__ == "__main__":
    sys.exit(main(command="cifar", program="cifar"))
