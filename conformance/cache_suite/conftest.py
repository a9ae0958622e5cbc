"""Fixtures of the cache under test and of the models. Without --kvspec-cache, pytest collects no tests."""

from collections.abc import Callable
from functools import cache
from pathlib import Path
from typing import Any

import pytest

_given = pytest.StashKey[dict[str, str]]()
"""Folder of --kvspec-model, by the family of the model. Empty without this option."""


def pytest_ignore_collect(collection_path: Path, config: pytest.Config) -> bool | None:
    """Collect nothing without --kvspec-cache."""
    return True if config.getoption("--kvspec-cache") is None else None


def pytest_configure(config: pytest.Config) -> None:
    """Find the model before pytest collects tests."""
    name = config.getoption("--kvspec-model")
    config.stash[_given] = {} if name is None else loadable_model(name)


def loadable_model(name: str) -> dict[str, str]:
    """Return the folder of a model, by the family of the model.

    Raises:
        pytest.UsageError: if the model is not on this machine.
    """
    from transformers import AutoConfig

    from models_integration.pocket import model_folder
    from spec.errors import SpecError

    try:
        folder = str(model_folder(name))
        return {AutoConfig.from_pretrained(folder, local_files_only=True).model_type: folder}
    except SpecError as error:
        raise pytest.UsageError(str(error)) from error
    except (OSError, ValueError) as error:
        reason = "transformers cannot read its config.json" if Path(name).is_dir() else "there is no such folder"
        raise pytest.UsageError(f"model = {name!r}: must be the folder of a transformers model; {reason}") from error


def pytest_generate_tests(metafunc: pytest.Metafunc) -> None:
    """Parametrize tests by family and kind of kept sets.

    A case without eviction has a mark for all rows of the family.
    """
    from conformance.cache_suite.abilities import ABILITIES
    from conformance.cache_suite.judge import KINDS, TINY, WHOLE

    families = list(metafunc.config.stash[_given] or TINY)
    kinds = [kind for kind in KINDS if kind != WHOLE]
    if "ability" in metafunc.fixturenames:
        metafunc.parametrize(("family", "ability"), [
            _about(family, [ability], family, ability) for family in families for ability in ABILITIES
        ])
        return
    if "kind" not in metafunc.fixturenames:
        metafunc.parametrize("family", [_about(family, kinds[:1], family) for family in families])
        return
    metafunc.parametrize(("family", "kind"), [
        _about(family, kinds if kind == WHOLE else [kind], family, kind) for family in families for kind in KINDS
    ])


def _about(family: str, kinds: list[str], *values: str) -> Any:
    return pytest.param(*values, marks=pytest.mark.row(*(f"{family}: {kind}" for kind in kinds)))


@pytest.fixture(scope="session")
def run(request: pytest.FixtureRequest) -> Callable[..., Any]:
    """Return the function of --kvspec-cache."""
    from spec.plugins import find_plugin

    actual = find_plugin("cache", request.config.getoption("--kvspec-cache"), "kvspec.caches").value
    assert callable(actual)
    return actual


@pytest.fixture(scope="session")
def folder_of(request: pytest.FixtureRequest, tmp_path_factory: pytest.TempPathFactory) -> Callable[[str], str]:
    """Return a function that maps a family to the folder of --kvspec-model, or else of a tiny model."""
    from conformance.cache_suite.judge import save_tiny

    given = request.config.stash[_given]
    return cache(lambda family: given.get(family) or str(save_tiny(family, tmp_path_factory.mktemp(family))))


@pytest.fixture
def folder(folder_of: Callable[[str], str], family: str) -> str:
    """Return the folder of the model."""
    return folder_of(family)


@pytest.fixture(scope="session")
def renumbered(request: pytest.FixtureRequest) -> bool:
    """Return True if the cache declares that it renumbers the kept tokens."""
    return bool(request.config.getoption("--kvspec-positions") == "renumbered")


@pytest.fixture(scope="session")
def seed(request: pytest.FixtureRequest) -> int:
    """Return the random seed of all drawn inputs: --hypothesis-seed, which `kvspec verify --seed` sets."""
    return int(request.config.getoption("--hypothesis-seed", None) or 0)
