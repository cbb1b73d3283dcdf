"""``python -m tpuscope.doctor``: the same as ``mshnet doctor``, also where torch does not start."""

import argparse
import sys

from ..errors import RequestError
from .command import add_flags


def main() -> int:
    parser = argparse.ArgumentParser(
        prog="mshnet doctor",
        description="Check what works on this machine, and say how to mend what does not.",
        formatter_class=argparse.RawDescriptionHelpFormatter,
        allow_abbrev=False,
    )
    add_flags(parser)
    args = parser.parse_args()
    try:
        return args.command(args)
    except RequestError as error:
        print(f"mshnet doctor: {error}", file=sys.stderr)
        return 2
    except KeyboardInterrupt:
        print("mshnet doctor: interrupted", file=sys.stderr)
        return 130


if __name__ == "__main__":
    sys.exit(main())
