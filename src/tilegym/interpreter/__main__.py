"""``python -m tilegym.interpreter script.py [argument ...]``: runs a cuTile script without a GPU."""

from __future__ import annotations

import runpy
import sys
from pathlib import Path

from .cuda_on_cpu import redirect
from .install import install


def main() -> None:
    if len(sys.argv) < 2 or sys.argv[1] in ("-h", "--help"):
        print(__doc__)
        raise SystemExit(0 if len(sys.argv) > 1 else 2)
    script = Path(sys.argv[1])
    if not script.is_file():
        raise SystemExit(f"no such script: {script}")
    sys.argv = sys.argv[1:]
    sys.path[0] = str(script.parent.resolve())
    install()
    with redirect():
        runpy.run_path(str(script), run_name="__main__")


if __name__ == "__main__":
    main()
