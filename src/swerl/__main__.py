"""`python -m swerl`: the `swerl` command."""

from __future__ import annotations

import gc
import sys


def main() -> None:
    """Run the command line; Ctrl-C during imports ends it without a traceback."""
    # Imports make many objects and no garbage; `cli.main` collects again before the command runs.
    gc.disable()
    try:
        from swerl.cli.main import app

        app()
    except KeyboardInterrupt:
        sys.exit(130)


if __name__ == "__main__":
    main()
