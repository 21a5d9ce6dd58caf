"""Train a small dense Llama on packed text with transformers' Trainer, make it sparse, and train it on.

Prints perplexities on held-out text of the dense model, of the sparse one that it becomes, and of both after the same
further steps; saves the sparse model. The text is the source of Python's standard library, a byte a token.
"""

from __future__ import annotations

import argparse
import math
import os
from copy import deepcopy
from pathlib import Path

import torch
from tabulate import tabulate
from transformers import DataCollatorWithFlattening, LlamaConfig, LlamaForCausalLM, Trainer, TrainingArguments

from nsa_layer import NSAConfig
from nsa_layer.integrations.hf import convert_to_nsa

PAD, VOCABULARY = 256, 257
LENGTH = 512  # bytes, at most, of a sequence
SPARSE = NSAConfig(block_size=16, block_counts=6, window_size=32)


def documents() -> list[dict[str, list[int]]]:
    """Beginnings of the standard library's modules, as token ids."""
    files = sorted(Path(os.__file__).parent.glob("*.py"))
    texts = [file.read_bytes()[:LENGTH] for file in files]
    return [dict(input_ids=list(text)) for text in texts if len(text) >= 64]


def train(model: torch.nn.Module, data: list, steps: int, lr: float, out: Path) -> Trainer:
    """Steps of two sequences each, packed one behind the other."""
    arguments = TrainingArguments(
        output_dir=str(out), max_steps=steps, per_device_train_batch_size=2, learning_rate=lr, warmup_steps=steps // 10,
        weight_decay=0.01, bf16=torch.cuda.is_available(), use_cpu=not torch.cuda.is_available(), save_strategy="no",
        logging_steps=50, report_to=[], disable_tqdm=True, seed=0,
    )  # fmt: skip
    collator = DataCollatorWithFlattening(return_flash_attn_kwargs=True)
    trainer = Trainer(model=model, args=arguments, train_dataset=data, data_collator=collator)
    trainer.train()
    return trainer


@torch.no_grad()
def perplexity(model: torch.nn.Module, data: list) -> float:
    """The loss of each byte but a sequence's first, given those before it."""
    model.eval()
    total = count = 0
    for entry in data:
        ids = torch.tensor([entry["input_ids"]], device=model.device)
        total += model(ids, labels=ids).loss.item() * (ids.shape[1] - 1)
        count += ids.shape[1] - 1
    return math.exp(total / count)


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--out", type=Path, default=Path("nsa-llama"), help="folder of the sparse model (%(default)s)")
    parser.add_argument("--steps", type=int, default=300, help="steps of the dense model (%(default)s)")
    parser.add_argument("--more", type=int, default=60, help="further steps of both (%(default)s)")
    arguments = parser.parse_args()
    torch.manual_seed(0)
    held_out, data = documents()[::10], [x for i, x in enumerate(documents()) if i % 10]
    sizes = dict(hidden_size=96, intermediate_size=192, num_hidden_layers=2, num_attention_heads=4)
    sizes |= dict(num_key_value_heads=2, vocab_size=VOCABULARY, pad_token_id=PAD, bos_token_id=None, eos_token_id=None)
    dense = LlamaForCausalLM(LlamaConfig(**sizes, attn_implementation="sdpa"))
    train(dense, data, arguments.steps, 3e-3, arguments.out)
    rows = [["dense", perplexity(dense, held_out)]]
    whole = SPARSE.replace(block_counts=LENGTH // SPARSE.block_size)
    rows.append(["sparse, lists of all blocks", perplexity(convert_to_nsa(dense, whole), held_out)])
    sparse = convert_to_nsa(deepcopy(dense), SPARSE)
    rows.append(["sparse", perplexity(sparse, held_out)])
    for name, model in (("dense", dense), ("sparse", sparse)):
        trainer = train(model, data, arguments.more, 1e-3, arguments.out)
        rows.append([f"{name}, {arguments.more} steps later", perplexity(model, held_out)])
    trainer.save_model()
    print(tabulate(rows, headers=["attention", "held-out perplexity"], floatfmt=".3f", tablefmt="pipe"))
    print(f"{arguments.out}: the sparse model, for examples/generate_hf.py")


if __name__ == "__main__":
    main()
