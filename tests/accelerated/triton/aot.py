"""Compilation of the kernels without a GPU: `python -m tests.accelerated.triton.aot [widths]`.

TRITON_INTERPRET must not be set, because an interpreted kernel cannot be compiled. The test uses `--json`.
"""

import argparse
import json
import re
import subprocess
import sys
import tempfile
from collections.abc import Iterator
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any

import triton
from triton.backends.compiler import GPUTarget
from triton.compiler import ASTSource

from accelerated.triton_gpu import activation, kernels, launch, nestedkv
from accelerated.triton_gpu.launch import AttentionTiles, Shape
from spec.parameters import NESTEDKV

FLOATS = {"factor", "unit", "share", "tau", "bound", "low", "high", "epsilon"}
_TYPES = {
    "*fp32": "LSE TOP LOG PEAK WEIGHT A COLUMN SALIENCE INVERSE BLOCK STABLE ANOMALY",
    "*fp64": "NUMBERS SCORE NORM RANGES SURPRISE",
    "*i64": "INDEX",
    "*i32": "ACTIVE",
}
POINTERS = {name: kind for kind, names in _TYPES.items() for name in names.split()}
ALIGNED = {*POINTERS, "Q", "K", "q_head", "q_row", "k_head", "k_row"}
NVIDIA = r"REG:(?P<registers>\d+) STACK:(?P<stack>\d+) .*?LOCAL:(?P<local>\d+)"
AMD = r"\.private_segment_fixed_size: (?P<stack>\d+).*\.vgpr_count: +(?P<registers>\d+)"
HEADS, GROUP, K_CROSS, K_INTRA = 32, 4, 4, 8


@dataclass(frozen=True)
class Target:
    """Device for which kernels are compiled. A program can use `registers` registers and `shared` bytes there."""

    gpu: GPUTarget
    text: str
    """Name of the assembler text."""
    matrix: str
    """Pattern of the instructions whose factors have fewer bits than float32."""
    registers: int
    shared: int


TARGETS = {
    "sm_80": Target(GPUTarget("cuda", 80, 32), "ptx", r"\bmma\.sync", 65536, 163 * 1024),
    "sm_90": Target(GPUTarget("cuda", 90, 32), "ptx", r"wgmma\.mma_async", 65536, 227 * 1024),
    "gfx942": Target(GPUTarget("hip", "gfx942", 64), "amdgcn", r"\bv_mfma\w*(?:bf16|xf32)", 131072, 64 * 1024),
}


@dataclass(frozen=True)
class Job:
    """Kernel, with the constants of one launch."""

    module: Any
    kernel: str
    element: str
    shape: Shape
    constants: dict[str, Any]
    options: dict[str, bool]


@dataclass(frozen=True)
class Compiled:
    """Resources of a compiled kernel. `local` and `spilled` are bytes per thread."""

    target: str
    kernel: str
    element: str
    d: int
    rows: int
    columns: int
    warps: int
    registers: int
    stack: int
    local: int
    shared: int
    matrix: int
    fused: int
    """Fused multiply-adds in float64 of a CUDA target. On an AMD target, each quotient and square root has some."""


def jobs(d: int, element: str) -> Iterator[Job]:
    """Return the kernels of S1 for a layer like a layer of Llama-3.1-8B, with heads of d channels."""
    D = max(16, triton.next_power_of_2(d))
    tiles: AttentionTiles = launch.attention_tiles(D, 4 if element == "fp32" else 2, False)
    widths = {"d": d, "D": D, "CAPPED": False, "GROUP": GROUP}

    def sized(shape: Shape) -> dict[str, int]:
        return {"ROWS": shape.rows, "KEYS": shape.columns}

    def job(kernel: str, shape: Shape, constants: dict[str, Any]) -> Job:
        return Job(kernels, kernel, element, shape, constants, launch.FLOAT32)

    packed = {**widths, **sized(tiles.softmax), "PACK": GROUP, "ROWS": tiles.softmax.rows // GROUP}
    yield job("row_softmax", tiles.softmax, {**packed, "KNOWN": False})
    yield job("row_softmax", tiles.softmax, {**packed, "KNOWN": True})
    plain = Shape(tiles.cross.rows, tiles.cross.columns)
    yield job("active_tiles", plain, {"H": HEADS, **sized(tiles.cross)})
    best = {"PLACES": triton.next_power_of_2(K_CROSS), "TAKE": K_CROSS}
    yield job("cross_neighbours", tiles.cross, {**widths, **sized(tiles.cross), **best, "H": HEADS})
    yield job("chunk_attention", tiles.chunk, {**widths, **sized(tiles.chunk), "H": HEADS})
    tokens = {"H": HEADS, "HEADS": HEADS, "ROWS": tiles.chunk.rows, "TOKENS": tiles.tokens, "TAKE": 3}
    yield job("salience", Shape(tiles.tokens, HEADS), tokens)
    yield job("row_normalise", tiles.normalise, sized(tiles.normalise))
    best = {"PLACES": triton.next_power_of_2(K_INTRA), "TAKE": K_INTRA}
    chosen = {"ROWS": tiles.intra.rows, "COLUMNS": tiles.intra.columns, "DEPTH": tiles.depth}
    yield job("intra_neighbours", tiles.intra, {**chosen, **best})
    rows = launch.nested_rows(D, NESTEDKV.W)
    for kernel in ("measured", "anomalies"):
        yield Job(nestedkv, kernel, element, Shape(rows, D, 8), {"d": d, "ROWS": rows, "D": D}, launch.FLOAT32)


def later_jobs() -> Iterator[Job]:
    """Return the kernels of key norms, and of NestedKV after the cosines."""
    row = launch.searched_row(False)
    for module, kernel, shape, constants in (
        (activation, "mean_inverse_norms", Shape(launch.NORMS, 1), {"NORMS": launch.NORMS, "WIDTH": 128}),
        (nestedkv, "stable_direction", Shape(128, 1), {"D": 128}),
        (nestedkv, "extremes", row, {"SCAN": row.columns}), (nestedkv, "surprises", row, {"SCAN": row.columns}),
        (nestedkv, "routed", Shape(launch.LANES, 1), {"LANES": launch.LANES}),
    ):
        yield Job(module, kernel, "fp64", shape, constants, launch.FLOAT64)


def _type_of(argument: str, job: Job) -> str:
    if argument in job.constants:
        return "constexpr"
    if argument in FLOATS:
        return "fp32"
    return f"*{job.element}" if argument in ("Q", "K") else POINTERS.get(argument, "i32")


def _compiled(job: Job, ones: set[str], target: str = "sm_90") -> Any:
    """Compile the kernel with these arguments equal to 1, which Triton treats as constants."""
    kernel = getattr(job.module, job.kernel)
    names = kernel.arg_names
    values = {**job.constants, **{name: 1 for name in names if name in ones}}
    constants = {(names.index(name),): value for name, value in values.items()}
    signature = {name: "constexpr" if name in values else _type_of(name, job) for name in names}
    aligned = [(i,) for i, name in enumerate(names) if name in ALIGNED and (i,) not in constants]
    attributes = {place: [["tt.divisibility", 16]] for place in aligned}
    source = ASTSource(kernel, signature=signature, constexprs=constants, attrs=attributes)
    options = {"num_warps": job.shape.warps, "num_stages": job.shape.stages, **job.options}
    return triton.compile(source, target=TARGETS[target].gpu, options=options)


def compile_for_ones(job: Job) -> None:
    """Compile with every integer that may be a constant equal to 1: one head, one token. The interpreter has none."""
    parameters = getattr(job.module, job.kernel).params
    _compiled(job, {one.name for one in parameters if not one.do_not_specialize and _type_of(one.name, job) == "i32"})


def compile_job(job: Job, target: str) -> Compiled:
    """Compile, and read the resources that the assembler reports."""
    actual = _compiled(job, {"q_dim", "k_dim"}, target)
    text = actual.asm[TARGETS[target].text]
    report, pattern = (text, AMD) if "hsaco" in actual.asm else (_usage(actual.asm["cubin"]), NVIDIA)
    match = re.search(pattern, report, re.DOTALL)
    if match is None:
        raise RuntimeError(f"the assembler reports no resources: {report[-2000:]}")
    resources = {name: int(value) for name, value in match.groupdict(default="0").items()}
    return Compiled(
        target, job.kernel, job.element, job.constants.get("d", 0), job.shape.rows, job.shape.columns,
        job.shape.warps, resources["registers"], resources["stack"], resources.get("local", 0), actual.metadata.shared,
        len(re.findall(TARGETS[target].matrix, text)),
        len(re.findall(r"\bfma\.rn\.f64", text)),
    )


def _usage(cubin: bytes) -> str:
    """Return the report of cuobjdump."""
    tool = Path(triton.__file__).parent / "backends" / "nvidia" / "bin" / "cuobjdump"
    with tempfile.NamedTemporaryFile(suffix=".cubin") as file:
        file.write(cubin)
        file.flush()
        text = subprocess.run([tool, "-res-usage", file.name], capture_output=True, text=True, check=True)
    return text.stdout + text.stderr


def main(arguments: list[str] | None = None) -> int:
    """Print one line per kernel."""
    parser = argparse.ArgumentParser(prog="tests.accelerated.triton.aot", description=__doc__)
    parser.add_argument("dims", nargs="*", type=int, default=[64, 96, 128, 256])
    parser.add_argument("--elements", default="bf16", help="bf16, fp16, fp32, separated by commas")
    parser.add_argument("--all", action="store_true", help="compile all widths for all targets, not only for sm_90")
    parser.add_argument("--json", action="store_true")
    chosen = parser.parse_args(arguments)
    for target in TARGETS:
        widths = chosen.dims if chosen.all or target == "sm_90" else chosen.dims[-2:-1]
        wanted = [job for element in chosen.elements.split(",") for d in widths for job in jobs(d, element)]
        for job in [*wanted, *later_jobs()]:
            actual = compile_job(job, target)
            print(json.dumps(asdict(actual)) if chosen.json else _line(actual), flush=True)
    for job in [*jobs(chosen.dims[0], "bf16"), *later_jobs()]:
        compile_for_ones(job)
    return 0


def _line(actual: Compiled) -> str:
    return (
        f"{actual.target:6} {actual.kernel:18} {actual.element} d={actual.d:<3} {actual.rows}x{actual.columns}"
        f" w{actual.warps}: {actual.registers} registers, stack {actual.stack}, local {actual.local},"
        f" shared {actual.shared}, tensor cores {actual.matrix}, float64 fma {actual.fused}"
    )


if __name__ == "__main__":
    sys.exit(main())
