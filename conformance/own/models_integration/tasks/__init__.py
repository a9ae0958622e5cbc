"""Tests of models_integration/tasks."""
