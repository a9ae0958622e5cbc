"""Checks of results that the tests of several files share."""
