"""`python -m swerl.cli`: the `swerl` command."""

from __future__ import annotations

import sys


def main() -> None:
    """Run the command line; Ctrl-C during imports ends it without a traceback."""
    try:
        from swerl.cli.main import app

        app()
    except KeyboardInterrupt:
        sys.exit(130)


if __name__ == "__main__":
    main()
