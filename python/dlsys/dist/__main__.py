"""`python -m dlsys.dist launch -n 4 script.py`."""

import sys

from .launch import main

sys.exit(main())
