"""Tests of the integration with `transformers`, by folder."""
