"""Where packed sequences start, counted in tokens, in compressed blocks and in query tiles."""

from __future__ import annotations

from functools import lru_cache
from itertools import accumulate
from typing import NamedTuple

import torch

from nsa_layer.call_spec import CallSpec
from nsa_layer.config import NSAConfig


class Packing(NamedTuple):
    """Starts are int32 [sequences + 1] on the GPU and end with the total.

    They are made from the lengths that the host knows, and belong to nobody else: a caller's ``cu_seqlens`` may be
    refilled at any time.

    Attributes:
        cu_seqlens, cu_blocks, cu_tiles: of tokens, of compressed blocks, of query tiles.
        total_blocks, total_tiles: of all sequences.
        longest, longest_blocks: of one sequence, in tokens and in compressed blocks.
    """

    cu_seqlens: torch.Tensor
    cu_blocks: torch.Tensor
    cu_tiles: torch.Tensor
    total_blocks: int
    total_tiles: int
    longest: int
    longest_blocks: int

    @classmethod
    def of(cls, spec: CallSpec, device: torch.device) -> Packing | None:
        """None for a batch of equal length. Nothing waits for the device."""
        if spec.lengths is None:
            return None
        config, longest = spec.config, max(spec.lengths)
        find = _starts if _are_lasting() else _starts.__wrapped__
        copy, starts, totals = find(spec.lengths, config, device)
        copy.ready()
        return cls(*starts, *totals, longest, config.compressed_length(longest))


def starts_on(cu_seqlens: torch.Tensor, device: torch.device) -> torch.Tensor:
    """The starts [sequences + 1] on `device`: themselves, or for those on the CPU the copy that was made before."""
    if cu_seqlens.device == device:
        return cu_seqlens
    find = _copied if _are_lasting() else _copied.__wrapped__
    return find(tuple(cu_seqlens.tolist()), device).ready()


class _Copy(NamedTuple):
    """A copy of numbers of the host, the stream that it was sent on, and the event after that; None without a GPU."""

    numbers: torch.Tensor
    stream: torch.cuda.Stream | None
    sent: torch.cuda.Event | None

    def ready(self) -> torch.Tensor:
        """The numbers, to be read on the current stream.

        On another stream than they were sent on, it waits for them, and their memory for it, once the caches have
        forgotten them. In a capture, before which all is done, they are kept for good.
        """
        device = self.numbers.device
        if _is_captured(device):
            _held[id(self.numbers)] = self.numbers
        elif self.sent is not None:
            stream = torch.cuda.current_stream(device)
            if stream != self.stream:
                stream.wait_event(self.sent)
                self.numbers.record_stream(stream)
        return self.numbers


# A CUDA graph reads what the call that it captured read, for as long as there are replays.
_held: dict[int, torch.Tensor] = {}


@lru_cache(maxsize=64)  # the same packing is seen layer after layer, and by every call that a CUDA graph captures
def _copied(numbers: tuple[int, ...], device: torch.device) -> _Copy:
    return _moved(torch.tensor(numbers, dtype=torch.int32, device="cpu"), device)


@lru_cache(maxsize=64)
def _starts(
    lengths: tuple[int, ...], config: NSAConfig, device: torch.device
) -> tuple[_Copy, tuple[torch.Tensor, ...], tuple[int, int]]:
    """Starts of tokens, blocks and tiles, together and one by one, and the totals of the latter two."""
    blocks, tiles = map(config.compressed_length, lengths), map(config.num_tiles, lengths)
    starts = [list(accumulate(counts, initial=0)) for counts in (lengths, blocks, tiles)]
    size = len(lengths) + 1
    # Rows of a multiple of 16 bytes: attention copies what starts elsewhere, at every call.
    numbers = torch.zeros(3, -(-size // 4) * 4, dtype=torch.int32, device="cpu")
    numbers[:, :size] = torch.tensor(starts, device="cpu")
    copy = _moved(numbers, device)
    # Not by indexing, which looks for the device: fake tensors have none.
    return copy, copy.numbers.narrow(1, 0, size).unbind(), (starts[1][-1], starts[2][-1])


def _moved(numbers: torch.Tensor, device: torch.device) -> _Copy:
    """A copy: the host does not wait for it, since that would be for all that the GPU has to do before.

    Raises:
        RuntimeError: in a CUDA graph, whose replays would copy from memory that is no longer there.
    """
    if _is_captured(device):
        raise RuntimeError(
            "a call with these cu_seqlens is captured in a CUDA graph before it was made once; make it once before"
        )
    if device.type != "cuda" or type(numbers) is not torch.Tensor:
        return _Copy(numbers.to(device), None, None)
    stream = torch.cuda.current_stream(device)
    return _Copy(numbers.pin_memory().to(device, non_blocking=True), stream, stream.record_event())


def _are_lasting() -> bool:
    """Whether tensors that are made now may serve later calls: none wrapped by a transform, or of a mode's own kind,
    such as the fake ones that kernels are compiled with."""
    return not torch._C._are_functorch_transforms_active() and not torch._C._len_torch_dispatch_stack()


def _is_captured(device: torch.device) -> bool:
    return device.type == "cuda" and torch.cuda.is_available() and torch.cuda.is_current_stream_capturing()
