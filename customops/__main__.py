"""``python -m customops``: the command line, see `customops._cli`."""

from __future__ import annotations

import sys

from customops._cli.main import main

if __name__ == "__main__":
    sys.exit(main())
