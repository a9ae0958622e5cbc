"""Run the command `kvspec` with `python -m kvspec`."""

from models_integration.cli import main

main()
