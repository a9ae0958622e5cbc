"""The suite with a saboteur in it: `python -m pytest -p conformance.assurance.saboteurs.plugin --saboteur NAME`.

The reference is patched before any test module is imported, so tests of a stage, of a function and of the
pipeline all meet the wrong reading. Only tests marked with the saboteur's item run, those that judge any
backend first. The cases are the profile's own; only shrinking is left out, which comes after the verdict.
"""

import pytest
from hypothesis import Phase, settings

from conformance.assurance.saboteurs import SABOTEURS
from conformance.assurance.saboteurs.install import install
from conformance.assurance.saboteurs.registry import Saboteur
from conformance.exceptions import items_marked

__all__ = ["judges_any_backend"]


def pytest_addoption(parser: pytest.Parser) -> None:
    group = parser.getgroup("kvspec")
    group.addoption("--saboteur", metavar="NAME", help="which wrong reading stands in the reference")
    group.addoption("--saboteur-item", metavar="ID", help="without a saboteur: run the tests of this item")


@pytest.hookimpl(trylast=True)
def pytest_configure(config: pytest.Config) -> None:
    saboteur = chosen(config)
    if saboteur:
        install(saboteur)
    profile = settings.default or settings()
    phases = [phase for phase in profile.phases if phase in (Phase.explicit, Phase.generate)]
    settings.register_profile("saboteurs", profile, phases=phases, report_multiple_bugs=False)
    settings.load_profile("saboteurs")


def chosen(config: pytest.Config) -> Saboteur | None:
    """The saboteur that the option names.

    Raises:
        pytest.UsageError: for an unknown name.
    """
    name = config.getoption("--saboteur")
    if name is None:
        return None
    if name not in SABOTEURS:
        raise pytest.UsageError(f"--saboteur {name}: unknown; python -m conformance.assurance.saboteurs --list")
    return SABOTEURS[name]


@pytest.hookimpl(trylast=True)
def pytest_collection_modifyitems(config: pytest.Config, items: list[pytest.Item]) -> None:
    """Keep the tests of the item, in the order in which they say most."""
    saboteur = chosen(config)
    wanted = saboteur.item if saboteur else config.getoption("--saboteur-item")
    others = [item for item in items if wanted not in items_marked(item)]
    config.hook.pytest_deselected(items=others)
    mine = [item for item in items if item not in others]
    items[:] = sorted(mine, key=lambda item: not judges_any_backend(item))


def judges_any_backend(item: pytest.Item) -> bool:
    """Whether the test runs for a backend other than the reference."""
    fixtures = set(getattr(item, "fixturenames", ()))
    return "judged" in fixtures and "reference_items" not in fixtures
