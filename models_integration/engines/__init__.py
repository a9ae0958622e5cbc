"""Engines that serve many requests at once, and what they ask before they run."""
