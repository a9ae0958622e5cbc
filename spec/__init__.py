"""The specification: records, parameters, budgets and interfaces that every implementation shares.

The normative texts are the Markdown files in this folder. `spec.errors`, `spec.records`, `spec.policy` and
`spec.backend` define the types of the stages' arguments and results. The package `reference` computes the policies.
"""

from pathlib import Path

__all__ = ["SPEC_VERSION"]

SPEC_VERSION = Path(__file__).with_name("VERSION").read_text(encoding="ascii").strip()
