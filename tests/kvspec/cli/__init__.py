"""Tests of kvspec/cli."""
