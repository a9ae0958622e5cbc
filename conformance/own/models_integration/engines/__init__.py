"""Engines that serve many requests: what they answer, what they hold, and what they refuse."""
