"""Compile every Triton kernel for an architecture, on any machine, and say what came out.

``python -m moevement_kernels.compiled --capability 90`` prints a line for each kernel and fails if a matrix product
does not use the architecture's tensor core instruction.
"""

from __future__ import annotations

import argparse
import json
import re
import sys
from collections.abc import Iterator
from dataclasses import asdict, dataclass
from typing import Any

INSTRUCTION = {80: "mma.sync", 90: "wgmma.mma_async"}
"""With which an architecture multiplies matrices."""
_SIZES = {"BM": 128, "BN": 128, "BK": 64, "GROUP": 8}


@dataclass(frozen=True)
class Case:
    """A kernel with its constants."""

    name: str
    kernel: Any
    types: dict[str, str]
    """Of arguments that are no constants, in order."""
    constants: dict[str, Any]
    multiplies: bool
    warps: int = 8


@dataclass(frozen=True)
class Compiled:
    """What came out."""

    name: str
    capability: int
    instruction: str | None
    """Of matrix products, with its shape and dtypes."""
    wide_loads: bool
    """Whether rows come in 16 bytes at a time."""
    shared_bytes: int


def cases(capability: int) -> Iterator[Case]:
    """Every kernel, each dtype and format that the architecture has."""
    from triton import language as tl

    from moevement_kernels import triton_kernels as kernels
    from moevement_kernels import triton_pack, triton_popularity

    table = {"tile_expert": "*i32", "tile_begin": "*i32", "tile_end": "*i32", "tiles": "i32"}
    named = {"bf16": tl.bfloat16, "fp32": tl.float32}
    # FP8 has no conversions before 8.9.
    formats = [("bf16", 0), ("fp32", 0), *([("bf16", 1), ("bf16", 2)] if capability >= 89 else [])]
    for dtype, form in formats:
        any_, sizes = f"*{dtype}", _SIZES | ({"BN": 64, "BK": 32} if dtype == "fp32" else {})
        shared = {"DTYPE": named[dtype], "W_DTYPE": tl.uint8 if form else named[dtype], "FORMAT": form}
        label = f"{dtype}{('', ' fp8 weights', ' fp8 weights by block')[form]}"
        multiplies = dtype != "fp32"  # exact FP32 has no tensor core
        for kind, gated in ((0, True), (2, False)):
            activation = {"KIND": kind, "GATED": gated}
            up = {"x": any_, "p": "*fp32", "w1_at": "*i64", "scale_at": "*i64", "h": any_, "a": any_, **table,
                  "H": "i32", "F": "i32", "scale_stride": "i32"}  # fmt: skip
            yield Case(f"up {label} {'gated' if gated else 'plain'}", kernels.up_kernel, up,
                       {**activation, **shared, **sizes, "BN": 64 if gated else sizes["BN"]}, multiplies)  # fmt: skip
            e5m2 = form > 0
            back = {"dy": "*u8" if e5m2 else any_, "dy_scale": "*fp32", "h": any_, "p": "*fp32", "w2_at": "*i64",
                    "scale_at": "*i64", "dh": any_, "dp_parts": "*fp32", **table, "tokens": "i32", "H": "i32", "F": "i32",
                    "scale_stride": "i32"}  # fmt: skip
            yield Case(f"hidden gradient {label} {'gated' if gated else 'plain'}", kernels.hidden_gradient_kernel, back,
                       {**activation, "DY_IS_E5M2": e5m2, **shared, **sizes}, multiplies)  # fmt: skip
        product = {"left": any_, "w_at": "*i64", "scale_at": "*i64", "out": any_, **table, "K": "i32", "N": "i32",
                   "stride": "i32", "scale_stride": "i32"}  # fmt: skip
        for transposed in (True, False):
            yield Case(f"product {label} {'W^T' if transposed else 'W'}", kernels.product_kernel, product,
                       {"TRANSPOSED": transposed, **shared, **sizes}, multiplies)  # fmt: skip
        if not form:
            weight = {"left": any_, "right": any_, "p": "*fp32", "out_at": "*i64", "left_offsets": "*i64",
                      "right_offsets": "*i64", "M": "i32", "N": "i32"}  # fmt: skip
            for from_h in (False, True):
                constants = {"FROM_H": from_h, "KIND": 0, "GATED": from_h, "ACCUMULATE": True}
                yield Case(f"weight gradient {label} {'from h' if from_h else ''}".strip(), kernels.weight_gradient_kernel,
                           weight, {**constants, **{key: sizes[key] for key in ("BM", "BN", "BK")}}, multiplies)  # fmt: skip
    pack = {"address": "*i64", "buffer": "*u8", "target": "*i64", "place": "*i64", "left": "*i64", "sums": "*i64"}
    for source, target, item in ((tl.float32, tl.float32, 4), (tl.float32, tl.bfloat16, 2), (tl.uint8, tl.uint8, 1)):
        yield Case(f"pack {source} to {target}", triton_pack.pack_kernel, pack,
                   {"SOURCE": source, "TARGET": target, "ITEM": item, "CHUNK": 4096}, False, 4)  # fmt: skip
    count = {"routed": "*u8", "probabilities": "*fp32", "hard": "*i32", "soft": "*fp32", "tokens": "i32", "experts": "i32"}
    yield Case("popularity", triton_popularity.count_kernel, count, {"BT": 128, "BE": 32}, False, 4)


def compile_case(case: Case, capability: int) -> Compiled:
    """Down to the machine's code.

    Raises:
        RuntimeError: matrix products do not use the architecture's instruction.
    """
    import triton
    from triton.backends.compiler import GPUTarget
    from triton.compiler import ASTSource

    names = list(case.kernel.arg_names)
    signature = {name: case.types.get(name, "constexpr") for name in names}
    # As it is at run time: torch's memory begins at multiples of 16 bytes, and hidden sizes are multiples of 16.
    even = {name for name, kind in case.types.items() if kind.startswith("*") or name in ("H", "F", "K", "N", "M", "stride")}
    attributes = {(names.index(name),): [["tt.divisibility", 16]] for name in even}
    source = ASTSource(
        case.kernel, signature, {(names.index(name),): value for name, value in case.constants.items()}, attributes
    )
    options = {"num_warps": case.warps, "num_stages": 3}
    made = triton.compile(source, target=GPUTarget("cuda", capability, 32), options=options)
    ptx = made.asm["ptx"]
    wanted = INSTRUCTION[capability]
    found = re.search(re.escape(wanted) + r"[\w.:]*", ptx)
    if case.multiplies and not found:
        raise RuntimeError(f"{case.name} for {capability}: no {wanted} in its PTX")
    wide = bool(re.search(r"cp\.async\.\w+\.shared\.global[\w.:]* [^;]*, 0x10\b|ld\.global[\w.:]*\.v4\.b32", ptx))
    return Compiled(case.name, capability, found[0] if found else None, wide, made.metadata.shared)


def main() -> int:
    """Compile all; returns the exit code."""
    parser = argparse.ArgumentParser(prog="python -m moevement_kernels.compiled", description=__doc__)
    parser.add_argument("--capability", type=int, nargs="+", default=[90], choices=sorted(INSTRUCTION))
    parser.add_argument("--json", action="store_true", help="print one JSON object as the last line")
    given = parser.parse_args()
    made = []
    for capability in given.capability:
        for case in cases(capability):
            made.append(compile_case(case, capability))
            one = made[-1]
            print(f"{capability}  {one.name:48} {one.shared_bytes:7} B shared  {one.instruction or ''}", flush=True)
    if given.json:
        print(json.dumps([asdict(one) for one in made]))
    return 0


if __name__ == "__main__":
    sys.exit(main())
