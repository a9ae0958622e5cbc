"""Tables of spec/implementing.md and protocol.md, spec/implementing.json, and the exports of reference.policies.

`python -m lab.implementer_tables` writes them from code and vectors. In the pages it replaces the
text between the marks.
"""

import ast
import inspect
import json
import re
import sys
import textwrap
from collections.abc import Callable, Mapping, Sequence
from functools import cache, partial
from pathlib import Path
from typing import Any, TypeAlias, get_args, get_type_hints

from conformance.checks.vector_checks import BOUNDED
from conformance.engine.methods import SHARED, method_ops
from conformance.engine.ops import OPS, RECORDS
from conformance.engine.values import CLASSES
from conformance.paths import ROOT, SPEC
from conformance.vectors import files
from conformance.vectors.codec import STATE, is_compact
from lab import pages
from spec import backend
from spec.backend import Backend
from spec.errors import SpecError
from spec.parameters import ESSAY, NESTEDKV, PAPER, TINY, CrystalCacheParameters, NestedKVParameters
from spec.parameters import crystalcache as crystal_module
from spec.parameters import nestedkv as nestedkv_module

PAGE = SPEC / "implementing.md"
DATA = SPEC / "implementing.json"
EXPORTS = ROOT / "reference" / "policies" / "__init__.py"


def meanings(path: str) -> Mapping[str, str]:
    """Return the description of each field of a module's class, which is the text below the field."""
    module = ast.parse(Path(path).read_text(encoding="utf-8"))
    (record,) = (node for node in module.body if isinstance(node, ast.ClassDef))
    result = {}
    for field, below in zip(record.body, record.body[1:], strict=False):
        if isinstance(field, ast.AnnAssign) and isinstance(below, ast.Expr):
            result[ast.unparse(field.target)] = " ".join(str(ast.literal_eval(below.value)).split())
    return result


def shown(value: object) -> str:
    """Return a value as it is written in JSON. A fraction is text, and a form is in quotes."""
    return f'`"{value}"`' if isinstance(value, str) else str(value).strip("()")


def admitted(name: str, record: type[CrystalCacheParameters] | type[NestedKVParameters]) -> str:
    """Return the bound of a parameter, from the error that the record raises for the invalid value -2^32."""
    try:
        record(**{name: -(2**32)})  # type: ignore[arg-type]
    except SpecError as error:
        return re.sub(r"^must (be |lie )?|\bbe ", "", error.bound)
    raise AssertionError(f"{name} = -2^32 is admitted")


Profiles: TypeAlias = Mapping[str, CrystalCacheParameters | NestedKVParameters]

CRYSTAL = crystal_module.__file__, {"PAPER": PAPER, "ESSAY": ESSAY, "TINY": TINY}
NESTED = nestedkv_module.__file__, {"value": NESTEDKV}


def parameters_of(module: str, profiles: Profiles) -> Mapping[str, Any]:
    """Return each parameter with its value in each profile, its bound and its description."""
    (record,) = {type(profile) for profile in profiles.values()}
    return {
        name: {**{title: getattr(profile, name) for title, profile in profiles.items()},
               "admitted": admitted(name, record), "what": what}
        for name, what in meanings(module).items()
    }


def parameters(module: str, profiles: Profiles) -> str:
    result = parameters_of(module, profiles)
    rows = [
        [f"`{name}`", *(shown(row[title]) for title in profiles), row["admitted"], row["what"]]
        for name, row in result.items()
    ]
    return pages.table(["Parameter", *(title[0].upper() + title[1:] for title in profiles), "Admitted", "What"], rows)


@cache
def operations() -> Mapping[str, Sequence[Any]]:
    """Return the published tests of each operation. Large tests are left out, because their inputs are compact."""
    result: dict[str, list[Any]] = {}
    for _, group, test in files.published():
        if is_compact(list(test["inputs"].values())):
            continue
        result.setdefault(group["operation"], []).append(test)
    return result


def kind_of(values: Sequence[Any]) -> str:
    """Return the type of values, with `[]` for each axis."""
    lists = [value for value in values if isinstance(value, list)]
    kinds = sorted({scalar(value) for value in values if not isinstance(value, list)})
    if lists:
        kinds.append(row_kind(lists))
    return " or ".join(kinds)


def row_kind(lists: Sequence[list[Any]]) -> str:
    """Return the type of lists: a list of one type, or a row whose columns have different types."""
    lengths = {len(value) for value in lists}
    flat = [x for value in lists for x in value]
    kinds = {scalar(x) for x in flat if not isinstance(x, list)}
    if len(lengths) == 1 and len(lists) > 1 and len(kinds - {"null"}) > 1:
        return "(" + ", ".join(kind_of(column) for column in zip(*lists, strict=True)) + ")"
    inner = kind_of(flat)
    return f"({inner})[]" if " or " in inner else f"{inner}[]"


def scalar(value: object) -> str:
    if isinstance(value, str):
        if re.fullmatch(r"-?0x[01]\.[0-9a-f]+p[+-]\d+|-?inf|nan", value):
            return "float"
        return "p/q" if re.fullmatch(r"\d+/\d+", value) else "text"
    return {bool: "bool", int: "int", type(None): "null"}[type(value)]


# Inputs that do not occur in all their forms in the vectors.
INPUT_KINDS = {"budget": "budget", "softcap": "float or null"}


def members_of(maps: Sequence[Mapping[str, Any]], known: Mapping[str, str]) -> Mapping[str, str]:
    """Return the type of each name. `?` marks names that may be left out."""
    result = {}
    for name in dict.fromkeys(name for one in maps for name in one):
        values = [one[name] for one in maps if name in one]
        result[name + "?" * (len(values) < len(maps))] = known.get(name) or kind_of(values)
    return result


def named(maps: Sequence[Mapping[str, Any]], known: Mapping[str, str]) -> Mapping[str, str]:
    """Return the names of inputs or results with their types. A state is one name."""
    members = members_of(maps, known)
    if not set(STATE) <= members.keys():
        return members
    rest = {name: kind for name, kind in members.items() if name not in (*STATE, "budget")}
    return {"*state*": "state", **rest}


def sides(tests: Sequence[Any]) -> tuple[Sequence[Mapping[str, Any]], Sequence[Mapping[str, Any]]]:
    """Return the inputs of an operation's tests, and the results of the valid tests."""
    return [test["inputs"] for test in tests], [test["expected"] for test in tests if test["result"] == "valid"]


def for_programs() -> str:
    """Return the data for programs as JSON.

    The data are the parameters with their values, the operations with inputs, results and bounds, and the methods with
    their arguments.
    """
    parameters = {"crystalcache": parameters_of(*CRYSTAL), "nestedkv": parameters_of(*NESTED)}
    described = {}
    for operation, tests in operations().items():
        inputs, results = sides(tests)
        says = BOUNDED[operation].says if operation in BOUNDED else {}
        bounds = {name: text for names, text in says.items() for name in names.split()}
        described[operation] = {
            "inputs": named(inputs, INPUT_KINDS), "results": named(results, {}), "bounds": bounds,
        }
    return in_lines({
        "parameters": in_lines({of: in_lines(dumped(rows)) for of, rows in parameters.items()}),
        **dumped({"state": state_members()}), "operations": in_lines(dumped(described)),
        "methods": in_lines(dumped({op: row.arguments for op, row in method_ops().items()})),
    }) + "\n"


def dumped(members: Mapping[str, object]) -> Mapping[str, str]:
    return {name: json.dumps(member, default=str) for name, member in members.items()}


def in_lines(members: Mapping[str, str]) -> str:
    """Return a JSON object with one line for each member."""
    return "{\n" + ",\n".join(f'"{name}": {text}' for name, text in members.items()) + "\n}"


def state_members() -> Mapping[str, str]:
    """Return the fields of a decode state, from the tests of a decode step."""
    tests = operations()["decode_step"]
    return {"budget": "budget", **{name: kind_of([test["inputs"][name] for test in tests]) for name in STATE}}


def state() -> str:
    return typed(state_members()) + ".\n"


def typed(members: Mapping[str, str]) -> str:
    """Return names with their types. A state appears only by name, because its fields are listed elsewhere."""
    return ", ".join(name if kind == "state" else f"`{name}` {kind}" for name, kind in members.items())


def says(thing: object) -> str:
    """Return the docstring of a stage or a record without its errors. The items describe the errors."""
    return " ".join((inspect.getdoc(thing) or "").partition("Raises:")[0].split()).replace("|", r"\|")


FAMILIES: Mapping[str, Any] = {name: get_args(get_type_hints(Backend)[name])[0] for name in backend.FAMILIES}
"""Protocols of the stages, by family."""


def asked() -> str:
    """Return the table of the operations that an engine must answer."""
    rows = []
    for op, row in OPS.items():
        family, _, stage = op.partition(".")
        rows.append([f"`{op}`", typed(row.arguments), row.result, says(getattr(FAMILIES[family], stage))])
    return pages.table(["Operation", "Arguments", "Result", "What"], rows)


def shared() -> str:
    """Return the table of the arguments that have the same meaning in all operations."""
    rows = {name: kind for row in method_ops().values() for name, kind in row.arguments.items() if name in SHARED}
    return pages.table(["Argument", "Type", "What"], [[f"`{name}`", kind, SHARED[name]] for name, kind in rows.items()])


def members() -> str:
    """Return the table of the records in the protocol."""
    rows = [[name, typed(row), says(CLASSES[name])] for name, row in RECORDS.items()]
    return pages.table(["Record", "Members", "What"], rows)


PAGES: Mapping[Path, Mapping[str, Callable[[], str]]] = {
    PAGE: {
        "crystalcache-parameters": partial(parameters, *CRYSTAL),
        "nestedkv-parameters": partial(parameters, *NESTED), "state": state,
    },
    SPEC / "protocol.md": {
        "operations": asked, "records": members, "arguments": shared,
    },
}


RUNS = {"advance", "advance_turn", "eviction_budget", "retain", "retain_turn", "scheduled", "start"}
"""Exports of `reference.policies` besides the functions that return a policy."""
NOT_EXPORTED = {"make_policy", "policy_of_layer", "protecting", "with_twins"}


def exported(module: ast.Module) -> list[str]:
    """Return the names that the package exports from a module of `reference.policies`."""
    public = [
        name for node in module.body if isinstance(node, ast.Assign) and ast.unparse(node.targets[0]) == "__all__"
        for name in ast.literal_eval(node.value)
    ]
    makers = {
        node.name for node in module.body
        if isinstance(node, ast.FunctionDef) and node.returns is not None and ast.unparse(node.returns) == "Policy"
    }
    return sorted((RUNS | makers - NOT_EXPORTED) & set(public))


def exports(package: Path = EXPORTS.parent) -> str:
    """Return the text of `reference/policies/__init__.py`: its docstring, an import from each module, and `__all__`."""
    head, names = (package / "__init__.py").read_text(encoding="utf-8").partition("\n\n")[0], list[str]()
    lines = [head, ""]
    for path in sorted(package.glob("*.py")):
        result = exported(ast.parse(path.read_text(encoding="utf-8"))) if path.name != "__init__.py" else []
        line = f"from reference.policies.{path.stem} import {', '.join(result)}"
        if len(line) > 120:
            line = line.replace(" import ", " import (\n    ").replace(", ", ",\n    ") + ",\n)"
        lines += [line] if result else []
        names += result
    listed = ", ".join(f'"{name}"' for name in sorted(names)) + ","
    listed = textwrap.fill(listed, 120, initial_indent="    ", subsequent_indent="    ", break_on_hyphens=False)
    return "\n".join([*lines, "", "__all__ = [", listed, "]", ""])


def main() -> int:
    """Write the exports, the tables in their pages, and the same data as JSON."""
    EXPORTS.write_text(exports(), encoding="utf-8")
    for page, tables in PAGES.items():
        pages.write(page, lambda name, tables=tables: tables[name]())  # type: ignore[misc]
    DATA.write_text(for_programs(), encoding="utf-8")
    return 0


if __name__ == "__main__":
    sys.exit(main())
