"""The command ``tilegym``. It stands beside the package, whose import takes seconds, most of them PyTorch's."""

import sys


def main() -> None:
    """Entry point: as ``tilegym.cli.main``, but Ctrl-C ends the import too in one line, with status 130."""
    try:
        from tilegym.cli import main as run
    except KeyboardInterrupt:
        print("interrupted", file=sys.stderr)
        sys.exit(130)
    run()
