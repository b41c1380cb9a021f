"""`python -m dlsys.apps.gpt` is `dlsys gpt`."""

import sys

from ..cli import main

if __name__ == "__main__":
    sys.exit(main(command="gpt", program="gpt"))
