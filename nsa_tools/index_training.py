"""Training the index of a converted model: alone, by its loss over the chosen blocks or over all, or with the model.

`index_alone` and `listing` work in any loop: ``index_loss(model).backward()`` after a forward in training is all that
a step of the index needs. `train_index` is such a loop, with progress, a checkpoint, and Ctrl-C. `coverage` says what
the chosen blocks have of dense attention's probability.
"""

from __future__ import annotations

import math
import time
from collections.abc import Callable, Iterator
from contextlib import ExitStack, contextmanager, nullcontext
from pathlib import Path
from typing import Any, NamedTuple

import torch
from torch import nn
from torch.utils._python_dispatch import TorchDispatchMode
from tqdm import tqdm

from nsa_layer import NSAConfig, index_loss
from nsa_layer.branches import Branches
from nsa_layer.call import Call, Saved
from nsa_layer.operators.layer import INPUTS, OP, static_spec
from nsa_layer.reference import SelectionScores, forced_blocks, select_blocks
from nsa_tools.demo.checkpoint import load_checkpoint, save_checkpoint
from nsa_tools.demo.stop_request import StopRequest

Tensor = torch.Tensor
__all__ = ["coverage", "index_alone", "listing", "train_index"]
ROWS = 512  # queries whose dense probabilities are in memory at a time


class Coverage(NamedTuple):
    """Dense attention's probability in the blocks that a call chose, and in as many of the best ones."""

    chosen: float
    best: float


def indices_of(model: nn.Module) -> list[Branches]:
    """The layers that have an index; ValueError if none has."""
    layers = [part for part in model.modules() if isinstance(part, Branches) and part.q_index is not None]
    if not layers:
        raise ValueError(f"{type(model).__name__} has no layers of rule='index': convert_to_nsa makes some")
    return layers


def index_parameters(model: nn.Module) -> list[nn.Parameter]:
    """Projections and norms of the model's indices."""
    return [x for layer in indices_of(model) for name, x in layer.named_parameters() if "_index" in name]


@contextmanager
def index_alone(model: nn.Module) -> Iterator[list[nn.Parameter]]:
    """While entered, a model is frozen and in eval mode but for its indices, whose parameters are yielded.

    No activation of one layer is kept for another's backward: `nsa` gives o no gradient in an index.

    Example:
        >>> config = NSAConfig(rule="index", branches=("selected",), block_size=16, block_counts=4)
        >>> model = NSAttention(64, num_heads=4, num_kv_heads=2, config=config)
        >>> with index_alone(model) as parameters:
        ...     o = model(torch.randn(1, 100, 64))
        >>> index_loss(model).backward()  # gradients of the parameters
    """
    layers, parameters = indices_of(model), index_parameters(model)
    modes = {part: part.training for part in model.modules()}
    frozen = {x: x.requires_grad for x in model.parameters()}
    try:
        model.eval().requires_grad_(False)
        for layer in layers:
            layer.training = True  # of the layer alone: what it holds stays in eval mode
        for x in parameters:
            x.requires_grad_()
        yield parameters
    finally:
        for part, mode in modes.items():
            part.training = mode
        for x, needs_grad in frozen.items():
            x.requires_grad_(needs_grad)


@contextmanager
def listing(model: nn.Module, tokens: int) -> Iterator[None]:
    """While entered, lists hold all blocks of sequences of so many tokens: attention is dense, and the index learns
    about every block. The kernels list 128 blocks at most.

    Example:
        >>> config = NSAConfig(rule="index", branches=("selected",), block_size=16, block_counts=4)
        >>> model = NSAttention(64, num_heads=4, num_kv_heads=2, config=config)
        >>> with listing(model, 100):
        ...     model.config.block_counts
        7
    """
    before = {layer: layer.config for layer in indices_of(model)}
    try:
        for layer, config in before.items():
            layer.config = config.replace(block_counts=config.num_blocks(tokens))
        yield
    finally:
        for layer, config in before.items():
            layer.config = config


def train_index(
    model: nn.Module,
    batch_of: Callable[[int], Tensor],
    *,
    steps: int,
    learning_rate: float = 1e-3,
    warm_up: float = 0.05,
    all_blocks: bool = False,
    weight: float | None = None,
    checkpoint: Path | None = None,
    save_every: int = 50,
    seconds: float = math.inf,
) -> list[float]:
    """Train a model's index, and with ``weight`` the whole model; AdamW without decay, gradients of norm 1 at most.

    Where parameters are in half precision, AdamW updates copies in fp32.

    Args:
        model: a language model of transformers, or what is called with ids and returns an object with ``loss``.
        batch_of: token ids [B, T] of a step, int64, on the model's device; asked for each step once.
        steps: to take, those before a checkpoint included.
        learning_rate: the highest; it rises for the share ``warm_up`` of the steps, then falls as a cosine to 0.
        all_blocks: list all blocks, as `listing`.
        weight: None: the index alone; a number: loss + weight * index loss, by which everything trains; 0: the loss
            without that of an index, which the model needs not have.
        checkpoint: a file that is written every ``save_every`` steps and at the end, and gone on from where it exists.
        seconds: after which no further step begins.

    Returns:
        The index' loss of each step taken, summed over layers (with weight 0 the model's). SIGINT ends the training
        after a step, saved.

    Raises:
        ValueError: the model has no index, and weight is not 0.
        FloatingPointError: a loss is not finite.

    Example:
        >>> sizes = dict(hidden_size=64, intermediate_size=64, vocab_size=50, num_hidden_layers=1)
        >>> config = NSALlamaConfig(**sizes, nsa=dict(rule="index", branches=("selected",), block_counts=2))
        >>> model = NSALlamaForCausalLM(config)
        >>> losses = train_index(model, lambda step: torch.randint(50, (1, 300)), steps=2)
    """
    losses, deadline = [], time.monotonic() + seconds
    with ExitStack() as stack:
        if weight is None:
            parameters = stack.enter_context(index_alone(model))
        else:
            if weight:
                indices_of(model)
            parameters = list(model.train().parameters())
        trained = [x.detach().float() for x in parameters]  # the same memory where they are fp32
        optimizer = torch.optim.AdamW(trained, lr=learning_rate, betas=(0.9, 0.95), weight_decay=0.0)
        state = dict(models={"index": nn.ParameterList(trained)}, optimizers={"index": optimizer})
        step, device = 0, str(parameters[0].device)
        if checkpoint is not None and checkpoint.is_file():
            step = load_checkpoint(checkpoint, **state, device=device)
            _copy(trained, parameters)
        stop = stack.enter_context(StopRequest())
        bar = stack.enter_context(tqdm(total=steps, initial=step, unit="step"))
        rise = max(1, round(warm_up * steps))
        while step < steps and time.monotonic() < deadline and stop.signal is None:
            for group in optimizer.param_groups:
                group["lr"] = learning_rate * min((step + 1) / rise, 0.5 + 0.5 * math.cos(math.pi * step / steps))
            ids = batch_of(step)
            with listing(model, ids.shape[-1]) if all_blocks else nullcontext():
                outputs = model(ids) if weight is None else model(ids, labels=ids)
            shown = outputs.loss if weight == 0 else index_loss(model)
            loss = outputs.loss + weight * shown if weight else shown
            if not math.isfinite(loss.item()):
                raise FloatingPointError(f"the loss is {loss.item()} at step {step}; try a lower learning_rate")
            loss.backward()
            for x, parameter in zip(trained, parameters, strict=True):
                x.grad, parameter.grad = None if parameter.grad is None else parameter.grad.float(), None
            torch.nn.utils.clip_grad_norm_(trained, 1.0)
            optimizer.step()
            _copy(trained, parameters)
            losses.append(shown.item())
            step += 1
            bar.set_postfix(loss=f"{losses[-1]:.3f}", refresh=False)
            bar.update()
            if checkpoint is not None and step % save_every == 0:
                save_checkpoint(checkpoint, step=step, **state)
        if checkpoint is not None and losses and step % save_every:
            save_checkpoint(checkpoint, step=step, **state)
    return losses


@torch.no_grad()
def _copy(trained: list[Tensor], parameters: list[nn.Parameter]) -> None:
    for x, parameter in zip(trained, parameters, strict=True):
        parameter.copy_(x)


@torch.no_grad()
def coverage(model: nn.Module, ids: Tensor) -> list[Coverage]:
    """`Coverage` of each layer, by the calls of `nsa` in a forward of token ids [B, T].

    Mean over heads and over tokens that see more blocks than are listed; ValueError where none does.

    Example:
        >>> sizes = dict(hidden_size=64, intermediate_size=64, vocab_size=50, num_hidden_layers=1)
        >>> config = NSALlamaConfig(**sizes, nsa=dict(rule="index", branches=("selected",), block_counts=2))
        >>> model = NSALlamaForCausalLM(config)
        >>> chosen, best = coverage(model, torch.randint(50, (1, 300)))[0]  # of layer 0
    """
    was_training = model.training
    with _Calls() as calls:
        model.eval()(ids)
    model.train(was_training)
    return calls.results


class _Calls(TorchDispatchMode):
    """Looks at each call of the operator, and computes its `Coverage`."""

    def __init__(self) -> None:
        super().__init__()
        self.results: list[Coverage] = []

    def __torch_dispatch__(self, func: Any, types: Any, args: tuple = (), kwargs: dict | None = None) -> Any:
        outputs = func(*args, **(kwargs or {}))
        if func is OP:
            call, lists = Call(*args[:INPUTS]), Saved(*outputs[1 : 1 + len(Saved._fields)]).block_indices
            self.results.append(_coverage(call._replace(spec=static_spec(args[INPUTS:])), lists))
        return outputs


def _coverage(call: Call, lists: Tensor) -> Coverage:
    T, n, config, size = call.q.shape[1], lists.shape[-1], call.config, call.config.block_size
    first = n * size  # tokens from here on see more than n blocks
    if first >= T:
        raise ValueError(f"coverage needs more than {n} blocks of {size} tokens, got {T} tokens")
    sums, count = torch.zeros(2, dtype=torch.float64), 0
    for at, mass in dense_mass(call.q, call.k, size, call.spec.softmax_scale, first=first):
        for i, listed in enumerate((lists[:, at].transpose(1, 2), best_blocks(mass, at, config))):
            listed = listed.long()  # [B, Hkv, rows, n]
            sums[i] += mass.gather(-1, listed.clamp(min=0)).masked_fill(listed < 0, 0).sum().cpu()
        count += mass[..., 0].numel()
    return Coverage(*(sums / count).tolist())


def best_blocks(mass: Tensor, at: Tensor, config: NSAConfig) -> Tensor:
    """The forced blocks and those of most mass [B, Hkv, rows, blocks], of queries at positions ``at``: int32
    [B, Hkv, rows, n], ascending, padded with -1."""
    t, blocks = at[:, None], mass.shape[-1]
    start = torch.arange(blocks, device=at.device) * config.block_size
    forced = forced_blocks(t, t, start, blocks * config.block_size, config=config, causal=True)
    scores = SelectionScores(mass.masked_fill(start > t, -torch.inf), start <= t, forced)
    return select_blocks(scores, config=config, width=min(config.block_counts, blocks))


def dense_mass(
    q: Tensor, k: Tensor, block_size: int, softmax_scale: float, *, first: int = 0
) -> Iterator[tuple[Tensor, Tensor]]:
    """Dense causal attention's probability of each block, mean over the group: pairs of positions of queries, and
    fp32 [B, Hkv, rows, blocks]. From the query ``first`` on.

    Args:
        q: [B, T, Hq, D].
        k: [B, T, Hkv, D].
    """
    T, Hkv = q.shape[1], k.shape[2]
    k = k.float().transpose(1, 2)[:, :, None]
    for start in range(first, T, ROWS):
        at = torch.arange(start, min(start + ROWS, T), device=q.device)
        seen = k[..., : start + len(at), :].transpose(-1, -2)
        scores = q[:, at].float().transpose(1, 2).unflatten(1, (Hkv, -1)) @ seen * softmax_scale
        later = torch.arange(seen.shape[-1], device=q.device) > at[:, None]
        probability = scores.masked_fill_(later, -torch.inf).softmax(-1).mean(2)
        padded = nn.functional.pad(probability, (0, -T % block_size + T - seen.shape[-1]))
        yield at, padded.unflatten(-1, (-1, block_size)).sum(-1)
