"""Tests of models_integration/studies."""
