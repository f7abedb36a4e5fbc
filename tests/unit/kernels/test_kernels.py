"""Checks of kernels without a GPU: under Triton's interpreter, in their machine code, and by CUDA's compiler."""

from __future__ import annotations

import json
import os
import re
import shutil
import subprocess
import sys
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import pytest
import triton
from moevement_kernels import cuda
from moevement_kernels.compiled import Case, compile_case

from moevement_core.snapshot import triton_sums
from tests.training import ROOT

pytestmark = pytest.mark.builds

COMPILED_FOR = (90, 80)
LIMIT_S = 1800
"""Time limit in seconds. An idle machine needs half a minute, or two minutes for all kernels."""


@dataclass(frozen=True)
class Kernels:
    """Choice of kernels to compile, and of tests to run under the interpreter."""

    match: tuple[str, ...]
    """Texts that select kernels: the name of each compiled kernel contains at least one."""
    for_hopper: int
    """Number of kernels for Hopper."""
    marked: str
    """Expression of markers that selects the tests."""


CHOSEN = {
    "swiglu in bf16": Kernels(
        ("bf16, swiglu", "product bf16", "weight gradient bf16"), for_hopper=2 + 2 + 2, marked="not full"
    ),
    "all": Kernels(("bf16", "fp16", "fp32"), for_hopper=3 * (2 * 5 + 2 + 2), marked=""),
}  # fmt: skip
"""Choices by name. ``for_hopper`` is, per dtype: two kernels per activation, two products and two weight gradients."""


@pytest.fixture(scope="module", params=["swiglu in bf16", pytest.param("all", marks=pytest.mark.full)])
def kernels(request: pytest.FixtureRequest) -> Kernels:
    """Return the choice of one activation and dtype, or of all."""
    return CHOSEN[request.param]


@pytest.fixture(scope="module")
def processes(kernels: Kernels, tmp_path_factory: pytest.TempPathFactory) -> Iterator[dict[str, subprocess.Popen[str]]]:
    """Start interpreter and compiler side by side, because each needs one core for most of half a minute."""
    pytest_ = [sys.executable, "-m", "pytest", "-q", "-p", "no:cacheprovider", "-m", kernels.marked, "tests/kernels"]
    compiled = [sys.executable, "-W", "ignore", "-m", "moevement_kernels.compiled", "--json", "--match", *kernels.match]
    common = {**os.environ, "OMP_NUM_THREADS": "1", "TRITON_CACHE_DIR": str(tmp_path_factory.mktemp("cache"))}
    # Triton reads TRITON_INTERPRET when it is imported.
    started = {
        name: subprocess.Popen(
            command, cwd=ROOT, env={**common, **more}, text=True, stdout=subprocess.PIPE, stderr=subprocess.STDOUT
        )
        for name, command, more in (
            ("interpreted", pytest_, {"TRITON_INTERPRET": "1"}),
            ("compiled", [*compiled, "--capability", *map(str, COMPILED_FOR)], {}),
        )
    }
    yield started
    for process in started.values():
        process.kill()


@pytest.fixture(scope="module")
def figures(processes: dict[str, subprocess.Popen[str]]) -> list[dict[str, Any]]:
    """Return the figures of each compiled kernel."""
    out, _ = processes["compiled"].communicate(timeout=LIMIT_S)
    assert processes["compiled"].returncode == 0, out
    return list(json.loads(out.splitlines()[-1]))


def test_kernels_compile_to_tensor_core_instructions(figures: list[dict[str, Any]], kernels: Kernels) -> None:
    products = [kernel for kernel in figures if "bf16" in kernel["name"]]
    assert {kernel["capability"] for kernel in products} == set(COMPILED_FOR)
    for kernel in products:
        assert kernel["instruction"].startswith("wgmma" if kernel["capability"] == 90 else "mma.sync"), kernel
        assert kernel["narrow_loads"] == 0, kernel
        assert kernel["shared_bytes"] <= (227 if kernel["capability"] == 90 else 163) << 10, kernel


def test_all_of_a_kernel_is_in_registers(figures: list[dict[str, Any]], kernels: Kernels) -> None:
    """Check that no kernel for sm_90a spills registers."""
    of_hopper = [kernel for kernel in figures if kernel["capability"] == 90]
    assert len(of_hopper) == kernels.for_hopper
    spilled = {kernel["name"]: (kernel["spill_stores"], kernel["spill_loads"]) for kernel in of_hopper}
    assert {name: bytes_ for name, bytes_ in spilled.items() if bytes_ != (0, 0)} == {}
    assert all(0 < kernel["registers"] <= 255 for kernel in of_hopper)


def test_kernels_under_the_interpreter(processes: dict[str, subprocess.Popen[str]]) -> None:
    """Check that ``tests/kernels`` pass under Triton's interpreter."""
    out, _ = processes["interpreted"].communicate(timeout=LIMIT_S)
    assert processes["interpreted"].returncode == 0, out[-8000:]
    assert " passed" in out or "[100%]" in out, out


@pytest.mark.parametrize("words", ["u8", "i16", "i32", "i64"])
def test_sums_of_state_compile(words: str) -> None:
    constants = {"FIRST": 3, "SECOND": 5, "BLOCK_WORDS": triton_sums.BLOCK, "BLOCKS_EACH": triton_sums.BLOCKS}
    pointers = {"data": f"*{words}", "total": "*i64", "words": "i64", "place": "i64"}
    compiled = compile_case(Case("sums", triton_sums._sums, constants, pointers, multiplies=False, warps=4), 90)
    assert (compiled.spill_stores, compiled.spill_loads) == (0, 0)


@pytest.mark.skipif(shutil.which("nvcc") is None, reason="there is no nvcc")
def test_the_cuda_source_compiles(tmp_path: Path) -> None:
    source = Path(cuda.__file__).with_name("grouped_product.cu")
    cubin = tmp_path / "out.cubin"
    command = ["nvcc", "-std=c++17", "-O3", "-arch=sm_90a", "-Xptxas", "-v", "--keep", "--keep-dir", str(tmp_path)]
    ran = subprocess.run([*command, "-cubin", "-o", str(cubin), str(source)], capture_output=True, text=True)
    assert ran.returncode == 0, ran.stderr
    spilled = re.findall(r"(\d+) bytes spill", ran.stderr)
    assert set(spilled) == {"0"}, ran.stderr
    assert "serialized" not in ran.stderr, ran.stderr  # the warning of ptxas if it waits for each product
    ptx = next(tmp_path.glob("*.ptx")).read_text()
    assert "wgmma.mma_async.sync.aligned.m64n256k16.f32.bf16.bf16" in ptx
    assert "cp.async.bulk.tensor.2d" in ptx
    assert waits(cubin)[-1] == 0
    assert set(waits(cubin)[:-1]) == {1}


def waits(cubin: Path) -> list[int]:
    """Return, for each wait in the machine code, the number of product groups that may still be in flight."""
    disassembler = Path(triton.__file__).parent / "backends" / "nvidia" / "bin" / "cuobjdump"
    ran = subprocess.run([disassembler, "-sass", cubin], capture_output=True, text=True, check=True)
    return [int(depth, 16) for depth in re.findall(r"WARPGROUP\.DEPBAR\.LE gsb0, (0x[0-9a-f]+)", ran.stdout)]
