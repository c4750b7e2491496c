"""`python -m swerl.cli`: the `swerl` command."""

from __future__ import annotations

import sys


def main() -> None:
    """Run the command line, in which Ctrl-C is no error from the first import on."""
    try:
        from swerl.cli.main import app

        app()
    except KeyboardInterrupt:
        sys.exit(130)


if __name__ == "__main__":
    main()
