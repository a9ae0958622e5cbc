"""Check the sentences that users read against rules of plain English: `python -m lab.style`.

The rules are proselint checks for sentences that a reader of technical English must read twice. They apply to pages,
help texts, docstrings and error messages. Names of variables, functions and classes must not contain a private word.
The exit code is 1 if a sentence or a name breaks a rule.
"""

import argparse
import ast
import inspect
import re
import sys
from argparse import ArgumentParser
from collections import Counter
from collections.abc import Callable, Iterable, Iterator
from functools import partial
from itertools import chain, starmap
from pathlib import Path
from typing import Any, NamedTuple

from griffe import Alias, Docstring, DocstringSectionKind, GriffeLoader, Object
from markdown_it import MarkdownIt
from markdown_it.token import Token
from proselint.registry import CheckRegistry
from proselint.registry.checks import Check, CheckResult
from proselint.registry.checks.engine import Fancy
from proselint.registry.checks.types import ExistenceSimple
from proselint.tools import LintFile
from typer.main import get_command

from conformance.paths import ROOT
from conformance.verify.request import parser as verify
from kvspec.cli.app import app
from lab.layers import PACKAGES

LONGEST = 25
"""Maximum number of words in a sentence."""
SUBJECTS = tuple(
    f"lab/measure/certificates/{name}.py" for name in ("kvpress_caches", "kvpress_policies", "transformers_caches")
)
"""Files whose digests are in certificates of docs/results, so that their sentences cannot change."""
PRIVATE = frozenset(("found", "made", "own", "room", "rooms", "said", "tells", "told"))
"""Words that do not say what a value is. Use the word of the field, such as `kept`, `expected` or `original`."""
STORED = frozenset((
    ("reference/crystalcache/coattention.py", "own"), ("conformance/oracles/s1.py", "own"),
    ("conformance/verify/outcomes.py", "found"), ("models_integration/archive/library.py", "room"),
))
"""Files and names that cannot change: inputs in spec/vectors, a key of certificates, an argument that users pass."""
MARK = "X"
"""Word that replaces code in a sentence. A sentence may begin with it."""

_ENDS = re.compile(r"(?<!e\.g\.)(?<!i\.e\.)(?<!cf\.)(?<=[.!?])[\"')]*\s+(?=[A-Z0-9\"'(]|kv|lse|[a-z]\s)")
_PART = re.compile(r"[A-Z]?[a-z]+|[A-Z]+(?![a-z])")
_WORD = re.compile(r"[^\s–—]*\w[^\s–—]*")
_PAUSE = re.compile(r"[:;](?=\s)")
_HEADLESS = re.compile(r"(What|Who|Whoever|Whatever|Which|That which)\b")
_DOCUMENTED = (ast.Module, ast.ClassDef, ast.FunctionDef, ast.AsyncFunctionDef)
# Prepositions, conjunctions, pronouns and adverbs. ruff's D401 reports verbs in the third person.
_OPENER = re.compile(
    "(?i)(?:after|against|also|although|and|as|at|because|before|behind|besides?|between|both|but|by|during|even"
    "|everything|for|from|here|how|however|if|in|inside|into|its?|just|neither|no-one|none|nor|not|nothing|of|on|only|or"
    "|over|outside|since|so|than|that|theirs?|them|then|there|these|they|this|those|through|to|under|unless|until|what"
    r"|whatever|when|whenever|where|whether|which|whichever|while|who|whoever|whose|why|with|within|without|yet)\b"
)
# After these nouns, "where" refers to a place and is correct.
_PLACE = r"(?<!place )(?<!places )(?<!position )(?<!positions )(?<!folder )(?<!line )"


class Passage(NamedTuple):
    """Text without markup, and its first line in a file: a paragraph, a cell, a heading, or the help of an option."""

    source: str
    line: int
    text: str


class Offence(NamedTuple):
    """Rule that a passage breaks."""

    source: str
    line: int
    rule: str
    message: str

    def __str__(self) -> str:
        return f"{self.source}:{self.line}: {self.rule}: {self.message}"


def offences(passages: Iterable[Passage]) -> Iterator[Offence]:
    """Yield each broken rule with its line. Words in quotation marks are ignored."""
    for passage in filter(lambda one: one.text.strip(), passages):
        for result in LintFile(passage.source, passage.text).lint({"max_errors": 1000, "checks": {"kvspec": True}}):
            path, message = result.check_result.check_path, result.check_result.message
            line = passage.line + result.pos[0] - 1  # proselint inserts a line before the text
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
            if result := wrong(sentence):
                shown = f"{result}: {' '.join(sentence.split())[:70]}"
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
        "verbs", "{}: a thing is, has, uses or returns", "stands?", "stood", "lies", "lay", "lives", "lived",
        "goes on", "went on", "says", "said", "knows", "knew", "sees", "saw", "dies", "died",
        "live (?:on|in|as|for|with)", r"(?<!you )(?<!to )(?<!cannot )(?:lie(?! in [(\[])|die|say|know)",
    ),
    _of_words(
        "private", "{}: use the word of the field", "saboteurs?", "doors?", "rooms?", "houses?", "witnesses",
        "habits?", "refused by name", "side by side",
    ),
    _of_words("names", "{}: write kvspec.NAME", r"models_integration\.\w+", r"reference\.policies\.\w+"),
    _of_words(
        "policy", "{}: write policy", "(?:eviction|retention|your own|each|every|other|all|which) methods?",
    ),
)
CheckRegistry().register_many(_CHECKS)


_MARKDOWN = MarkdownIt("commonmark").enable("table")
_LISTS = (DocstringSectionKind.parameters, DocstringSectionKind.raises, DocstringSectionKind.returns,
          DocstringSectionKind.attributes, DocstringSectionKind.yields)


def of_page(path: Path) -> Iterator[Passage]:
    """Yield the passages of a Markdown file, without its code."""
    return of_markdown(path.read_text(encoding="utf-8"), path.relative_to(ROOT).as_posix(), 1)


def of_markdown(text: str, source: str, first: int) -> Iterator[Passage]:
    """Yield the paragraphs, headings, cells and list items of a text that begins on line `first` of a file."""
    for token in _MARKDOWN.parse(text):
        if token.type == "inline" and token.map is not None:
            yield Passage(source, first + token.map[0], "".join(map(_words, token.children or ())))


def _words(token: Token) -> str:
    if token.type in ("text", "text_special"):
        return token.content
    return {"softbreak": "\n", "hardbreak": "\n", "code_inline": MARK}.get(token.type, "")


def of_docstrings(package: str) -> Iterator[Passage]:
    """Yield the docstrings of a package's exported names and their public members, each with its first line."""
    loader = GriffeLoader(search_paths=[ROOT])
    for behind in ("spec", "reference", "models_integration", "experiments", "conformance"):
        loader.load(behind)
    module = loader.load(package)
    loader.resolve_aliases(implicit=True, external=False)
    for name in module.exports or ():
        result = module.members[str(name)]
        yield from _of_object(result.final_target if isinstance(result, Alias) else result)


def _of_object(one: Object | Alias) -> Iterator[Passage]:
    if one.docstring is not None:
        yield from _of_docstring(one.docstring, str(one.relative_filepath))
    for member in one.members.values() if one.is_class else ():
        if member.is_public and not member.is_alias:
            yield from _of_object(member)


def docstrings_in(package: str) -> Iterator[tuple[str, Docstring]]:
    """Yield the file and the docstring of each module, class and function of a package, except in SUBJECTS."""
    for path in sorted(ROOT.glob(f"{package}/**/*.py")):
        source = path.relative_to(ROOT).as_posix()
        if source in SUBJECTS:
            continue
        for node in ast.walk(ast.parse(path.read_text(encoding="utf-8"))):
            if isinstance(node, _DOCUMENTED) and (text := ast.get_docstring(node, clean=False)):
                docstring = Docstring(text, lineno=node.body[0].lineno)
                if isinstance(node, ast.Module):
                    docstring.value = text  # griffe has removed the indentation of code after the first line
                yield source, docstring


def opener_offences(docstrings: Iterable[tuple[str, Docstring]]) -> Iterator[Offence]:
    """Yield each docstring that begins neither with a verb nor with a noun phrase."""
    for source, docstring in docstrings:
        if opener := _OPENER.match(docstring.value):
            message = f"{opener[0]!r}: begin with a verb, or with a noun phrase that names the result"
            yield Offence(source, docstring.lineno or 1, "opener", message)


def name_offences(source: str, code: str) -> Iterator[Offence]:
    """Yield each name that a file defines with a private word. Names of tests are sentences, and are not checked."""
    for node in ast.walk(ast.parse(code)):
        name = _defined(node)
        words = PRIVATE.intersection(word.lower() for word in _PART.findall(name))
        if words and (source, name) not in STORED and not name.startswith("test_"):
            message = f"{name}: {min(words)!r} does not say what the value is"
            yield Offence(source, getattr(node, "lineno", 1), "name", message)


def _defined(node: ast.AST) -> str:
    """Return the name that a node defines, or ""."""
    if isinstance(node, ast.FunctionDef | ast.AsyncFunctionDef | ast.ClassDef):
        return node.name
    if isinstance(node, ast.Name | ast.Attribute) and isinstance(node.ctx, ast.Store):
        return node.id if isinstance(node, ast.Name) else node.attr
    return str(getattr(node, "arg" if isinstance(node, ast.arg) else "asname", None) or "")


def share_with_opener(package: str) -> str:
    """Return the share of a package's docstrings that begin with a verb or a noun phrase, in words."""
    docstrings = list(docstrings_in(package))
    right = len(docstrings) - len(list(opener_offences(docstrings)))
    return f"{100 * right / len(docstrings):.1f} % of {len(docstrings)} docstrings begin with a verb or a noun phrase"


def _of_docstring(docstring: Docstring, source: str) -> Iterator[Passage]:
    line = docstring.lineno or 1
    for section in docstring.parse("google", warnings=False):
        if section.kind in _LISTS:
            parts = [part.description for part in section.value]
        else:
            parts = [section.value] if section.kind is DocstringSectionKind.text else []
        for part in parts:
            yield from of_markdown(part, source, line)


def of_help(command: Any) -> Iterator[Passage]:
    """Yield the `--help` texts of a typer command and its subcommands, with the line of the command's function."""
    function = inspect.unwrap(command.callback) if command.callback else None
    source, line = ("kvspec/cli", 1) if function is None else _place(function)
    for text in (command.help, *(getattr(one, "help", None) for one in command.params)):
        yield from of_markdown(inspect.cleandoc(text or ""), source, line)
    for one in getattr(command, "commands", {}).values():
        yield from of_help(one)


def of_options(parser: ArgumentParser, function: Any) -> Iterator[Passage]:
    """Yield the help texts of an argparse parser, with the line of the function that makes the parser."""
    source, line = _place(function)
    for text in (parser.description, *(action.help for action in parser._actions)):
        yield from of_markdown(text or "", source, line)


def _place(function: Any) -> tuple[str, int]:
    code = function.__code__
    return Path(code.co_filename).resolve().relative_to(ROOT).as_posix(), code.co_firstlineno


def of_errors(path: Path) -> Iterator[Passage]:
    """Yield the third argument of each SpecError of a module, with values replaced.

    If the argument is a name, yield the texts that are assigned to this name.
    """
    nodes = list(ast.walk(ast.parse(path.read_text(encoding="utf-8"))))
    bounds = [node.args[2] for node in nodes if isinstance(node, ast.Call) and len(node.args) == 3
              and getattr(node.func, "id", "") == "SpecError"]
    names = {bound.id for bound in bounds if isinstance(bound, ast.Name)}
    bounds += [node.value for node in nodes if isinstance(node, ast.Assign)
               and names & {getattr(target, "id", "") for target in node.targets}]
    for bound in bounds:
        yield from of_markdown(_literal(bound), path.relative_to(ROOT).as_posix(), bound.lineno)


def _literal(node: ast.expr) -> str:
    if isinstance(node, ast.Constant):
        return str(node.value)
    return "".join(map(_literal, node.values)) if isinstance(node, ast.JoinedStr) else MARK


def _pages(*patterns: str) -> Iterator[Passage]:
    return chain.from_iterable(of_page(path) for pattern in patterns for path in sorted(ROOT.glob(pattern)))


def _errors() -> Iterator[Passage]:
    return chain.from_iterable(of_errors(path) for name in PACKAGES for path in sorted(ROOT.glob(f"{name}/**/*.py")))


def _docstrings(package: str) -> Iterator[Passage]:
    return chain.from_iterable(_of_docstring(docstring, source) for source, docstring in docstrings_in(package))


NAMES = "names"
GROUPS: dict[str, Callable[[], Iterator[Passage]]] = {
    "pages": lambda: _pages("README.md", "CONTRIBUTING.md", "docs/**/*.md", "lab/*.md"),
    "kvspec --help": lambda: chain(of_help(get_command(app)), of_options(verify(), verify)),
    "SpecError": _errors,
    "exported docstrings": lambda: of_docstrings("kvspec"),
    NAMES: lambda: iter(()),
    **{f"docstrings of {package}": partial(_docstrings, package) for package in PACKAGES},
}


def offences_in(group: str) -> list[Offence]:
    """Return the offences of a group, without duplicates."""
    package = group.removeprefix("docstrings of ")
    openers = opener_offences(docstrings_in(package)) if package != group else ()
    names = chain.from_iterable(starmap(name_offences, _sources())) if group == NAMES else ()
    return list(dict.fromkeys(chain(openers, names, offences(GROUPS[group]()))))


def _sources() -> Iterator[tuple[str, str]]:
    for path in chain.from_iterable(sorted(ROOT.glob(f"{package}/**/*.py")) for package in PACKAGES):
        if (source := path.relative_to(ROOT).as_posix()) not in SUBJECTS:
            yield source, path.read_text(encoding="utf-8")


def main(arguments: list[str] | None = None) -> int:
    """Print the offences of each group, and how docstrings begin in each package. Return 1 if there is an offence."""
    argparse.ArgumentParser(prog="lab.style", description=__doc__).parse_args(arguments)
    failed = False
    for group in GROUPS:
        result = offences_in(group)
        failed |= bool(result)
        for one in result:
            print(one)
        rules = Counter(one.rule for one in result)
        print(f"{group}: {len(result)} ({', '.join(f'{rule} {number}' for rule, number in sorted(rules.items()))})")
    for package in PACKAGES:
        print(f"{package}: {share_with_opener(package)}")
    return int(failed)


if __name__ == "__main__":
    sys.exit(main())
