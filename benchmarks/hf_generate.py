"""Time of a token that a Llama of transformers generates, sparse through `NSAModelCache` beside dense attention.

python benchmarks/hf_generate.py --tokens 65536
"""

from __future__ import annotations

import argparse
import statistics
import time

import torch
from tabulate import tabulate
from transformers import LlamaConfig, LlamaForCausalLM, PreTrainedModel, StoppingCriteria, logging

from nsa_layer import NSAConfig
from nsa_layer.integrations.hf import convert_to_nsa

UNTIMED_STEPS = 6  # a graph is captured in some of them


class Clock(StoppingCriteria):
    """The time at each token, which stops nothing."""

    def __init__(self) -> None:
        self.times: list[float] = []

    def __call__(self, input_ids: torch.Tensor, scores: object, **_: object) -> torch.Tensor:
        _wait()
        self.times.append(time.perf_counter())
        return torch.zeros(len(input_ids), dtype=torch.bool, device=input_ids.device)


def measured(model: PreTrainedModel, ids: torch.Tensor, steps: int, kind: str) -> tuple[float, float]:
    """Seconds to the first token after the prompt ids [B, T], and between the median two later ones."""
    clock = Clock()
    _wait()
    begin = time.perf_counter()
    options = dict(max_new_tokens=steps, min_new_tokens=steps, do_sample=False, cache_implementation=kind)
    model.generate(ids, attention_mask=torch.ones_like(ids), stopping_criteria=[clock], **options)
    between = [after - before for before, after in zip(clock.times, clock.times[1:])]
    return clock.times[0] - begin, statistics.median(between[UNTIMED_STEPS:])


def _wait() -> None:
    if torch.cuda.is_available():
        torch.cuda.synchronize()


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--tokens", type=int, default=65536, help="of the prompt (%(default)s)")
    parser.add_argument("--batch", type=int, default=1, help="sequences (%(default)s)")
    parser.add_argument("--steps", type=int, default=24, help="tokens generated (%(default)s)")
    parser.add_argument("--layers", type=int, default=4, help="of the model (%(default)s)")
    parser.add_argument("--width", type=int, default=4096, help="of the model, whose heads have 128 (%(default)s)")
    args = parser.parse_args()
    logging.set_verbosity_error()
    device, dtype = ("cuda", torch.bfloat16) if torch.cuda.is_available() else ("cpu", torch.float32)
    torch.manual_seed(0)
    heads = args.width // 128
    sizes = dict(hidden_size=args.width, intermediate_size=11 * args.width // 4, num_hidden_layers=args.layers)
    sizes |= dict(num_attention_heads=heads, num_key_value_heads=max(1, heads // 4), max_position_embeddings=2**20)
    sizes |= dict(eos_token_id=None, pad_token_id=0)
    with torch.device(device):
        dense = LlamaForCausalLM(LlamaConfig(**sizes, attn_implementation="sdpa")).to(dtype).eval()
    sparse = convert_to_nsa(dense, NSAConfig())
    ids = torch.randint(1, dense.config.vocab_size, (args.batch, args.tokens), device=device)
    kinds = {
        "sparse": (sparse, None),
        'sparse, `"static"`': (sparse, "static"),
        "dense, `sdpa`": (dense, None),
        'dense, `sdpa`, `"static"`': (dense, "static"),
    }
    rows = []
    for name, (model, kind) in kinds.items():
        measured(model, ids, args.steps, kind)  # compiles, plans cuDNN's attention for each length
        prefill, step = measured(model, ids, args.steps, kind)
        rows.append([name, f"{prefill:.3f}", f"{1e3 * step:.2f}"])
        print(*rows[-1], flush=True)
    headers = ["attention and `cache_implementation`", "first token (s)", "each token (ms)"]
    print(tabulate(rows, headers=headers, tablefmt="pipe", disable_numparse=True))


if __name__ == "__main__":
    main()
