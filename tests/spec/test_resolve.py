"""Search for a backend or a policy by its name, and the errors if it is not found."""

import sys
from collections.abc import Iterator
from pathlib import Path

import pytest

from conformance.plugin import subject_of
from reference.backend import BACKEND
from reference.policies.names import ENTRY_POINTS as POLICY_ENTRY_POINTS
from reference.policies.names import NAMES, check_name, constants_of, constants_of_model, make_policy, user_policy
from spec.backend import BUILT_IN, ENTRY_POINTS, Backend, CrystalStages, resolve
from spec.errors import BackendUnavailable, SpecError
from spec.validate import check_choices

MODULE = """
from spec.backend import Backend
MINE = Backend("mine")
OTHER = 3
"""


@pytest.fixture
def elsewhere(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """Return the folder of a third party's module, which is installed with an entry point."""
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
    """Reports and errors contain this name."""
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
    """Return the imported modules of `accelerated`."""
    return [name for name in sys.modules if name.startswith("accelerated.")]


@pytest.fixture
def no_engines() -> Iterator[None]:
    """Remove all imported engines, and restore them afterwards. No second copy of a module is left."""
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
@pytest.mark.parametrize(("name", "package"), [
    ("numba", "numba"), ("numba", "threadpoolctl"), ("triton", "triton"), ("triton", "torch"),
])
def test_a_missing_package_is_named_with_what_brings_it(
    name: str, package: str, monkeypatch: pytest.MonkeyPatch,
) -> None:
    if package != "numba":
        pytest.importorskip("numba", reason="Triton's backend imports Numba's first")
    monkeypatch.setitem(sys.modules, package, None)
    with pytest.raises(BackendUnavailable, match=rf"'{name}'.*{package}.*pip install 'kvspec\[{name}\]' brings"):
        resolve(name)


@pytest.mark.parametrize(
    ("name", "near"), [("snapkw", "snapkv"), ("SnapKW", "snapkv"), ("crystal", "crystalcache"), ("ada-kw", "adakv")],
)
def test_an_unknown_policy_is_answered_with_its_nearest(name: str, near: str) -> None:
    with pytest.raises(SpecError) as caught:
        check_name(name)
    assert f"did you mean {near}" in caught.value.bound
    assert len(str(caught.value)) < 160


def test_a_name_that_looks_like_none_has_no_suggestion() -> None:
    listed = f"{len(NAMES)} known names, see `kvspec policies`"
    with pytest.raises(SpecError, match=rf"'zzzz': is none of the {listed} \(your own"):
        check_name("zzzz")


def test_of_a_few_names_all_are_listed() -> None:
    with pytest.raises(SpecError, match=r"task = 'x': must be one of needle, delayed$"):
        check_choices("task", ("x",), ("needle", "delayed"))


USER_MODULE = """
from reference.policies import knorm, snapkv
MINE = knorm()
NUMBER = 3
"""


@pytest.fixture
def here(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """Return the current folder with a user's module. A distribution is installed in a different folder."""
    installed = tmp_path / "site" / "third_party-1.0.dist-info"
    installed.mkdir(parents=True)
    (installed / "METADATA").write_text("Metadata-Version: 2.1\nName: third-party\nVersion: 1.0\n", encoding="utf-8")
    (installed / "entry_points.txt").write_text(f"[{POLICY_ENTRY_POINTS}]\ntheirs = users_own:MINE\n", encoding="utf-8")
    monkeypatch.syspath_prepend(tmp_path / "site")
    work = tmp_path / "work"
    work.mkdir()
    monkeypatch.chdir(work)
    (work / "users_own.py").write_text(USER_MODULE, encoding="utf-8")
    for name in ("users_own", "wrong", "many"):
        monkeypatch.delitem(sys.modules, name, raising=False)
    return work


@pytest.mark.usefixtures("reference_items")
@pytest.mark.spec("PO-RETAIN")
@pytest.mark.parametrize("name", ["users_own:MINE", "theirs"])
def test_a_policy_is_found_by_attribute_and_by_entry_point(name: str, here: Path) -> None:
    folders = list(sys.path)
    policy = make_policy(check_name(name), {})
    assert policy is sys.modules["users_own"].MINE
    assert (policy.name, constants_of(name), constants_of_model(name)) == ("knorm", frozenset(), frozenset())
    assert sys.path == folders


@pytest.mark.usefixtures("reference_items", "here")
@pytest.mark.spec("PO-RETAIN")
def test_an_attribute_is_not_searched_among_entry_points(monkeypatch: pytest.MonkeyPatch) -> None:
    """Check that no entry points are searched, because the search opens a file of each installed package."""
    def search(**_: object) -> None:
        raise AssertionError("searched the installed packages")

    for module in ("reference.policies.names", "spec.plugins"):
        monkeypatch.setattr(f"{module}.entry_points", search)
    assert check_name("users_own:MINE") == "users_own:MINE"
    assert make_policy("users_own:MINE", {}) is sys.modules["users_own"].MINE
    with pytest.raises(AssertionError, match="searched"):
        check_name("theirs")


@pytest.mark.usefixtures("reference_items")
@pytest.mark.spec("PO-RETAIN")
def test_a_digest_is_of_the_code_that_runs(here: Path) -> None:
    """Check that results keep their name if the file of their code changes while the code runs."""
    first = user_policy("users_own:MINE").digest
    (here / "users_own.py").write_text(USER_MODULE + "\n# later, and longer\n", encoding="utf-8")
    assert user_policy("users_own:MINE").digest == user_policy("theirs").digest == first
    del sys.modules["users_own"]
    assert user_policy("users_own:MINE").digest != first


@pytest.mark.usefixtures("reference_items")
@pytest.mark.spec("PO-RETAIN")
@pytest.mark.parametrize(
    ("name", "words"),
    [
        ("their", "did you mean theirs"), ("users_own:YOURS", "no attribute 'YOURS'; it has .*MINE, NUMBER"),
        ("many:MINE_1", "no attribute 'MINE_1'; did you mean mine_1, "), ("users_own:NUMBER", "the type is int$"),
        ("nowhere:MINE", "No module named 'nowhere'; install the module, or start kvspec in the folder that contains"),
        ("json.no:MINE", "No module named 'json.no'; install the module, or .* contains json$"),
        ("users_own:knorm", "policy_from_score"), ("wrong:MINE", r"raises SyntaxError: .*\(wrong\.py, line 1\)$"),
        ("broken:MINE", r"the module raises ModuleNotFoundError: No module named 'absent' \(broken\.py, line 2\)$"),
        ("fails:MINE", r"the module raises ZeroDivisionError: division by zero \(fails\.py, line 2\)$"),
        (":MINE", "cannot be loaded: write the name of the module and of the object"), ("users_own:", "such as my_mod"),
    ],
)
def test_what_is_no_policy_is_one_line(name: str, words: str, here: Path) -> None:
    sources = {
        "wrong": "MINE = (", "broken": "import json\nimport absent", "fails": "def f():\n    1 / 0\nf()",
        "many": "\n".join(f"mine_{at} = {at}" for at in range(20)),
    }
    for module, text in sources.items():
        (here / f"{module}.py").write_text(text, encoding="utf-8")
    with pytest.raises(SpecError, match=words) as caught:
        check_name(name, "policy")
    assert (caught.value.argument, caught.value.value) == ("policy", name)
    assert "\n" not in str(caught.value)


@pytest.mark.usefixtures("reference_items")
@pytest.mark.spec("PO-RETAIN")
def test_a_file_of_the_folder_hides_no_module(here: Path) -> None:
    """A module of the folder imports an installed module, and the folder has a file with the same name."""
    (here / "users_own.py").write_text(f"import this_or_that\n{USER_MODULE}", encoding="utf-8")
    for folder, text in ((here.parent / "site", "SAFE = 1"), (here, "raise RuntimeError('the file ran')")):
        (folder / "this_or_that.py").write_text(text, encoding="utf-8")
    assert user_policy("users_own:MINE").value is sys.modules["users_own"].MINE
    with pytest.raises(SpecError, match=r"this_or_that\.py has the name of a different module .*: rename the file"):
        user_policy("this_or_that:MINE")
