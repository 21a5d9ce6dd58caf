"""Serve prompts by continuous batching over one pool of pages: the template of a backend for an inference engine.

    python examples/serve.py [--rule index] [--fp8] [--page 64] [--layout HND] [--pages 90]

Requests come and go. Prompts are computed in chunks, sequences with the same beginning share its pages, and each step
verifies a draft and goes back behind its first wrong token. One page table leads to the tokens of all layers, and to
compressed keys, which lie with their last tokens. Each finished sequence is compared with one call of `nsa` for all of
it. Weights are random, since wrong pages show in any; prompts are sources of Python's standard library, a byte a token.
Runs on a GPU, decoding by a CUDA graph, else on a CPU.
"""

from __future__ import annotations

import argparse
import os
import random
import time
from collections import deque
from collections.abc import Callable
from dataclasses import dataclass, field
from functools import partial
from itertools import accumulate, islice, product, takewhile
from pathlib import Path

import torch
from rich.console import Console
from rich.table import Table
from torch import nn
from tqdm import tqdm

from nsa_layer import NSAConfig, nsa, nsa_with_kvcache
from nsa_layer.rope import RotaryEmbedding
from nsa_tools.measure.timing import capture

HEADS, KV_HEADS, D, INDEX_DIM, LAYERS = 8, 2, 64, 16, 2
CHUNK, DRAFT, CAPACITY = 192, 3, 1024  # tokens of a step's prompts, that a sequence verifies, of a sequence
CONFIG = NSAConfig(block_size=32, block_counts=4, window_size=64)
QUESTIONS = "What is this module for?", "Which of its names are public?", "Write a test of its first function."
FP8, Tensor = torch.float8_e4m3fn, torch.Tensor
Attend = Callable[..., Tensor]


class Layer(nn.Module):
    """Attention and an MLP, each after a norm and beside a residual path."""

    def __init__(self, config: NSAConfig) -> None:
        super().__init__()
        self.rows = dict(q=(HEADS, D), k=(KV_HEADS, D), v=(KV_HEADS, D))
        if config.rule == "index":
            self.rows |= dict(q_index=(KV_HEADS, INDEX_DIM), k_index=(1, INDEX_DIM))
        dim, self.sizes = HEADS * D, [heads * size for heads, size in self.rows.values()]
        self.norms, self.rope = nn.ModuleList(nn.RMSNorm(n) for n in (dim, D, D, dim)), RotaryEmbedding(D)
        self.project, self.out = nn.Linear(dim, sum(self.sizes), bias=False), nn.Linear(dim, dim, bias=False)
        self.gate_weight = nn.Parameter(torch.randn(HEADS, len(config.branches), D))
        self.mlp = nn.Sequential(nn.Linear(dim, dim, bias=False), nn.GELU(), nn.Linear(dim, dim, bias=False))

    def forward(self, x: Tensor, positions: Tensor, attend: Attend) -> Tensor:
        parts = self.project(self.norms[0](x)).split(self.sizes, -1)
        new = {name: part.unflatten(-1, row) for (name, row), part in zip(self.rows.items(), parts)}
        new["q"], new["k"] = self.rope(self.norms[1](new["q"]), self.norms[2](new["k"]), positions)
        x = x + self.out(attend(**new, gate_weight=self.gate_weight).flatten(-2))
        return x + self.mlp(self.norms[3](x))


class Model(nn.Module):
    """Tokens and their positions, [B, T] or [total], to fp32 logits; attend(i, **tensors) is layer i's attention."""

    def __init__(self, config: NSAConfig) -> None:
        super().__init__()
        self.embedding, self.norm = nn.Embedding(256, HEADS * D), nn.RMSNorm(HEADS * D)
        self.layers = nn.ModuleList(Layer(config) for _ in range(LAYERS))
        self.head = nn.Linear(HEADS * D, 256, bias=False)

    def forward(self, tokens: Tensor, positions: Tensor, attend: Attend) -> Tensor:
        x = self.embedding(tokens)
        for i, layer in enumerate(self.layers):
            x = layer(x, positions, partial(attend, i))
        return self.head(self.norm(x)).float()


class Pool:
    """The caches of all layers, and the pages that are free or end a prefix that is known.

    A free page keeps its tokens until it is taken again, so that a prompt finds those of sequences that have left.
    """

    def __init__(self, config: NSAConfig, pages: int, size: int, layout: str, **options: object) -> None:
        self.config, self.size = config, size
        self.keys = max(1, size // config.stride)  # compressed keys whose last token is on one page
        rows = {name: (pages, size, KV_HEADS, D) for name in ("k_cache", "v_cache")}
        if config.rule == "index":
            rows["k_index_cache"] = (pages, size, 1, INDEX_DIM)
        if config.computes("compressed"):
            rows |= {name: (pages * self.keys, 1, KV_HEADS, D) for name in ("k_cmp_cache", "v_cmp_cache")}
        self.layers: list[dict[str, Tensor]] = [{} for _ in range(LAYERS)]
        for caches, (name, (count, slots, heads, dim)) in product(self.layers, rows.items()):
            by_head = torch.empty(count, heads, slots, dim, **options).transpose(1, 2)
            caches[name] = by_head if layout == "HND" else by_head.contiguous()
        self.users, self.free = [0] * pages, dict.fromkeys(range(pages))  # the oldest first
        self.by_prefix: dict[bytes, int] = {}
        self.prefixes: dict[int, bytes] = {}

    def tables(self, pages: Tensor) -> dict[str, Tensor]:
        """Page tables int32 [B, n]; -1 where there is no page, which no call reads."""
        if not self.config.computes("compressed"):
            return dict(page_table=pages)
        stride, count = self.config.stride, self.config.compressed_length(pages.shape[1] * self.size)
        last = torch.arange(count, device=pages.device) * stride + self.config.span - 1
        slots = pages[:, last // self.size] * self.keys + last % self.size // stride
        return dict(page_table=pages, cmp_page_table=slots.int())

    def attend(self, i: int, *, metadata: dict[str, Tensor], **new: Tensor) -> Tensor:
        return nsa_with_kvcache(**new, **self.layers[i], **metadata, config=self.config)

    def take(self, tokens: bytes, capacity: int) -> tuple[list[int], int]:
        """Pages for a sequence, and how many of these tokens they have; none if there are too few."""
        known = [self.by_prefix[each] for each in takewhile(self.by_prefix.__contains__, self._prefixes(tokens))]
        lacking = -(-capacity // self.size) - len(known)
        free = [page for page in self.free if page not in known][:lacking]
        if len(free) < lacking:
            return [], 0
        for page in free:
            self.by_prefix.pop(self.prefixes.pop(page, b""), None)
        for page in known + free:
            self.users[page] += 1
            self.free.pop(page, None)
        return known + free, len(known) * self.size

    def note(self, tokens: bytes, pages: list[int]) -> None:
        """Pages that these computed tokens have filled can be found from now on."""
        for prefix, page in zip(self._prefixes(tokens), pages):
            if page not in self.prefixes and prefix not in self.by_prefix:
                self.prefixes[page], self.by_prefix[prefix] = prefix, page

    def _prefixes(self, tokens: bytes) -> list[bytes]:
        """Tokens up to the end of each full page; an engine has a hash of each page's and the one before."""
        return [tokens[:end] for end in range(self.size, len(tokens) + 1, self.size)]

    def give_back(self, pages: list[int]) -> None:
        for page in reversed(pages):  # of a prefix the end is forgotten first
            self.users[page] -= 1
            if not self.users[page]:
                self.free[page] = None


@dataclass(eq=False)
class Request:
    """A sequence: its tokens, of which the first `length` are in the caches, and the logits of the new ones."""

    prompt: bytes
    count: int  # new tokens
    tokens: bytes = b""
    length: int = 0
    pages: list[int] = field(default_factory=list)
    logits: list[Tensor] = field(default_factory=list)


class Engine:
    """The scheduler: a step is a call for chunks of prompts, and one for the last token and a draft of the others."""

    def __init__(self, model: Model, pool: Pool, slots: int, device: str) -> None:
        self.model, self.pool, self.device, self.width = model, pool, device, -(-CAPACITY // pool.size)
        self.slots: list[Request | None] = [None] * slots
        self.counts = dict.fromkeys(("tokens shared", "tokens computed", "drafts accepted", "drafts taken back"), 0)
        # Of each slot the length, tokens and pages: one copy brings all to the device, where a graph reads them.
        self.host = torch.full((1 + 1 + DRAFT + self.width, slots), -1, dtype=torch.int32, pin_memory=device == "cuda")
        self.inputs, self.verify = self.host.to(device), self._verify
        if device == "cuda":
            graph, logits = capture(self._verify, warm_ups=3)
            self.verify = lambda: graph.replay() or logits

    def _verify(self) -> Tensor:
        """Logits [slots, 1 + DRAFT, 256]; an empty slot has length -1, which fits no cache: nothing is written."""
        lengths, tokens, pages = self.inputs.split((1, 1 + DRAFT, self.width))
        positions = (lengths + torch.arange(1 + DRAFT, device=self.device)[:, None]).T
        metadata = dict(cache_seqlens=lengths[0]) | self.pool.tables(pages.T.contiguous())
        return self.model(tokens.T.clamp(min=0), positions, partial(self.pool.attend, metadata=metadata))

    def enter(self, request: Request) -> bool:
        """True if there were a slot and pages."""
        if None not in self.slots:
            return False
        request.tokens, capacity = request.prompt, len(request.prompt) + request.count + DRAFT
        request.pages, request.length = self.pool.take(request.prompt[:-1], capacity)
        if request.pages:
            self.slots[self.slots.index(None)] = request
            self.counts["tokens shared"] += request.length
        return bool(request.pages)

    def step(self) -> list[Request]:
        """Sequences that this step has finished; a sequence's last token is left to its draft's call."""
        running, chunks, budget = [each for each in self.slots if each is not None], {}, CHUNK
        for request in running:
            if count := min(len(request.tokens) - 1 - request.length, budget):
                chunks[request] = count
                budget -= count
        if chunks:
            self._prefill(chunks)
        return self._decode([each for each in running if each.length == len(each.tokens) - 1])

    def _prefill(self, chunks: dict[Request, int]) -> None:
        def tensor(numbers: list) -> Tensor:
            return torch.tensor(numbers, dtype=torch.int32).to(self.device)

        tokens = tensor([*b"".join(each.tokens[each.length : each.length + n] for each, n in chunks.items())])
        positions = tensor([at for each, n in chunks.items() for at in range(each.length, each.length + n)])
        pages = tensor([each.pages + [-1] * (self.width - len(each.pages)) for each in chunks])
        metadata = dict(cache_seqlens=tensor([each.length for each in chunks])) | self.pool.tables(pages)
        # On the host, so that no call has to wait for them.
        metadata["cu_seqlens_q"] = torch.tensor([*accumulate(chunks.values(), initial=0)], dtype=torch.int32)
        self.model(tokens, positions, partial(self.pool.attend, metadata=metadata))
        for request, n in chunks.items():
            request.length += n
            self.pool.note(request.tokens[: request.length], request.pages)
            self.counts["tokens computed"] += n

    def _decode(self, ready: list[Request]) -> list[Request]:
        if not ready:
            return []
        drafts = {self.slots.index(request): draft(request.tokens) for request in ready}
        self.host.fill_(-1)
        for request, (slot, drafted) in zip(ready, drafts.items()):
            numbers = [request.length, request.tokens[-1], *drafted, *request.pages]
            self.host[: len(numbers), slot] = torch.tensor(numbers, dtype=torch.int32)
        self.inputs.copy_(self.host, non_blocking=True)
        logits = self.verify().clone()
        best = logits.argmax(-1).tolist()  # the step's only wait for the device
        for request, (slot, drafted) in zip(ready, drafts.items()):
            right, most = 0, min(DRAFT, request.count - 1 - len(request.logits))
            while right < most and drafted[right] == best[slot][right]:
                right += 1
            request.tokens += bytes(best[slot][: right + 1])
            request.logits += logits[slot, : right + 1]
            request.length += 1 + right  # that is all to go back: what lies behind is written before it is read
            self.pool.note(request.tokens[: request.length], request.pages)
            self.counts["drafts accepted"] += right
            self.counts["drafts taken back"] += DRAFT - right
            if len(request.logits) == request.count:
                self.pool.give_back(request.pages)
                self.slots[slot] = None
        return [request for request in ready if request not in self.slots]


def draft(tokens: bytes) -> list[int]:
    """Tokens that followed the last three before; zeros where they are new."""
    at = tokens.rfind(tokens[-3:], 0, len(tokens) - 1)
    following = tokens[at + 3 : at + 3 + DRAFT] if at >= 0 else b""
    return [*following, *bytes(DRAFT - len(following))]


def difference(model: Model, config: NSAConfig, request: Request, device: str, *, fp8: bool) -> float:
    """Relative difference of a sequence's logits from those of one call for all its tokens, as the caches keep them."""

    def stored(x: Tensor) -> Tensor:
        return x.clamp(-448, 448).to(FP8).to(x.dtype) if fp8 else x

    def attend(_: int, **new: Tensor) -> Tensor:
        new |= {name: stored(x) for name, x in new.items() if name in ("k", "v", "k_index")}
        if fp8 and config.computes("compressed"):
            blocks = (len(request.tokens) - 1) // config.span
            for name in "kv":
                means = new[name][:, : blocks * config.span].unflatten(1, (blocks, -1)).float().mean(2)
                new[f"{name}_cmp"] = stored(means).to(new[name].dtype)
        return nsa(**new, config=config)

    tokens = torch.tensor([[*request.tokens[:-1]]], device=device)
    want = model(tokens, torch.arange(tokens.shape[1], device=device), attend)[0, len(request.prompt) - 1 :]
    return ((torch.stack(request.logits) - want).norm() / want.norm()).item()


def requests(count: int, new: int) -> deque[Request]:
    """Questions about modules of the standard library; those about one module begin alike."""
    files = sorted(Path(os.__file__).parent.glob("*.py"), key=lambda file: -file.stat().st_size)
    texts = [b"Read this source.\n\n" + file.read_bytes()[: 150 + 97 * i % 400] for i, file in enumerate(files)]
    asked = ((text + b"\n\n" + question.encode(), new) for text in texts for question in QUESTIONS)
    return deque(Request(*each) for each in islice(asked, count))


@torch.inference_mode()
def serve(arguments: argparse.Namespace) -> dict[str, float]:
    """Serve and check; numbers of the run, of what it finished where it was interrupted."""
    torch.manual_seed(0)
    device = "cuda" if torch.cuda.is_available() else "cpu"
    dtype, bound = (torch.bfloat16, 0.05) if device == "cuda" else (torch.float32, 1e-4)
    index = dict(rule="index", branches=("selected", "window"))
    config = CONFIG.replace(**index) if arguments.rule == "index" else CONFIG
    model, options = Model(config).to(device, dtype), dict(dtype=FP8 if arguments.fp8 else dtype, device=device)
    pool = Pool(config, arguments.pages, arguments.page, arguments.layout, **options)
    engine, draw = Engine(model, pool, arguments.slots, device), random.Random(0)
    waiting, begin, steps, differences = requests(arguments.requests, arguments.tokens), time.perf_counter(), 0, []
    with tqdm(total=len(waiting) * arguments.tokens, unit=" tokens") as progress:
        try:
            while waiting or any(engine.slots):
                if waiting and (draw.random() < 0.3 or not any(engine.slots)) and engine.enter(waiting[0]):
                    waiting.popleft()
                elif not any(engine.slots):
                    raise SystemExit(f"--pages {arguments.pages} of {arguments.page} tokens are too few for a sequence")
                for request in engine.step():
                    differences.append(difference(model, config, request, device, fp8=arguments.fp8))
                    assert differences[-1] <= bound, f"{differences[-1]:.2g} from the whole call: {request.tokens}"
                    progress.update(request.count)
                steps += 1
        except KeyboardInterrupt:
            print("interrupted")
    counts = dict(sequences=len(differences), steps=steps, seconds=time.perf_counter() - begin)
    return counts | engine.counts | {"largest difference from the whole call": max(differences, default=0.0)}


def options(arguments: list[str] | None = None) -> argparse.Namespace:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--rule", choices=("nsa", "index"), default="nsa", help="that chooses blocks")
    parser.add_argument("--fp8", action="store_true", help="keep caches in float8_e4m3fn")
    parser.add_argument("--layout", choices=("NHD", "HND"), default="NHD", help="of a page")
    for name, size in dict(page=16, pages=160, slots=6, requests=18, tokens=48).items():
        parser.add_argument("--" + name, type=int, default=size, help="%(default)s")
    return parser.parse_args(arguments)


def main() -> None:
    table = Table(show_header=False)
    for name, number in serve(options()).items():
        table.add_row(name, f"{number:,}" if isinstance(number, int) else f"{number:.2g}")
    Console().print(table)


if __name__ == "__main__":
    main()
