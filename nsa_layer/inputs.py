"""Argument checks of `nsa`: errors name the argument, its value and the expectation, before anything runs."""

from __future__ import annotations

import math
from collections.abc import Hashable, Sequence
from itertools import accumulate
from typing import Any, NamedTuple

import torch

from nsa_layer import support
from nsa_layer.call_spec import OWN_KEYS, CallSpec, CallTensors
from nsa_layer.config import LARGEST, NSAConfig, require_bools

DTYPES = (torch.float16, torch.bfloat16, torch.float32, torch.float64)
CAPACITY = 1024

# Everything that the checks read, of calls that passed: an equal call is not checked again.
_passed: dict[Hashable, CallSpec] = {}


class Arguments(NamedTuple):
    """The arguments of `nsa` that are checked."""

    tensors: CallTensors
    config: NSAConfig
    softmax_scale: float | None
    max_seqlen: int | None
    causal: bool


def check_inputs(given: Arguments, *, backend: str | None = "reference", validate: bool = True) -> CallSpec:
    """Check every argument of `nsa` and return the static side of the call; in a graph, without packed lengths.

    Reads ``cu_seqlens`` on the host: one synchronisation for packed input whose starts are on a GPU, else none. None
    either without ``validate``, where kernels can do without lengths: the call then has a bound of them.
    """
    tensors, config, softmax_scale, max_seqlen, causal = given
    if tensors.cu_seqlens is not None or tensors.block_indices is not None or torch.compiler.is_compiling():
        return _check(given, backend, validate)
    try:
        seen = (
            *[None if t is None else (t.shape, t.dtype, t.device, t.stride(-1)) for t in tensors.differentiable],
            *(config, type(softmax_scale), softmax_scale, max_seqlen, type(causal), causal),
        )
        spec = _passed.get(seen)
    except (AttributeError, IndexError, RuntimeError, TypeError):
        return _check(given)  # raises: such arguments are never accepted
    if spec is None:
        spec = _check(given)
        if len(_passed) >= CAPACITY:
            _passed.clear()
        _passed[seen] = spec
    return spec


def _check(given: Arguments, backend: str | None = "reference", validate: bool = True) -> CallSpec:
    tensors, config, softmax_scale, max_seqlen, causal = given
    q, k, v, cu_seqlens, block_indices = *tensors[:3], tensors.cu_seqlens, tensors.block_indices
    if not isinstance(config, NSAConfig):
        raise TypeError(f"config must be an NSAConfig, got {type(config).__name__}")
    require_bools(causal=causal)
    check_qkv(q, k, v, packed=cu_seqlens is not None)
    D, Hkv = k.shape[-1], k.shape[-2]
    check_weights(tensors, Hkv, v.shape[-1])
    leave = not validate and leaves_starts_on_gpu(backend, cu_seqlens, q)
    lengths = _check_lengths(cu_seqlens, max_seqlen, q, read=not leave)
    bound = min(max_seqlen or q.shape[0], q.shape[0]) if leave else None
    if torch.compiler.is_compiling():  # the operator may leave starts on a GPU too
        bound = max_seqlen
    _check_own_keys(tensors, config, lengths)
    if block_indices is not None:
        of = lengths if cu_seqlens is not None else q.shape[1:2]
        tiles = None if of is None else list(map(config.num_tiles, of))
        check_lists(block_indices, q, Hkv, tiles, packed=cu_seqlens is not None)
    scale, listed = check_scale(softmax_scale, D), block_indices is not None
    return CallSpec(config, causal, scale, lengths, listed=listed, bound=bound)


def check_list_count(block_indices: torch.Tensor, q: torch.Tensor, cu_seqlens: torch.Tensor, q_tile: int) -> None:
    """Raise ValueError for as many lists as packed sequences of q [total, Hq, D] have by no lengths."""
    least = -(-q.shape[0] // q_tile)
    most = least if q_tile == 1 else least + cu_seqlens.shape[0] - 2
    if not least <= block_indices.shape[0] <= most:
        raise ValueError(f"block_indices must have {least} to {most} lists, got {block_indices.shape[0]}")


def leaves_starts_on_gpu(backend: str | None, cu_seqlens: torch.Tensor | None, q: torch.Tensor) -> bool:
    """True if the host does not read starts that are on a GPU, since the kernels that run do; False in a graph, whose
    operators decide."""
    if not isinstance(cu_seqlens, torch.Tensor) or cu_seqlens.device.type != "cuda" or torch.compiler.is_compiling():
        return False
    return backend in (None, "cute") and support.has_kernels(q)


def _check_own_keys(tensors: CallTensors, config: NSAConfig, lengths: tuple[int, ...] | None) -> None:
    (q, k, v), count = tensors[:3], config.compressed_length
    if tensors.has_own_window and not config.window_size:
        raise ValueError("k_win and v_win must be None where there is no window, got one with window_size=0")
    lead = (q.shape[0], count(q.shape[1])) if q.dim() == 4 else (sum(map(count, lengths)),) if lengths else ()
    shapes = ((*lead, *k.shape[-2:]), (*lead, *v.shape[-2:]), tuple(k.shape), tuple(v.shape))
    for name, shape in zip(OWN_KEYS, shapes, strict=True):
        if (x := getattr(tensors, name)) is None:
            continue
        if "cmp" in name and not lead:  # lengths are not known here
            rows = tensors.v_cmp if tensors.k_cmp is None else tensors.k_cmp
            shape = (*rows.shape[:1], *shape)
        _check_weight(name, x, shape, q)
        if x.dtype != q.dtype:
            raise TypeError(f"{name} must have q's dtype {q.dtype}, got {x.dtype}")
        if x.stride(-1) != 1 and x.shape[-1] > 1:
            raise ValueError(f"{name} must be contiguous in its last dimension, got stride {x.stride(-1)}")


def lists_in_int32(block_indices: object) -> object:
    """Lists of int64 in int32: numbers that it has no room for are padding in both."""
    if isinstance(block_indices, torch.Tensor) and block_indices.dtype == torch.int64 and not block_indices.is_nested:
        return block_indices.clamp(-1, LARGEST).to(torch.int32)
    return block_indices


def check_lists(
    block_indices: torch.Tensor, q: torch.Tensor, Hkv: int, tiles: list[int] | None, *, packed: bool
) -> None:
    """Raise TypeError or ValueError unless they are int32 [B, M, Hs, n], packed [tiles, Hs, n].

    Args:
        tiles: of each packed sequence, or of each sequence of a batch: one number. None: not known.
    """
    name = "block_indices"
    if not isinstance(block_indices, torch.Tensor):
        raise TypeError(f"{name} must be a torch.Tensor or None, got {type(block_indices).__name__}")
    refuse_nested(name, block_indices)
    if block_indices.dtype != torch.int32:
        raise TypeError(f"{name} must be int32 or int64, got {block_indices.dtype}")
    if block_indices.device != q.device:
        raise ValueError(f"{name} must be on q's device {q.device}, got {block_indices.device}")
    lead = tuple(block_indices.shape[:1]) if tiles is None else (sum(tiles),) if packed else (q.shape[0], *tiles)
    heads, shape = (Hkv, q.shape[-2]), tuple(block_indices.shape)
    # Not `in`: in graphs of PyTorch 2.11 no number is in a tuple of symbols.
    if shape[:-2] != lead or len(shape) < 2 or all(shape[-2] != count for count in heads) or shape[-1] == 0:
        said = ", ".join(map(str, lead))
        raise ValueError(f"{name} must have shape ({said}, {heads[0]} or {heads[1]}, n) with n >= 1, got {shape}")


def check_positions(q_offset: torch.Tensor | int | None, pairs: Sequence[tuple[int, int]], *, causal: bool) -> None:
    """Raise ValueError for queries before the first key of their sequence.

    The numbers of a tensor are read on a CPU only, and not in a graph.

    Args:
        pairs: queries and keys of the sequences.
    """
    if isinstance(q_offset, torch.Tensor):
        if q_offset.device.type == "cpu" and not torch.compiler.is_compiling() and q_offset.min() < 0:
            raise ValueError(f"q_offset must be at least 0, got {int(q_offset.min())}")
    elif q_offset is None and causal and min(S - T for T, S in pairs) < 0:
        fewer = max(T - S for T, S in pairs)
        raise ValueError(f"k must have at least as many tokens as q where q_offset is None, got {fewer} fewer")


def refuse_nested(name: str, x: torch.Tensor) -> None:
    """Raise TypeError for a nested tensor, whose shape says little or cannot be asked for."""
    if x.is_nested:
        raise TypeError(f"{name} must not be a nested tensor; pack the sequences and pass cu_seqlens")


def check_starts(cu_seqlens: torch.Tensor, name: str = "cu_seqlens") -> None:
    """Raise TypeError or ValueError unless it is int32 [sequences + 1]; the numbers are not read."""
    if not isinstance(cu_seqlens, torch.Tensor):
        raise TypeError(f"{name} must be a torch.Tensor or None, got {type(cu_seqlens).__name__}")
    refuse_nested(name, cu_seqlens)
    if cu_seqlens.dtype != torch.int32:
        raise TypeError(f"{name} must be int32, got {cu_seqlens.dtype}")
    if cu_seqlens.dim() != 1 or cu_seqlens.shape[0] < 2:
        raise ValueError(f"{name} must be [sequences + 1], got shape {tuple(cu_seqlens.shape)}")


def check_qkv(q: torch.Tensor, k: torch.Tensor, v: torch.Tensor, *, packed: bool, same_length: bool = True) -> None:
    """Raise TypeError or ValueError unless shapes, dtypes, devices and strides are those that `nsa` takes.

    Args:
        same_length: k has as many tokens as q.
    """
    dims = 3 if packed else 4
    layout = "packed [total, H, D], since cu_seqlens is given" if packed else "[B, T, H, D], or packed with cu_seqlens"
    for name, tensor in (("q", q), ("k", k), ("v", v)):
        if not isinstance(tensor, torch.Tensor):
            raise TypeError(f"{name} must be a torch.Tensor, got {type(tensor).__name__}")
        refuse_nested(name, tensor)
        if tensor.dtype not in DTYPES:
            raise TypeError(f"{name} must be float16, bfloat16, float32 or float64, got {tensor.dtype}")
        if tensor.dim() != dims:
            raise ValueError(f"{name} must be {layout}, got {tensor.dim()} dimensions: {tuple(tensor.shape)}")
        if tensor.dtype != q.dtype:
            raise TypeError(f"{name} must have q's dtype {q.dtype}, got {tensor.dtype}")
        if tensor.device != q.device:
            raise ValueError(f"{name} must be on q's device {q.device}, got {tensor.device}")
        if 0 in tensor.shape:
            raise ValueError(f"{name} must have no empty dimension, got shape {tuple(tensor.shape)}")
        if tensor.stride(-1) != 1 and tensor.shape[-1] > 1:
            raise ValueError(f"{name} must be contiguous in its last dimension, got stride {tensor.stride(-1)}")
    if not same_length and k.shape[:-3] != q.shape[:-3]:
        raise ValueError(f"k must have q's batch of {q.shape[0]}, got {k.shape[0]}")
    if same_length and k.shape[:-2] != q.shape[:-2]:
        lead, own, other = "total" if packed else "B, T", list(q.shape[:-2]), list(k.shape[:-2])
        raise ValueError(f"k must be [{lead}, H, D] with q's [{lead}] of {own}, got {other}")
    if v.shape[:-1] != k.shape[:-1]:
        raise ValueError(f"v must have k's tokens and heads {list(k.shape[:-1])}, got {list(v.shape[:-1])}")
    if k.shape[-1] != q.shape[-1]:
        raise ValueError(f"k must have q's head dimension {q.shape[-1]}, got {k.shape[-1]}")
    if q.shape[-2] % k.shape[-2]:
        raise ValueError(f"q's heads must be a multiple of k's, got {q.shape[-2]} and {k.shape[-2]}")


def check_weights(given: Any, Hkv: int, Dv: int) -> None:
    """Raise TypeError or ValueError unless gates and weights of compression are those of q [.., Hq, D], or None."""
    q, D = given.q, given.q.shape[-1]
    shapes = {"gate_weight": (q.shape[-2], 3, D), "gates": (*q.shape[:-1], 3)}
    shapes |= {"compress_k_weight": (Hkv, D, D), "compress_v_weight": (Hkv, Dv, Dv)}
    if given.gates is not None and given.gate_weight is not None:
        raise ValueError("gate_weight and gates exclude each other, got both; pass one or neither")
    for name, shape in shapes.items():
        if (tensor := getattr(given, name)) is not None:
            _check_weight(name, tensor, shape, q)
    for weight, key in (("compress_k_weight", "k_cmp"), ("compress_v_weight", "v_cmp")):
        if getattr(given, weight) is not None and getattr(given, key) is not None:
            raise ValueError(f"{weight} and {key} exclude each other, got both; project before, or pass one")


def _check_weight(name: str, tensor: torch.Tensor, shape: tuple[int, ...], q: torch.Tensor) -> None:
    if not isinstance(tensor, torch.Tensor):
        raise TypeError(f"{name} must be a torch.Tensor or None, got {type(tensor).__name__}")
    refuse_nested(name, tensor)
    if not tensor.is_floating_point():
        raise TypeError(f"{name} must be of a floating-point dtype, got {tensor.dtype}")
    if tuple(tensor.shape) != shape:
        raise ValueError(f"{name} must have shape {shape}, got {tuple(tensor.shape)}")
    if tensor.device != q.device:
        raise ValueError(f"{name} must be on q's device {q.device}, got {tensor.device}")


def check_scale(softmax_scale: float | None, D: int) -> float:
    """The scale in force; TypeError or ValueError where it is none."""
    if softmax_scale is None:
        return 1.0 / math.sqrt(D)
    if isinstance(softmax_scale, bool) or not isinstance(softmax_scale, (int, float)):
        raise TypeError(f"softmax_scale must be a number or None, got {softmax_scale!r}")
    if not 2.0**-126 <= softmax_scale <= 2.0**126:  # the range of fp32, also in units of log2
        raise ValueError(f"softmax_scale must be positive and finite in float32, got {softmax_scale}")
    return float(softmax_scale)


def _check_lengths(
    cu_seqlens: torch.Tensor | None, max_seqlen: int | None, q: torch.Tensor, *, read: bool
) -> tuple[int, ...] | None:
    if max_seqlen is not None and (isinstance(max_seqlen, bool) or not isinstance(max_seqlen, int)):
        raise TypeError(f"max_seqlen must be an int or None, got {max_seqlen!r}")
    if cu_seqlens is None:
        if max_seqlen is not None:
            raise ValueError(f"max_seqlen is for packed input, got {max_seqlen} without cu_seqlens")
        return None
    lengths = check_lengths(cu_seqlens, q, "cu_seqlens", "q", read=read)
    if lengths is not None and max_seqlen is not None and max_seqlen < max(lengths):
        raise ValueError(f"max_seqlen must be at least the longest sequence, {max(lengths)}, got {max_seqlen}")
    return lengths


def starts_of_lengths(lengths: Sequence[int]) -> torch.Tensor:
    """``cu_seqlens`` of packed sequences, int32 [sequences + 1] on the CPU."""
    return torch.tensor([0, *accumulate(lengths)], dtype=torch.int32)


def check_lengths(
    cu_seqlens: torch.Tensor, x: torch.Tensor, name: str, of: str, *, read: bool = True
) -> tuple[int, ...] | None:
    """The lengths of the sequences that are packed in x [total, ...]; TypeError or ValueError where they are not.

    None in a graph that is compiled or exported: the operators check the numbers when it runs.

    Args:
        read: False leaves the numbers alone, and returns None.
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
