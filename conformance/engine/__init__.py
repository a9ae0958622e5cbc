"""Engines in any language: a process that implements spec/protocol.md, as a backend that the suite tests."""
