"""Faults in the kernels themselves and in what they wait for, found on a GPU; kernels are compiled past the cache."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import replace
from typing import Any

from fuzz.attention_lists import two_passes
from fuzz.mutations import fault, faults, given, instead, result
from fuzz.prop import GPU

ON_A_GPU = dict(needs=GPU, seconds=120.0)
IS_ITS, OF_LAYER = "attention.is", "layer.is its definition, kernels"
UNIONS = "nsa_layer.kernels.union_lists.unions:union_lists"


def lost(count: Any, step: Any) -> Any:
    """A step's size where a loop has two or more steps, else 0."""
    import cutlass
    from cutlass import Int32

    return cutlass.select_(count > step, Int32(step), Int32(0))


faults(
    ("kernel: no tail mask", "flash_attn.cute.mask:AttentionMask.apply_mask", IS_ITS,
     "Keys past the end of a sequence are not masked on Hopper.", given(mask_seqlen=False), ON_A_GPU),
    ("kernel: classification off by one", "flash_attn.cute.compressed_causal.mask:CompressedCausal.keys_seen_by",
     IS_ITS, "A query sees one compressed key too many.", result(lambda keys: keys + 1),
     ON_A_GPU | dict(shows=lambda kind: kind.compress)),
    ("kernel: loads past the end", "flash_attn.cute.runtime.bounded_loads:bounded", "relations.neighbours",
     "On Hopper, tiles of a packed sequence hold rows of the next one.",
     instead(lambda original, tensor, cu_seqlens, dim=0: tensor), ON_A_GPU | dict(shows=lambda kind: kind.packed)),
    ("kernel: union without its last block", UNIONS, OF_LAYER, "Unions of two or more blocks lack the last one.",
     result(lambda unions: unions._replace(counts=unions.counts - (unions.counts > 1).int())), ON_A_GPU),
    ("kernel: dropped entry", "flash_attn.cute.bwd_sm90.query_loop:QueryLoop.create", IS_ITS,
     "Backward leaves out the first entry of every list of two or more.",
     result(lambda loop: replace(loop, begin=loop.begin + lost(loop.end - loop.begin, loop.subtiles))),
     ON_A_GPU | dict(shows=lambda kind: kind.lists)),
    ("kernel: dq loses its last step", "flash_attn.cute.fwd_sm90.loads:KeyLoop.create", IS_ITS,
     "The dq pass leaves out the last step of every loop of two or more.",
     result(lambda loop: replace(loop, count=loop.count - lost(loop.count, loop.parts))),
     ON_A_GPU | dict(shows=two_passes)),
    ("kernel: first sequence's rows", "flash_attn.cute.lists.rows:find_row", IS_ITS,
     "Every batch reads the first one's lists; not in a pack, whose rows are of different widths.",
     instead(lambda original, tensors, rows_before, batch, *place, **more: original(
         tensors, rows_before, batch * 0 if rows_before is None else batch, *place, **more)),
     ON_A_GPU | dict(shows=lambda kind: kind.lists and kind.form == "padded")),
)  # fmt: skip


@fault(
    "kernel: hangs", "fuzz.attention_lists:backward_lists", IS_ITS, needs=GPU, seconds=300.0, waits=True,
    shows=lambda kind: kind.passes == 1 and kind.deterministic and not kind.plan and not kind.packed,
)  # fmt: skip
@instead
def _never_its_turn(original: Callable, *args: Any, **more: Any) -> Any:
    """Every add to dq waits for one more than comes before it, so that none is first: what the watchdog is for."""
    lists = original(*args, **more)
    names = [name for name in ("dq_write_order", "dq_write_order_full") if getattr(lists, name, None) is not None]
    return lists._replace(**{name: getattr(lists, name) + 1 for name in names}) if names else lists


@fault("kernel: bit of a token", UNIONS, OF_LAYER, **ON_A_GPU)
@result
def _token_bit(unions: Any) -> Any:
    """In each tile the first block of the union is listed by its first token where it was not, and not where it was."""
    bits = unions.bits.clone()
    bits[..., 0, 0] ^= 1
    return unions._replace(bits=bits)


@fault("kernel: pair lost", "nsa_layer.kernels.union_lists.key_csr:pairs_by_block", OF_LAYER, **ON_A_GPU)
@result
def _lost_pair(pairs: Any) -> Any:
    """The last token that lists a block adds nothing to its gradients, if there are others."""
    items = pairs.work_tiles.clone()
    items[:, 2] -= (items[:, 2] - items[:, 1] > 1).int()
    return pairs._replace(work_tiles=items)
