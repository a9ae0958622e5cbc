"""The rules, as checks of proselint, about what a reader of plain technical English has to read twice."""

import re
from collections.abc import Callable, Iterable, Iterator
from typing import Any, NamedTuple

from proselint.registry import CheckRegistry
from proselint.registry.checks import Check, CheckResult
from proselint.registry.checks.engine import Fancy
from proselint.registry.checks.types import ExistenceSimple
from proselint.tools import LintFile

__all__ = ["MARK", "Offence", "Passage", "offences"]

LONGEST = 25
"""Words of a sentence."""
MARK = "X"
"""A word that replaces code in a sentence, and may begin it."""

_ENDS = re.compile(r"(?<!e\.g\.)(?<!i\.e\.)(?<!cf\.)(?<=[.!?])[\"')]*\s+(?=[A-Z0-9\"'(])")
_WORD = re.compile(r"[^\s–—]*\w[^\s–—]*")
_PAUSE = re.compile(r"[:;](?=\s)")
_HEADLESS = re.compile(r"(What|Who|Whoever|Whatever|Which|That which)\b")
# Behind a noun of place, "where" is the right word.
_PLACE = r"(?<!place )(?<!places )(?<!position )(?<!positions )(?<!folder )(?<!line )"


class Passage(NamedTuple):
    """Text without markup, and its first line in a file: a paragraph, a cell, a heading, the help of an option."""

    source: str
    line: int
    text: str


class Offence(NamedTuple):
    """A rule that a passage breaks."""

    source: str
    line: int
    rule: str
    message: str

    def __str__(self) -> str:
        return f"{self.source}:{self.line}: {self.rule}: {self.message}"


def offences(passages: Iterable[Passage]) -> Iterator[Offence]:
    """Each rule that is broken, with the line; words in quotation marks break none."""
    for passage in filter(lambda one: one.text.strip(), passages):
        for found in LintFile(passage.source, passage.text).lint({"max_errors": 1000, "checks": {"kvspec": True}}):
            path, message = found.check_result.check_path, found.check_result.message
            line = passage.line + found.pos[0] - 1  # proselint puts a line before the text
            yield Offence(passage.source, line, path.partition(".")[2], message)


def _sentences(text: str) -> Iterator[tuple[int, str]]:
    start = 0
    for end in [*(match.end() for match in _ENDS.finditer(text)), len(text)]:
        if sentence := text[start:end].strip():
            yield text.index(sentence, start), sentence
        start = end


def _too_long(sentence: str) -> str:
    words = len(_WORD.findall(sentence))
    return f"{words} words" if words > LONGEST else ""


def _too_many_parts(sentence: str) -> str:
    return "more than one colon or semicolon" if len(_PAUSE.findall(sentence)) > 1 else ""


def _headless(sentence: str) -> str:
    begins = _HEADLESS.match(sentence)
    return "begins without a noun" if begins and not sentence.endswith("?") else ""


def _of_sentences(name: str, wrong: Callable[[str], str]) -> Check:
    def check(text: str, check: Check) -> Iterator[CheckResult]:
        for start, sentence in _sentences(text):
            if found := wrong(sentence):
                shown = f"{found}: {' '.join(sentence.split())[:70]}"
                yield CheckResult(check.path, shown, (start, start + len(sentence)), None)

    return Check(check, path=f"kvspec.{name}")


def _of_words(name: str, message: str, *patterns: str) -> Check:
    pattern = rf"\b(?:{'|'.join(patterns)})\b"
    return Check(ExistenceSimple(pattern), Fancy(), f"kvspec.{name}", message)


_CHECKS: tuple[Any, ...] = (
    _of_sentences("length", _too_long),
    _of_sentences("parts", _too_many_parts),
    _of_sentences("headless", _headless),
    _of_words("where", "write 'if' for a condition, 'when' for a time", _PLACE + "where"),
    _of_words(
        "verbs", "{}: a thing is, has, uses or returns", "stands?", "stood", "lies", "lay", "lives?", "lived",
        "goes on", "went on", "says", "said", "knows", "knew", "sees", "saw", "dies", "died",
        r"(?<!you )(?<!to )(?<!cannot )(?:lie(?! in [(\[])|die|say|know)",
    ),
    _of_words(
        "private", "{}: use the word of the field", "saboteurs?", "doors?", "rooms?", "houses?", "witness(?:es)?",
        "habits?", "refused by name", "side by side",
    ),
    _of_words("names", "{}: write kvspec.NAME", r"models_integration\.\w+", r"reference\.policies\.\w+"),
    _of_words(
        "policy", "{}: write policy", "(?:eviction|retention|your own|each|every|other|all|which) methods?",
    ),
)
CheckRegistry().register_many(_CHECKS)
