"""Start of the command `kvspec` as `python -m models_integration.cli`."""

from models_integration.cli import main

main()
