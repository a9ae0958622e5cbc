"""Specification of kvspec: records, parameters, budgets and interfaces that every implementation shares.

The Markdown files in the folder `spec` are normative. `spec.errors`, `spec.records`, `spec.policy` and `spec.backend`
define the types of the stages' arguments and results. The package `reference` computes the policies.
"""

from pathlib import Path

__all__ = ["SPEC_VERSION"]

SPEC_VERSION = Path(__file__).with_name("VERSION").read_text(encoding="ascii").strip()
