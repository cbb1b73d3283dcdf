"""``python -m tpuscope``."""

import sys

from .cli import main

if __name__ == "__main__":  # the process that traces a step imports this file, too
    sys.exit(main())
