"""``python -m tpuscope.doctor``: ``tpuscope doctor``, also where torch cannot be imported."""

import sys

from ..cli import main

if __name__ == "__main__":
    sys.exit(main(["doctor", *sys.argv[1:]]))
