"""Tests of published measurements: certificates, the matrix, and comparisons with kvpress."""

import pytest

pytest.importorskip("z3")

import json
import re
import tomllib
from dataclasses import replace

import numpy as np

from conformance.methods.method import METHODS
from conformance.paths import DOCS, SPEC
from conformance.verify.subject import digest_of
from lab.measure.certificates import __main__ as certificates
from lab.measure.peers.inputs import SMALL, drawn, positions_of
from lab.measure.peers.table import OURS
from lab.pages import fill
from reference import policies
from reference.policies.names import POLICIES
from spec.backend import BUILT_IN
from spec.budget import Budget
from spec.policy import Observation


@pytest.mark.parametrize("name", certificates.SUBJECTS)
def test_a_certificate_is_about_the_files_that_are_here(name: str) -> None:
    certificate = tomllib.loads((certificates.OUT / f"{name}.toml").read_text(encoding="utf-8"))
    schema = json.loads((SPEC / "certificate.schema.json").read_text(encoding="utf-8"))
    pytest.importorskip("jsonschema").validate(json.loads(json.dumps(certificate, default=str)), schema)
    subject = certificates.SUBJECTS[name]
    assert certificate["subject"]["named"] == subject.named
    if subject.kind == "server":
        assert certificate["run"]["model"] == subject.options[1]
    elif subject.kind != "command":
        file = f"{subject.named.partition(':')[0]}.py"
        assert certificate["subject"]["digest"] == digest_of({file: subject.folder / file})


def test_the_table_is_of_all_certificates() -> None:
    text = (certificates.OUT / "README.md").read_text(encoding="utf-8")
    assert certificates.table() in fill(text, certificates.table) == text


def test_an_unknown_name_is_refused() -> None:
    assert certificates.main(["nobody"]) == 2


def test_keys_are_found_at_their_positions() -> None:
    rng = np.random.default_rng(0)
    keys = rng.standard_normal((3, 20, 4)).astype(np.float32)
    chosen = np.stack([rng.permutation(20)[:7] for _ in keys])
    some = np.stack([head[at] for head, at in zip(keys, chosen, strict=True)])
    assert positions_of(some, keys).tolist() == chosen.tolist()
    with pytest.raises(ValueError, match="head 1: a key is none"):
        positions_of(np.where(np.arange(3)[:, None, None] == 1, some + 1, some), keys)
    keys[2, 5] = keys[2, 9]
    with pytest.raises(ValueError, match="head 2: 1 of 20 keys"):
        positions_of(some, keys)


@pytest.mark.parametrize("seed", range(8))
def test_our_pyramid_on_one_layer_is_what_the_policy_keeps_there(seed: int) -> None:
    """The budgets part alone, against the whole policy on all layers."""
    inputs, (ours, _) = drawn(seed, 120), OURS["PyramidKV"]
    views, heads = dict.fromkeys(range(SMALL.layers), inputs.view), len(inputs.k)
    B = -(-inputs.kept * inputs.n // 1)
    actual = policies.retain(
        policies.pyramidkv(SMALL.window, SMALL.kernel), Budget(count=int(B)),
        Observation(inputs.n, SMALL.layers * heads, None, views),
    )
    for layer in range(SMALL.layers):
        groups = [actual.group(layer * heads + head).tolist() for head in range(heads)]
        assert ours(replace(inputs, layer=layer), frozenset()) == groups


@pytest.mark.parametrize("press", OURS)
def test_every_reading_gives_kept_sets_on_every_input(press: str) -> None:
    """Check budgets of a pyramid, also if no token is left for the last layer."""
    ours, readings = OURS[press]
    for seed in range(30):
        inputs = drawn(seed, 40)
        for some in [(), *((reading,) for reading in readings), readings]:
            for kept in ours(inputs, frozenset(some)):
                assert kept == sorted(set(kept))
                assert set(kept) <= set(range(inputs.n))


def test_the_page_describes_each_reading() -> None:
    _, table = (DOCS / "peers.md").read_text(encoding="utf-8").split("| Reading | kvpress | kvspec |\n")
    described = re.findall(r"^\| ([^|]+) \| [^|]+ \| [^|]+ \|$", table, re.MULTILINE)
    assert described[0] == "---"
    assert sorted(described[1:]) == sorted({reading for _, readings in OURS.values() for reading in readings})


@pytest.mark.law("as-it-is-described")
def test_matrix_has_each_policy_backend_and_engine() -> None:
    page = (DOCS / "results" / "matrix.md").read_text(encoding="utf-8")
    (heads,) = (line for line in page.splitlines() if line.startswith("| Method | numpy"))
    rows = {name for line in page.splitlines() if line.startswith("| `") for name in re.findall(r"[\w-]+", line)[:1]}
    assert {*METHODS, *POLICIES} - rows == {"crystalcache", "fullcache"}
    engines = {file.parent.name for file in (DOCS / "examples").glob("*/engine.*")}
    assert {name for name in BUILT_IN if f" {name} " not in heads} == {"triton"}
    assert {name for name in engines if f"engine-{name} " not in heads} == set()
