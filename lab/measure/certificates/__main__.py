"""Make certificates of other implementations: `python -m lab.measure.certificates [NAME ...]`.

Without names, the command makes the certificates for which this environment has the packages. `page` writes the table
of docs/results/certificates from the files there. `nox -s lab -- certificates` runs the command in both environments.
"""

import os
import shutil
import subprocess
import sys
import tomllib
from collections import Counter
from dataclasses import dataclass
from importlib.util import find_spec
from pathlib import Path
from typing import Any

from conformance.paths import DOCS, ROOT
from lab import pages

HERE, OUT, LOGS = Path(__file__).resolve().parent, DOCS / "results" / "certificates", ROOT / "results" / "certificates"
ENGINE = Path("build", "engine")
COMPILERS: dict[str, tuple[str, ...]] = {
    "c": ("cc", "-O2", "-std=c99", "engine.c", "-lm"), "cpp": ("g++", "-O2", "-std=c++17", "engine.cpp"),
}
"""Commands that compile the example engines, each in its folder of docs/examples."""
PROGRAMS = {"engine-c": ("c", ENGINE), "engine-cpp": ("cpp", ENGINE.with_name("engine-cpp"))}
"""Engines that must be compiled: the language, and the path of the program."""


PACKAGES = {"kvpress": "kvpress", "llama-cpp": "llama_cpp", "vllm": "vllm"}
"""Packages with a separate environment, by the first word of their certificates."""


@dataclass(frozen=True)
class Subject:
    """Implementation to test: the option of `kvspec verify`, and a note that explains the verdict."""

    kind: str
    named: str
    note: str = ""
    options: tuple[str, ...] = ()

    @property
    def folder(self) -> Path:
        """Folder in which the command runs. Modules are found and their file is hashed there."""
        return ROOT if self.kind == "command" else HERE

    @property
    def command(self) -> list[str]:
        return [f"--{self.kind}", self.named, *self.options]


PRESSES = (
    "streaming_llm", "snapkv", "pyramidkv", "chunkkv", "tova", "keydiff", "knorm", "adakv", "expected_attention",
    "observed_attention",
)
SUBJECTS: dict[str, Subject] = {
    "engine-c": Subject("command", str(ENGINE), "docs/examples/c, compiled by `cc -O2 -std=c99`"),
    "engine-cpp": Subject(
        "command", str(PROGRAMS["engine-cpp"][1]), "docs/examples/cpp, compiled by `g++ -O2 -std=c++17`; five methods",
        ("--as", "snapkv,pyramidkv,keydiff,knorm,streamingllm"),
    ),
    "engine-javascript": Subject(
        "command", "node docs/examples/javascript/engine.mjs", "few examples of each property: minutes, not hours",
        ("--timeout", "300", "--profile", "few"),
    ),
    "transformers-dynamic": Subject("cache", "transformers_caches:dynamic", "with explicit positions"),
    "transformers-dynamic-default-positions": Subject(
        "cache", "transformers_caches:dynamic_default_positions",
        "a misuse that is easy to make: without `position_ids` the model counts what is stored",
    ),
    "transformers-static": Subject("cache", "transformers_caches:static", "with explicit positions"),
    "transformers-fp8": Subject("cache", "transformers_caches:fp8", "8 bits are not exact, and are not meant to be"),
    "kvpress-gathered": Subject(
        "cache", "kvpress_caches:gathered", "on Gemma 3 a question of several tokens is read without causality",
    ),
    "kvpress-masked": Subject(
        "cache", "kvpress_caches:masked", "nothing is freed; all failures are of 70 tokens read at once",
    ),
    "kvpress-rerotation": Subject(
        "cache", "kvpress_rotations:rerotated", "KeyRerotationPress: positions 0, 1, ..., one set size for all heads",
        ("--positions", "renumbered"),
    ),
    "kvpress-finch": Subject(
        "cache", "kvpress_rotations:finch", "FinchPress with its default `rerotate_keys=True`",
        ("--positions", "renumbered"),
    ),
    "llama-cpp-shift": Subject(
        "cache", "llama_cpp_caches:shifted",
        "context shift of llama-cpp-python 0.3.36 in float32; a cell has all layers and heads of a token",
        ("--positions", "renumbered"),
    ),
    "vllm-snapkv": Subject(
        "server", "http://127.0.0.1:8000", "`kvspec serve pocket --policy snapkv --budget 0.3` on a CPU",
        ("--model", "pocket"),
    ),
    **{
        f"kvpress-{name.replace('_', '-')}": Subject("policy", f"kvpress_policies:{name}", "", ("--profile", "dev"))
        for name in PRESSES
    },
}


def _mine(name: str) -> bool:
    """Return True if this environment can test the subject. kvpress has an environment with an older transformers."""
    there = [prefix for prefix, package in PACKAGES.items() if find_spec(package)]
    return name.startswith(tuple(there)) if there else not name.startswith(tuple(PACKAGES))


def compile_engine(language: str, program: Path) -> None:
    """Compile an example engine."""
    executable = ROOT / program
    executable.parent.mkdir(exist_ok=True)
    subprocess.run([*COMPILERS[language], "-o", str(executable)], cwd=DOCS / "examples" / language, check=True)


def make(name: str) -> None:
    """Test one subject, and copy its certificate to the folder of the page.

    Raises:
        RuntimeError: if nothing was tested.
    """
    subject, out = SUBJECTS[name], LOGS / name
    if name in PROGRAMS:
        compile_engine(*PROGRAMS[name])
    environment = {**os.environ, "PYTHONPATH": str(ROOT)}
    command = [sys.executable, "-m", "conformance.verify", *subject.command, "--out", str(out)]
    done = subprocess.run(command, cwd=subject.folder, env=environment, check=False)
    if done.returncode not in (0, 1):
        raise RuntimeError(f"{name}: nothing was judged")
    shutil.copyfile(out / "certificate.toml", OUT / f"{name}.toml")


def _counts(certificate: dict[str, Any]) -> str:
    """Return the number of rows by verdict. For an engine, only the families that it offers count."""
    verdicts = Counter(row["verdict"] for row in certificate["items"].values() if row["verdict"] != "not offered")
    order = ("pass", "fail", "not served", "not promised", "N/A", "not run")
    return ", ".join(f"{verdicts[one]} {one}" for one in order if verdicts[one])


def _row(name: str) -> list[str]:
    certificate = tomllib.loads((OUT / f"{name}.toml").read_text(encoding="utf-8"))
    with_ = certificate["device"].get("transformers")
    who = certificate["subject"]["name"] + (f", transformers {with_}" if with_ else "")
    note = SUBJECTS[name].note or (f"fails: {', '.join(certificate['failing'])}" if certificate["failing"] else "")
    return [f"[{name}]({name}.toml)", certificate["verdict"], who, _counts(certificate), note]


def table(_: str = "") -> str:
    """Return the table of README.md of the certificates."""
    rows = [_row(name) for name in SUBJECTS if (OUT / f"{name}.toml").exists()]
    return pages.table(["Certificate", "Verdict", "Judged", "Rows", "Note"], rows)


def main(names: list[str]) -> int:
    """Make all certificates or the named ones, or write the page."""
    if unknown := sorted(set(names) - {*SUBJECTS, "page"}):
        print(f"no certificate {', '.join(unknown)}: there are {', '.join(SUBJECTS)}", file=sys.stderr)
        return 2
    for name in filter(_mine, [one for one in names or SUBJECTS if one != "page"]):
        make(name)
    if names == ["page"]:
        pages.write(OUT / "README.md", table)
    return 0


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
