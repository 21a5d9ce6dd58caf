"""Training: both models take the same steps, at once on a CPU, until Ctrl-C or SIGTERM ask for the end."""

from __future__ import annotations

import math
import time
from collections.abc import Callable, Iterable, Iterator
from concurrent.futures import ThreadPoolExecutor
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path
from typing import TypeVar

import torch
from tqdm import tqdm

from nsa_tools import index_training
from nsa_tools.demo.checkpoint import save_checkpoint
from nsa_tools.demo.data import Text, held_out_windows, training_batch
from nsa_tools.demo.demo_config import DemoConfig
from nsa_tools.demo.model import CHOSEN, ByteModel, with_blocks_chosen
from nsa_tools.demo.stop_request import StopRequest
from nsa_tools.report.files import MetricsLog

MAX_GRADIENT_NORM = 1.0
INDEX_SECONDS = 40.0
Argument, Result = TypeVar("Argument"), TypeVar("Result")
Map = Callable[[Callable[[Argument], Result], Iterable[Argument]], list[Result]]


@contextmanager
def side_by_side(device: str, *, models: int, threads: int) -> Iterator[Map]:
    """Yields a ``map``: on a CPU its calls run at once, each with so many threads; on a GPU one after the other.

    One model's operators are too small to be worth sharing among cores: PyTorch's threads wait for each other by
    spinning, and on a machine with other work to do a step then takes a hundred times as long. Two models on two cores
    need not wait.
    """
    if torch.device(device).type != "cpu":
        yield lambda function, arguments: [function(x) for x in arguments]
        return
    before = torch.get_num_threads()
    torch.set_num_threads(threads)
    try:
        with ThreadPoolExecutor(models, initializer=torch.set_num_threads, initargs=(threads,)) as pool:
            yield lambda function, arguments: list(pool.map(function, arguments))
    finally:
        torch.set_num_threads(before)


def build_optimizers(models: dict[str, ByteModel], config: DemoConfig) -> dict[str, torch.optim.AdamW]:
    """The same AdamW for each model."""
    return {
        name: torch.optim.AdamW(model.parameters(), lr=config.lr, betas=(0.9, 0.95), weight_decay=0.01)
        for name, model in models.items()
    }


def learning_rate(config: DemoConfig, step: int) -> float:
    """Rises linearly for ``warmup`` steps, then falls as 1 / sqrt(step): it needs no end, so a run can be continued."""
    return config.lr * min((step + 1) / config.warmup, math.sqrt(config.warmup / (step + 1)))


@dataclass
class Training:
    """A training run of both models.

    Attributes:
        each: maps a function over the models' names, `side_by_side`.
        log, checkpoint: where losses and state go.
        deadline: when to stop, on the clock of `time.monotonic`.
    """

    config: DemoConfig
    text: Text
    models: dict[str, ByteModel]
    optimizers: dict[str, torch.optim.AdamW]
    each: Map
    log: MetricsLog
    checkpoint: Path
    deadline: float

    def run(self, step: int, stop: StopRequest, *, on_evaluation: Callable[[], None] = lambda: None) -> int:
        """Train from ``step`` until the steps are done, the time is up or a stop is asked for; return the step reached.

        ``on_evaluation`` is called after each round on held-out text, its checkpoint written.
        """
        self._evaluate(step)
        with tqdm(total=self.config.steps, initial=step, unit="step", dynamic_ncols=True) as bar:
            while step < self.config.steps and time.monotonic() < self.deadline and stop.signal is None:
                records = self.each(lambda name: self._learn(name, step), self.models)
                said = (f"{r['model']} {r['loss']:.3f} {r['tokens_per_second']:,.0f} tokens/s" for r in records)
                bar.set_postfix_str(", ".join(said), refresh=False)
                for record in records:
                    self.log.write(**record)
                step += 1
                bar.update()
                if step % self.config.eval_every == 0:
                    self._evaluate(step)
                    self.save(step)
                    on_evaluation()
        # What is saved must be continued as if it had not stopped, so the step is whole: both models have taken it.
        self.save(step)
        if stop.signal is None:
            self._evaluate(step)
        return step

    def save(self, step: int) -> None:
        save_checkpoint(self.checkpoint, step=step, models=self.models, optimizers=self.optimizers)

    def _learn(self, name: str, step: int) -> dict[str, object]:
        """One step of one model; returns its record."""
        config, model, optimizer = self.config, self.models[name], self.optimizers[name]
        order = dict(seed=config.seed, step=step, batch=config.batch, seqlen=config.seqlen)
        sequences = training_batch(self.text, **order).to(config.device)
        for group in optimizer.param_groups:
            group["lr"] = learning_rate(config, step)
        begin = time.perf_counter()
        model.train()
        loss = model.loss(sequences)
        loss.backward()
        torch.nn.utils.clip_grad_norm_(model.parameters(), MAX_GRADIENT_NORM)
        optimizer.step()
        optimizer.zero_grad(set_to_none=True)
        value = loss.item()
        if torch.device(config.device).type == "cuda":
            torch.cuda.synchronize(config.device)
        seconds = time.perf_counter() - begin
        if not math.isfinite(value):
            raise FloatingPointError(f"the training loss of {name} is {value} at step {step}; try a smaller --lr")
        rate = round(config.batch * config.seqlen / seconds, 1)
        return dict(kind="train", model=name, step=step + 1, loss=value, seconds=seconds, tokens_per_second=rate)

    def _evaluate(self, step: int) -> None:
        """The mean loss of each model on the held-out sequences, once for each step."""
        done = {record["model"] for record in self.log.select("held_out") if record["step"] == step}
        missing = [name for name in self.models if name not in done]
        losses = self.each(lambda name: held_out_loss(self.models[name], self.text, self.config), missing)
        for name, loss in zip(missing, losses):
            self.log.write(kind="held_out", model=name, step=step, loss=loss)


@torch.no_grad()
def held_out_loss(model: ByteModel, text: Text, config: DemoConfig) -> float:
    """The mean loss on the held-out sequences."""
    windows = held_out_windows(text, windows=config.eval_windows, seqlen=config.seqlen)
    model.eval()
    losses = [model.loss(window[None].to(config.device)).item() for window in windows]
    return math.fsum(losses) / len(losses)


def log_chosen_blocks(dense: ByteModel, step: int, text: Text, config: DemoConfig, each: Map, log: MetricsLog) -> None:
    """Log held-out losses of the dense model with attention to blocks of `CHOSEN`: an index as it starts, and trained.

    The index alone is trained, by its own loss, on the sequences of the steps that follow ``step``, which is what its
    records are of: a run that goes on drops them.
    """
    models = {kind: with_blocks_chosen(dense, config, kind) for kind in CHOSEN}
    for kind, loss in zip(CHOSEN, each(lambda kind: held_out_loss(models[kind], text, config), CHOSEN)):
        log.write(kind="chosen", model=kind, step=step + 1, index_steps=0, loss=loss)
    model, order = models["by index"], dict(batch=config.batch, seqlen=config.seqlen, seed=config.seed)

    def batch_of(done: int) -> torch.Tensor:
        return training_batch(text, step=step + done, **order)[:, :-1].to(config.device)

    losses = index_training.train_index(model, batch_of, steps=config.index_steps, seconds=INDEX_SECONDS)
    for done, loss in enumerate(losses, 1):
        log.write(kind="index", model="by index", step=step + done, loss=loss)
    loss, done = held_out_loss(model, text, config), len(losses)
    log.write(kind="chosen", model="by index", step=step + max(1, done), index_steps=done, loss=loss)
