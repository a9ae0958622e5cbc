"""Run the tests of the changed files: `python -m lab.quick [COMMIT]`.

By default, files count as changed since the last commit. A changed test module is run. For each other changed module,
the command runs the test modules that import it, and those that test an item implemented in it. The run stops after 40
seconds; `nox -s conformance` runs all tests.
"""

import subprocess
import sys
from collections.abc import Collection
from functools import cache

from conformance.paths import ROOT
from lab.layers import Module, module_of, read_modules
from lab.trace import Trace, read_tree

SECONDS = 40
NEED_A_SUBJECT = ("conformance/policy_suite/", "conformance/cache_suite/")
PROFILE = ["-m", "pytest", "-q", "-x", "-n", "2", "--dist", "worksteal", "--kvspec-profile", "few"]


def changed_files(since: str) -> set[str]:
    """Return the files that differ from a commit, and the new files.

    Raises:
        SystemExit: if the repository has no such commit.
    """
    result = set[str]()
    for command in (["diff", "--name-only", since, "--"], ["ls-files", "--others", "--exclude-standard"]):
        completed = subprocess.run(["git", *command], check=False, cwd=ROOT, capture_output=True, text=True)
        if completed.returncode:
            raise SystemExit(f"quick: {completed.stderr.strip()}")
        result |= set(completed.stdout.splitlines())
    return result


def is_test(path: str) -> bool:
    """Return True for a test module that runs without options that name a policy, a cache or a server."""
    return path.rpartition("/")[2].startswith("test_") and not path.startswith(NEED_A_SUBJECT)


@cache
def _tree() -> tuple[dict[str, Module], Trace]:
    return read_modules(ROOT), read_tree(ROOT)


def judging(changed: Collection[str]) -> list[str]:
    """Return the test modules to run for the changed files."""
    modules, trace = _tree()
    names = {name for name, module in modules.items() if module.source in changed}
    result = {
        module.source for name, module in modules.items() if is_test(module.source)
        and (name in names or any(module_of(imported, modules) in names for _, imported in module.imports))
    }
    items = {item for item, places in trace.functions.items() if {place.split(":")[0] for place in places} & {*changed}}
    places = {place.split(":")[0] for item in items for place in trace.tests[item]}
    return sorted(result | {place for place in places if is_test(place)})


def main(arguments: list[str]) -> int:
    """Run the tests, and return the exit code of pytest. Return 0 without tests, or if none failed in time."""
    files = judging(changed_files(arguments[0] if arguments else "HEAD"))
    print(f"quick: {len(files)} test modules", flush=True)
    try:
        command = [sys.executable, *PROFILE, *files]
        return subprocess.run(command, check=False, timeout=SECONDS).returncode if files else 0
    except subprocess.TimeoutExpired:
        print(f"\nquick: stopped after {SECONDS} seconds, and no test had failed; `nox -s conformance` runs all")
        return 0


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
