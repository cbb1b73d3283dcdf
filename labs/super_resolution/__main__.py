"""``python -m labs.super_resolution``."""

import sys

from .cli import main

if __name__ == "__main__":
    sys.exit(main())
