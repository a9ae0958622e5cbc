"""Whose cache is judged, on which models; without one there is nothing to collect."""

from collections.abc import Callable
from functools import cache
from pathlib import Path
from typing import Any

import pytest

_given = pytest.StashKey[dict[str, str]]()
"""The folder of --kvspec-model by its family, or nothing."""


def pytest_ignore_collect(collection_path: Path, config: pytest.Config) -> bool | None:
    """What every test here is about must be given."""
    return True if config.getoption("--kvspec-cache") is None else None


def pytest_configure(config: pytest.Config) -> None:
    """Find the model, before anything is collected."""
    name = config.getoption("--kvspec-model")
    config.stash[_given] = {} if name is None else found_model(name)


def found_model(name: str) -> dict[str, str]:
    """The folder of a model by its family.

    Raises:
        pytest.UsageError: for one that is not on this machine.
    """
    from transformers import AutoConfig

    from models_integration.model.published_weights import located
    from spec.errors import SpecError

    try:
        folder = str(located(name))
        return {AutoConfig.from_pretrained(folder, local_files_only=True).model_type: folder}
    except SpecError as error:
        raise pytest.UsageError(str(error)) from error
    except (OSError, ValueError) as error:
        said = " ".join(str(error).split())
        raise pytest.UsageError(f"model = {name!r}: must be a model on this machine: {said}") from error


def pytest_generate_tests(metafunc: pytest.Metafunc) -> None:
    """Each family with each kind of kept sets; where nothing is evicted, that is about all rows of the family."""
    from conformance.cache_suite.judge import ABILITIES, KINDS, TINY, WHOLE

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
    """The function of --kvspec-cache."""
    from spec.plugins import find_plugin

    found = find_plugin("cache", request.config.getoption("--kvspec-cache"), "kvspec.caches").value
    assert callable(found)
    return found


@pytest.fixture(scope="session")
def folder_of(request: pytest.FixtureRequest, tmp_path_factory: pytest.TempPathFactory) -> Callable[[str], str]:
    """The model of a family: the one of --kvspec-model, else a tiny one."""
    from conformance.cache_suite.judge import save_tiny

    given = request.config.stash[_given]
    return cache(lambda family: given.get(family) or str(save_tiny(family, tmp_path_factory.mktemp(family))))


@pytest.fixture
def folder(folder_of: Callable[[str], str], family: str) -> str:
    """Of the model."""
    return folder_of(family)


@pytest.fixture(scope="session")
def renumbered(request: pytest.FixtureRequest) -> bool:
    """Whether the cache declares that it renumbers what it keeps."""
    return bool(request.config.getoption("--kvspec-positions") == "renumbered")


@pytest.fixture(scope="session")
def seed(request: pytest.FixtureRequest) -> int:
    """Of what is drawn: --hypothesis-seed, which `kvspec verify --seed` sets."""
    return int(request.config.getoption("--hypothesis-seed", None) or 0)
