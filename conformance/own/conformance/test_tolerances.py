"""Tolerances live in tolerances.py, settings in plugin.py, oracles in plain Python."""

import re
from pathlib import Path

import pytest

from conformance.paths import ROOT
from conformance.tolerances import BOUNDS

SUITE = ROOT / "conformance"
# The words are put together here, or this file would find itself.
FORBIDDEN = {
    "tolerances.py": re.compile("|".join([r"\brt" + "ol=", r"\bat" + "ol=", "app" + r"rox\(", "all" + r"close\("])),
    "plugin.py": re.compile("@" + r"settings\("),
}
# These compare float32 logits of whole models, and metrics and figures with what was worked out by hand.
OTHER = tuple(f"own/models_integration/{room}" for room in ("session", "studies", "tasks"))


def files() -> list[Path]:
    return [path for path in sorted(SUITE.rglob("*.py")) if not path.relative_to(SUITE).as_posix().startswith(OTHER)]


@pytest.mark.parametrize("home", FORBIDDEN)
def test_tolerances_and_settings_have_one_home(home: str) -> None:
    found = [
        f"{path.relative_to(SUITE)}:{number}"
        for path in files() if path.name != home
        for number, line in enumerate(path.read_text(encoding="utf-8").splitlines(), 1)
        if FORBIDDEN[home].search(line)
    ]
    assert found == []


@pytest.mark.parametrize("key", BOUNDS)
def test_each_bound_has_its_reason_and_its_use(key: tuple[str, str]) -> None:
    item, precision = key
    sources = "".join(path.read_text(encoding="utf-8") for path in files())
    assert precision == "float64"
    assert len(BOUNDS[key].reason.split()) > 5
    assert f'close("{item}"' in sources or f'relative("{item}"' in sources


def test_oracles_share_nothing_with_what_they_judge() -> None:
    for path in [*(SUITE / "oracles").glob("*.py"), *(SUITE / "assurance" / "oracles").glob("*.py")]:
        imports = re.findall(r"^\s*(?:from|import) ([a-z_]+)", path.read_text(encoding="utf-8"), re.MULTILINE)
        assert not {"numpy", "reference", "accelerated", "models_integration"} & set(imports)
