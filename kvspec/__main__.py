"""`python -m kvspec`: the command."""

from models_integration.cli import main

main()
