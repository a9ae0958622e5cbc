"""The sentences that users read: of pages, docstrings, `--help` and errors, each with its file and line."""

import ast
import inspect
from argparse import ArgumentParser
from collections.abc import Iterator
from pathlib import Path
from typing import Any

from griffe import Alias, Docstring, DocstringSectionKind, GriffeLoader, Object
from markdown_it import MarkdownIt
from markdown_it.token import Token

from conformance.assurance.style.rules import MARK, Passage
from conformance.paths import ROOT

__all__ = ["of_docstrings", "of_errors", "of_help", "of_markdown", "of_page"]

_MARKDOWN = MarkdownIt("commonmark").enable("table")
_LISTS = (DocstringSectionKind.parameters, DocstringSectionKind.raises, DocstringSectionKind.returns,
          DocstringSectionKind.attributes, DocstringSectionKind.yields)


def of_page(path: Path) -> Iterator[Passage]:
    """A Markdown file without its code."""
    return of_markdown(path.read_text(encoding="utf-8"), path.relative_to(ROOT).as_posix(), 1)


def of_markdown(text: str, source: str, first: int) -> Iterator[Passage]:
    """Paragraphs, headings, cells and items of lists, whose text begins on a line of a file."""
    for token in _MARKDOWN.parse(text):
        if token.type == "inline" and token.map is not None:
            yield Passage(source, first + token.map[0], "".join(map(_words, token.children or ())))


def _words(token: Token) -> str:
    if token.type in ("text", "text_special"):
        return token.content
    return {"softbreak": "\n", "hardbreak": "\n", "code_inline": MARK}.get(token.type, "")


def of_docstrings(package: str) -> Iterator[Passage]:
    """Docstrings of the names that a package exports, and of their public members; each at its first line."""
    loader = GriffeLoader(search_paths=[ROOT])
    for behind in ("spec", "reference", "models_integration", "conformance"):
        loader.load(behind)
    module = loader.load(package)
    loader.resolve_aliases(implicit=True, external=False)
    for name in module.exports or ():
        found = module.members[str(name)]
        yield from _of_object(found.final_target if isinstance(found, Alias) else found)


def _of_object(one: Object | Alias) -> Iterator[Passage]:
    if one.docstring is not None:
        yield from _of_docstring(one.docstring, str(one.relative_filepath))
    for member in one.members.values() if one.is_class else ():
        if member.is_public and not member.is_alias:
            yield from _of_object(member)


def _of_docstring(docstring: Docstring, source: str) -> Iterator[Passage]:
    line = docstring.lineno or 1
    for section in docstring.parse("google"):
        if section.kind in _LISTS:
            parts = [part.description for part in section.value]
        else:
            parts = [section.value] if section.kind is DocstringSectionKind.text else []
        for part in parts:
            yield from of_markdown(part, source, line)


def of_help(command: Any) -> Iterator[Passage]:
    """What `--help` of a command of typer, and of its subcommands, prints; at the line of its function."""
    function = inspect.unwrap(command.callback) if command.callback else None
    source, line = ("models_integration/cli", 1) if function is None else _place(function)
    for text in (command.help, *(getattr(one, "help", None) for one in command.params)):
        yield from of_markdown(inspect.cleandoc(text or ""), source, line)
    for one in getattr(command, "commands", {}).values():
        yield from of_help(one)


def of_options(parser: ArgumentParser, function: Any) -> Iterator[Passage]:
    """The same of argparse, at the line of the function that makes the parser."""
    source, line = _place(function)
    for text in (parser.description, *(action.help for action in parser._actions)):
        yield from of_markdown(text or "", source, line)


def _place(function: Any) -> tuple[str, int]:
    code = function.__code__
    return Path(code.co_filename).resolve().relative_to(ROOT).as_posix(), code.co_firstlineno


def of_errors(path: Path) -> Iterator[Passage]:
    """The third argument of each SpecError of a module, or the assignments to its name; values replaced."""
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
