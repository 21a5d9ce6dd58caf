"""Text written by the trained models, one byte at a time."""

from __future__ import annotations

import math
import time

import torch

from nsa_tools.demo.data import Text, held_out_windows
from nsa_tools.demo.demo_config import DemoConfig
from nsa_tools.demo.model import ByteModel
from nsa_tools.demo.train import Map

TEMPERATURE = 0.7
MAX_PROMPT = 1024
SHOWN_PROMPT = 300
# On a slow or busy machine the sample gets shorter, so that the report does not outlast the time budget by much.
MAX_SECONDS = 15.0


@torch.no_grad()
def continue_text(
    model: ByteModel, prompt: torch.Tensor, count: int, *, seed: int, seconds: float = math.inf
) -> torch.Tensor:
    """Sample ``count`` bytes after a prompt, or as many as come in some seconds: int64 [n] -> int64 [at most count].

    A model with caches is given what they do not have. Without, the sequence has its full length from the start: the
    models are causal, so what stands behind the last byte so far changes nothing, and kernels see one shape.
    """
    generator = torch.Generator().manual_seed(seed)
    tokens = torch.cat((prompt, prompt.new_zeros(count)))[None]
    model.eval()
    caches, cached = model.new_caches(*tokens.shape), 0
    limit = time.monotonic() + seconds
    end = len(prompt)
    while end < tokens.shape[1] and time.monotonic() < limit:
        if caches is None:
            logits = model(tokens)[0, end - 1]
        else:
            logits, cached = model(tokens[:, cached:end], caches=caches)[0, -1], end
        p = (logits.cpu() / TEMPERATURE).softmax(-1)
        tokens[0, end] = torch.multinomial(p, 1, generator=generator).item()
        end += 1
    return tokens[0, len(prompt) : end].cpu()


def sample_report(models: dict[str, ByteModel], each: Map, text: Text, config: DemoConfig) -> str:
    """The end of a held-out prompt, what each model writes after it, and what the text itself says there."""
    window = held_out_windows(text, windows=1, seqlen=config.seqlen)[0]
    length = min(MAX_PROMPT, max(1, config.seqlen // 4), config.seqlen)
    prompt, real = window[:length], window[length : length + config.sample_bytes]
    parts = [(f"prompt (its last {min(length, SHOWN_PROMPT)} of {length} bytes)", prompt[-SHOWN_PROMPT:])]

    def write(name: str) -> torch.Tensor:
        start, count = prompt.to(config.device), config.sample_bytes
        return continue_text(models[name], start, count, seed=config.seed, seconds=MAX_SECONDS)

    for name, written in zip(models, each(write, models)):
        cut = "" if len(written) == config.sample_bytes else f", cut off after {MAX_SECONDS:g} seconds"
        parts.append((f"written by {name}, temperature {TEMPERATURE}{cut}", written))
    parts.append(("the text itself", real))
    return "\n".join(f"=== {title} ===\n{decode(tokens)}\n" for title, tokens in parts)


def decode(tokens: torch.Tensor) -> str:
    """Bytes as text; what is no UTF-8, or is a control character, becomes a question mark."""
    text = bytes(tokens.tolist()).decode("utf-8", errors="replace")
    return "".join(c if c.isprintable() or c in "\n\t" else "?" for c in text.replace("\ufffd", "?"))
