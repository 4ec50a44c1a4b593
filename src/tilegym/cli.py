"""Runs a command of :mod:`tilegym_command`, whose errors become one line."""

import os
import sys
import warnings
from typing import Any

from tilegym.errors import TileGymError
from tilegym_command import asked_for
from tilegym_command import build_app


def _show_warning(message: Warning | str, *_: Any, **__: Any) -> None:
    print(f"warning: {message}", file=sys.stderr)


def main() -> None:
    """Runs the command in ``sys.argv``; TileGym's own errors become one line, exit 1."""
    warnings.showwarning = _show_warning  # without the line of source that gave it
    asked = asked_for()
    try:
        build_app(asked)()
    except TileGymError as error:
        print(f"error: {error}", file=sys.stderr)
        sys.exit(1)
    except ModuleNotFoundError as error:
        if error.name is None or error.name.split(".")[0] == "tilegym":
            raise
        print(f"error: `tilegym {asked}` needs a package that is not installed: {error.name}", file=sys.stderr)
        print("remedy: pip install 'tilegym[dev]', or that package alone", file=sys.stderr)
        sys.exit(1)
    except KeyboardInterrupt:  # while the command was being imported; each has its own way to end afterwards
        print("interrupted", file=sys.stderr)
        sys.exit(130)
    except BrokenPipeError:  # `tilegym tune --list | head`
        os.dup2(os.open(os.devnull, os.O_WRONLY), sys.stdout.fileno())
        sys.exit(1)


if __name__ == "__main__":
    main()
