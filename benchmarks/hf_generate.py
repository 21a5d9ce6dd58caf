"""Prefill and decode step of a Llama of transformers, sparse through `NSAModelCache` beside dense attention.

python benchmarks/hf_generate.py --tokens 65536
"""

from __future__ import annotations

import argparse
import statistics
import time
from collections.abc import Callable

import torch
from tabulate import tabulate
from transformers import Cache, DynamicCache, LlamaConfig, LlamaForCausalLM, PreTrainedModel

from nsa_layer import NSAConfig
from nsa_layer.integrations.hf import NSAModelCache, convert_to_nsa

UNTIMED_STEPS = 3


@torch.no_grad()
def measured(model: PreTrainedModel, cache: Cache, ids: torch.Tensor, steps: int) -> tuple[float, float]:
    """Seconds of a prefill, and of the median step that follows it; the last tokens of ids [B, T] are the steps'."""

    def timed(step: Callable[[], object]) -> float:
        _wait()
        begin = time.perf_counter()
        step()
        _wait()
        return time.perf_counter() - begin

    prompt, rest = ids[:, :-steps], ids[:, -steps:].split(1, dim=1)
    prefill = timed(lambda: model(prompt, past_key_values=cache, logits_to_keep=1))
    times = [timed(lambda: model(new, past_key_values=cache)) for new in rest]
    return prefill, statistics.median(times[UNTIMED_STEPS:])


def _wait() -> None:
    if torch.cuda.is_available():
        torch.cuda.synchronize()


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--tokens", type=int, default=65536, help="of the prompt (%(default)s)")
    parser.add_argument("--batch", type=int, default=1, help="sequences (%(default)s)")
    parser.add_argument("--steps", type=int, default=24, help="tokens decoded one by one (%(default)s)")
    parser.add_argument("--layers", type=int, default=4, help="of the model (%(default)s)")
    parser.add_argument("--width", type=int, default=4096, help="of the model, whose heads have 128 (%(default)s)")
    given = parser.parse_args()
    device, dtype = ("cuda", torch.bfloat16) if torch.cuda.is_available() else ("cpu", torch.float32)
    torch.manual_seed(0)
    heads = given.width // 128
    sizes = dict(hidden_size=given.width, intermediate_size=11 * given.width // 4, num_hidden_layers=given.layers)
    sizes |= dict(num_attention_heads=heads, num_key_value_heads=max(1, heads // 4), max_position_embeddings=2**20)
    with torch.device(device):
        dense = LlamaForCausalLM(LlamaConfig(**sizes, attn_implementation="sdpa")).to(dtype).eval()
    sparse = convert_to_nsa(dense, NSAConfig())
    ids = torch.randint(dense.config.vocab_size, (given.batch, given.tokens + given.steps), device=device)
    rows = []
    for _ in range(2):  # what is compiled and allocated first is of the first round
        caches = NSAModelCache(sparse.config, ids.shape[1]), DynamicCache(config=dense.config)
        rows = [
            [name, *measured(model, cache, ids, given.steps)]
            for name, model, cache in zip(("sparse", "dense (sdpa)"), (sparse, dense), caches)
        ]
    table = [[name, f"{prefill:.3f}", f"{1e3 * step:.2f}"] for name, prefill, step in rows]
    print(tabulate(table, headers=["attention", "prefill (s)", "step (ms)"], tablefmt="pipe", disable_numparse=True))


if __name__ == "__main__":
    main()
