"""Run ``python -m mshnet``."""

import sys

from .cli import main

if __name__ == "__main__":  # replicas import this file too
    sys.exit(main())
