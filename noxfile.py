"""Everything that is run on kvspec: `nox -s conformance` proves it, `nox -s demo` shows it."""

import hashlib
import shutil
import sys
from pathlib import Path

import nox

nox.options.sessions = ["lint", "types", "layers", "trace", "conformance"]
nox.options.error_on_missing_interpreters = True

ROOT = Path(__file__).resolve().parent
# torch is most of a gigabyte, so the sessions share one environment, stamped by what it was made from.
SHARED = ROOT / ".nox" / f"shared-{sys.version_info.major}.{sys.version_info.minor}"

OLDER_TRITON = "3.6.0"
WORKERS = ["-n", "2", "--dist", "worksteal"]

# Triton's S1, with S2 to S6 as kernels too: in the pipeline they stand behind the host's, so their own tests are run.
ON_DEVICE = "accelerated.triton_gpu.backend:ON_DEVICE"
LATER = ("impact", "trunks", "graph", "score", "dissolution", "vectors")
LATER_STAGES = [f"conformance/suite/test_{name}.py" for name in LATER]
# Of decode, Triton has the key norms, which test_activation.py judges; the rest is Numba's.
DECODE = ("decode", "decode_machine", "segments", "essay_decode")
ON_HOST = [f"--ignore=conformance/suite/test_{name}.py" for name in DECODE]


def stamp() -> str:
    """A digest of the files that decide what the environment holds."""
    files = [ROOT / "pyproject.toml", ROOT / "constraints.txt"]
    return hashlib.sha256(b"\0".join(path.read_bytes() for path in files)).hexdigest()


def shared_python(session: nox.Session) -> str:
    """The interpreter of the shared environment, made on first use and remade when the stamp changes."""
    python = SHARED / ("Scripts" if sys.platform == "win32" else "bin") / "python"
    mark = SHARED / "stamp"
    if not (python.exists() and mark.exists() and mark.read_text(encoding="ascii") == stamp()):
        shutil.rmtree(SHARED, ignore_errors=True)
        session.run(sys.executable, "-m", "venv", str(SHARED), external=True)
        session.run(
            str(python), "-m", "pip", "install", "--quiet", "-c", "constraints.txt", "-e", ".[dev]", external=True
        )
        mark.write_text(stamp(), encoding="ascii")
    return str(python)


def run(session: nox.Session, *arguments: str, **environment: str) -> None:
    session.run(shared_python(session), "-m", *arguments, external=True, env=environment)


@nox.session(venv_backend="none")
def demo(session: nox.Session) -> None:
    """Policies side by side on the pocket model, with controls: a table and a picture."""
    run(session, "models_integration.cli", "demo", *session.posargs)


def on_device_or_interpreted(session: nox.Session) -> dict[str, str]:
    """What a process of Triton kernels needs in its environment: the interpreter, where there is no GPU."""
    ask = "import torch; print(torch.cuda.is_available())"
    found = str(session.run(shared_python(session), "-c", ask, external=True, silent=True))
    return {} if found.strip() == "True" else {"TRITON_INTERPRET": "1"}


@nox.session(venv_backend="none")
def conformance(session: nox.Session) -> None:
    """The suite, for each backend in a process of its own; `-- --backend X` for one, or anybody's."""
    if session.posargs:
        kernels = any("triton" in argument for argument in session.posargs)
        environment = on_device_or_interpreted(session) if kernels else {}
        run(session, "pytest", *WORKERS, *session.posargs, **environment)
        return
    run(session, "pytest", *WORKERS, "--jaxtyping-packages=reference,beartype.beartype")
    run(session, "pytest", *WORKERS, "--backend", "numba")
    run(session, "pytest", *WORKERS, "--backend", "numba", NUMBA_DISABLE_JIT="1")
    environment = on_device_or_interpreted(session)
    few = ["pytest", *WORKERS, "--kvspec-profile", "few"]
    run(session, *few, "--backend", "triton", *ON_HOST, **environment)
    run(session, *few, "--backend", ON_DEVICE, *LATER_STAGES, **environment)


@nox.session(venv_backend="none")
def triton(session: nox.Session) -> None:
    """The whole suite on Triton's kernels for S1 to S6; in the interpreter, an hour without a GPU."""
    environment = on_device_or_interpreted(session)
    run(session, "pytest", *WORKERS, "--backend", "triton", "conformance/own/accelerated/triton", **environment)
    run(session, "pytest", *WORKERS, "--backend", ON_DEVICE, *session.posargs, **environment)


@nox.session(venv_backend="none")
def gpu(session: nox.Session) -> None:
    """On a GPU: conformance, generation, benchmarks; figures to docs/results. `-- --dry-run --out X` needs none."""
    run(session, "conformance.measure.gpu", *session.posargs)


@nox.session(venv_backend="none")
def aot36(session: nox.Session) -> None:
    """The kernels compiled for sm_90 by Triton 3.6, which many machines with a GPU have; no GPU needed."""
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
    """Ruff over everything."""
    run(session, "ruff", "check", ".")


@nox.session(venv_backend="none")
def layers(session: nox.Session) -> None:
    """Who imports whom."""
    run(session, "conformance.assurance.layers")


@nox.session(venv_backend="none")
def trace(session: nox.Session) -> None:
    """Every item of the specification has a function and a test, and its text is the one that was read."""
    run(session, "conformance.assurance.trace", *session.posargs)


@nox.session(venv_backend="none")
def prove(session: nox.Session) -> None:
    """The integer decisions, proved over their source by z3, with false claims that must be refuted."""
    run(session, "conformance.assurance.proofs")


@nox.session(venv_backend="none")
def vectors(session: nox.Session) -> None:
    """The vectors of spec/vectors, made again by the oracles and compared; `-- --write` adds new ones."""
    run(session, "conformance.assurance.vector_writer", *session.posargs)


@nox.session(venv_backend="none")
def saboteurs(session: nox.Session) -> None:
    """The reference with one item wrong, some hundred times over: each must die by a test of its item."""
    run(session, "conformance.assurance.saboteurs", *session.posargs)


@nox.session(venv_backend="none")
def mutation(session: nox.Session) -> None:
    """Small changes to the reference and Numba's code: each must die by its item's tests. Some hours; goes on later."""
    run(session, "conformance.assurance.mutation", *(session.posargs or ["run"]))
    if not session.posargs:
        run(session, "conformance.assurance.mutation", "report")


@nox.session(venv_backend="none")
def bench(session: nox.Session) -> None:
    """How fast the stages are, as ratios inside one run; some minutes on a quiet machine."""
    files = [str(path) for path in sorted(Path("conformance/measure/benchmarks").glob("bench_*.py"))]
    run(session, "pytest", "-p", "no:xdist", "-s", *(session.posargs or files))


@nox.session(venv_backend="none")
def study(session: nox.Session) -> None:
    """Our own studies, `-- decode` or `-- archive`, with their options; figures to results/. A second run goes on."""
    name, *options = session.posargs or ["decode"]
    run(session, f"conformance.measure.studies.{name}", *options)


@nox.session(venv_backend="none")
def peers(session: nox.Session) -> None:
    """Our policies beside kvpress, which needs an older transformers: an environment of its own, a few minutes."""
    home = ROOT / ".nox" / "peers"
    python = str(home / ("Scripts" if sys.platform == "win32" else "bin") / "python")
    if not (home / "complete").exists():
        shutil.rmtree(home, ignore_errors=True)
        session.run(sys.executable, "-m", "venv", str(home), external=True)
        wanted = ["-c", "constraints.txt", "kvpress==0.5.*", "jaxtyping"]
        session.run(python, "-m", "pip", "install", "--quiet", *wanted, external=True)
        (home / "complete").touch()
    session.run(python, "-m", "conformance.measure.peers", *session.posargs, external=True)
