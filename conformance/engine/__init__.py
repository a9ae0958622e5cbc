"""Engines in any language: a process that speaks spec/protocol.md, as a backend that the suite judges."""
