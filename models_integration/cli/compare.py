"""Functions that convert the options of `kvspec compare`, `kvspec sweep` and `kvspec demo` to a rules file."""

from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

from rich.console import Console

from models_integration.cache.atomic_file import publish_readable
from models_integration.cli.checks import check_file
from models_integration.cli.options import names_of
from models_integration.studies.evidence.controls import CONTROL_BOUNDS, FULL
from models_integration.studies.evidence.rules import rules_of, rules_text
from spec.errors import SpecError
from spec.parameters import ESSAY, PAPER

__all__ = ["GRIDS", "save_rules", "study_of"]


def _constants(**changed: object) -> str:
    return ", ".join(f'{name}="{one}"' if isinstance(one, str) else f"{name}={one}" for name, one in changed.items())


GRIDS: dict[str, tuple[str, ...]] = {
    name: ("crystalcache", *(f"crystalcache({constants})" for constants in each)) for name, each in {
        # Values that the paper varies, according to Appendix A.
        "appendix-a": (
            *(_constants(T_max=value) for value in (16, 24, 48)), *(_constants(s=value) for value in (2.0, 10.0)),
            *(_constants(alpha=value) for value in (0.25, 0.5, 2.0, 8.0)),
        ),
        "extensions": (
            _constants(**{name: one for name, one in vars(ESSAY).items() if one != getattr(PAPER, name)}),
            _constants(allocation="tiers"), *(_constants(coverage=value) for value in (0.1, 0.25, 0.5)),
            _constants(merge="median"), _constants(rarity="reciprocal"), _constants(rarity="exponential"),
        ),
    }.items()
}
"""Policies of each grid: CrystalCache with the parameters of the paper, then CrystalCache with changed parameters."""


def study_of(
    title: str, policies: Sequence[str], budgets: str, tasks: str, lengths: str, samples: int, seeds: str,
    placements: str, models: str, *, controls: bool, bare: bool, calibration: str = "",
) -> dict[str, Any]:
    """Return the entries of the table [study] of a rules file that has the same meaning as the options.

    Raises:
        SpecError: if a list is empty, or if a seed or length is not a whole number.
    """
    checked = tuple(CONTROL_BOUNDS) if controls else ()
    return {
        "title": title, "models": names_of("model", models), "contexts": samples, "questions": 1,
        "seeds": _numbers("seeds", seeds), "lengths": _numbers("lengths", lengths),
        "placements": names_of("placements", placements), "tasks": names_of("tasks", tasks),
        "policies": [name for name in policies if name != FULL], "budgets": names_of("budgets", budgets),
        "controls": [*((FULL,) if FULL in policies else ()), *checked], "bare": bare,
        **({"calibration": calibration} if calibration else {}),
    }


def _numbers(option: str, text: str) -> list[int]:
    try:
        return [int(one) for one in names_of(option, text)]
    except ValueError as error:
        raise SpecError(option, text, "must be whole numbers, separated by commas") from error


def save_rules(study: Mapping[str, Any], path: Path) -> None:
    """Write a study as a rules file, and print the command that runs the rules file.

    Raises:
        SpecError: if `Rules` does not accept an entry, or if the file cannot be written.
    """
    rules_of(**study)
    check_file("write_rules", path)
    publish_readable(path, rules_text(**study).encode())
    Console().print(f"{path}; run it with: kvspec sweep {path}", highlight=False, soft_wrap=True)
