"""`python -m rollgraph`."""

import sys

from rollgraph.cli import main

if __name__ == "__main__":
    sys.exit(main())
