"""Checks of arguments: errors name the argument, its value and the expectation, before anything runs."""

from __future__ import annotations

import math
from collections.abc import Hashable, Iterable, Mapping, Sequence
from dataclasses import replace
from itertools import accumulate
from typing import Any, NamedTuple

import torch

from nsa_layer import support
from nsa_layer.call import DIFFERENTIABLE, FP8, Call, CallSpec
from nsa_layer.config import LARGEST, WIDEST_TILE, NSAConfig, require_bools, require_int

DTYPES = (torch.float16, torch.bfloat16, torch.float32, torch.float64)
MOST_KEPT = 1024  # checked calls, or layouts, that a cache holds
Q_TILES = tuple(1 << i for i in range(WIDEST_TILE.bit_length()))  # queries that may share a list
# q's dtype; of floating point; int32; the same, for what may be int64 before `lists_in_int32`; what q may have; q's
# dtype or FP8; fp32.
Q, FLOAT, INT32, LISTS, ANY = "q", "float", "int32", "int32 or int64", "any"
STORED, FLOAT32 = "stored", "float32"


class Kind(NamedTuple):
    """Shape and dtype that an argument must have.

    Attributes:
        shape: a letter or number for each dimension; "tokens", "keys" and "blocks" stand for dimensions of a layout.
        dtype: `Q`, `FLOAT`, `INT32`, `ANY`, `STORED` or `FLOAT32`.
        dense: contiguous in its last dimension.
        required: None is no such tensor.
    """

    shape: str
    dtype: str
    dense: bool = False
    required: bool = False


# Every tensor of the public functions, except starts of packed sequences and lists of blocks.
ARGUMENTS = {
    "q": Kind("tokens Hq D", ANY, dense=True, required=True),
    "k": Kind("keys Hkv D", Q, dense=True),
    "v": Kind("keys Hkv Dv", Q, dense=True),
    "gate_weight": Kind("Hq branches D", FLOAT),
    "gates": Kind("tokens Hq branches", FLOAT),
    "compress_k_weight": Kind("Hkv D D", FLOAT),
    "compress_v_weight": Kind("Hkv Dv Dv", FLOAT),
    "k_cmp": Kind("blocks Hkv D", Q, dense=True),
    "v_cmp": Kind("blocks Hkv Dv", Q, dense=True),
    "k_win": Kind("keys Hkv D", Q, dense=True),
    "v_win": Kind("keys Hkv Dv", Q, dense=True),
    "q_index": Kind("tokens Hkv Di", Q, dense=True),
    "k_index": Kind("keys Hi Di", Q, dense=True),
    "q_offset": Kind("sequences", INT32),
    "k_cache": Kind("rows S Hkv D", STORED, dense=True, required=True),
    "v_cache": Kind("rows S Hkv Dv", STORED, dense=True, required=True),
    "k_win_cache": Kind("rows S Hkv D", STORED, dense=True),
    "v_win_cache": Kind("rows S Hkv Dv", STORED, dense=True),
    "k_index_cache": Kind("rows S Hi Di", STORED, dense=True),
    "k_cmp_cache": Kind("rows_cmp Sc Hkv D", STORED, dense=True),
    "v_cmp_cache": Kind("rows_cmp Sc Hkv Dv", STORED, dense=True),
    "cache_seqlens": Kind("B", INT32, required=True),
    "page_table": Kind("B pages", INT32),
    "cmp_page_table": Kind("B cmp_pages", INT32),
    "cache_batch_idx": Kind("B", INT32),
    **dict.fromkeys(("k_scale", "v_scale", "k_win_scale", "v_win_scale"), Kind("Hkv", FLOAT32)),
    **dict.fromkeys(("k_cmp_scale", "v_cmp_scale"), Kind("Hkv", FLOAT32)),
    "k_index_scale": Kind("Hi", FLOAT32),
    "out": Kind("tokens Hq Dv", Q),
    "x": Kind("tokens dim", Q, required=True),
}
BATCH = {"tokens": "B T", "keys": "B T", "blocks": "B Tc"}
PACKED = {"tokens": "total", "keys": "total", "blocks": "blocks"}
NO_EMPTY = ("q", "k", "v", "q_index", "k_index", "k_cache", "v_cache", "k_index_cache")
OF_BRANCHES = {
    "compressed": ("compress_k_weight", "compress_v_weight", "k_cmp", "v_cmp", "k_cmp_cache", "v_cmp_cache"),
    "selected": ("block_indices",),
    "window": ("k_win", "v_win", "k_win_cache", "v_win_cache"),
}

# Everything that the checks read, of calls that passed: an equal call is not checked again.
_passed: dict[Hashable, CallSpec] = {}


def check_tensor(
    name: str, x: object, q: torch.Tensor, sizes: dict[str, int], layout: Mapping[str, str], *, required: bool = False
) -> None:
    """Raise TypeError or ValueError unless x is what `ARGUMENTS` say.

    Args:
        sizes: by letter; a letter that is not there is any size, and is what it is from then on.
        layout: `BATCH`, `PACKED` or another one.
        required: None is an error.
    """
    kind = ARGUMENTS[name]
    if x is None and not (required or kind.required):
        return
    check_kind(name, x, q, kind.dtype, optional=not (required or kind.required))
    letters = " ".join(layout.get(each, each) for each in kind.shape.split()).split()
    shape = tuple(x.shape)
    if name in NO_EMPTY and 0 in shape:
        raise ValueError(f"{name} must have no empty dimension, got shape {shape}")
    wanted = [int(each) if each.isdigit() else sizes.get(each) for each in letters]
    if len(shape) != len(wanted) or any(n is not None and n != m for n, m in zip(wanted, shape)):
        said = ", ".join(each if n is None else str(n) for each, n in zip(letters, wanted))
        raise ValueError(f"{name} must have shape ({said}), got {shape}")
    if kind.dense and x.stride(-1) != 1 and shape[-1] > 1:
        raise ValueError(f"{name} must be contiguous in its last dimension, got stride {x.stride(-1)}")
    for each, n in zip(letters, shape):
        sizes.setdefault(each, n)


def check_kind(name: str, x: object, q: object, dtype: str, *, optional: bool = True) -> None:
    """Raise TypeError or ValueError unless x is a tensor of such a dtype on q's device."""
    if not isinstance(x, torch.Tensor):
        raise TypeError(f"{name} must be a torch.Tensor{' or None' * optional}, got {type(x).__name__}")
    if x.is_nested:  # its shape says little, or cannot be asked for
        raise TypeError(f"{name} must not be a nested tensor; pack the sequences and pass cu_seqlens")
    if dtype == ANY and x.dtype not in DTYPES:
        raise TypeError(f"{name} must be float16, bfloat16, float32 or float64, got {x.dtype}")
    if dtype == FLOAT and not x.is_floating_point():
        raise TypeError(f"{name} must be of a floating-point dtype, got {x.dtype}")
    if dtype in (INT32, LISTS) and x.dtype != torch.int32:
        raise TypeError(f"{name} must be {dtype}, got {x.dtype}")
    if dtype == FLOAT32 and x.dtype != torch.float32:
        raise TypeError(f"{name} must be float32, got {x.dtype}")
    if dtype in (Q, STORED) and x.dtype != q.dtype and (dtype == Q or x.dtype != FP8):
        or_fp8 = " or be float8_e4m3fn" * (dtype == STORED)
        raise TypeError(f"{name} must have q's dtype {q.dtype}{or_fp8}, got {x.dtype}")
    if x.device != q.device:
        raise ValueError(f"{name} must be on q's device {q.device}, got {x.device}")


def check_qkv(
    q: torch.Tensor, k: torch.Tensor, v: torch.Tensor, *, packed: bool, same_length: bool = True
) -> tuple[dict[str, int], dict[str, str]]:
    """Sizes by letter, and the layout; TypeError or ValueError unless q, k and v fit `nsa`, where they have the
    `same_length`."""
    sizes, layout = {}, PACKED if packed else BATCH
    if not same_length:
        layout = layout | dict(keys="total_k" if packed else "B S")
    for name, x in (("q", q), ("k", k), ("v", v)):
        check_tensor(name, x, q, sizes, layout, required=True)
    check_groups(sizes)
    return sizes, layout


def check_groups(sizes: dict[str, int], of: str = "k") -> None:
    """Raise ValueError unless key/value heads divide query heads."""
    if sizes["Hq"] % sizes["Hkv"]:
        raise ValueError(f"q's heads must be a multiple of {of}'s, got {sizes['Hq']} and {sizes['Hkv']}")


def check_inputs(call: Call, *, backend: str | None = "reference", validate: bool = True, **options: Any) -> CallSpec:
    """Check every argument of `nsa` and return the static side of the call; in a graph, without packed lengths.

    Reads ``cu_seqlens`` on the host: one synchronisation for packed input whose starts are on a GPU, else none. None
    either without ``validate``, where kernels can do without lengths: the call then has a bound of them.
    """
    if call.cu_seqlens is not None or call.block_indices is not None or torch.compiler.is_compiling():
        return _check_nsa(call, backend, validate, **options)
    try:
        seen = (
            *[None if t is None else (t.shape, t.dtype, t.device, t.stride(-1)) for t in call.differentiable],
            *((type(x), x) for x in options.values()),
        )
        spec = _passed.get(seen)
    except (AttributeError, IndexError, RuntimeError, TypeError):
        return _check_nsa(call, **options)  # raises: such arguments are never accepted
    if spec is None:
        spec = _check_nsa(call, **options)
        if len(_passed) >= MOST_KEPT:
            _passed.clear()
        _passed[seen] = spec
    return spec


def _check_nsa(
    call: Call,
    backend: str | None = "reference",
    validate: bool = True,
    *,
    config: NSAConfig,
    softmax_scale: float | None,
    max_seqlen: int | None,
    causal: bool,
    index_scale: float | None = None,
    return_index_loss: bool = False,
) -> CallSpec:
    (q, k, v), packed = call[:3], call.cu_seqlens is not None
    require_config(config)
    require_bools(causal=causal)
    sizes, layout = check_qkv(q, k, v, packed=packed)
    check_exclusive(call)
    spec = CallSpec(config, causal, check_scale(softmax_scale, sizes["D"]), listed=call.block_indices is not None)
    read = validate or torch.compiler.is_compiling() or host_reads(backend, q, call.cu_seqlens)
    call = with_lengths(call._replace(spec=spec), max_seqlen, read=read)
    if not packed:
        sizes["Tc"] = config.compressed_length(sizes["T"])
    elif call.spec.lengths is not None:
        sizes["blocks"] = sum(map(config.compressed_length, call.spec.lengths))
    if call.has_own_window and not config.window_size:
        raise ValueError("k_win and v_win must be None where there is no window, got one with window_size=0")
    sizes["branches"] = len(config.branches)
    for name in DIFFERENTIABLE[3:]:
        check_tensor(name, getattr(call, name), q, sizes, layout)
    index_scale = check_rule(call, config, sizes, index_scale, return_index_loss, causal)
    check_lists(call)
    if config.rule != "index":
        return call.spec
    return replace(call.spec, index_scale=index_scale, index_loss=return_index_loss)


def check_selected(
    call: Call,
    *,
    block_size: int,
    softmax_scale: float | None,
    causal: bool,
    deterministic: bool,
    backend: str | None = "reference",
    validate: bool = True,
) -> CallSpec:
    """`check_inputs` of `selected_attention`: the number of lists tells how many queries share one."""
    (q, k, v), lists, starts, starts_k = call[:3], call.block_indices, call.cu_seqlens, call.cu_seqlens_k
    packed = starts is not None
    if starts_k is not None and not packed:
        raise ValueError("cu_seqlens_k is for packed input, got it without cu_seqlens")
    require_bools(causal=causal)
    _, layout = check_qkv(q, k, v, packed=packed, same_length=packed and starts_k is None)
    check_kind("block_indices", lists, q, LISTS, optional=False)
    count = lists.shape[-3] if lists.dim() == q.dim() else None
    if packed:
        check_starts(starts)
    q_tile = tile_of_packed_lists(count, len(q), call.B) if packed else None
    read = validate or q_tile is None or torch.compiler.is_compiling() or host_reads(backend, q, starts, starts_k)
    config = NSAConfig(block_size=block_size, deterministic=deterministic, branches=("selected",), window_size=0)
    spec = CallSpec(config, causal, check_scale(softmax_scale, q.shape[-1]), listed=True)
    call = with_lengths(call._replace(spec=spec), read=read)
    q_tile = q_tile or tile_of_lists(count, call.spec.lengths or q.shape[-3:-2])
    if q_tile > 1:
        call = call._replace(spec=replace(call.spec, config=config.replace(q_tile=q_tile)))
    if starts_k is not None and starts_k.shape != starts.shape:
        raise ValueError(f"cu_seqlens_k must have cu_seqlens's {call.B} sequences, got {len(starts_k) - 1}")
    check_lists(call)
    if call.q_offset is None or isinstance(call.q_offset, torch.Tensor):
        check_tensor("q_offset", call.q_offset, q, dict(sequences=call.B), layout)
    else:
        require_int("q_offset", call.q_offset, least=0)
    if backend == "reference" or call.q_offset is None:  # operators of other backends read it
        lengths, lengths_k = call.spec.lengths or q.shape[-3:-2], call.spec.key_lengths or k.shape[-3:-2]
        check_positions(call.q_offset, zip(lengths, lengths_k), causal=causal)
    return call.spec


def check_rule(
    call: Call, config: NSAConfig, sizes: dict[str, int], scale: float | None, loss: bool = False, causal: bool = True
) -> float | None:
    """The scale of an index in force; TypeError or ValueError where branches and tensors do not fit the rule."""
    require_bools(return_index_loss=loss)
    tensors, of_keys = call.by_name, "k_index" if call.cache is None else "k_index_cache"
    for branch, names in OF_BRANCHES.items():
        if branch not in config.branches and (more := [name for name in names if tensors.get(name) is not None]):
            raise ValueError(f"{more[0]} is of the {branch} branch, got branches={config.branches}")
    if config.rule != "index":
        if config.computes("selected") and not config.computes("compressed") and call.block_indices is None:
            raise ValueError(
                f"rule={config.rule!r} chooses blocks by the compressed branch, got branches={config.branches}; "
                "add it, give block_indices, or use rule='index'"
            )
        for name in ("q_index", "k_index", "k_index_cache", "index_scale"):
            if (tensors | dict(index_scale=scale)).get(name) is not None:
                raise ValueError(f"{name} is for rule='index', got it with rule={config.rule!r}")
        if loss:
            raise ValueError(f"return_index_loss is for rule='index', got it with rule={config.rule!r}")
        return None
    if call.q_index is None or tensors[of_keys] is None:
        raise ValueError(f"rule='index' needs q_index and {of_keys}, got None for one of them")
    if not causal:
        raise ValueError("rule='index' needs causal=True, got False")
    if call.block_indices is not None:
        raise ValueError("block_indices must be None with rule='index', whose lists are its choice, got a tensor")
    if sizes["Hi"] not in (1, sizes["Hkv"]):
        raise ValueError(f"{of_keys} must have {sizes['Hkv']} heads, as k has, or 1, got {sizes['Hi']}")
    return check_scale(scale, sizes["Di"], "index_scale")


def require_config(config: object) -> None:
    """Raise TypeError unless it is an `NSAConfig`."""
    if not isinstance(config, NSAConfig):
        raise TypeError(f"config must be an NSAConfig, got {type(config).__name__}")


def check_exclusive(call: Any) -> None:
    """Raise ValueError where two arguments of a call say the same."""
    for one, other in (("gate_weight", "gates"), ("compress_k_weight", "k_cmp"), ("compress_v_weight", "v_cmp")):
        if getattr(call, one) is not None and getattr(call, other) is not None:
            raise ValueError(f"{one} and {other} exclude each other, got both; pass one or neither")


def host_reads(backend: str | None, q: torch.Tensor, *starts: torch.Tensor | None) -> bool:
    """False if packed sequences' starts are on a GPU, where the kernels alone read them; the host reads others."""
    present = [x for x in starts if x is not None]
    kernels = backend == "cute" or (backend is None and support.has_kernels(q))
    return not (present and kernels and all(map(is_on_gpu, present)))


def is_on_gpu(starts: object) -> bool:
    """True for a tensor on a GPU."""
    return isinstance(starts, torch.Tensor) and starts.device.type == "cuda"


def with_lengths(call: Call, max_seqlen: int | None = None, *, read: bool, suffix: str = "") -> Call:
    """The call with its packed sequences' lengths, which the host reads and checks, or a bound of them; in a graph
    without. suffix: of the names of ``cu_seqlens`` and ``max_seqlen``."""
    q, starts_k, bound, most = call.q, call.cu_seqlens_k, None, f"max_seqlen{suffix}"
    if max_seqlen is not None and (isinstance(max_seqlen, bool) or not isinstance(max_seqlen, int)):
        raise TypeError(f"{most} must be an int or None, got {max_seqlen!r}")
    if max_seqlen is not None and call.cu_seqlens is None:
        raise ValueError(f"{most} is for packed input, got {max_seqlen} without cu_seqlens{suffix}")
    if call.cu_seqlens is None:
        return call
    lengths = check_lengths(call.cu_seqlens, q, f"cu_seqlens{suffix}", "q", read=read)
    if max_seqlen is not None and max_seqlen < (longest := max(lengths or (1,))):
        raise ValueError(f"{most} must be at least the longest sequence, {longest}, got {max_seqlen}")
    lengths_k = None if starts_k is None else check_lengths(starts_k, call.k, "cu_seqlens_k", "k", read=read)
    if not read:
        bound = min(max_seqlen or q.shape[0], q.shape[0])
    elif torch.compiler.is_compiling():  # the operator reads lengths, or leaves them
        bound = max_seqlen
    return call._replace(spec=replace(call.spec, lengths=lengths, lengths_k=lengths_k, bound=bound))


def lists_in_int32(block_indices: object) -> object:
    """Lists of int64 in int32: numbers beyond it are padding in both."""
    if isinstance(block_indices, torch.Tensor) and block_indices.dtype == torch.int64 and not block_indices.is_nested:
        return block_indices.clamp(-1, LARGEST).to(torch.int32)
    return block_indices


def check_lists(call: Call) -> None:
    """Raise TypeError or ValueError unless lists are int32 [B, M, Hs, n], packed [tiles of all sequences, Hs, n].

    Of packed sequences whose lengths the host does not know the number of tiles is checked within bounds, in a graph by
    the operator.
    """
    lists, q, packed = call.block_indices, call.q, call.packed
    if lists is None:
        return
    check_kind("block_indices", lists, q, LISTS)
    keys, shape = call.k if call.cache is None else call.cache.k_cache, tuple(lists.shape)
    known, heads = call.lengths_known, (keys.shape[-2], q.shape[-2])
    lead = shape[:1] if not known else (sum(call.num_lists),) if packed else (q.shape[0], *call.num_lists)
    # Not `in`: in graphs of PyTorch 2.11 no number is in a tuple of symbols.
    if shape[:-2] != lead or len(shape) < 2 or all(shape[-2] != count for count in heads) or shape[-1] == 0:
        said = ", ".join(map(str, lead))
        raise ValueError(
            f"block_indices must have shape ({said}, {heads[0]} or {heads[1]}, n) with n >= 1, got {shape}"
        )
    if not known and not torch.compiler.is_compiling():
        least, most = (call.config.num_tiles(q.shape[0], count) for count in (1, call.B))
        if not least <= shape[0] <= most:
            raise ValueError(f"block_indices must have {least} to {most} lists, got {shape[0]}")


def tile_of_lists(count: int | None, lengths: Sequence[int]) -> int:
    """The queries that share a list, by the number of lists: the smallest that fits; 1 where there is no number."""
    for tile in Q_TILES:
        if count is None or sum(-(-T // tile) for T in lengths) == count:
            return tile
    raise ValueError(
        f"block_indices must have a list for each query, {sum(lengths)}, or for each tile of 2, 4, .. {WIDEST_TILE} "
        f"queries, got {count} lists"
    )


def tile_of_packed_lists(count: int | None, total: int, sequences: int) -> int | None:
    """`tile_of_lists` of packed sequences of any lengths; None where it depends on them."""
    if count is None or count == total:
        return 1
    fit = [tile for tile in Q_TILES if -(-total // tile) <= count <= (total + sequences * (tile - 1)) // tile]
    return fit[0] if len(fit) == 1 else None


def check_compressed(call: Call) -> None:
    """Raise ValueError unless k_cmp and v_cmp have the rows that known lengths need; in a graph they may have more."""
    blocks = sum(map(call.config.compressed_length, call.spec.key_lengths or ()))
    for name, x in (("k_cmp", call.k_cmp), ("v_cmp", call.v_cmp)):
        if x is not None and call.packed and x.shape[0] < blocks:
            raise ValueError(f"{name} must have {blocks} rows for these cu_seqlens, got {x.shape[0]}")


def check_positions(q_offset: torch.Tensor | int | None, pairs: Iterable[tuple[int, int]], *, causal: bool) -> None:
    """Raise ValueError for queries before the first key of their sequence; pairs: queries and keys of each.

    The numbers of a tensor are read on a CPU only, and not in a graph.
    """
    if isinstance(q_offset, torch.Tensor):
        if q_offset.device.type == "cpu" and not torch.compiler.is_compiling() and q_offset.min() < 0:
            raise ValueError(f"q_offset must be at least 0, got {int(q_offset.min())}")
    elif q_offset is None and causal and (fewer := max(T - S for T, S in pairs)) > 0:
        raise ValueError(f"k must have at least as many tokens as q where q_offset is None, got {fewer} fewer")


def check_starts(cu_seqlens: torch.Tensor, name: str = "cu_seqlens") -> None:
    """Raise TypeError or ValueError unless it is int32 [sequences + 1]; the numbers are not read."""
    check_kind(name, cu_seqlens, cu_seqlens, INT32)
    if cu_seqlens.dim() != 1 or cu_seqlens.shape[0] < 2:
        raise ValueError(f"{name} must be [sequences + 1], got shape {tuple(cu_seqlens.shape)}")


def check_scale(softmax_scale: float | None, D: int, name: str = "softmax_scale") -> float:
    """The scale in force; TypeError or ValueError for a wrong one."""
    if softmax_scale is None:
        return 1.0 / math.sqrt(D)
    if isinstance(softmax_scale, bool) or not isinstance(softmax_scale, (int, float)):
        raise TypeError(f"{name} must be a number or None, got {softmax_scale!r}")
    if not 2.0**-126 <= softmax_scale <= 2.0**126:  # the range of fp32, also in units of log2
        raise ValueError(f"{name} must be positive and finite in float32, got {softmax_scale}")
    return float(softmax_scale)


def starts_of_lengths(lengths: Iterable[int], device: torch.device | str = "cpu") -> torch.Tensor:
    """``cu_seqlens`` of packed sequences, int32 [sequences + 1]."""
    return torch.tensor([0, *accumulate(lengths)], dtype=torch.int32, device="cpu").to(device)


def check_lengths(
    cu_seqlens: torch.Tensor, x: torch.Tensor, name: str, of: str, *, read: bool = True
) -> tuple[int, ...] | None:
    """The lengths of the sequences that are packed in x [total, ...]; TypeError or ValueError where they are not.

    None if they are not read, as in a graph, whose operators check the numbers when it runs.
    """
    check_starts(cu_seqlens, name)
    if cu_seqlens.device not in (x.device, torch.device("cpu")):
        raise ValueError(f"{name} must be on q's device {x.device} or on the CPU, got {cu_seqlens.device}")
    if torch.compiler.is_compiling() or not read:
        return None
    starts = cu_seqlens.tolist()
    lengths = tuple(end - start for start, end in zip(starts, starts[1:]))
    if starts[0] != 0:
        raise ValueError(f"{name} must start at 0, got {starts[0]}")
    if min(lengths) < 0:
        raise ValueError(f"{name} must not fall, got {starts}")
    if starts[-1] != x.shape[0]:
        raise ValueError(f"{name} must end at the {x.shape[0]} tokens of {of}, got {starts[-1]}")
    return lengths


def assert_numbers(call: Call, *, max_seqlen: int | None = None) -> None:
    """Assert that starts on q's device are starts, and that there is a list for each tile; `max_seqlen` as in `nsa`.

    Starts on the CPU are left to the operators, which read them.
    """
    (q, k), cu_seqlens, cu_seqlens_k = call[:2], call.cu_seqlens, call.cu_seqlens_k
    block_indices, q_tile = call.block_indices, call.config.q_tile
    for name, starts, x in (("cu_seqlens", cu_seqlens, q), ("cu_seqlens_k", cu_seqlens_k, k)):
        if starts is not None and starts.device == q.device:
            lengths = starts.diff()
            right = (starts[0] == 0) & (starts[-1] == x.shape[0]) & (lengths >= 0).all()
            torch._assert_async(right, f"{name} must start at 0, not fall, and end at the tokens that are packed")
            if max_seqlen is not None:
                torch._assert_async((lengths <= max_seqlen).all(), "max_seqlen must be at least the longest sequence")
    if block_indices is not None and cu_seqlens is not None:
        tiles = ((cu_seqlens.diff() + q_tile - 1) // q_tile).sum().to(q.device, non_blocking=True)
        torch._assert_async(tiles <= block_indices.shape[0], "block_indices must have a list for each tile")
