"""``python -m dtorch`` is the command ``dtorch``."""

import sys

from dtorch.cli import main

if __name__ == "__main__":
    sys.exit(main())
