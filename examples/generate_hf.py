"""Generate with a sparse model of transformers through its cache: a padded batch, greedy, by sampling and with beams.

Takes the folder that examples/train_hf.py writes, whose tokens are bytes.
"""

from __future__ import annotations

import argparse
import time
from pathlib import Path

import torch
from transformers import AutoModelForCausalLM, set_seed

from nsa_layer.integrations.hf import NSAModelCache

PROMPTS = (
    '"""Utilities for reading and writing files.\n"""\n\nimport os\nimport sys\n\n__all__ = ["',
    "import ",
)
WAYS = {
    "greedy": dict(do_sample=False),
    "sampling": dict(do_sample=True, temperature=0.7),
    "three beams": dict(do_sample=False, num_beams=3),
}


def batch_of(prompts: tuple[str, ...], pad: int) -> dict[str, torch.Tensor]:
    """Token ids with padding on the left, and the mask that says where."""
    rows = [list(prompt.encode()) for prompt in prompts]
    width = max(map(len, rows))
    ids = torch.tensor([[pad] * (width - len(row)) + row for row in rows])
    return dict(input_ids=ids, attention_mask=(ids != pad).long())


def text_of(tokens: torch.Tensor) -> str:
    return bytes(token for token in tokens.tolist() if token < 256).decode("utf-8", errors="replace")


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("folder", type=Path, nargs="?", default=Path("nsa-llama"), help="of a model (%(default)s)")
    parser.add_argument("--tokens", type=int, default=120, help="to generate (%(default)s)")
    arguments = parser.parse_args()
    if not arguments.folder.is_dir():
        parser.error(f"{arguments.folder} is no folder: python examples/train_hf.py --out {arguments.folder} makes one")
    model = AutoModelForCausalLM.from_pretrained(arguments.folder).eval()
    if torch.cuda.is_available():
        model.bfloat16().cuda()
    batch = {name: x.to(model.device) for name, x in batch_of(PROMPTS, model.config.pad_token_id).items()}
    for way, options in WAYS.items():
        set_seed(0)
        begin = time.perf_counter()
        made = model.generate(**batch, max_new_tokens=arguments.tokens, **options)
        rate = len(PROMPTS) * arguments.tokens / (time.perf_counter() - begin)
        print(f"=== {way}, {rate:.0f} tokens/s")
        for row in made:
            print(text_of(row), end="\n---\n")

    # A cache of one's own goes on from turn to turn.
    cache = NSAModelCache(model.config)
    ids = batch["input_ids"][:1]
    for turn in ("", "\ndef open("):
        ids = torch.cat((ids, torch.tensor([list(turn.encode())], dtype=torch.long, device=ids.device)), dim=1)
        ids = model.generate(ids, past_key_values=cache, max_new_tokens=arguments.tokens, do_sample=False)
    print(f"=== two turns on one cache of {cache.get_seq_length()} tokens, {cache.nbytes:,} bytes\n{text_of(ids[0])}")


if __name__ == "__main__":
    main()
