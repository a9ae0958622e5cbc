"""How a backend is found, and what is said when it is not."""

import sys
from collections.abc import Iterator
from pathlib import Path

import numpy as np
import pytest

from conformance.plugin import subject_of
from reference.backend import BACKEND
from spec.backend import BUILT_IN, ENTRY_POINTS, Backend, CrystalStages, resolve
from spec.errors import BackendUnavailable, SpecError
from spec.parameters import TINY

MODULE = """
from spec.backend import Backend
MINE = Backend("mine")
OTHER = 3
"""


@pytest.fixture
def elsewhere(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """A third party's module, installed with an entry point."""
    (tmp_path / "third_party_engine.py").write_text(MODULE, encoding="utf-8")
    (tmp_path / "needs_a_gpu.py").write_text("import no_such_driver", encoding="utf-8")
    installed = tmp_path / "third_party-1.0.dist-info"
    installed.mkdir()
    (installed / "METADATA").write_text("Metadata-Version: 2.1\nName: third-party\nVersion: 1.0\n", encoding="utf-8")
    (installed / "entry_points.txt").write_text(
        f"[{ENTRY_POINTS}]\nmine = third_party_engine:MINE\n", encoding="utf-8"
    )
    monkeypatch.syspath_prepend(tmp_path)
    monkeypatch.delitem(sys.modules, "third_party_engine", raising=False)
    return tmp_path


@pytest.mark.spec("CC-PREFILL")
def test_an_instance_is_itself() -> None:
    mine = Backend("mine")
    assert resolve(mine) is mine


@pytest.mark.spec("CC-PREFILL")
def test_numpy_is_the_reference() -> None:
    assert resolve("numpy") is BACKEND
    assert isinstance(BACKEND.require_crystal(), CrystalStages)


@pytest.mark.spec("CC-PREFILL", "CC-DISSOLVE")
def test_a_built_in_backend_says_the_name_that_it_is_found_by(backend: Backend, request: pytest.FixtureRequest) -> None:
    """It stands in reports and in errors."""
    asked = subject_of(request.config)
    if asked not in BUILT_IN:
        pytest.skip("a third party names itself as it likes")
    assert backend.name == asked


@pytest.mark.spec("CC-PREFILL")
@pytest.mark.usefixtures("elsewhere")
@pytest.mark.parametrize("name", ["third_party_engine:MINE", "mine"])
def test_a_third_party_is_found_by_attribute_or_entry_point(name: str) -> None:
    assert resolve(name).name == "mine"


@pytest.mark.spec("CC-PREFILL")
@pytest.mark.usefixtures("elsewhere")
def test_an_unknown_name_lists_the_known_ones() -> None:
    with pytest.raises(SpecError, match="'nampy'") as caught:
        resolve("nampy")
    assert caught.value.argument == "backend"
    assert all(name in caught.value.bound for name in [*BUILT_IN, "mine", "module:ATTRIBUTE"])


@pytest.mark.spec("CC-PREFILL")
@pytest.mark.usefixtures("elsewhere")
@pytest.mark.parametrize(
    ("name", "reason"),
    [
        ("needs_a_gpu:BACKEND", "no_such_driver"), ("no_such_module:BACKEND", "no_such_module"),
        ("third_party_engine:YOURS", "YOURS"),
    ],
)
def test_what_cannot_be_loaded_says_why(name: str, reason: str) -> None:
    with pytest.raises(BackendUnavailable, match=reason):
        resolve(name)


@pytest.mark.spec("CC-PREFILL")
@pytest.mark.usefixtures("elsewhere")
@pytest.mark.parametrize("wrong", ["third_party_engine:OTHER", 3, None, ["numpy"]])
def test_what_is_no_backend_is_refused(wrong: object) -> None:
    with pytest.raises(SpecError) as caught:
        resolve(wrong)  # type: ignore[arg-type]
    assert caught.value.argument == "backend"


@pytest.mark.spec("CC-PREFILL")
def test_a_missing_family_names_those_that_are_there() -> None:
    with pytest.raises(BackendUnavailable, match=r"'mine'.*'crystal'.*none"):
        Backend("mine").require_crystal()


def engines() -> list[str]:
    """Imported modules of `accelerated`."""
    return [name for name in sys.modules if name.startswith("accelerated.")]


@pytest.fixture
def no_engines() -> Iterator[None]:
    """As if none had been imported; afterwards each stands where it stood, and no second copy of any is left."""
    before = {name: sys.modules.pop(name) for name in engines()}
    yield
    for name in engines():
        del sys.modules[name]
    sys.modules.update(before)
    for name, module in before.items():
        parent, _, child = name.rpartition(".")
        setattr(sys.modules[parent], child, module)


@pytest.mark.spec("CC-PREFILL")
@pytest.mark.usefixtures("no_engines")
@pytest.mark.parametrize(("name", "package"), [("numba", "numba"), ("triton", "triton"), ("triton", "torch")])
def test_a_missing_package_is_named_with_what_brings_it(
    name: str, package: str, monkeypatch: pytest.MonkeyPatch,
) -> None:
    if package != "numba":
        pytest.importorskip("numba", reason="Triton's backend imports Numba's first")
    monkeypatch.setitem(sys.modules, package, None)
    with pytest.raises(BackendUnavailable, match=rf"'{name}'.*{package}.*pip install 'kvspec\[{name}\]' brings"):
        resolve(name)


@pytest.mark.spec("CC-COATTENTION")
def test_numba_without_threadpoolctl_says_so_where_it_is_needed(monkeypatch: pytest.MonkeyPatch) -> None:
    """S2 to S6 run without it; S1 would fight over the cores with BLAS."""
    pytest.importorskip("numba", reason="pip install 'kvspec[numba]'")
    threads = pytest.importorskip("accelerated.numba_cpu.threads")
    monkeypatch.setattr(threads, "BLAS", None)
    q = np.ones((1, 2, 2), dtype=np.float32)
    with pytest.raises(BackendUnavailable, match=r"needs threadpoolctl: pip install 'kvspec\[numba\]'"):
        resolve("numba").require_crystal().coattention(q, q, np.arange(2), TINY, 1.0, None)
