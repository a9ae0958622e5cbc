"""Run the command `kvspec` with `python -m kvspec`."""

from kvspec.cli import main

main()
