"""Checks of a whole prefill. If only the fused function of a backend is wrong, the first complaint names it."""

from collections.abc import Mapping
from dataclasses import replace
from itertools import combinations
from typing import Any

from conformance.checks import stage_checks
from conformance.strategies.prompts import Prompt
from reference.crystalcache import prefill
from spec.backend import Backend
from spec.records import CrystalRetention

__all__ = ["prefill_complaints"]

AGREES = "the single stages are right, and the fused function `prefill` of the backend differs from them"


def prefill_complaints(result: CrystalRetention, prompt: Prompt, backend: Backend, precision: str) -> list[str]:
    """Return the complaints about a prefill of a backend, or an empty list.

    If the backend has a fused `prefill` and the single stages have no complaint, the first complaint is of `prefill`.
    It names the arguments that the fused function seems to ignore, if the result is right without them.
    """
    complaints = [*stage_checks.retention(result, prompt, precision)]
    if not complaints or backend.prefill is None:
        return complaints
    single = prefill(**prompt.arguments, backend=replace(backend, prefill=None))
    if [*stage_checks.retention(single, prompt, precision)]:
        return complaints
    return [AGREES + _ignored(result, prompt, precision), *complaints]


def _ignored(result: CrystalRetention, prompt: Prompt, precision: str) -> str:
    """Return the smallest set of arguments that explains the result if they are ignored, in words, or ""."""
    inputs = prompt.inputs
    default: Mapping[str, Any] = {"scaling": inputs.q.shape[2] ** -0.5, "softcap": None, "sinks": None}
    given = [name for name in default if getattr(inputs, name) is not default[name]]
    given = [name for name in given if name != "scaling" or inputs.scaling != default["scaling"]]
    for number in range(1, len(given) + 1):
        for names in combinations(given, number):
            without = replace(prompt, inputs=replace(inputs, **{name: default[name] for name in names}))
            if not [*stage_checks.retention(result, without, precision)]:
                return f"; it is as if `prefill` ignored {' and '.join(names)}"
    return ""
