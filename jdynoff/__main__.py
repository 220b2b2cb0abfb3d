"""`python -m jdynoff`."""

import sys

from jdynoff.cli import main

if __name__ == "__main__":
    sys.exit(main())
