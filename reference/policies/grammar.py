"""The text of a policy: `score[:k=v]*[/part=value[:k=v]*]*`, such as `snapkv/layers=pyramid:beta=20/every=64`."""

import re
from collections.abc import Mapping
from dataclasses import dataclass, field
from fractions import Fraction
from typing import Any, TypeAlias

from spec.errors import SpecError
from spec.files import parse_toml

__all__ = ["Composition", "Value", "Words", "format_value", "is_composition", "parse_call", "parse_composition",
    "parse_value"]

Value: TypeAlias = int | float | Fraction | str | bool | tuple[Any, ...]
Words: TypeAlias = Mapping[str, str]

SCORE = "score="
_ALLOWED = re.compile(r"[A-Za-z0-9._:=/-]*")
"""Characters that need no quotes in a shell, in TOML, in JSON and in the query of a URL."""
_WITHOUT_TEXT = {"sink+recent": "sink-and-recent"}
"""Values that have characters outside of _ALLOWED, with the words that stand for them in a text."""
_VALUES = {word: value for value, word in _WITHOUT_TEXT.items()}
_CALL = 'must be a policy name, or a policy name with constants, such as crystalcache(alpha=0.5, impact="salience")'
_CONSTANT = re.compile(r":[A-Za-z_0-9]+=")
_FORM = "write name[:constant=value]*[/part=value[:constant=value]*]*, such as snapkv:W=16/layers=pyramid/every=64"


@dataclass(frozen=True)
class Composition:
    """A parsed text: a policy or the scorer of a policy, with constants, and the parts that are changed.

    Attributes:
        name: name of the policy.
        scorer_only: True for `score=NAME`, which takes only the scorer of the policy.
        constants: constants of the policy, as text.
        parts: value and constants of each part, as text.
    """

    name: str
    scorer_only: bool = False
    constants: Words = field(default_factory=dict)
    parts: Mapping[str, tuple[str, Words]] = field(default_factory=dict)

    def __str__(self) -> str:
        """Return the text, which `parse_composition` parses to an equal object."""
        head = SCORE * self.scorer_only + self.name + _words(self.constants)
        parts = (f"{part}={value}{_words(constants)}" for part, (value, constants) in self.parts.items())
        return "/".join([head, *parts])


def _words(constants: Words) -> str:
    return "".join(f":{name}={value}" for name, value in constants.items())


def is_composition(name: str) -> bool:
    """Return True if a policy name is text with parts or constants, not a plain name or `module:ATTRIBUTE`."""
    if "(" in name or " " in name or "\\" in name:
        return False
    return name.startswith(SCORE) or re.search(r"/[^/]*=", name) is not None or bool(_CONSTANT.search(name))


def parse_call(text: str, argument: str = "policy") -> tuple[str, dict[str, Any]]:
    """Return the text before the parentheses, and the constants in the parentheses: `snapkv(W=16)`.

    Raises:
        SpecError: if the text has a wrong form.
    """
    if not isinstance(text, str) or "(" not in text:
        return text, {}
    name, _, rest = text.partition("(")
    if not rest.endswith(")") or "\n" in rest:
        raise SpecError(argument, text, _CALL)
    try:
        return name, dict(parse_toml(f"constants = {{{rest[:-1]}}}")["constants"])
    except ValueError as error:  # a number of thousands of digits, and deep lists
        raise SpecError(argument, text, f"{_CALL}: {error}") from error


def parse_composition(text: str, argument: str = "policy") -> Composition:
    """Parse the text of a policy. Names of parts and values are checked when the policy is made.

    Raises:
        SpecError: if the text has a wrong form, or names a part or a constant twice. The message has the wrong part.
    """
    good = _ALLOWED.match(text)
    assert good is not None
    if good.end() < len(text):
        raise SpecError(argument, text, f"has the character {text[good.end()]!r} at {good.end()}; {_FORM}")
    head, *rest = text.split("/")
    scorer_only = head.startswith(SCORE)
    name, constants = _split(head.removeprefix(SCORE), text, argument)
    parts: dict[str, tuple[str, Words]] = {}
    for one in rest:
        part, equals, value = one.partition("=")
        if not (part and equals and value):
            raise SpecError(argument, text, f"the part {one!r} must be part=value; {_FORM}")
        if part in parts:
            raise SpecError(argument, text, f"the part {part!r} is given twice: leave out one")
        parts[part] = _split(value, text, argument)
    return Composition(name, scorer_only, constants, parts)


def _split(segment: str, text: str, argument: str) -> tuple[str, Words]:
    value, *rest = segment.split(":")
    constants: dict[str, str] = {}
    for one in rest:
        name, equals, text_value = one.partition("=")
        if not (name and equals and text_value):
            raise SpecError(argument, text, f"{one!r} in {segment!r} must be constant=value; {_FORM}")
        if name in constants:
            raise SpecError(argument, text, f"the constant {name!r} in {segment!r} is given twice: leave out one")
        constants[name] = text_value
    if not value:
        raise SpecError(argument, text, f"{segment!r} has no name; {_FORM}")
    return value, constants


def format_value(value: object) -> str:
    """Return a constant as text. A fraction that has no short decimal is written as 1of3, and a list as 1_2_3.

    Raises:
        SpecError: if the constant is not a number, a list of numbers or a word.
    """
    if isinstance(value, tuple) and value and not any(isinstance(one, str | tuple) for one in value):
        return "_".join(map(format_value, value))
    if isinstance(value, bool):
        return str(value).lower()
    if isinstance(value, Fraction):
        decimal = repr(float(value)).removesuffix(".0")
        return decimal if Fraction(decimal) == value else f"{value.numerator}of{value.denominator}"
    if isinstance(value, float):
        return repr(value).replace("e+", "e")
    if isinstance(value, str) and value in _WITHOUT_TEXT:
        return _WITHOUT_TEXT[value]
    if isinstance(value, int | str) and _ALLOWED.fullmatch(str(value)):
        return str(value)
    raise SpecError("constant", value, "cannot be written in the text of a policy: pass the constant as an argument")


def parse_value(text: str, like: object) -> Value:
    """Return a constant from text, of the type of `like`.

    Raises:
        ValueError: if the text is not a value of this type.
    """
    if isinstance(like, tuple):
        return tuple(parse_value(one, like[0]) for one in text.split("_"))
    if "_" in text and not isinstance(like, str):
        raise ValueError("a number without _")  # int and Fraction accept 1_000, and _ separates the numbers of a list
    if isinstance(like, bool):
        return {"true": True, "false": False}[text]
    if isinstance(like, Fraction):
        top, _, bottom = text.partition("of")
        return Fraction(top) / Fraction(bottom or 1)
    if isinstance(like, float):
        return float(text)
    return int(text) if isinstance(like, int) else _VALUES.get(text, text)
