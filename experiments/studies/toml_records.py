"""Records (dataclasses) of the tables of a TOML file. Keys and types are checked."""

import json
from collections.abc import Callable, Collection, Mapping
from dataclasses import MISSING, fields
from typing import Any, TypeGuard, TypeVar, get_args

from spec.errors import SpecError
from spec.validate import did_you_mean

__all__ = ["is_list_of", "record_of", "tables_of"]

T = TypeVar("T")
_SCALARS: dict[type, tuple[str, str]] = {
    str: ("text in quotes", '"..."'), int: ("a whole number", "3"), float: ("a number", "0.1"),
    bool: ("true or false", "true"),
}
"""Description and example of the values of each type."""


def is_list_of(value: object, kind: type[T]) -> TypeGuard[list[T] | tuple[T, ...]]:
    """Return True if a value is a list, and all items have exactly this type. A bool is not an int."""
    return isinstance(value, list | tuple) and all(type(one) is kind for one in value)


def tables_of(read: Mapping[str, Any], name: str) -> list[dict[str, Any]]:
    """Return the tables [[name]] of a TOML file. A file may have none.

    Raises:
        SpecError: if the value is not a list of tables.
    """
    tables = read.get(name, [])
    if not is_list_of(tables, dict):
        raise SpecError(name, tables, f"must be a list of tables: type [[{name}]], and then a line for each key")
    return list(tables)


def record_of(
    argument: str, kind: Callable[..., T], given: Mapping[str, Any], computed: Mapping[str, Any] | None = None,
    hidden: Collection[str] = (),
) -> T:
    """Return the record of a table, with lists as tuples.

    Args:
        argument: name of the file for errors about keys.
        kind: class of the record.
        given: keys and values of the table.
        computed: fields that the table does not have.
        hidden: names of the fields that the table must not have.

    Raises:
        SpecError: if a key is missing or unknown, if a value has a wrong type, or as in the class.
    """
    record: Any = kind
    types = {field.name: field.type for field in fields(record) if field.name not in hidden}
    _check_keys(argument, kind, given, types)
    for name, value in given.items():
        if not _fits(value, types[name]):
            raise SpecError(name, value, _bound(name, value, types[name]))
    values = {name: tuple(value) if isinstance(value, list) else value for name, value in given.items()}
    return kind(**values, **(computed or {}))


def _check_keys(argument: str, kind: Any, given: Mapping[str, Any], names: Collection[str]) -> None:
    needed = {one.name for one in fields(kind) if one.default is MISSING and one.default_factory is MISSING}
    missing, unknown = sorted((needed & {*names}) - set(given)), sorted(set(given) - {*names})
    if missing or unknown:
        parts = [f"missing: {', '.join(missing)}"] if missing else []
        parts += [f"unknown: {', '.join(unknown)}"] if unknown else []
        hint = did_you_mean(unknown[0], names) if unknown else ""
        raise SpecError(argument, missing + unknown, f"{'; '.join(parts)}{hint}; the keys are {', '.join(names)}")


def _fits(value: object, wanted: Any) -> bool:
    if wanted is float:
        return type(value) in (int, float)
    if isinstance(wanted, type):
        return type(value) is wanted
    kinds = get_args(wanted)
    return isinstance(value, Mapping) if len(kinds) > 1 and kinds[1] is Any else is_list_of(value, kinds[0])


def _bound(name: str, value: Any, wanted: Any) -> str:
    """Return the error text for a value of a wrong type, with an example of the right type."""
    if wanted in _SCALARS:
        kind, example = _SCALARS[wanted]
        return f"must be {kind}: type {name} = {_as_scalar(value, wanted) or example}"
    item, *more = get_args(wanted)
    if more == [Any]:
        return f"must be a table: type {name} = {{key = value}}"
    values = value if isinstance(value, list | tuple) else (value,)
    items = [one for one in (_as_scalar(one, item) for one in values) if one] or [_SCALARS[item][1]]
    return f"must be a list of {'texts in quotes' if item is str else 'integers'}: type {name} = [{', '.join(items)}]"


def _as_scalar(value: object, wanted: type) -> str:
    """Return a value as TOML of the wanted type, such as 4 for "4", or "" if the value is not such a value."""
    if isinstance(value, list | tuple) and len(value) == 1:
        (value,) = value
    if wanted is str and type(value) in (str, int, float):
        return json.dumps(str(value), ensure_ascii=False)
    if wanted is bool and value in ("true", "false"):
        return str(value)
    try:
        number = wanted(value) if wanted in (int, float) and type(value) is str else value
    except ValueError:
        return ""
    fits = isinstance(number, int | float) and type(number) is wanted and number - number == 0
    return str(number) if fits else ""
