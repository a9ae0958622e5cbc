"""Archived keys and values of wrapped chunks: recognising models, storing, finding and splicing."""
