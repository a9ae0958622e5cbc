"""Vectors of the model's stages as theorems: written from spec/vectors, and checked by the kernel to the last bit."""

import re
from collections.abc import Callable, Iterator, Mapping
from fractions import Fraction
from itertools import count, pairwise
from pathlib import Path
from typing import Any

from conformance.vectors.codec import expanded, is_compact, mismatches
from conformance.vectors.files import decoded, parameters_of, published
from lab.proofs.coq.build import run_coq
from lab.vector_writer.brute_force import encoded
from lab.vector_writer.expected import OPERATIONS
from spec.parameters import PAPER

LARGEST = 5000
"""Maximum number of values in a vector for the kernel. Larger vectors are only checked on the engine."""

Values = Mapping[str, Any]
_FLOAT = re.compile(r"-?0x[0-9a-f.]+p[+-]\d+|-?inf|nan")


def real(x: Any) -> str:
    """Return a float, given as text or as a float, in the syntax of Coq."""
    text = x.hex() if isinstance(x, float) else x
    named = {"nan": "nan", "inf": "infinity", "-inf": "neg_infinity"}
    return f"({named.get(text, text)})%float"


def term(x: Any) -> str:
    """Return the Coq term of a value in a vector."""
    if isinstance(x, bool):
        return str(x).lower()
    if isinstance(x, int):
        return f"({x})"
    if isinstance(x, str | float):
        return real(x)
    return "[" + "; ".join(map(term, x)) + "]"


def rational(x: Fraction | int | str) -> str:
    return "({} # {})%Q".format(*Fraction(x).as_integer_ratio())


def _sizes(offsets: list[int]) -> list[int]:
    return [b - a for a, b in pairwise(offsets)]


def _parts(values: list[Any], sizes: list[int]) -> Iterator[list[Any]]:
    at = 0
    for size in sizes:
        yield values[at : at + size]
        at += size


def _protected(i: Values, e: Values, p: Values) -> tuple[str, str]:
    pairs = "; ".join(f"({a}, {b})" for a, b in pairwise(i["offsets"]))
    return f"map (fun '(a, b) => protected {i['n']} {p['N_sink']} {p['W_recent']} a b) [{pairs}]", term(e["protected"])


def _cut(i: Values, e: Values, p: Values) -> tuple[str, str]:
    pairs = list(zip(i["sizes"], i["protected"], strict=True))
    safe, alive = (sum(size for size, flag in pairs if flag == which) for which in (True, False))
    return f"cut {safe} {alive} ({i['B']})", term(e["c_0"])


def _allocate(i: Values, e: Values, p: Values) -> tuple[str, str]:
    sizes = term(i["sizes"])
    return f"shares_of {sizes} (allocate {p['N_min']} {sizes} {i['c_0']})", term(e["r"])


def _keep_count(i: Values, e: Values, p: Values) -> tuple[str, str]:
    return f"keep_count {rational(Fraction(float.fromhex(i['r'])))} {i['size']} {p['N_min']}", term(e["k"])


def _dissolve_D(i: Values, e: Values, p: Values) -> tuple[str, str]:
    return f"map (fun '(r, d) => times r d) (combine {term(i['r'])} {term(i['D'])})", term(e["D"])


def _dissolve(i: Values, e: Values, p: Values) -> tuple[str, str]:
    offsets = i["offsets"]
    members = _parts(i["impact"], _sizes(offsets))
    columns = zip(offsets[:-1], members, i["score"], i["D"], i["protected"], strict=True)
    all_ = "; ".join(" ".join(["T", *map(term, column)]) for column in columns)
    return f"dissolved {p['N_min']} {i['B']} [{all_}]", f"({term(e['kept'])}, {term(e['ratio'])}, {term(e['D'])})"


def _sentences(i: Values, e: Values, p: Values) -> tuple[str, str]:
    return f"offsets 0 (sentences 0 {term(i['ends'])})", term(e["offsets"])


def _interface(i: Values, e: Values, p: Values) -> tuple[str, str]:
    (a, b), (c, d) = i["current"], i["sentence"]
    last, first = ("range {} {}".format(*e[side]) for side in ("last5", "first5"))
    return f"(last5 {a} {b}, first5 {c} {d})", f"({last}, {first})"


def _interface_edges(i: Values, e: Values, p: Values) -> tuple[str, str]:
    near = "; ".join(f"({a}, ({b}, {real(w)}))" for a, b, w in i["edges"])
    find = f"(fun a => map snd (filter (fun edge => fst edge =? a) [{near}]))"
    (a, b), (c, d) = i["current"], i["sentence"]
    return f"interface_edges (stored_edges {find} (fun _ => [])) (last5 {a} {b}) (first5 {c} {d})", term(e["weights"])


def _merge(i: Values, e: Values, p: Values) -> tuple[str, str]:
    weights = f"({term(i['weights'])} : list float)"
    return f"merges {real(p['tau_merge'])} {p['T_max']} {weights} {i['size']} {i['next_size']}", term(e["merges"])


def _split(i: Values, e: Values, p: Values) -> tuple[str, str]:
    return f"Trunks.split {i['T_max']} {i['size']}", term(e["sizes"])


def _rows(neighbours: list[list[int]], weights: list[list[str]]) -> str:
    pairs = (zip(ns, ws, strict=True) for ns, ws in zip(neighbours, weights, strict=True))
    rows = ("[" + "; ".join(f"({n}, {real(w)})" for n, w in row if n >= 0) + "]" for row in pairs)
    return "([" + "; ".join(rows) + "] : list (list (Z * float)))"


def _trunks(i: Values, e: Values, p: Values) -> tuple[str, str]:
    near, far = _rows(i["intra"], i["intra_weight"]), _rows(i["cross"], i["cross_weight"])
    start, ends = i["start"], term(i["ends"])
    edges = f"stored_edges (row {start} {near}) (row {start} {far})"
    sizes = f"trunks {real(p['tau_merge'])} {p['T_max']} ({edges}) {start} {ends}"
    return (f"let sizes := {sizes} in (offsets {start} sizes, map trunk_impact (pieces sizes {term(i['impact'])}))",
            f"({term(e['offsets'])}, {term(e['impact'])})")


def _budget(i: Values, e: Values, p: Values) -> tuple[str, str] | None:
    asked = i["budget"]
    if asked is None or isinstance(asked, bool):
        return None
    text = str(float.fromhex(asked)) if isinstance(asked, str) and _FLOAT.fullmatch(asked) else str(asked)
    seen = i.get("seen", i.get("n"))
    read = f'parse "{text}"%string'
    if "argument" in e:
        return read, "None"
    if "B" in e:
        return f"option_map (fun b => effective b {seen} {p['N_sink']} {p['W_recent']}) ({read})", f"Some {e['B']}"
    return f"option_map (fun b => tokens b {seen}) ({read})", f"Some {e['tokens']}"


def _score(i: Values, e: Values, p: Values) -> tuple[str, str]:
    scored = [row for row in zip(i["D"], i["M_tilde"], e["score"], strict=True) if row[1] != "nan"]
    D, M, want = (list(column) for column in zip(*scored, strict=True))
    return f"map (fun '(d, x) => best_path {real(p['alpha'])} d x) (combine {term(D)} {term(M)})", term(want)


def _scored(values: list[str], i: Values, form: str) -> str:
    """Return the tokens of a row as tuples: score or none, protected or not, and index."""
    scores = ("None" if x == "nan" else f"(Some {term(x)})" for x in values)
    rows = zip(scores, map(term, i["protected"]), count(), strict=False)
    return "; ".join(form.format(*row) for row in rows)


def _top_units(i: Values, e: Values, p: Values) -> tuple[str, str]:
    groups = "; ".join(f"selected {i['B']} [{_scored(row, i, 'U {2} {0} {1}')}]" for row in i["values"])
    return f"[{groups}]", term(e["kept"])


def _best_blocks(i: Values, e: Values, p: Values) -> tuple[str, str]:
    groups = "; ".join(f"best_blocks {i['b']} [{_scored(row, i, '({}, {})')}] {i['B']}" for row in i["values"])
    return f"[{groups}]", term(e["kept"])


def _whole_shares(i: Values, e: Values, p: Values) -> tuple[str, str]:
    return f"whole_shares [{'; '.join(map(rational, i['targets']))}]", term(e["shares"])


def _pyramid(i: Values, e: Values, p: Values) -> tuple[str, str]:
    W = min(i["W"], i["n"])
    line = f"pyramid {rational(i['B'] - W)} {rational(i['n'] - W)} {rational(i['beta'])} {i['L']}"
    return f"whole_shares (map (Qplus {rational(W)}) ({line}))", term(e["shares"])


def _cosines(i: Values, e: Values, p: Values) -> tuple[str, str]:
    rows = f"({term(e['V'])} : list (list float))"
    return f"let rows := {rows} in map (fun u => map (dot u) rows) rows", term(e["cosines"])


def _diverse(i: Values, e: Values, p: Values) -> tuple[str, str]:
    scores = term(["-inf" if x == "nan" else x for x in i["s"]])
    rows = f"({term(i['V'])} : list (list float))"
    similarity = f"(fun a b => dot (nth (Z.to_nat a) {rows} []) (nth (Z.to_nat b) {rows} []))"
    return f"diverse {real(i['lam'])} {similarity} {scores} {term(i['retained'])} {i['k']}", term(e["kept"])


STAGES: Mapping[str, Callable[[Values, Values, Values], tuple[str, str] | None]] = {
    "CC-PROTECTED": _protected, "CC-CUT": _cut, "CC-ALLOCATE": _allocate, "CC-KEEP-COUNT": _keep_count,
    "CC-DISSOLVE-D": _dissolve_D, "dissolve": _dissolve, "CC-SENTENCES": _sentences, "CC-INTERFACE": _interface,
    "CC-INTERFACE-EDGES": _interface_edges, "CC-MERGE": _merge, "CC-SPLIT": _split, "trunks": _trunks,
    "CC-BUDGET-FORMS": _budget, "CC-BUDGET": _budget, "CC-SCORE": _score, "PO-TOP-UNITS": _top_units,
    "PO-BEST-BLOCKS": _best_blocks, "DV-COSINE": _cosines, "DV-GREEDY": _diverse, "PO-WHOLE-SHARES": _whole_shares,
    "PO-PYRAMID-BUDGET": _pyramid,
}


def _numbers(x: Any) -> int:
    values = x.values() if isinstance(x, Mapping) else x if isinstance(x, list) else None
    return 1 if values is None else sum(map(_numbers, values))


def _asked(group: Values, test: Values) -> bool:
    """Return True if the model has this stage in the paper's form.

    The model has no errors except the errors of budgets.
    """
    stage = group["operation"]
    forms = {"merge", "trunk_impact", "allocation", "coverage"} & group.get("parameters", {}).keys()
    return stage in STAGES and not forms and (test["result"] == "valid" or stage == "CC-BUDGET-FORMS")


def whole(group: Values, test: Values) -> Values:
    """Return the expected results. Summaries are replaced by the brute force's values, whose digests must be equal."""
    expected: Values = test["expected"]
    short = {name: want for name, want in expected.items() if is_compact(want)}
    if not short:
        return expected
    inputs, p = expanded(decoded(test["inputs"])), parameters_of(decoded(group["parameters"]))
    values = OPERATIONS[group["operation"]].results(inputs, p)
    wrong = [one for name, want in short.items() for one in mismatches(name, values[name], decoded(want))]
    assert not wrong, (group["operation"], test["tcId"], wrong)
    return {**expected, **{name: encoded(values[name]) for name in short}}


def written() -> Iterator[tuple[str, str]]:
    """Yield name and statement of each vector's theorem."""
    for _, group, test in published():
        if not _asked(group, test) or _numbers(inputs := expanded(test["inputs"])) > LARGEST:
            continue
        parameters = {**vars(PAPER), **group.get("parameters", {})}
        sides = STAGES[group["operation"]](inputs, whole(group, test), parameters)
        if sides is not None:
            yield f"vector_{group['operation'].replace('-', '_')}_{test['tcId']}", f"{sides[0]} = {sides[1]}"


def check_vectors(home: Path) -> int:
    """Write the theorems next to the compiled model, let the kernel check them, and return their number.

    Raises:
        ProofFailure: if a theorem does not hold.
    """
    actual = list(written())
    proofs = (f"Theorem {name} : {statement}.\nProof. vm_compute. reflexivity. Qed.\n" for name, statement in actual)
    (home / "Vectors.v").write_text("From Kvspec Require Import Binary64.\n\n" + "\n".join(proofs), encoding="utf-8")
    run_coq(home, "Binary64")
    run_coq(home, "Vectors")
    return len(actual)
