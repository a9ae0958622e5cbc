"""Run the checks and measurements: `python -m lab.measure.gpu`. See the package.

A run takes half an hour at most. docs/results/gpu.md explains how to run it in parts.
"""

import argparse
import datetime
import os
import platform
import re
import subprocess
import sys
from collections.abc import Callable
from functools import cache, partial
from importlib import import_module
from importlib.metadata import PackageNotFoundError, version
from importlib.util import find_spec
from pathlib import Path
from typing import Any

from conformance.paths import ROOT

PACKAGES = ("torch", "triton", "numba", "numpy", "transformers")
NO_DEVICE = (
    "no CUDA device: torch sees none here. Run this on a machine with one; `--dry-run` walks the same path on the CPU,"
    " in Triton's interpreter, with tiny sizes"
)
# Time limit of each part in seconds.
LIMITS = {
    "ceilings": 20, "conformance": 400, "sessions": 60, "generation": 100, "speed": 150, "profile": 120, "ragged": 40,
    "decoding": 200, "policies": 150, "families": 100, "splices": 60, "batched": 240,
}


def parse(arguments: list[str] | None) -> argparse.Namespace:
    """Return the parsed command line."""
    parser = argparse.ArgumentParser(prog="python -m lab.measure.gpu", description=__doc__)
    parser.add_argument("--model", help="transformers model, as path or name; default: random weights, 8B shape")
    parser.add_argument("--out", type=Path, help="folder of the page and the JSON; default docs/results")
    parser.add_argument("--dry-run", action="store_true", help="tiny sizes, no figures; needs no GPU, and needs --out")
    parser.add_argument("--parts", default=",".join(LIMITS), help="parts to run, comma-separated; default: %(default)s")
    chosen = parser.parse_args(arguments)
    chosen.parts = chosen.parts.split(",")
    unknown = set(chosen.parts) - set(LIMITS)
    if unknown:
        parser.error(f"unknown parts {', '.join(sorted(unknown))}; known: {', '.join(LIMITS)}")
    if chosen.dry_run and chosen.out is None:
        parser.error("a dry run says nothing about speed and stays out of docs/results: give --out")
    return chosen


def main(arguments: list[str] | None = None) -> int:
    """Run the parts in order, and write all measurements, even after an error."""
    chosen = parse(arguments)
    missing = [name for name in ("torch", "triton", "numba") if find_spec(name) is None]
    if missing:
        print(f"not installed: {', '.join(missing)}", file=sys.stderr)
        return 2
    import torch

    if not torch.cuda.is_available():
        if not chosen.dry_run:
            print(NO_DEVICE, file=sys.stderr)
            return 2
        # Triton reads the variable when kernels are defined, so it must be set before their import.
        os.environ["TRITON_INTERPRET"] = "1"
    from lab.measure.gpu.measure import Report

    words = sys.argv[1:] if arguments is None else arguments
    report = Report(_header(words), chosen.dry_run, dict.fromkeys(LIMITS, "not run"))
    try:
        _run(report, chosen)
    except KeyboardInterrupt:
        report.notes.append("Interrupted: what is missing was not measured.")
    finally:
        date, device = report.header["date"], "-".join(re.findall(r"\w+", report.header["device"].lower()))
        page = report.write(chosen.out or ROOT / "docs" / "results", f"{date}-{device}")
        print(f"written: {page} and its JSON")
    asked = [report.parts[name] for name in chosen.parts]
    return 0 if all(outcome == "done" for outcome in asked) else 1


def _run(report: "Report", chosen: argparse.Namespace) -> None:  # type: ignore[name-defined]
    from lab.measure.gpu import measure

    for name, part in _parts(report, chosen).items():
        if name not in chosen.parts:
            continue
        measure.say(f"{name}, at most {LIMITS[name]} s")
        report.parts[name] = "interrupted"
        try:
            with measure.limit(LIMITS[name]):
                part()
            report.parts[name] = "done"
        except Exception as error:
            report.parts[name] = f"failed: {type(error).__name__}: {error}".splitlines()[0]
            measure.say(report.parts[name])
            if name == "conformance":
                report.notes.append("Conformance is not green, so nothing was measured after it.")
                return


def _parts(report: "Report", chosen: argparse.Namespace) -> dict[str, Callable[[], None]]:  # type: ignore[name-defined]
    from lab.measure.gpu import generation, measure, speed
    from lab.measure.gpu.models import DRY, FULL, Subject

    scale = DRY if chosen.dry_run else FULL

    @cache
    def subject() -> Subject:
        measure.say("making the model")
        return Subject.random(scale) if chosen.model is None else Subject.loaded(chosen.model, scale)

    def speeds() -> None:
        speed.s1(report, scale)
        speed.whole_prefill(report, scale, subject())

    return {
        "ceilings": partial(speed.ceilings, report, scale),
        "conformance": partial(generation.conformance, report, scale),
        "sessions": lambda: _of("sessions").sessions(report, scale),
        "generation": lambda: generation.generation(report, scale, subject()),
        "speed": speeds,
        "profile": lambda: speed.profile(report, scale, subject()),
        "ragged": lambda: _of("decoding").ragged(report, scale),
        "decoding": lambda: _of("decoding").decoding(report, scale, subject()),
        "policies": lambda: _of("decoding").policies(report, scale, subject()),
        "families": lambda: _of("sessions").families(report, scale),
        "splices": lambda: _of("decoding").splices(report, scale, subject()),
        "batched": lambda: _of("decoding").batched(report, scale, subject()),
    }


def _of(module: str) -> Any:
    """Return a module, imported when its part runs. If a package is missing, the other parts still run."""
    return import_module(f"lab.measure.gpu.{module}")


def _header(words: list[str]) -> dict[str, str]:
    import torch

    from spec import SPEC_VERSION

    gpu = torch.cuda.is_available()
    versions = {name: _version(name) for name in PACKAGES}
    return {
        "device": torch.cuda.get_device_name() if gpu else f"{platform.machine()} CPU, interpreter",
        "date": datetime.datetime.now(tz=datetime.UTC).date().isoformat(),
        "command": " ".join(["python -m lab.measure.gpu", *words]),
        "spec": SPEC_VERSION,
        "commit": _output_of("git", "rev-parse", "--short", "HEAD"),
        "python": platform.python_version(),
        **versions,
        **({"memory": f"{torch.cuda.get_device_properties(0).total_memory / 1e9:.0f} GB",
            "driver": _output_of("nvidia-smi", "--query-gpu=driver_version", "--format=csv,noheader"),
            "cuda": str(torch.version.cuda)} if gpu else {}),
    }


def _version(name: str) -> str:
    try:
        return version(name)
    except PackageNotFoundError:
        return "not installed"


def _output_of(*command: str) -> str:
    try:
        result = subprocess.run(command, cwd=ROOT, capture_output=True, text=True, check=False, timeout=20)
    except OSError:
        return "unknown"
    return result.stdout.strip() or "unknown"


if __name__ == "__main__":
    sys.exit(main())
