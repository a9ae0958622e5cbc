"""Start of the command `kvspec` as `python -m kvspec.cli`."""

from kvspec.cli import main

main()
