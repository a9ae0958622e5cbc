"""Pytest plugin with the options, profiles and fixtures of the test suites.

Run `python -m pytest -p conformance.plugin --pyargs conformance.suite`. `pytest --help` prints the options.

The profiles set the number of random examples of each property: few (12), dev (50), ci (150) or nightly (20 000). The
profile few also runs only every twentieth case of a long loop. An interpreted kernel needs up to a second for a case. A
compiled kernel must be compiled for each shape.

`spec` is imported inside functions. jaxtyping must install hooks before `spec` is first imported, but pytest imports
this module before jaxtyping installs the hooks.
"""

import os
import platform
import signal
import sys
from collections.abc import Callable
from dataclasses import replace
from functools import cache
from importlib.util import find_spec
from pathlib import Path
from typing import TYPE_CHECKING, Any

import hypothesis
import numpy as np
import pytest
from hypothesis import HealthCheck, Phase, settings

from conformance import exceptions
from conformance.abstentions import abstain
from conformance.items import known_items

if TYPE_CHECKING:
    from conformance.engine.process import Engine
    from spec.backend import Backend, BreathStages, CrystalStages, DiversityStages, NestedKVStages, PolicyStages

POSITIONS = ("kept", "renumbered")
EXAMPLES = {"few": 12, "dev": 50, "ci": 150, "nightly": 20_000}
"""Largest number of random examples of each property, by profile."""
PROFILES = tuple(EXAMPLES)
FEW_OF_A_LOOP = 20

_exceptions = pytest.StashKey[list[exceptions.Exemption]]()
_engine = pytest.StashKey["Engine | None"]()


def pytest_addoption(parser: pytest.Parser) -> None:
    option = parser.getgroup("kvspec", "kvspec conformance").addoption
    option("--backend", help="backend to test: a name or module:ATTRIBUTE. Default: numpy")
    option("--kvspec-command", metavar="TEXT",
           help="command that starts the engine to test, in any programming language (spec/protocol.md)")
    option("--kvspec-timeout", type=float, metavar="SECONDS", default=60.0,
           help="maximum number of seconds that the engine may take to answer. Default: 60")
    option("--kvspec-precision", choices=("float64", "float32", "bfloat16"),
           help="precision of stage S1, or dtype of a server. Default: the precision that the engine reports; float64"
                " for the backend numpy; float32 for all other backends and for servers")
    option("--kvspec-profile", choices=PROFILES,
           help="profile, which sets the number of random examples of each property. Default: the environment variable"
                " KVSPEC_PROFILE. If KVSPEC_PROFILE is not set: ci if CI=true, otherwise dev")
    option("--kvspec-policy", metavar="NAME", help="policy to test with conformance.policy_suite: module:ATTRIBUTE")
    option("--kvspec-as", metavar="METHOD", action="append",
           help="published method that must keep the same tokens as the policy, such as 'snapkv(W=16)'. Repeatable")
    option("--kvspec-cache", metavar="NAME",
           help="Python function to test with conformance.cache_suite, as module:ATTRIBUTE. It evicts tokens and"
                " returns logits")
    option("--kvspec-server", metavar="URL",
           help="address of a server to test with conformance.server_suite. The server states what it evicts")
    option("--kvspec-model", metavar="FOLDER",
           help="folder of the transformers model for --kvspec-cache and --kvspec-server. Default for --kvspec-cache:"
                " tiny random models of five families")
    option("--kvspec-positions", choices=POSITIONS,
           help="positions of the tokens that the cache keeps: kept (positions of the text, default), or renumbered"
                " from 0 in each head")
    option("--kvspec-exceptions", metavar="FILE.toml",
           help="TOML file of known failures, each with a reason, an issue and an expiry date")


def profile_of(config: pytest.Config) -> str:
    """Return the profile from the option or from the environment. Default: ci if CI=true, otherwise dev."""
    chosen = config.getoption("--kvspec-profile") or os.environ.get("KVSPEC_PROFILE")
    if chosen is None:
        return "ci" if os.environ.get("CI") == "true" else "dev"
    if chosen not in PROFILES:
        raise pytest.UsageError(f"KVSPEC_PROFILE = {chosen!r}: must be one of {', '.join(PROFILES)}")
    return str(chosen)


def _register_profiles() -> None:
    # The first call with a shape includes imports and compilation, so a time limit would fail at random.
    slow = [HealthCheck.too_slow]
    settings.register_profile("dev", max_examples=EXAMPLES["dev"], deadline=None, suppress_health_check=slow)
    # Every run has the same cases and stores nothing. A failure prints how to reproduce the failure.
    settings.register_profile(
        "ci", max_examples=EXAMPLES["ci"], derandomize=True, database=None, deadline=None, print_blob=True,
        phases=(Phase.explicit, Phase.generate, Phase.shrink), suppress_health_check=slow,
    )
    # The profile "few" is the profile "ci" with fewer examples, because interpreted kernels are slow.
    settings.register_profile("few", settings.get_profile("ci"), max_examples=EXAMPLES["few"])
    # Every run has many new cases. Failures are stored in the database of Hypothesis.
    settings.register_profile(
        "nightly", max_examples=EXAMPLES["nightly"], deadline=None, print_blob=True, suppress_health_check=slow,
    )


def fewer_examples(test: Callable[..., None]) -> Callable[..., None]:
    """Reduce the number of examples to a quarter, for a property that is tested with each of many policies."""
    profile = settings.default
    assert profile is not None
    return settings(max_examples=max(1, profile.max_examples // 4))(test)


def with_rejections(test: Callable[..., None]) -> Callable[..., None]:
    """Turn off two health checks, for tests that reject many examples or need a long time for an example."""
    return settings(suppress_health_check=[HealthCheck.filter_too_much, HealthCheck.too_slow])(test)


def known_vectors() -> frozenset[str]:
    """Return the ids of the test vectors of stages. The cases of test_vectors.py have the same ids."""
    from conformance.vectors.files import published

    return frozenset(f"{stage}-{test['tcId']}" for stage, group, test in published() if group["operation"].islower())


def pytest_configure(config: pytest.Config) -> None:
    config.addinivalue_line("markers", "spec(*ids): ids of the specification's items that the test checks")
    config.addinivalue_line("markers", "row(*names): rows for the test in the certificate of a policy or cache")
    config.addinivalue_line("markers", "law(name): property without an item that the test checks in kvspec's packages")
    config.addinivalue_line("markers", "judges(backend): the backend whose own code the test checks")
    config.addinivalue_line("markers", "beyond(*backends): backends that skip the test, because of memory or head size")
    config.addinivalue_line("markers", "nightly: slow test that runs only with --kvspec-profile nightly")
    _register_profiles()
    settings.load_profile(profile_of(config))
    config.stash[_engine] = engine = engine_of(config)
    if engine is not None:
        signal.signal(signal.SIGTERM, lambda number, _: _end_with(engine, number))
    file = config.getoption("--kvspec-exceptions")
    result: list[exceptions.Exemption] = []
    if file:
        result = exceptions.read(Path(file), known_items(), known_vectors())
    config.stash[_exceptions] = result


@pytest.hookimpl(tryfirst=True)
def pytest_collection_modifyitems(config: pytest.Config, items: list[pytest.Item]) -> None:
    """Check the markers `spec`, deselect tests that do not apply to the backend or the profile, and apply exceptions.

    Raises:
        pytest.UsageError: if a marker names an unknown item of the specification, or has a wrong form.
    """
    known = known_items()
    for item in items:
        for mark in item.iter_markers("spec"):
            if mark.kwargs or not mark.args:
                raise pytest.UsageError(f'{item.nodeid}: write @pytest.mark.spec("...")')
            for name in mark.args if known else ():
                if name not in known:
                    raise pytest.UsageError(f"{item.nodeid}: unknown item {name!r}")
    _leave_out(config, [item for item in items if not judges(item, subject_of(config))], items)
    if profile_of(config) != "nightly":
        _leave_out(config, [item for item in items if item.get_closest_marker("nightly")], items)
    result = config.stash[_exceptions]
    exceptions.apply(result, items)
    if not any("::" in argument for argument in config.args):
        exceptions.refuse_unknown(result, items)


def pytest_collection_finish() -> None:
    """Let Hypothesis use only constants of the modules that are imported now.

    Hypothesis draws constants from all imported modules. If a test imported a module, all later draws would change.
    Then two workers, or two runs, would have different examples for the same seed.
    """
    # This function is private (Hypothesis 6.170), and older versions do not have it.
    providers: Any = sys.modules.get("hypothesis.internal.conjecture.providers")
    if hasattr(providers, "_get_local_constants"):
        result = providers._get_local_constants()
        providers._get_local_constants = lambda: result


def judges(item: pytest.Item, backend: str) -> bool:
    """Return True if a test applies to a backend. All tests without `beyond("numpy")` apply to numpy."""
    fixtures = set(getattr(item, "fixturenames", ()))
    mine = ("backend_under_test" in fixtures and "reference_items" not in fixtures) or "keeps" in fixtures
    named = {name for mark in item.iter_markers("judges") for name in mark.args}
    if any(backend in mark.args for mark in item.iter_markers("beyond")):
        return False
    return backend == "numpy" or mine or backend in named


def subject_of(config: pytest.Config) -> str:
    """Return the command of the tested engine, or the name of the tested backend."""
    return str(config.getoption("--kvspec-command") or config.getoption("--backend") or "numpy")


def engine_of(config: pytest.Config) -> "Engine | None":
    """Start the engine of --kvspec-command, and return the engine. Without --kvspec-command, return None.

    Raises:
        pytest.UsageError: if --backend is also given, if the timeout is not a positive number, or if the engine does
            not answer the request `hello`.
    """
    command, seconds = config.getoption("--kvspec-command"), config.getoption("--kvspec-timeout")
    if command is None:
        return None
    # Imported late: it imports the reference, which jaxtyping's hook checks only if it is imported after the hook.
    from conformance.engine.process import Engine
    from spec.errors import SpecError
    from spec.validate import check_seconds

    if config.getoption("--backend"):
        raise pytest.UsageError("give either --backend or --kvspec-command, but not both")
    try:
        check_seconds("--kvspec-timeout", seconds)
        return Engine(command, seconds)
    except SpecError as error:
        raise pytest.UsageError(str(error)) from error


def _end_with(engine: "Engine", number: int) -> None:
    """Stop the engine, which runs in a separate session, and then end this process by the signal `number`."""
    engine.stop()
    signal.signal(number, signal.SIG_DFL)
    signal.raise_signal(number)


def pytest_unconfigure(config: pytest.Config) -> None:
    engine = config.stash.get(_engine, None)
    if engine is not None:
        engine.stop()


def _leave_out(config: pytest.Config, others: list[pytest.Item], items: list[pytest.Item]) -> None:
    if others:
        config.hook.pytest_deselected(items=others)
        left_out = set(others)
        items[:] = [item for item in items if item not in left_out]


def pytest_report_header(config: pytest.Config) -> str:
    from spec import SPEC_VERSION

    checks = "with" if find_spec("beartype") else "without"
    cut = f", every {FEW_OF_A_LOOP}th case of long loops" if profile_of(config) == "few" else ""
    return (
        f"kvspec: backend {subject_of(config)}, S1 in {precision_of(config)}, spec {SPEC_VERSION},"
        f" profile {profile_of(config)} ({settings.default.max_examples if settings.default else 0} examples{cut}),"
        f" numpy {np.__version__}, hypothesis {hypothesis.__version__}, python {platform.python_version()},"
        f" {checks} beartype"
    )


def precision_of(config: pytest.Config) -> str:
    """Return the precision of the tested stage S1, float64 or float32, or the dtype of the tested server."""
    engine, server = config.stash[_engine], config.getoption("--kvspec-server") is not None
    default = "float64" if subject_of(config) == "numpy" and not server else "float32"
    return str(config.getoption("--kvspec-precision") or (engine.hello.precision if engine else default))


def spec_of(config: pytest.Config) -> str:
    """Return the version of the specification that an engine reports. For a backend, return an empty string."""
    engine = config.stash[_engine]
    return engine.hello.spec if engine else ""


def skip_without(backend_under_test: "Backend", *families: str) -> None:
    """Skip the test if the tested backend does not have a stage family. Every stage family is optional."""
    for family in families:
        if getattr(backend_under_test, family) is None:
            abstain("not offered", f"backend {backend_under_test.name!r} has no stage family {family!r}")


@pytest.fixture(scope="session")
def subject(request: pytest.FixtureRequest, method_engine: "Engine | None") -> "Backend":
    """Backend under test. The backend receives the arrays of the test without copies."""
    from conformance.checks.refusals import guarded
    from conformance.engine.process import backend_of
    from spec.backend import FAMILIES, resolve
    from spec.errors import BackendUnavailable

    result = backend_of(method_engine) if method_engine else resolve(subject_of(request.config))
    if all(getattr(result, family) is None for family in FAMILIES):
        raise BackendUnavailable(f"backend {result.name!r} has no stage family, so kvspec cannot test the backend")
    return guarded(result)


@pytest.fixture(scope="session")
def method_engine(request: pytest.FixtureRequest, tmp_path_factory: pytest.TempPathFactory) -> "Engine | None":
    """Engine of --kvspec-command, or None. Long requests that fail are in a temporary folder for each test."""
    engine = request.config.stash[_engine]
    if engine is not None:
        folder_of = cache(lambda test: tmp_path_factory.mktemp("requests"))
        engine.requests = lambda: folder_of(os.environ["PYTEST_CURRENT_TEST"].rpartition(" ")[0])
    return engine


@pytest.fixture(scope="session")
def together(request: pytest.FixtureRequest) -> bool:
    """Return True if two threads can call stages at the same time.

    An engine answers one request at a time. Triton's interpreter changes modules of Triton during a call.
    """
    return request.config.stash[_engine] is None and os.environ.get("TRITON_INTERPRET", "0") in ("", "0")


@pytest.fixture(scope="session")
def backend_under_test(subject: "Backend", together: bool) -> "Backend":
    """Backend under test, with checks of the rules that apply to every call."""
    from conformance.calls import held_to_rules

    return held_to_rules(subject, together)


@pytest.fixture(scope="session")
def backend(backend_under_test: "Backend") -> "Backend":
    """Backend under test. Skips the test if the backend has no CrystalCache stages."""
    skip_without(backend_under_test, "crystal")
    return backend_under_test


@pytest.fixture(scope="session")
def stages(backend: "Backend") -> "CrystalStages":
    """CrystalCache stages of the tested backend."""
    return backend.require_crystal()


@pytest.fixture(scope="session")
def decoder(backend_under_test: "Backend") -> "Backend":
    """Stages of the tested backend for decode steps and later segments. Skips the test if it lacks either family."""
    skip_without(backend_under_test, "crystal", "breath")
    return replace(backend_under_test, decoding=None)


@pytest.fixture(scope="session")
def decoders(decoder: "Backend", subject: "Backend", together: bool) -> "list[Backend]":
    """Stages of `decoder`, and those of `Backend.decoding` if the tested backend has it."""
    from conformance.calls import held_to_rules
    from conformance.checks.refusals import guarded

    if subject.decoding is None:
        return [decoder]
    return [decoder, held_to_rules(guarded(subject.decoding), together)]


@pytest.fixture(scope="session")
def breath_stages(backend_under_test: "Backend") -> "BreathStages":
    """Stages of decode-time eviction of the tested backend."""
    skip_without(backend_under_test, "breath")
    return backend_under_test.require_breath()


@pytest.fixture(scope="session")
def nestedkv_stages(backend_under_test: "Backend") -> "NestedKVStages":
    """NestedKV stages of the tested backend."""
    skip_without(backend_under_test, "nestedkv")
    return backend_under_test.require_nestedkv()


@pytest.fixture(scope="session")
def selector(backend_under_test: "Backend") -> "DiversityStages":
    """Stages of set-conditioned selection of the tested backend."""
    skip_without(backend_under_test, "diversity")
    return backend_under_test.require_diversity()


@pytest.fixture(scope="session")
def policy_stages(backend_under_test: "Backend") -> "PolicyStages":
    """Stages of the published policies of the tested backend."""
    skip_without(backend_under_test, "policies")
    return backend_under_test.require_policies()


@pytest.fixture(scope="session")
def precision(request: pytest.FixtureRequest) -> str:
    """Precision of the tested stage S1: float64 or float32."""
    return precision_of(request.config)


@pytest.fixture(scope="session")
def every(request: pytest.FixtureRequest) -> int:
    """Step width of long loops: 1, or 20 for the profile "few", which runs only every twentieth case."""
    return FEW_OF_A_LOOP if profile_of(request.config) == "few" else 1


@pytest.fixture(scope="session")
def reference_items() -> None:
    """Mark a test of functions of the reference. The test does not apply to a different backend."""
