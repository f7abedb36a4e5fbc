"""Grouped input gradient in CUDA C++ (wgmma and TMA), for compute capability 9.0 and BF16.

:mod:`torch.utils.cpp_extension` builds the kernel at the first use. On each device, the module compares the kernel with
FP32 products before training uses it.
"""

from __future__ import annotations

import ctypes
import functools
import socket
from pathlib import Path
from typing import Any

import torch

from moevement_kernels.cuda.locked import locked
from moevement_kernels.tiles import RowTiles, Tiles, row_tiles
from moevement_kernels.weights import Weights

NAME = "moevement_grouped_product"
SOURCES = Path(__file__).parent
FLAGS = ("-std=c++17", "-O3", "-gencode=arch=compute_90a,code=sm_90a")
ROWS = 128
"""Number of rows of a tile; equal to the constant ``BM`` in ``grouped_product.cu``."""
BUILD_LIMIT_S = 600.0
"""Longest time to wait while another process builds the kernel, in seconds. A build takes less than a minute."""
_DESCRIPTION_BYTES = 128
_TOLERANCE = 2**-6
"""Largest allowed difference between kernel and FP32 products, relative to the largest element.

The kernel may differ because BF16 rounds to 2^-9, and because it adds products in another order than torch.
"""


class CudaKernelError(RuntimeError):
    """Error for a kernel that cannot be built or run, or that computes wrong results on this device."""


def fits(left: torch.Tensor, weights: Weights, rows: RowTiles, size: Tiles) -> bool:
    """Return True if the kernel supports these arguments on their GPU.

    The result does not depend on which experts are frozen, because a replay must use the same kernel as the original
    iteration.
    """
    return (
        left.is_cuda
        and left.dtype == torch.bfloat16
        and size.rows == ROWS
        and left.shape[1] % 8 == 0
        and weights.columns % 8 == 0
        and torch.cuda.get_device_capability(left.device)[0] == 9
    )


def run(left: torch.Tensor, weights: Weights, rows: RowTiles, out: torch.Tensor) -> None:
    """Compute ``out = left W``, where W ``[K, N]`` is the weight of a token's expert.

    For T tokens, ``left`` is ``[T, K]`` and ``out`` is ``[T, N]``.

    Raises:
        CudaKernelError: the kernel cannot run, or its check on this device failed.
    """
    _check_on(left.device.index)
    _run(left, weights, rows, out)


def prepare() -> None:
    """Build the kernel and check it on the current device, so that training does not wait for it later.

    Raises:
        CudaKernelError: see :func:`run`.
    """
    _check_on(torch.cuda.current_device())


def _run(left: torch.Tensor, weights: Weights, rows: RowTiles, out: torch.Tensor) -> None:
    stream = torch.cuda.current_stream(left.device).cuda_stream
    pointers = tuple(weight.data_ptr() for weight in weights.data)
    described = _described(left.device.index, pointers, weights.rows, weights.columns)
    code = library().grouped_product_run(
        ctypes.c_void_p(left.data_ptr()), ctypes.c_int64(left.shape[0]), weights.rows, weights.columns,
        ctypes.c_void_p(described.data_ptr()), ctypes.c_void_p(rows.expert.data_ptr()),
        ctypes.c_void_p(rows.begin.data_ptr()), ctypes.c_void_p(rows.end.data_ptr()), rows.count,
        ctypes.c_void_p(out.data_ptr()), ctypes.c_void_p(stream),
    )  # fmt: skip
    _raise(code, "running")


@functools.lru_cache(maxsize=1024)
def _described(device: int, pointers: tuple[int, ...], inner: int, columns: int) -> torch.Tensor:
    """Return the tensor maps (of TMA) through which the hardware reads the weights.

    The maps hold addresses of weights. Weights stay at their addresses during training, so the maps are cached.
    """
    array = (ctypes.c_void_p * len(pointers))(*pointers)
    on_device = torch.empty(len(pointers) * _DESCRIPTION_BYTES, dtype=torch.uint8, device=f"cuda:{device}")
    stream = torch.cuda.current_stream(device).cuda_stream
    code = library().grouped_product_describe(
        array, len(pointers), ctypes.c_int64(inner), ctypes.c_int64(columns), ctypes.c_void_p(on_device.data_ptr()),
        ctypes.c_void_p(stream),
    )  # fmt: skip
    _raise(code, "describing weights for")
    return on_device


def build_folder() -> Path:
    """Return this node's build folder in torch's folder (``TORCH_EXTENSIONS_DIR``), and create it if it is missing.

    Each node has its own folder because nodes may share torch's folder, for example in a home directory on NFS. There,
    locks may not work between nodes.
    """
    from torch.utils import cpp_extension

    folder = Path(cpp_extension._get_build_directory(NAME, verbose=False)) / f"on_{socket.gethostname()}"
    folder.mkdir(exist_ok=True)
    return folder


@functools.cache
def library() -> Any:
    """Return the library with the kernel. The first process of a node builds the library, and the others wait.

    Raises:
        CudaKernelError: the build failed, or another process has been building for more than ``BUILD_LIMIT_S``.
    """
    from torch.utils import cpp_extension

    try:
        folder = build_folder()
        # Torch's lock file remains if a process is killed during a build; other processes would wait for it forever.
        with locked(folder.with_name(f"{folder.name}.lock"), BUILD_LIMIT_S):
            (folder / "lock").unlink(missing_ok=True)
            path = cpp_extension.load(
                NAME, [str(SOURCES / "grouped_product.cu")], extra_cuda_cflags=list(FLAGS), is_python_module=False,
                build_directory=str(folder), verbose=False,
            )  # fmt: skip
    except (OSError, RuntimeError, ImportError) as error:
        raise CudaKernelError(f"the CUDA kernel cannot be built: {error}; use the Triton kernels") from error
    return ctypes.CDLL(str(path))


@functools.cache
def _check_on(device: int) -> None:
    """Compare the kernel with FP32 products on a problem of uneven sizes, and raise an error if it differs too much.

    The problem is so large that the kernel uses each buffer of its pipeline of loads several times.
    """
    generator = torch.Generator().manual_seed(7)
    # The inner dimension has enough steps to go through all buffers more than twice. There are more row tiles than in
    # one group.
    counts, inner, columns = [130, 0, 1, 1300], 840, 328
    place = torch.device("cuda", device)
    left = torch.randn(sum(counts), inner, generator=generator).to(place, torch.bfloat16)
    weights = Weights([torch.randn(inner, columns, generator=generator).to(place, torch.bfloat16) for _ in counts])
    out = left.new_empty(sum(counts), columns)
    _run(left, weights, row_tiles(counts, ROWS, place), out)
    parts = zip(left.split(counts), weights.data, strict=True)
    wanted = torch.cat([part.float() @ weight.float() for part, weight in parts])
    off = float((out.float() - wanted).abs().max() / wanted.abs().max())
    if not off < _TOLERANCE:
        raise CudaKernelError(
            f"the CUDA kernel is wrong by {off:.3g} of the largest element on {torch.cuda.get_device_name(device)}; "
            f"the limit is {_TOLERANCE}; use the Triton kernels"
        )


def _raise(code: int, doing: str) -> None:
    if code:
        raise CudaKernelError(f"{doing} the CUDA kernel failed with error {code}; use the Triton kernels")
