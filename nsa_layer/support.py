"""The table of what the kernels support on each architecture; every refusal and every choice of a backend reads it."""

from __future__ import annotations

import os
import re
from collections.abc import Callable
from dataclasses import replace
from functools import lru_cache
from importlib import import_module
from types import ModuleType

import torch

from nsa_layer.call import Call
from nsa_layer.config import NSAConfig

BACKENDS = {"cute": "nsa_layer.cute.backend", "eager": "nsa_layer.eager.backend", "reference": "nsa_layer.reference"}
ARCHITECTURES = {90: "runs", 100: "compiles"}  # no GPU has run sm_100: it is compiled, and traced in tests
KV_TILE = 128  # tokens of the kernels' key/value tile
UNION_ROWS = 128  # of a tile that reads the union of its queries' lists
UNION_BLOCK = 64  # keys of an entry of a union of a tile's lists
LEAST_BLOCK = 16  # keys of a listed block; those smaller than an entry share it
# Of the kernels that select blocks: blocks of a list, compressed keys that overlap a block, query heads of a group.
MOST_BLOCKS, MOST_BLOCKS_BY_INDEX, MOST_OVERLAPS = 64, 128, 64
INDEX_DIMS = (16, 32, 64, 128)
INDEX_SIZES = f"{', '.join(map(str, INDEX_DIMS[:-1]))} or {INDEX_DIMS[-1]}"
MOST_HEADS_BY_TILE, MOST_HEADS_BY_TOKEN = 32, 128
KERNEL_DTYPES = (torch.float16, torch.bfloat16)
# (D, Dv) that kernels are compiled for, ascending; others are padded.
NATIVE_DIMS = ((64, 64), (96, 96), (128, 128), (192, 128), (256, 256))
WIDEST_IN_DECODE = 128  # D of the kernels of few queries on caches, which take all D and Dv up to it
DIM_STEP, LEAST_DIM = 8, 16  # D and Dv are multiples of the first, and at least the second
MULTIPLES = f"multiples of {DIM_STEP} from {LEAST_DIM} to {NATIVE_DIMS[-1][0]}"
WIDEST_BY_KEY_TILE = 128  # D of Hopper's kernels over lists of key tiles


def backend_module(backend: str) -> ModuleType:
    """The module with a backend's `forward` and `backward`; the reference's has `attend`."""
    return import_module(BACKENDS[backend])


def hopper_kv_tile(block_size: int) -> int:
    """Tokens of the key/value tile of Hopper's block-sparse kernels."""
    return 64 if block_size == 64 else KV_TILE


def reads_unions(config: NSAConfig, D: int, *, listed: bool) -> bool:
    """True if a kernel's tile of 128 rows reads the union of the lists of its queries; else tiles of 128 and 256
    queries have lists of key tiles, on Hopper, each wholly in a listed block.

    Args:
        D: the head dimension of q and k.
        listed: the lists are the caller's.
    """
    if listed or config.q_tile < UNION_ROWS or D > WIDEST_BY_KEY_TILE:
        return True
    if config.block_size % hopper_kv_tile(config.block_size):
        return True
    return kernel_family(device_arch()) == 100


def native_dims(D: int, Dv: int) -> tuple[int, int]:
    """The dimensions that the kernels compute with: the smallest of `NATIVE_DIMS` that hold these, or, where none
    does, these."""
    return next((dims for dims in NATIVE_DIMS if dims[0] >= D and dims[1] >= Dv), (D, Dv))


def kernel_dims(call: Call, *, needs_grad: bool) -> tuple[int, int]:
    """The dimensions of the rows that the kernels read for a call: native ones, or those that it has. TMA puts zeros
    behind rows of the selected branch alone, on Hopper, without a gradient, if a tile holds whole tokens."""
    dims, native = call.dims, native_dims(*call.dims)
    in_place = call.one_branch and not needs_grad and UNION_ROWS % call.q_heads_per_list == 0
    if dims == native or not in_place or call.k.shape[-1] != dims[0]:
        return native
    on_hopper = kernel_family(device_arch(call.q.device.index)) == 90
    return dims if on_hopper and reads_unions(call.config, native[0], listed=call.spec.listed) else native


def _has_other_dims(call: Call) -> bool:
    D, Dv = dims = call.dims
    return native_dims(*dims) not in NATIVE_DIMS or Dv > D or Dv < LEAST_DIM or any(d % DIM_STEP for d in dims)


def _selects(call: Call) -> bool:
    """True if blocks are selected by the compressed branch."""
    return call.block_indices is None and call.config.rule != "index"


def _has_too_long_lists(call: Call) -> bool:
    most = MOST_BLOCKS_BY_INDEX if call.config.rule == "index" else MOST_BLOCKS
    return call.block_indices is None and call.config.block_counts > most


def _has_too_many_heads(call: Call) -> bool:
    most = MOST_HEADS_BY_TOKEN if call.config.by_token else MOST_HEADS_BY_TILE
    return _selects(call) and call.q_heads_per_list > most


def _has_too_many_overlaps(call: Call) -> bool:
    overlaps = (call.config.block_size + call.config.span) // call.config.stride - 1
    return _selects(call) and call.config.by_token and overlaps > MOST_OVERLAPS


# Features that the kernels have on all `ARCHITECTURES`, and those that they lack on all, with a test of the calls that
# ask for them. The other backends have everything. A tile of a union has a bit for each token and each small block of
# an entry.
SUPPORTED = (
    *(f"dtype {str(dtype).removeprefix('torch.')}" for dtype in KERNEL_DTYPES),
    *(f"head dimensions {dims}" for dims in NATIVE_DIMS),
    f"other {MULTIPLES}, Dv <= D: rows copied and padded, on Hopper with the selected branch alone and no gradients "
    "those of k and v only",
    f"block_size that divides {KV_TILE} or is a multiple of {UNION_BLOCK}",
    "any compress_stride, not causal",
    "rule='index'",
    "branches left out",
    "q_tile 1",
    "q_tile 2 to 64",
    "q_tile 128 and 256",
    "block_indices",
    "selected_attention",
    "k_cmp, v_cmp, k_win, v_win",
    "deterministic forward",
    "deterministic backward",
    "packed sequences",
    "nsa_with_kvcache",
    "caches in float8_e4m3fn",
    "context parallelism",
)
LACKING: dict[str, Callable[[Call], bool]] = {
    "dtype float32": lambda call: call.q.dtype is torch.float32,
    "dtype float64": lambda call: call.q.dtype is torch.float64,
    f"head dimensions other than {MULTIPLES}, Dv <= D": _has_other_dims,
    "any other block_size": lambda call: KV_TILE % call.config.block_size and call.config.block_size % UNION_BLOCK,
    f"block_size below {LEAST_BLOCK}": lambda call: call.config.block_size < LEAST_BLOCK,
    "block_size 16 with G below 4, 32 with 1": lambda call: (
        call.q_heads_per_list * call.config.block_size < UNION_BLOCK
    ),
    f"block_counts above {MOST_BLOCKS}, of an index above {MOST_BLOCKS_BY_INDEX}": _has_too_long_lists,
    f"G above {MOST_HEADS_BY_TOKEN} with q_tile 1, above {MOST_HEADS_BY_TILE} with others": _has_too_many_heads,
    f"blocks that more than {MOST_OVERLAPS} compressed keys overlap": _has_too_many_overlaps,
    "compress_offset 0 with compress_stride 1": lambda call: (
        call.config.span > call.config.stride == 1 and not call.config.offset
    ),
    "rule='seed'": lambda call: call.config.rule == "seed",
    f"index of other than {INDEX_SIZES} dimensions": lambda call: (
        call.q_index is not None and call.q_index.shape[-1] not in INDEX_DIMS
    ),
}


def device_arch(index: int | None = None) -> int:
    """The architecture that kernels are made for: 90 for Hopper, 100 for Blackwell, 0 without a GPU.

    ``FLASH_ATTENTION_ARCH`` (such as "sm_90") overrides what the device says, as it does for the kernels.

    Args:
        index: of the GPU; None: the current one.
    """
    if index is None and torch.cuda.is_available():
        index = torch.cuda.current_device()
    return _device_arch(os.environ.get("FLASH_ATTENTION_ARCH"), index)


device_arch._dynamo_marked_constant = True  # PyTorch 2.11 cannot trace a pattern that was never compiled


@lru_cache(maxsize=None)
def _device_arch(forced: str | None, index: int | None) -> int:
    if forced:
        match = re.fullmatch(r"(?:sm_?)?(\d+)[af]?", forced, re.IGNORECASE)
        if not match:
            raise ValueError(f"FLASH_ATTENTION_ARCH must look like sm_90, got {forced!r}")
        return int(match[1])
    major, minor = torch.cuda.get_device_capability(index) if torch.cuda.is_available() else (0, 0)
    return major * 10 + minor


def kernel_family(arch: int) -> int:
    """90 for every Hopper part, 100 for every datacenter Blackwell part, else the architecture itself."""
    return {9: 90, 10: 100}.get(arch // 10, arch)


def has_kernels(x: torch.Tensor) -> bool:
    """True if x is on a GPU that there are kernels for."""
    return x.device.type == "cuda" and kernel_family(device_arch(x.device.index)) in ARCHITECTURES


def missing_feature(call: Call, arch: int) -> str | None:
    """The first feature that a call asks for and the kernels lack on this architecture, or None."""
    if kernel_family(arch) not in ARCHITECTURES:
        return "kernels"
    return next((name for name, asks in LACKING.items() if asks(call)), None)


def choose_backend(backend: str | None, call: Call, device: torch.device) -> str:
    """The backend that runs: the one that is named, or an error; for None the kernels on a supported GPU, else eager.

    A GPU with kernels that lack something asked for is an error too: nothing slower runs unless it is named.

    Raises:
        ValueError: no such backend, or the kernels are named for tensors that are not on a GPU.
        NotImplementedError: the kernels lack something on this architecture; the message says what.
    """
    if backend is not None and not (isinstance(backend, str) and backend in BACKENDS):
        raise ValueError(f"backend must be None or one of {', '.join(map(repr, BACKENDS))}, got {backend!r}")
    if backend in ("eager", "reference"):
        return backend
    if device.type != "cuda":
        if backend == "cute":
            raise ValueError(f"backend='cute' needs tensors on a GPU, got {device}; use backend='eager'")
        return "eager"
    arch = device_arch(device.index)
    if backend is None and kernel_family(arch) not in ARCHITECTURES:
        return "eager"
    if (missing := missing_feature(call, arch)) is not None:
        asked = "dtype={}, D={}, Dv={}, {}".format(call.q.dtype, *call.dims, call.config)
        raise NotImplementedError(f"sm_{arch}: the kernels do not support {missing} ({asked}); backend='eager' does")
    return "cute"


def on_backend(backend: str | None, call: Call) -> Call:
    """The call as it runs: deterministic where PyTorch asks for it, on the backend of `choose_backend`."""
    spec = call.spec.in_force()
    if backend == "reference" and call.cache is None and call.cu_seqlens is not None and torch.compiler.is_compiling():
        raise NotImplementedError("backend='reference' reads cu_seqlens, so that a graph can have no packed sequences")
    name = choose_backend(backend, call, call.q.device)
    return call._replace(spec=spec if name == spec.backend else replace(spec, backend=name))
