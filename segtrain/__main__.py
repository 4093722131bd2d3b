"""`python -m segtrain` is the `segtrain` command."""

import sys

from segtrain.cli import main

if __name__ == "__main__":
    sys.exit(main())
