"""Tests of kvspec's packages, by package."""
