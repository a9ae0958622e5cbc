"""Texts of policies, read by the oracle of compositions: the parts of a text, and the parts of the named policy.

The syntax and the order of the parts follow PO-COMPOSE. No code is shared with the reference.
"""

import re
from collections.abc import Mapping
from dataclasses import dataclass
from fractions import Fraction
from typing import Any

from conformance.methods.brute import Parts

Words = Mapping[str, str]
Values = Mapping[str, Words]
"""Value and constants of each part. The value has the key ""."""
DEFAULTS: Mapping[str, Words] = {
    "every": {"excess": "1"}, "crush": {"block": "16", "anchor": "alternating"},
    "diverse": {"signature": "flat", "rule": "alpha"}, "chunks": {"gate": "0"},
}
RULES: Mapping[str, Words] = {
    "pyramid": {"beta": "20"}, "table": {"shares": "1"},
    "adaptive": {"safeguard": "0.2"}, "quota": {"safeguard": "0.2"},
}
"""Defaults of the constants of parts and of rules, from the table in spec/composition.md."""
LENGTHS = {"sink": "N_sink", "recent": "N_recent", "block": "block"}
"""Constants that are numbers of tokens, by the part of a text that has the same meaning."""
CONSTANT = re.compile(r"(\d*)([A-Za-z_]\w*)")


@dataclass(frozen=True)
class Text:
    """The text of a policy without constants of the scorer: value and constants of each part, as in the text."""

    name: str
    scorer_only: bool
    parts: Mapping[str, tuple[str, Words]]


def parsed(text: str) -> Text:
    """Return the parts of a valid text, by the syntax in spec/composition.md."""
    head, *rest = text.split("/")
    parts = dict[str, tuple[str, Words]]()
    for one in rest:
        part, _, value = one.partition("=")
        first, *constants = value.split(":")
        parts[part] = first, {key: option for key, _, option in (constant.partition("=") for constant in constants)}
    return Text(head.removeprefix("score="), head.startswith("score="), parts)


def number(text: str) -> Fraction:
    """Return the number of a text, such as 0.2 or 1of3."""
    above, _, below = text.partition("of")
    return Fraction(above) / Fraction(below or 1)


def complete_parts(composition: Text, parts: Parts, constants: Mapping[str, Any]) -> Values:
    """Return the parts of a text: those of the named policy, and the parts that the text changes."""
    host = parsed(f"host/{parts.text}" if parts.text else "host").parts
    if composition.scorer_only:
        bare = parts.unscored
        host = parsed(f"host/{bare}").parts if bare else {
            part: value for part, value in host.items() if part in ("sink", "recent") and bare is None
        }
    result = {part: _with_constants({"": value, **words}, constants) for part, (value, words) in host.items()}
    if {"layers", "heads"} & composition.parts.keys():
        result.pop("threshold", None)
    for part, (value, words) in composition.parts.items():
        kept = {} if part in ("layers", "heads", "every", "steps") else result.get(part, {})
        result[part] = {**kept, **words, "": value}
    return {part: {**DEFAULTS.get(part, {}), **RULES.get(words[""], {}), **words} for part, words in result.items()}


def _with_constants(words: Words, constants: Mapping[str, Any]) -> Words:
    """Return the words of a part. A word such as W or 2N_sink is a multiple of a constant."""
    def of_constant(word: str) -> str:
        match = CONSTANT.fullmatch(word)
        if match is None or match[2] not in constants:
            return word
        value = constants[match[2]]
        return str(value if isinstance(value, str) else int(match[1] or 1) * Fraction(value)).replace("/", "of")

    return {name: of_constant(word) for name, word in words.items()}


def constants_of(words: Words) -> dict[str, Any]:
    """Return the constants of a scorer inside a part, as numbers if they are numbers."""
    result = dict[str, Any]()
    for name, text in words.items():
        if name:
            value = number(text) if re.fullmatch(r"-?[\d.]+(of\d+)?", text) else text
            result[name] = int(value) if isinstance(value, Fraction) and value.denominator == 1 else value
    return result


def fields_of_parameters(constants: Mapping[str, Any]) -> Mapping[str, Any]:
    """Return the fields of `parameters` among the constants, by name."""
    return vars(constants["parameters"]) if "parameters" in constants else {}
