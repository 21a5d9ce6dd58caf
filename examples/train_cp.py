"""Train a small model on long sequences with FSDP2 and context parallelism, and go on with another number of ranks.

    torchrun --nproc-per-node 2 examples/train_cp.py --cp 2 --steps 20 --checkpoint run
    torchrun --nproc-per-node 4 examples/train_cp.py --cp 2 --steps 40 --checkpoint run

Ranks form a mesh of dp x cp. The cp ranks of a row share sequences: each holds a part of their tokens. Weights are
sharded over all ranks. The second command goes on where the first one ended, on twice the ranks. Runs on GPUs with
NCCL, else on CPUs with gloo. Tokens follow a fixed table nine times of ten, so that the loss falls from ln 64 = 4.16.
"""

from __future__ import annotations

import argparse
import os
from pathlib import Path

import torch
import torch.distributed as dist
import torch.distributed.checkpoint as dcp
import torch.nn.functional as F
from torch import nn
from torch.distributed.checkpoint.state_dict import get_state_dict, set_state_dict
from torch.distributed.device_mesh import DeviceMesh, init_device_mesh
from torch.distributed.fsdp import MixedPrecisionPolicy, fully_shard

from nsa_layer import ContextParallel, NSAConfig, NSAttention, shard_sequence
from nsa_layer.rope import RotaryEmbedding

SYMBOLS = 64


class Block(nn.Module):
    """Attention, then an MLP, each after a norm and beside a residual path."""

    def __init__(self, dim: int, heads: int, kv_heads: int, config: NSAConfig) -> None:
        super().__init__()
        self.norms = nn.ModuleList(nn.RMSNorm(dim) for _ in range(2))
        rope = RotaryEmbedding(dim // heads)
        self.attention = NSAttention(dim, num_heads=heads, num_kv_heads=kv_heads, config=config, rope=rope)
        self.mlp = nn.Sequential(nn.Linear(dim, 4 * dim, bias=False), nn.GELU(), nn.Linear(4 * dim, dim, bias=False))

    def forward(self, x: torch.Tensor, cu_seqlens: torch.Tensor | None) -> torch.Tensor:
        x = x + self.attention(self.norms[0](x), cu_seqlens=cu_seqlens)
        return x + self.mlp(self.norms[1](x))


class Model(nn.Module):
    """This rank's tokens, [B, T / R] or [total / R], to logits of the next ones."""

    def __init__(self, dim: int, layers: int, heads: int, kv_heads: int, config: NSAConfig) -> None:
        super().__init__()
        self.embedding = nn.Embedding(SYMBOLS, dim)
        self.blocks = nn.ModuleList(Block(dim, heads, kv_heads, config) for _ in range(layers))
        self.norm, self.head = nn.RMSNorm(dim), nn.Linear(dim, SYMBOLS, bias=False)

    def forward(self, tokens: torch.Tensor, cu_seqlens: torch.Tensor | None = None) -> torch.Tensor:
        x = self.embedding(tokens)
        for block in self.blocks:
            x = block(x, cu_seqlens)
        return self.head(self.norm(x)).float()


def draw(step: int, given: argparse.Namespace) -> tuple[torch.Tensor, torch.Tensor]:
    """A step's tokens and labels, int64 [batch, tokens]: the same on every rank, whatever their number."""
    generator = torch.Generator().manual_seed(step)
    table = torch.randperm(SYMBOLS, generator=torch.Generator().manual_seed(0))
    noise = torch.randint(SYMBOLS, (given.batch, given.tokens + 1), generator=generator)
    keep = torch.rand(noise.shape, generator=generator) < 0.9
    tokens = [noise[:, 0]]
    for t in range(1, given.tokens + 1):
        tokens.append(torch.where(keep[:, t], table[tokens[-1]], noise[:, t]))
    tokens = torch.stack(tokens, 1)
    return tokens[:, :-1], tokens[:, 1:]


def step_batch(
    step: int, mesh: DeviceMesh, cp: ContextParallel, given: argparse.Namespace
) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor | None]:
    """This rank's tokens and labels, and the starts of packed sequences."""
    tokens, labels = draw(step, given)
    share = given.batch // mesh["dp"].size()
    rows = slice(mesh.get_local_rank("dp") * share, (mesh.get_local_rank("dp") + 1) * share)
    tokens, labels, starts = tokens[rows], labels[rows], None
    if given.packed:  # the row's sequences as one pack; labels were made before, and the starts stay whole
        starts = torch.arange(0, tokens.numel() + 1, given.tokens, dtype=torch.int32)
        tokens, labels = tokens.flatten(), labels.flatten()
    dim = 0 if given.packed else 1
    return shard_sequence(tokens, cp, dim=dim), shard_sequence(labels, cp, dim=dim), starts


def build(mesh: DeviceMesh, cp: ContextParallel, given: argparse.Namespace) -> nn.Module:
    """The model, its weights sharded over all ranks and the sequences of its attention over the mesh's "cp"."""
    torch.manual_seed(0)
    config = NSAConfig(block_size=given.block, block_counts=4, window_size=2 * given.block)
    with torch.device(mesh.device_type):
        model = Model(given.dim, given.layers, given.heads, given.kv_heads, config)
    # cp ranks see other tokens, as dp ranks do: gradients are averaged over both, by FSDP.
    everyone = mesh._flatten("everyone")
    precision = {}
    if mesh.device_type == "cuda":
        precision = dict(mp_policy=MixedPrecisionPolicy(param_dtype=torch.bfloat16, reduce_dtype=torch.float32))
    for block in model.blocks:
        block.attention.set_context_parallel(cp)
        fully_shard(block, mesh=everyone, **precision)
    return fully_shard(model, mesh=everyone, **precision)


class Run:
    """The contents of a checkpoint: weights, the optimiser's state, and the number of steps taken.

    Args:
        folder: has a folder for each checkpoint; the last one that is complete is gone on from.
    """

    def __init__(self, model: nn.Module, folder: Path | None) -> None:
        self.model, self.folder, self.step = model, folder, 0
        self.optimizer = torch.optim.AdamW(model.parameters(), lr=3e-3)
        saved = [] if folder is None else sorted(file.parent for file in folder.glob("step-*/.metadata"))
        if saved:
            self._load(saved[-1])

    def save(self) -> None:
        """Every rank writes what it holds."""
        if self.folder is not None:
            dcp.save(self._state(), checkpoint_id=self.folder / f"step-{self.step:08}")

    def _load(self, saved: Path) -> None:
        """Every rank reads what it needs, however many wrote it."""
        state = self._state()
        dcp.load(state, checkpoint_id=saved)
        parts = dict(model_state_dict=state["model"], optim_state_dict=state["optimizer"])
        set_state_dict(self.model, self.optimizer, **parts)
        self.step = int(state["step"])

    def _state(self) -> dict[str, object]:
        weights, moments = get_state_dict(self.model, self.optimizer)
        return {"model": weights, "optimizer": moments, "step": torch.tensor(self.step)}


def take_step(run: Run, mesh: DeviceMesh, cp: ContextParallel, given: argparse.Namespace) -> float:
    """Train on the next batch; the mean loss of all ranks, before the step."""
    tokens, labels, starts = step_batch(run.step, mesh, cp, given)
    logits = run.model(tokens.to(mesh.device_type), starts)
    # Every rank has as many labels: the mean of the ranks' means is the batch's, and FSDP averages gradients.
    loss = F.cross_entropy(logits.flatten(0, -2), labels.flatten().to(mesh.device_type))
    loss.backward()
    run.optimizer.step()
    run.optimizer.zero_grad()
    run.step += 1
    mean = loss.detach() / dist.get_world_size()
    dist.all_reduce(mean)
    return mean.item()


def main() -> None:
    given = options()
    if "RANK" not in os.environ:
        raise SystemExit("torchrun starts the ranks: torchrun --nproc-per-node 2 examples/train_cp.py --cp 2")
    device = "cuda" if torch.cuda.is_available() else "cpu"
    if device == "cuda":
        torch.cuda.set_device(int(os.environ["LOCAL_RANK"]))
    dist.init_process_group("cpu:gloo,cuda:nccl" if device == "cuda" else "gloo")
    ranks = dist.get_world_size()
    if ranks % given.cp or given.batch % (ranks // given.cp):
        raise SystemExit(f"--cp must divide {ranks} ranks, and {ranks} / cp the batch of {given.batch}")
    mesh = init_device_mesh(device, (ranks // given.cp, given.cp), mesh_dim_names=("dp", "cp"))
    cp = ContextParallel(mesh["cp"], mode=given.mode, load_balance=given.load_balance)
    run = Run(build(mesh, cp, given), given.checkpoint)
    while run.step < given.steps:
        loss = take_step(run, mesh, cp, given)
        if dist.get_rank() == 0:
            print(f"step {run.step}: loss {loss:.4f}", flush=True)
        if run.step == given.steps or run.step % given.save_every == 0:
            run.save()
    dist.destroy_process_group()


def options(arguments: list[str] | None = None) -> argparse.Namespace:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--cp", type=int, default=1, help="ranks that share a sequence; divides their number")
    parser.add_argument("--mode", default="auto", choices=("auto", "heads", "gather"), help="of ContextParallel")
    balance = dict(default="zigzag", type=lambda name: None if name == "none" else name)
    parser.add_argument("--load-balance", **balance, metavar="{zigzag,none}", help="of ContextParallel")
    parser.add_argument("--packed", action="store_true", help="a rank's sequences as one pack")
    parser.add_argument("--steps", type=int, default=20, help="in all, those of the checkpoint included")
    parser.add_argument("--checkpoint", type=Path, help="folder to save to, and to go on from where it has one")
    parser.add_argument("--save-every", type=int, default=100, metavar="STEPS")
    sizes = dict(batch=4, tokens=512, dim=64, layers=2, heads=4, kv_heads=2, block=16)
    if torch.cuda.is_available():
        sizes |= dict(tokens=4096, dim=512, heads=8, kv_heads=2, block=64)
    for name, size in sizes.items():
        parser.add_argument("--" + name.replace("_", "-"), type=int, default=size)
    return parser.parse_args(arguments)


if __name__ == "__main__":
    main()
