"""Tests of models_integration/cli."""
