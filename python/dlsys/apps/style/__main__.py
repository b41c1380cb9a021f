"""`python -m dlsys.apps.style` is `dlsys style`."""

import sys

from ..cli import main

if __name__ == "__main__":
    sys.exit(main(command="style", program="style"))
