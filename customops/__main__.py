"""``python -m customops``: see `customops._cli`, which is loaded only here because it needs `rich`."""

from __future__ import annotations

import sys


def main() -> int:
    try:
        from customops._cli import check
    except ModuleNotFoundError as error:
        if error.name is None or error.name.partition(".")[0] != "rich":
            raise
        print('error: the command line needs rich; pip install "customops[cli]"', file=sys.stderr)
        return 2
    return check.main()


if __name__ == "__main__":
    sys.exit(main())
