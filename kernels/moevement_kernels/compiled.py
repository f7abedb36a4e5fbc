"""Compile every Triton kernel for a GPU architecture, on any machine, and report the results.

``python -m moevement_kernels.compiled --capability 90`` prints a line for each kernel. It fails if a matrix product
does not use the architecture's tensor core instruction. The numbers of registers and spilled bytes come from ptxas.
"""

from __future__ import annotations

import argparse
import contextlib
import io
import json
import re
import sys
from collections.abc import Iterator
from dataclasses import asdict, dataclass
from typing import Any

import torch

from moevement_kernels.activations import Activation
from moevement_kernels.launch import activation_constants
from moevement_kernels.tiles import Tiles, tiles_of

INSTRUCTION = {80: "mma.sync", 90: "wgmma.mma_async"}
"""Instruction of the tensor cores for matrix products, by compute capability (90 is 9.0)."""


@dataclass(frozen=True)
class Case:
    """Kernel to compile, with the values of its compile-time constants."""

    name: str
    kernel: Any
    constants: dict[str, Any]
    pointers: dict[str, str]
    """Types of the kernel's tensor arguments, by name. Arguments that are neither tensors nor constants are int32."""
    multiplies: bool
    warps: int = 8


@dataclass(frozen=True)
class Compiled:
    """Result of a compilation."""

    name: str
    capability: int
    instruction: str | None
    """Instruction of the tensor cores in the kernel, with shape and dtypes; None if the kernel has none."""
    narrow_loads: int
    """Number of load instructions for single elements. A good kernel loads rows and weights in units of 16 bytes."""
    shared_bytes: int
    registers: int
    """Number of registers of a thread."""
    spill_stores: int
    """Bytes of registers that a thread stores in memory because it has no more registers."""
    spill_loads: int
    """Bytes of registers that a thread loads back from memory."""


def cases(capability: int) -> Iterator[Case]:
    """Yield every kernel in each dtype to compile for an architecture.

    The dtypes are BF16 for every architecture, and FP16 and FP32 from capability 9.0 on.
    """
    yield from _mlp_cases("bf16", capability)
    if capability >= 90:
        yield from _mlp_cases("fp16", capability)
        yield from _mlp_cases("fp32", capability)


def _mlp_cases(dtype: str, capability: int) -> Iterator[Case]:
    from triton import language as tl

    from moevement_kernels import triton_kernels as kernels

    held = {"bf16": tl.bfloat16, "fp16": tl.float16, "fp32": tl.float32}[dtype]
    is_fp32 = dtype == "fp32"  # Exact FP32 products do not use tensor cores.
    held_by_torch = {"bf16": torch.bfloat16, "fp16": torch.float16, "fp32": torch.float32}[dtype]
    sizes = _sizes(tiles_of(held_by_torch))
    common = {"DTYPE": held, **sizes, "GROUP": 8}
    pointers = {
        **dict.fromkeys(("x", "h", "a", "left", "right", "out", "dy", "dh"), f"*{dtype}"),
        **dict.fromkeys(("p", "dp_parts"), "*fp32"),
        **dict.fromkeys(("w1_at", "w2_at", "w_at", "out_at"), "*i64"),
        **dict.fromkeys(("offsets", "active_offsets", "left_offsets", "right_offsets"), "*i64"),
        **dict.fromkeys(("tile_expert", "tile_begin", "tile_end"), "*i32"),
    }
    # Training is tuned for 9.0. For other architectures, one gated and one plain activation are enough.
    for kind in Activation if capability == 90 else (Activation.SWIGLU, Activation.GELU):
        constants = {**activation_constants(kind), **common}
        own = _sizes(tiles_of(held_by_torch, two_products=kind.is_gated))
        yield Case(f"up {dtype}, {kind}", kernels.up_kernel, constants | own, pointers, not is_fp32)
        name = f"hidden gradient {dtype}, {kind}"
        yield Case(name, kernels.hidden_gradient_kernel, constants, pointers, not is_fp32)
    for is_transposed in (True, False):
        constants = {"TRANSPOSED": is_transposed, **common}
        name = f"product {dtype}{', transposed' if is_transposed else ''}"
        yield Case(name, kernels.product_kernel, constants, pointers, not is_fp32)
    for accumulates in (False, True):
        name = f"weight gradient {dtype}{', added' if accumulates else ''}"
        constants = {"ACCUMULATE": accumulates, **sizes}
        yield Case(name, kernels.weight_gradient_kernel, constants, pointers, not is_fp32)


def _sizes(tiles: Tiles) -> dict[str, int]:
    return {"BM": tiles.rows, "BN": tiles.columns, "BK": tiles.inner}


def compile_case(case: Case, capability: int) -> Compiled:
    """Compile a kernel to machine code.

    Raises:
        RuntimeError: the kernel multiplies matrices without the architecture's tensor core instruction.
    """
    import triton
    from triton.backends.compiler import GPUTarget
    from triton.compiler import ASTSource

    names = list(case.kernel.arg_names)
    signature = {name: "constexpr" if name in case.constants else case.pointers.get(name, "i32") for name in names}
    # As at run time: torch's tensors begin at multiples of 16 bytes, and sizes of layers are multiples of 16.
    is_even = set(case.pointers) | {"H", "F", "K", "N", "M", "stride"}
    even = [
        param.name
        for param in case.kernel.params
        if param.name in is_even and not (param.do_not_specialize or param.do_not_specialize_on_alignment)
    ]
    attributes = {(names.index(name),): [["tt.divisibility", 16]] for name in even}
    constants = {(names.index(name),): value for name, value in case.constants.items()}
    source = ASTSource(case.kernel, signature, constants, attributes)
    options = {"num_warps": case.warps, "num_stages": 3}
    log = io.StringIO()
    with triton.knobs.compilation.scope(), triton.knobs.nvidia.scope(), contextlib.redirect_stdout(log):
        triton.knobs.compilation.always_compile = True  # A result from Triton's cache would have no register figures.
        triton.knobs.nvidia.dump_ptxas_log = True
        binary = triton.compile(source, target=GPUTarget("cuda", capability, 32), options=options)
    ptx = binary.asm["ptx"]
    wanted = INSTRUCTION[capability]
    instruction = re.search(re.escape(wanted) + r"[\w.:]*", ptx)
    if case.multiplies and not instruction:
        raise RuntimeError(f"{case.name} for capability {capability}: the PTX has no {wanted} instruction")
    narrow = len(re.findall(r"ld\.global[\w.:]*\.b(?:8|16)\b", ptx))
    return Compiled(
        case.name, capability, instruction[0] if instruction else None, narrow, binary.metadata.shared,
        _largest(r"Used (\d+) registers", log.getvalue()), _largest(r"(\d+) bytes spill stores", log.getvalue()),
        _largest(r"(\d+) bytes spill loads", log.getvalue()),
    )  # fmt: skip


def _largest(pattern: str, log: str) -> int:
    """Return the largest number that ``pattern`` finds in the log of ptxas.

    The log has several such numbers: for the kernel, and for each function that it calls.
    """
    return max(int(number) for number in re.findall(pattern, log))


def main() -> int:
    """Compile the kernels that the command line selects, print the results, and return the exit code."""
    parser = argparse.ArgumentParser(prog="python -m moevement_kernels.compiled", description=__doc__)
    parser.add_argument("--capability", type=int, nargs="+", default=[90], choices=sorted(INSTRUCTION))
    parser.add_argument(
        "--match", nargs="+", default=[""], metavar="TEXT", help="compile only kernels whose name contains a TEXT"
    )
    parser.add_argument("--json", action="store_true", help="print all results as a JSON list in the last line")
    arguments = parser.parse_args()
    results = []
    for capability in arguments.capability:
        for case in cases(capability):
            if not any(text in case.name for text in arguments.match):
                continue
            results.append(compile_case(case, capability))
            result = results[-1]
            figures = f"{result.shared_bytes:7} B shared {result.registers:4} registers"
            spilled = f"{result.spill_stores + result.spill_loads:5} B spilled"
            print(f"{capability}  {result.name:52} {figures} {spilled}  {result.instruction or ''}", flush=True)
    if arguments.json:
        print(json.dumps([asdict(result) for result in results]))
    return 0


if __name__ == "__main__":
    sys.exit(main())
