"""Tests of experiments/tasks."""
