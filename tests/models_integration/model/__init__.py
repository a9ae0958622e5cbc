"""Tests of models_integration/model."""
