"""``python -m chunkmem`` is the command ``chunkmem``."""

from __future__ import annotations

import sys

from chunkmem.cli.main import main

if __name__ == "__main__":
    sys.exit(main())
