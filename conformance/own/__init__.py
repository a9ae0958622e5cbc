"""Tests of kvspec's own packages, by package."""
