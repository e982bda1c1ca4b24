"""`python -m autotp`: the same as the command `autotp`."""

import sys

from autotp.commands import main

if __name__ == "__main__":
    sys.exit(main())
