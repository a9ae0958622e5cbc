"""Folders that need what is not installed are not collected: the rest of the suite needs NumPy alone."""

from importlib.util import find_spec

collect_ignore = [] if find_spec("torch") and find_spec("transformers") else ["integration"]
