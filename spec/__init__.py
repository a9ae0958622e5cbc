"""What must hold: records, parameters, budgets and interfaces that every implementation shares.

The normative texts are the Markdown files beside this module; `spec.errors`, `spec.records`, `spec.policy` and
`spec.backend` are the types that flow between stages. Nothing here computes a policy: see `reference`.
"""

from pathlib import Path

__all__ = ["SPEC_VERSION"]

SPEC_VERSION = Path(__file__).with_name("VERSION").read_text(encoding="ascii").strip()
