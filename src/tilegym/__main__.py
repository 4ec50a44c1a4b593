"""``python -m tilegym``: the command line."""

from tilegym.cli import main

main()
