"""Contents of the repository's pages: Python, commands, links."""

import ast
import importlib
import re
import shlex
import subprocess
import tomllib
from collections import Counter
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from fnmatch import fnmatch
from importlib.util import find_spec
from pathlib import Path
from typing import Any
from xml.etree import ElementTree

import pytest

from conformance.paths import ROOT
from conformance.verify.request import parsed as request
from conformance.verify.request import parser

pytestmark = pytest.mark.law('as-it-is-described')


PAGES = [
    path.relative_to(ROOT).as_posix()
    for pattern in (
        "README.md", "CONTRIBUTING.md", "docs/**/*.md", "spec/**/*.md", "models_integration/**/*.md", "lab/*.md",
    )
    for path in sorted(ROOT.glob(pattern))
]

_FENCE = re.compile(r"^```(\w*)\n(.*?)^```$", re.MULTILINE | re.DOTALL)
_SPAN = re.compile(r"`([^`]+)`")
_LINK = re.compile(r"\]\((?!\w+:)([^)#\s]*)#?([^)\s]*)\)")
_HEADING = re.compile(r"^#+ (.+)$", re.MULTILINE)


@dataclass(frozen=True)
class Fence:
    """Code block of a page: language ("" for commands), text, and the line of the page on which the text begins."""

    language: str
    text: str
    line: int


def read(page: str) -> str:
    return (ROOT / page).read_text(encoding="utf-8")


def fences(page: str) -> list[Fence]:
    """Return the code blocks of a page, in order."""
    text = read(page)
    return [Fence(m[1], m[2], 1 + text.count("\n", 0, m.start(2))) for m in _FENCE.finditer(text)]


def prose(page: str) -> str:
    """Return the text between the code blocks."""
    return _FENCE.sub("", read(page))


def commands(page: str) -> Iterator[list[str]]:
    """Yield the words of each command in a block without language, without comments.

    In spec/ such a block is a format.
    """
    for fence in fences(page):
        if not fence.language and not page.startswith("spec/"):
            yield from commands_in(fence)


def commands_in(fence: Fence) -> Iterator[list[str]]:
    """Yield the words of each command of one block."""
    for line in fence.text.replace("\\\n", " ").splitlines():
        yield from filter(None, (shlex.split(command, comments=True) for command in line.split("&&")))


def spoken(page: str) -> Iterator[list[str]]:
    """Yield the words of each command in running text. Its options may lack values."""
    for span in _SPAN.findall(prose(page)):
        if span.startswith(("kvspec ", "nox -s ", "python -m ")):
            yield span.split()


def links(page: str) -> Iterator[tuple[Path, str]]:
    """Yield each file of the repository that the page links to, and the anchor in it, or ""."""
    for target, anchor in _LINK.findall(_SPAN.sub("", prose(page))):
        yield (ROOT / page).parent / target if target else ROOT / page, anchor


def anchors(page: Path) -> set[str]:
    """Return the possible targets of links, as GitHub creates them from headings."""
    actual = _HEADING.findall(_FENCE.sub("", page.read_text(encoding="utf-8")))
    return {re.sub(r"[^\w\- ]", "", heading.lower()).replace(" ", "-") for heading in actual}


SECTIONS = ("A policy", "A backend", "A spec item", "A model family", "A codec")
PROGRAMS = [page for page in PAGES if any(fence.language == "python" for fence in fences(page))]
# Beginnings of commands that the test does not run, and the reason.
NOT_RUN = {
    "kvspec models fetch": "fetches",
    "kvspec explain text.txt --model smollm2": "reads what was fetched",
    "kvspec keep docs/examples/lighthouse.txt": "reads what was fetched",
    "kvspec compare --model": "reads the reader's own model, or what was fetched",
    "kvspec compare --policies crystalcache,streamingllm,fullcache": "takes a minute",
    "kvspec compare --policies snapkv,pyramidkv": "takes a minute",
    "kvspec compare --policies triattention": "takes ten seconds",
    "kvspec report results": "needs rows of what is not run here: studies/test_page.py runs it",
    "kvspec compare --policies mine:POLICY": "needs the page's own file: studies/test_own_names.py runs it",
    "kvspec paper": "takes minutes: studies/test_paper.py runs it",
    "kvspec study --rules rules.toml --out results --part all": "runs the reader's own model, with workers",
    "kvspec study --status": "reads what was not run",
    "kvspec lm-eval": "runs in an environment of its own",
    "kvspec serve": "needs vLLM: nox -s vllm runs its parts",
    "kvspec verify": "judges the reader's own package, for minutes",
}
GUIDE = {
    page: [words for words in commands(page) if words[0] in ("echo", "kvspec")]
    for page in PAGES if page.startswith("docs/guide/")
}
SHELL = {"git", "cd", ".", "echo"}
VLLM_OPTIONS = {"--dtype", "--enforce-eager", "--kv-cache-memory-bytes"}
"""Options of `vllm serve` that pages pass to `kvspec serve`, which accepts all of them."""


FIRST = ["README.md", *GUIDE]
NUMBERS = ("zero", "one", "two", "three", "four", "five", "six", "seven", "eight", "nine")


def defined_in(path: str) -> set[str]:
    """Return the classes, functions and methods that a file defines, as "name" or "Class.name"."""
    tree, names = ast.parse(read(path)), set[str]()
    for node in tree.body:
        if isinstance(node, ast.ClassDef | ast.FunctionDef):
            names.add(node.name)
        if isinstance(node, ast.ClassDef):
            names |= {f"{node.name}.{one.name}" for one in node.body if isinstance(one, ast.FunctionDef)}
    return names


def test_the_architecture_names_functions_with_their_files() -> None:
    text = read("docs/architecture.md")
    nouns = re.findall(r"^\| `(\w+)` \|.*\| `([\w/]+\.py)` \|$", text, re.MULTILINE)
    steps = re.findall(r"^\| (\d+) \| `([\w.]+)`.*\| `([\w/]+\.py)` \|$", text, re.MULTILINE)
    assert [name for name, _ in nouns] == ["Policy", "RetentionPolicy", "Method", "Session", "Retention"]
    assert [int(number) for number, *_ in steps] == list(range(1, 13))
    for name, path in [*nouns, *((name, path) for _, name, path in steps)]:
        assert name in defined_in(path), (name, path)


def test_a_policy_has_as_many_files_as_the_page_says() -> None:
    text = read("CONTRIBUTING.md").split("edit or add these ")[1]
    files = re.findall(r"^(\d)\. `([\w/.]+)`: ", text.split("Run these commands")[0], re.MULTILINE)
    assert [int(number) for number, _ in files] == list(range(1, len(files) + 1))
    assert text.startswith(f"{NUMBERS[len(files)]} files:")
    written = [path.replace("METHOD", "triattention") for _, path in files]
    assert [path for path in written if not (ROOT / path).is_file()] == []


def test_the_readme_of_the_lab_names_each_tool() -> None:
    named = {one for one in _SPAN.findall(read("lab/README.md")) if one.endswith((".py", "/"))}
    tools = {path.relative_to(ROOT / "lab") for folder in ("lab", "lab/measure") for path in (ROOT / folder).iterdir()}
    names = {f"{path.as_posix()}/" if (ROOT / "lab" / path).is_dir() else path.as_posix() for path in tools}
    missing = {name for name in names if name.endswith((".py", "/")) and "__" not in name and name != "measure/"}
    patterns = [one for one in named if "*" in one]
    assert {name for name in missing - named if not any(fnmatch(name, one) for one in patterns)} == set()
    assert {name for name in named - missing if "*" not in name} == set()


def run_here(words: Sequence[str]) -> bool:
    return not " ".join(words).startswith(tuple(NOT_RUN))


@pytest.fixture
def elsewhere(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """Return a folder with a text. Pages write their files into this folder."""
    (tmp_path / "text.txt").write_text("The river runs past the old mill. " * 30, encoding="utf-8")
    monkeypatch.chdir(tmp_path)
    return tmp_path


def test_every_kind_of_contribution_has_an_example_that_asserts_something() -> None:
    page = (ROOT / "CONTRIBUTING.md").read_text(encoding="utf-8")
    actual = re.findall(r"^## (.+?)$.*?^```python\n(.*?)^```$", page, re.MULTILINE | re.DOTALL)
    assert tuple(section for section, _ in actual) == SECTIONS
    assert all(re.search(r"^ *assert ", code, re.MULTILINE) for _, code in actual)


@pytest.mark.usefixtures("elsewhere")
@pytest.mark.parametrize("page", PROGRAMS)
def test_the_python_of_a_page_runs_and_prints_what_is_shown(
    page: str, capsys: pytest.CaptureFixture[str], recwarn: pytest.WarningsRecorder,
) -> None:
    every = fences(page)
    if any("models_integration" in fence.text for fence in every if fence.language == "python"):
        pytest.importorskip("transformers")
    names: dict[str, Any] = {"__name__": "page"}
    for block, after in zip(every, [*every[1:], None], strict=True):
        if block.language == "python":
            exec(compile("\n" * (block.line - 1) + block.text, str(ROOT / page), "exec"), names)
            printed, shown = lines(capsys.readouterr().out), shown_by(block, after)
            assert not shown or shows(shown, printed)
    assert page not in FIRST or [str(one.message) for one in recwarn if one.category is FutureWarning] == []


def shown_by(block: Fence, after: Fence | None) -> list[str]:
    """Return the output of a Python block as the page shows it, or an empty list."""
    if after is not None and after.language == "text":
        return lines(after.text)
    return re.findall(r"^ *print\(.*?  # (.+)$", block.text, re.MULTILINE)


def lines(text: str) -> list[str]:
    return [line.strip() for line in text.splitlines()]


def shows(shown: Sequence[str], printed: Sequence[str]) -> bool:
    """Return whether the lines on a page are the printed lines. `...` means any number of lines."""
    pattern = r"\n".join(".*" if line == "..." else re.escape(line) for line in shown)
    return re.fullmatch(pattern, "\n".join(printed), re.DOTALL) is not None


@pytest.mark.parametrize("page", FIRST)
def test_a_guide_begins_with_what_it_is_for_and_a_block(page: str) -> None:
    text = (ROOT / page).read_text(encoding="utf-8")
    assert page == "README.md" or text.splitlines()[2].startswith("After this page you can ")
    assert all(fence.line <= 12 for fence in fences(page)[:1])


def test_the_readme_is_short() -> None:
    assert len((ROOT / "README.md").read_text(encoding="utf-8").split()) <= 650


@pytest.mark.parametrize("page", [page for page, commands in GUIDE.items() if any(map(run_here, commands))])
def test_the_commands_of_a_guide_run(page: str, elsewhere: Path, capsys: pytest.CaptureFixture[str]) -> None:
    pytest.importorskip("transformers")
    from kvspec.cli.app import app

    printed = ""
    every = fences(page)
    for before, fence in zip(every[:1] + every, every, strict=False):
        if fence.language == "text" and not before.language and printed:
            assert shows(lines(fence.text), lines(printed))
        for words in commands_in(fence) if not fence.language else ():
            if words[0] == "echo":
                subprocess.run(["sh", "-c", f"echo '{words[1]}' {words[2]} {words[3]}"], check=True)
            elif words[0] == "kvspec" and run_here(words):
                app([printed.split()[-1] if word == "KEY" else word for word in words[1:]], standalone_mode=False)
                printed = capsys.readouterr().out


def test_the_defects_of_other_projects_are_counted() -> None:
    files = Counter(path.name.partition("-")[0] for path in (ROOT / "docs/upstream").glob("*.txt"))
    sentence = (
        f"{files.total()} defects: {files['kvpress']} of kvpress, {files['transformers']} of transformers,"
        f" {files['vllm']} of vLLM and {files['llama']} of llama-cpp-python."
    )
    assert sentence in " ".join((ROOT / "docs/trust.md").read_text(encoding="utf-8").split())


def test_what_is_not_run_stands_in_the_guide() -> None:
    commands = [" ".join(words) for page in GUIDE.values() for words in page]
    assert [beginning for beginning in NOT_RUN if not any(line.startswith(beginning) for line in commands)] == []


@pytest.mark.parametrize("page", PAGES)
def test_the_commands_of_a_page_exist(page: str) -> None:
    for words in commands(page):
        assert words[0] in SHELL or exists(words), words
        if words[0] == "kvspec":
            parsed(words[1 : words.index(">") if ">" in words else None])  # The rest belongs to the shell.
    for words in spoken(page):
        assert exists(words), words


def exists(words: Sequence[str]) -> bool:
    """Return whether the command, its options, or the named session, module or extra exists."""
    match words:
        case ["kvspec", *rest]:
            return {word for word in rest if word.startswith("--")} <= options(rest) | {"--", "--version", "--help"}
        case ["nox", "-s", *rest]:
            named = rest[: rest.index("--")] if "--" in rest else rest
            noxfile = importlib.import_module("noxfile")
            parts = {*noxfile.LAB, *noxfile.PARTS} if named == ["lab"] else None
            known = parts is None or (len(rest) > 2 and rest[2] in parts)
            return known and bool(named) and set(named) <= set(importlib.import_module("nox.registry").get())
        case ["python", "-m", module, *_]:
            home = ROOT / module.replace(".", "/")  # find_spec would import the parent packages, which may need torch.
            ours = home.with_suffix(".py").is_file() or (home / "__main__.py").is_file()
            return ours or ("." not in module and find_spec(module) is not None)
        case ["pip" | "python", *_] | [_, "-m", "pip", *_]:
            extras = tomllib.loads((ROOT / "pyproject.toml").read_text(encoding="utf-8"))["project"]
            named = re.findall(r"\[(.+)\]", " ".join(words))
            return {extra for group in named for extra in group.split(",")} <= set(extras["optional-dependencies"])
        case _:
            return False


def options(words: Sequence[str]) -> set[str]:
    """Return the options of a command. The options of `verify` are defined in the suite."""
    if words[0] == "verify":
        return {option for action in parser()._actions for option in action.option_strings}
    if words[0] == "lm-eval":  # This is a separate command line: nox -s lab -- extra lm-eval runs one.
        return set(words)
    command, _ = find_command(words)
    names = {option for parameter in command.params for option in parameter.opts}
    return names | VLLM_OPTIONS if words[0] == "serve" else names


def find_command(words: Sequence[str]) -> tuple[Any, list[str]]:
    """Return the command of typer's tree that the words name, and the words after its name."""
    from typer.main import get_command

    from kvspec.cli.app import app

    command: Any = get_command(app)
    rest = list(words)
    while rest and rest[0] in getattr(command, "commands", {}):
        command = command.commands[rest.pop(0)]
    return command, rest


def commands_below(command: Any) -> Iterator[Any]:
    """Yield the command and all its subcommands."""
    yield command
    for one in getattr(command, "commands", {}).values():
        yield from commands_below(one)


def test_every_option_has_a_help_text() -> None:
    """Check options whose type is a union too: typer drops the text of a part of them."""
    pytest.importorskip("transformers", reason="the commands drive transformers models")
    every = [(one.name, each.name, each.help) for one in commands_below(find_command(())[0]) for each in one.params]
    assert len(every) > 100
    assert [one for one in every if not one[2]] == []


def parsed(words: Sequence[str]) -> None:
    """Parse words as the command line would, including values and required arguments. Nothing is run."""
    if words[0] == "verify":
        request(words[1:])
        return
    command, rest = find_command(words)
    command.make_context("kvspec", rest)


@pytest.mark.parametrize("page", PAGES)
def test_the_links_of_a_page_lead_somewhere(page: str) -> None:
    for target, anchor in links(page):
        assert target.exists(), target
        assert not anchor or anchor in anchors(target), f"{target}#{anchor}"


@pytest.mark.parametrize("path", sorted(ROOT.glob("docs/**/*.svg")), ids=lambda path: path.name)
def test_a_picture_has_a_title_for_screen_readers(path: Path) -> None:
    picture = ElementTree.parse(path).getroot()
    title = picture.find("{http://www.w3.org/2000/svg}title")
    assert title is not None
    assert title.text
    assert picture.get("role") == "img"
    assert picture.get("aria-label", title.text) == title.text
    assert {"aria-label", "aria-labelledby"} & set(picture.keys())
    assert picture.get("aria-labelledby") == title.get("id")


@pytest.mark.parametrize("page", PAGES)
def test_a_picture_on_a_page_has_a_text(page: str) -> None:
    assert all(text.strip() for text in re.findall(r"!\[(.*?)\]\(", prose(page)))


def test_what_is_not_there_is_noticed() -> None:
    for missing in (
        "kvspec compare --polices x", "kvspec verify --bakend x", "kvspec nothing --out x", "nox -s nothing",
        "kvspec serve pocket --polcy snapkv",
        "nox -s lab -- nothing", "python -m conformance.no", "pip install kvspec[no]", "make all",
    ):
        assert not exists(missing.split()), missing
    with pytest.raises(Exception, match="valid integer"):
        parsed(["compare", "--samples", "long"])
