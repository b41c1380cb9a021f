"""`python -m dlsys.apps.explain` is `dlsys explain`."""

import sys

from ..cli import main

if __name__ == "__main__":
    sys.exit(main(command="explain", program="explain"))
