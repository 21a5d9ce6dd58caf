"""Tables of what the kernels support on each architecture; every refusal and every choice of a backend reads them."""

from __future__ import annotations

import os
import re
from collections.abc import Callable
from dataclasses import dataclass, replace
from functools import lru_cache
from importlib import import_module
from types import ModuleType

import torch

from nsa_layer.call import Call
from nsa_layer.config import BRANCHES, NSAConfig

BACKENDS = {
    "cute": "nsa_layer.cute.pages",
    "eager": "nsa_layer.eager.pages",
    "reference": "nsa_layer.reference",
}
ARCHITECTURES = (90, 100)
KV_TILE = 128  # tokens of the kernels' key/value tile
UNION_ROWS = 128  # of a tile that reads the union of its queries' lists
UNION_BLOCK = 64  # keys of an entry of a union, which is what a tile reads of its tokens' lists
LEAST_BLOCK = 16  # keys of a listed block; those smaller than an entry share it
# Of the kernels that select blocks: blocks of a list, compressed keys that overlap a block, query heads of a group.
MOST_BLOCKS, MOST_OVERLAPS = 64, 64
INDEX_DIMS = (16, 32, 64, 128)
MOST_HEADS_BY_TILE, MOST_HEADS_BY_TOKEN = 32, 128
KERNEL_DTYPES = (torch.float16, torch.bfloat16)
# (D, Dv) of attention, and where the kernels take it.
HEAD_DIMS = {(64, 64): ARCHITECTURES, (128, 128): ARCHITECTURES, (96, 96): (), (192, 128): ()}
ROW_LENGTHS = {D for dims, archs in HEAD_DIMS.items() if archs for D in dims}
# Of PyTorch, that take the layer whatever a call asks for (see docs/pytorch.md), and those that take no reference:
# it loops over sequences, and is no operator.
PYTORCH = {
    "torch.compile, fullgraph, any length": True,
    "torch.compile, packed sequences": False,
    "torch.compile, reduce-overhead": False,
    "torch.export, strict and not, any length": False,
    "AOTInductor": False,
    "torch.utils.checkpoint, both kinds": True,
    "selective checkpoints by operator": False,
    "save_on_cpu": True,
    "autocast": True,
    "GradScaler, gradient accumulation": True,
    "FSDP2": True,
    "DDP": True,
    "parametrize": True,
    "state_dict, deepcopy, pickle": True,
    "meta device, to_empty, reset_parameters": True,
    "functional_call": True,
    "profiler, operators and parts by name": False,
}


def pages(backend: str) -> ModuleType:
    """The module of a backend, with its two pages `forward` and `backward`; the reference has `attend`."""
    return import_module(BACKENDS[backend])


def hopper_kv_tile(block_size: int) -> int:
    """Tokens of the key/value tile of Hopper's block-sparse kernels."""
    return 64 if block_size == 64 else KV_TILE


def reads_unions(config: NSAConfig, *, listed: bool, arch: int | None = None) -> bool:
    """True if a kernel's tile of 128 rows reads the union of the lists of its queries; else tiles of 128 and 256
    queries have lists of key tiles, on Hopper, each wholly in a listed block.

    Args:
        listed: the lists are the caller's.
        arch: None: the current device's.
    """
    if listed or config.q_tile < UNION_ROWS or config.block_size % hopper_kv_tile(config.block_size):
        return True
    return kernel_family(device_arch() if arch is None else arch) == 100


@dataclass(frozen=True)
class Request:
    """A call, as far as its support depends on it.

    Attributes:
        lists: "given" where the caller gives lists of blocks, "alone" for `selected_attention`; or None.
        own_keys: keys or values of a branch are the caller's.
        rows: query heads that share a list.
        cached: keys and values are in caches, as for `nsa_with_kvcache`.
        gated: there are gates, or weights of them.
        index_dim, index_loss: of an index; its loss is asked for.
    """

    arch: int
    dtype: torch.dtype
    D: int
    Dv: int
    config: NSAConfig
    needs_grad: bool
    lists: str | None = None
    own_keys: bool = False
    rows: int = 16
    cached: bool = False
    gated: bool = False
    index_dim: int = 32
    index_loss: bool = False


@dataclass(frozen=True)
class Feature:
    """A row of the table: a name, a test of the calls that ask for it, the architectures that have it, and whether the
    reference does; eager has everything."""

    name: str
    asked: Callable[[Request], bool]
    archs: tuple[int, ...] = ARCHITECTURES
    reference: bool = True


def _by_union(r: Request) -> bool:
    return reads_unions(r.config, listed=r.lists is not None, arch=r.arch)


def _tiles_fit(r: Request) -> bool:
    size = r.config.block_size
    return KV_TILE % size == 0 or size % UNION_BLOCK == 0


def _has_too_many_heads(r: Request) -> bool:
    return (
        r.lists is None
        and not _by_index(r)
        and r.rows > (MOST_HEADS_BY_TOKEN if r.config.by_token else MOST_HEADS_BY_TILE)
    )


def _has_too_many_overlaps(r: Request) -> bool:
    size, stride = r.config.block_size, r.config.stride
    return (
        r.lists is None
        and r.config.by_token
        and not _by_index(r)
        and (size + r.config.span) // stride - 1 > MOST_OVERLAPS
    )


def _by_index(r: Request) -> bool:
    return r.lists is None and r.config.rule == "index"


def _is_one_branch(r: Request) -> bool:
    return r.config.branches == ("selected",) and not r.gated


def _lists_too_many(r: Request) -> bool:
    return r.lists is None and r.config.block_counts > (2 if _by_index(r) else 1) * MOST_BLOCKS


FEATURES = (
    *(Feature(f"dtype {str(dtype)[6:]}", lambda r, dtype=dtype: r.dtype is dtype) for dtype in KERNEL_DTYPES),
    Feature("dtype float32", lambda r: r.dtype is torch.float32, ()),
    Feature("dtype float64", lambda r: r.dtype is torch.float64, ()),
    *(Feature(f"head dimension {dims}", lambda r, dims=dims: (r.D, r.Dv) == dims, a) for dims, a in HEAD_DIMS.items()),
    Feature("any other head dimension", lambda r: (r.D, r.Dv) not in HEAD_DIMS, ()),
    Feature("block_size that divides 128 or is a multiple of 64", _tiles_fit),
    Feature("any other block_size", lambda r: not _tiles_fit(r), ()),
    Feature("block_size below 16", lambda r: _by_union(r) and r.config.block_size < LEAST_BLOCK, ()),
    # A tile has a bit for each of its tokens and each small block of an entry.
    Feature(
        "block_size 16 with G below 4, 32 with 1",
        lambda r: _by_union(r) and r.rows * r.config.block_size < UNION_BLOCK,
        (),
    ),
    Feature("block_counts above 64, of an index above 128", _lists_too_many, ()),
    Feature("G above 128 with q_tile 1, above 32 with others", _has_too_many_heads, ()),
    Feature("blocks that more than 64 compressed keys overlap", _has_too_many_overlaps, ()),
    Feature("q_tile 128 and 256", lambda r: r.config.q_tile >= 128),
    Feature("block_indices", lambda r: r.lists == "given"),
    Feature("selected_attention", lambda r: r.lists == "alone"),
    Feature("q_tile 1", lambda r: r.config.by_token),
    Feature("q_tile 2 to 64", lambda r: 1 < r.config.q_tile < 128),
    Feature(
        "compress_offset 0 with compress_stride 1",
        lambda r: (r.config.stride, r.config.offset) == (1, 0) and r.config.span > 1,
        (),
    ),
    Feature("deterministic forward", lambda r: r.config.deterministic and not r.needs_grad),
    Feature("deterministic backward", lambda r: r.config.deterministic and r.needs_grad),
    Feature("rule='seed'", lambda r: r.config.rule == "seed", ()),
    Feature("rule='index', the selected branch without gates", lambda r: _by_index(r) and _is_one_branch(r)),
    Feature("rule='index' with gates or other branches", lambda r: _by_index(r) and not _is_one_branch(r), ()),
    Feature("the index' loss", lambda r: r.index_loss, ()),
    Feature(
        "index of other than 16, 32, 64 or 128 dimensions", lambda r: _by_index(r) and r.index_dim not in INDEX_DIMS, ()
    ),
    Feature("branches left out, rule='nsa'", lambda r: not _by_index(r) and r.config.branches != BRANCHES, ()),
    Feature("k_cmp, v_cmp, k_win, v_win", lambda r: r.own_keys),
    Feature("nsa_with_kvcache", lambda r: r.cached),
    Feature("packed sequences", lambda r: False),
    Feature("context parallelism", lambda r: False),
    Feature("any compress_stride, not causal", lambda r: False),
    *(Feature(name, lambda r: False, reference=reference) for name, reference in PYTORCH.items()),
)


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


@lru_cache(maxsize=1024)
def missing_feature(request: Request) -> str | None:
    """The first thing asked for that the kernels lack on this architecture, or None."""
    family = kernel_family(request.arch)
    if family not in ARCHITECTURES:
        return "kernels"
    for feature in FEATURES:
        if feature.asked(request) and family not in feature.archs:
            return feature.name
    return None


def choose_backend(backend: str | None, *, device: torch.device, **call: object) -> str:
    """The backend that runs: the one that is named, or an error; for None the kernels on a supported GPU, else eager.

    A GPU with kernels that lack something asked for is an error too: nothing slower runs unless it is named.

    Args:
        call: fields of `Request`, but its architecture.

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
    if (missing := missing_feature(r := Request(arch, **call))) is not None:
        call = f"dtype={r.dtype}, D={r.D}, Dv={r.Dv}, {r.config}"
        raise NotImplementedError(f"sm_{arch}: the kernels do not support {missing} ({call}); backend='eager' does")
    return "cute"


def on_backend(backend: str | None, call: Call) -> Call:
    """The call as it runs: deterministic where PyTorch asks for it, on the backend of `choose_backend`."""
    q, cache, spec = call.q, call.cache, call.spec.in_force()
    v = call.v if cache is None else cache.v_cache
    if backend == "reference" and cache is None and call.cu_seqlens is not None and torch.compiler.is_compiling():
        raise NotImplementedError("backend='reference' reads cu_seqlens, so that a graph takes no packed sequences")
    sizes = dict(device=q.device, dtype=q.dtype, D=q.shape[-1], Dv=v.shape[-1], rows=call.q_heads_per_list)
    lists = "alone" if call.alone else "given" if spec.listed else None
    asked = dict(lists=lists, own_keys=any(x is not None for x in call[7:11]), cached=cache is not None)
    asked["needs_grad"] = call.needs_grad and cache is None
    asked |= dict(gated=call.gate != "none", index_loss=spec.index_loss)
    asked |= {} if call.q_index is None else dict(index_dim=call.q_index.shape[-1])
    name = choose_backend(backend, config=spec.config, **sizes, **asked)
    return call._replace(spec=spec if name == spec.backend else replace(spec, backend=name))
