"""Where the shipped files lie."""

from pathlib import Path

ASSETS = Path(__file__).parent / "assets"
CHAT_ASSETS = Path(__file__).parent / "chat_assets"
"""Of the sibling that has seen conversations."""
