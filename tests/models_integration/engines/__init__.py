"""Engines that serve many requests: answers, stored tokens, and errors."""
