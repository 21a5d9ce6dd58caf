"""A chunk's window on a second stream: after what came before, and before what reads it."""

from __future__ import annotations

from types import SimpleNamespace

import pytest
import torch
from stub_kernels import LAUNCHED, stubbed_layer

from nsa_layer import NSAConfig, nsa, nsa_with_kvcache
from nsa_layer.cute import forward, kvcache, side_stream

CONFIG = NSAConfig(block_counts=4)


class Stream:
    """Notes what waits for what, and how many kernels were launched before."""

    def __init__(self, name: str, noted: list) -> None:
        self.name, self.noted = name, noted

    def wait_stream(self, other: Stream) -> None:
        self.noted.append((f"{self.name} waits for {other.name}", len(LAUNCHED)))

    def __enter__(self) -> None:
        self.noted.append((f"to {self.name}", len(LAUNCHED)))

    def __exit__(self, *error: object) -> None:
        self.noted.append((f"from {self.name}", len(LAUNCHED)))


@pytest.fixture
def noted(monkeypatch: pytest.MonkeyPatch) -> list:
    found: list = []
    current, side = Stream("current", found), Stream("side", found)
    monkeypatch.setattr(torch.cuda, "current_stream", lambda device: current)
    monkeypatch.setattr(torch.cuda, "stream", lambda stream: stream)
    monkeypatch.setattr(side_stream, "_second", lambda device: side)
    monkeypatch.setattr(kvcache, "side_stream_for", lambda q: side_stream.SideStream(q.device))
    return found


def chunk() -> dict[str, torch.Tensor]:
    """Arguments of a call for 64 tokens."""

    def make(*shape: int) -> torch.Tensor:
        return torch.zeros(1, *shape, 128, dtype=torch.bfloat16)

    caches = dict(k_cache=make(512, 2), v_cache=make(512, 2), k_cmp_cache=make(8, 2), v_cmp_cache=make(8, 2))
    return caches | dict(q=make(64, 4), k=make(64, 2), v=make(64, 2), cache_seqlens=torch.zeros(1).int())


@pytest.mark.parametrize("paged", [False, True], ids=["rows", "pages"])
def test_the_window_is_joined_before_the_gate(noted: list, paged: bool) -> None:
    """On pages it is copied on its stream too."""
    given, copies = chunk(), 0
    if paged:
        given |= {name: x.unflatten(1, (4, -1)).squeeze(0) for name, x in given.items() if name.endswith("_cache")}
        given |= dict.fromkeys(("page_table", "cmp_page_table"), torch.arange(4).int().unsqueeze(0))
        copies = 2
    with stubbed_layer():
        LAUNCHED.clear()
        nsa_with_kvcache(**given, config=CONFIG, backend="cute")
        names = [at[0] for at, _ in LAUNCHED]
        window, want = names.index("_flash_attn_fwd"), []
        assert names[window - copies : window] == ["move_rows"] * copies
        for at in (*[window - copies] * paged, window):
            want += [("side waits for current", at), ("to side", at), ("from side", at + 1)]
        assert noted == [*want, ("current waits for side", names.index("gated_sum"))]
        noted.clear()
        nsa(*(given[name] for name in "qkv"), config=CONFIG, backend="cute")
        assert not noted


@pytest.mark.parametrize("fails", ["attend_branch", "select_blocks", "gated_sum"])
def test_the_window_is_joined_where_a_launch_fails(noted: list, monkeypatch: pytest.MonkeyPatch, fails: str) -> None:
    """Else its output would be freed, and be given to others, while it is written."""

    def fail(*given: object, **options: object) -> None:
        raise RuntimeError("a launch failed")

    monkeypatch.setattr(forward, fails, fail)
    with stubbed_layer(), pytest.raises(RuntimeError, match="a launch failed"):
        nsa_with_kvcache(**chunk(), config=CONFIG, backend="cute")
    waits = [what for what, _ in noted]
    assert waits == ["side waits for current", "to side", "from side", "current waits for side"]


@pytest.mark.parametrize(
    "device, shape, taken",
    [("cuda", (1, 4096, 32, 1), True), ("cuda", (1, 65536, 32, 1), False), ("cpu", (1,) * 4, False)],
)
def test_calls_with_few_tiles_on_a_gpu(monkeypatch: pytest.MonkeyPatch, device: str, shape: tuple, taken: bool) -> None:
    monkeypatch.setattr(side_stream, "SideStream", lambda device: device)
    monkeypatch.setattr(side_stream, "is_fake", lambda q: False)
    q = SimpleNamespace(shape=torch.Size(shape), device=torch.device(device))
    assert (side_stream.side_stream_for(q) is not None) == taken
