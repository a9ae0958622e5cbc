"""Tests of experiments/studies."""
