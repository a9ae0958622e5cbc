"""Tests of the Triton backend beside the common suite; each says why where it cannot run."""
