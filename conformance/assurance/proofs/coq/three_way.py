"""Each operation of the model on drawn inputs: the extracted model and any others must agree to the bit.

An operation is a stage, asked of a backend, or an item, asked with inputs and parameters as spec/vectors has them. Of
an item the third answer is a brute force's, as accelerated backends have stages alone.
"""

import sys
from collections.abc import Callable, Iterable, Iterator, Mapping
from dataclasses import astuple, dataclass, is_dataclass, replace
from fractions import Fraction
from pathlib import Path
from typing import Any, TypeAlias

import numpy as np

from conformance.assurance.item_vectors import ITEMS
from conformance.assurance.vector_writer.brute_force import encoded
from conformance.assurance.vector_writer.expected import OPERATIONS
from conformance.checks.vector_checks import same
from conformance.engine.process import Engine, backend_of
from conformance.methods import policies
from conformance.methods.policies import best_blocks as blocks_by_force
from conformance.methods.policies import pyramid_shares
from conformance.oracles.diversity import cosine
from conformance.vectors.codec import plain
from reference.diversity import cosines
from reference.policies.selectors import best_blocks, top_units
from spec.backend import Backend, resolve
from spec.errors import SpecError
from spec.parameters import TINY, CrystalCacheParameters
from spec.policy import Scores

Json: TypeAlias = Any
Answer: TypeAlias = Callable[[Json, CrystalCacheParameters], Any]


@dataclass(frozen=True)
class Side:
    """Who answers: stages as a backend, items from inputs and parameters; None is a refusal."""

    backend: Backend
    item: Callable[[str, Json, Mapping[str, Json]], Any]


Question: TypeAlias = Callable[[Side], Any]


def extracted(program: Path, seconds: float = 60) -> tuple[Engine, Side]:
    """The extracted model as a process, which is stopped by its `stop`, and as a side."""
    engine = Engine(f"{sys.executable} -m conformance.assurance.proofs.coq.engine {program}", seconds)

    def item(operation: str, inputs: Json, parameters: Mapping[str, Json]) -> Any:
        if "budget" in inputs:
            inputs = {**inputs, "budget": str(inputs["budget"])}  # the model reads text
        shown = {**vars(TINY), **parameters}
        known = {name: value for name, value in shown.items() if isinstance(value, int | float)}
        return engine.ask(operation, encoded({**inputs, "parameters": known}), _read)

    return engine, Side(backend_of(engine), item)


def _read(said: Json) -> Json:
    """Floats and large integers from their text, in every depth."""
    if isinstance(said, Mapping):
        return {name: _read(inner) for name, inner in said.items()}
    if isinstance(said, list):
        return [_read(inner) for inner in said]
    if not isinstance(said, str):
        return said
    return int(said) if said.lstrip("-").isdigit() else float.fromhex(said)


def in_reference() -> Side:
    """The reference, with whatever stands in for a part of it now."""
    return Side(resolve("numpy"), _side({**ITEMS, **_OF_REFERENCE}))


def independent() -> Side:
    """Numba's stages; of items, brute force."""
    return Side(resolve("numba"), _side({**{name: one.results for name, one in OPERATIONS.items()}, **_BY_FORCE}))


def _side(answers: Mapping[str, Answer]) -> Callable[[str, Json, Mapping[str, Json]], Any]:
    def item(operation: str, inputs: Json, parameters: Mapping[str, Json]) -> Any:
        try:
            return answers[operation](inputs, replace(TINY, **parameters))
        except SpecError:
            return None

    return item


def _asked(name: str, tokens: int | None) -> Any:
    return None if tokens is None else {name: tokens}


def _effective(i: Json, p: CrystalCacheParameters) -> Any:
    tokens = policies.asked(str(i["budget"]), i["n"])
    return _asked("B", None if tokens is None else max(p.N_sink + p.W_recent, tokens))


def _units(i: Json, p: CrystalCacheParameters) -> Any:
    """Units are protected by their first tokens."""
    bounds, protected = np.array(i["offsets"]), np.zeros(i["offsets"][-1], dtype=np.bool_)
    protected[bounds[:-1][np.array(i["pinned"])]] = True
    found = top_units(Scores(np.array(i["values"]), bounds), np.full(len(i["values"]), i["B"]), protected)
    return {"kept": np.split(found.positions, found.offsets[1:-1])}


def _blocks(i: Json, p: CrystalCacheParameters) -> Any:
    values, shares, pinned = (np.array(i[name]) for name in ("values", "shares", "pinned"))
    found = best_blocks(values, shares, pinned, i["b"])
    return {"positions": found.positions, "offsets": found.offsets}


def _blocks_by_force(i: Json, p: CrystalCacheParameters) -> Any:
    rows = zip(i["values"], i["pinned"], strict=True)
    scores = [[None if flag else x for x, flag in zip(*row, strict=True)] for row in rows]
    kept = [blocks_by_force(row, i["b"], share) for row, share in zip(scores, i["shares"], strict=True)]
    return {"positions": [at for row in kept for at in row], "offsets": np.cumsum([0, *map(len, kept)])}


_OF_REFERENCE: Mapping[str, Answer] = {
    "PO-TOP-UNITS": _units, "PO-BEST-BLOCKS": _blocks, "DV-COSINE": lambda i, p: {"cosines": cosines(np.array(i["V"]))},
}
_BY_FORCE: Mapping[str, Answer] = {
    "CC-BUDGET-FORMS": lambda i, p: _asked("tokens", policies.asked(str(i["budget"]), i["seen"])),
    "CC-BUDGET": _effective,
    "PO-TOP-UNITS": lambda i, p: {
        "kept": [policies.best_units(row, i["offsets"], i["pinned"], i["B"]) for row in i["values"]]
    },
    "PO-BEST-BLOCKS": _blocks_by_force,
    "PO-PYRAMID-BUDGET": lambda i, p: {
        "shares": pyramid_shares(Fraction(i["B"]), min(i["W"], i["n"]), i["L"], i["n"], i["beta"])
    },
    "DV-COSINE": lambda i, p: {"cosines": [[cosine(a, b) for b in i["V"]] for a in i["V"]]},
}


def differences(answering: Mapping[str, Side], asked: Iterable[tuple[str, Question]]) -> Iterator[str]:
    """Each question that they do not all answer alike, and who stands alone with his answer."""
    for name, question in asked:
        answers = {who: question(one) for who, one in answering.items()}
        alone = [who for who in answers if not any(_same(answers[who], answers[o]) for o in answers if o != who)]
        if alone:
            yield f"{name}: {', '.join(alone)} stands alone"


def _same(a: Any, b: Any) -> bool:
    if is_dataclass(a) and not isinstance(a, type):
        return all(_same(x, y) for x, y in zip(astuple(a), astuple(b), strict=True))
    if isinstance(a, Mapping) and isinstance(b, Mapping):
        return a.keys() == b.keys() and all(same(plain(a[name]), plain(b[name])) for name in a)
    if a is None or b is None:
        return a is b
    return np.array_equal(a, b, equal_nan=np.asarray(a).dtype.kind == "f")
