"""Tests of the suite itself: what its strategies reach, what its comparator lets through."""
