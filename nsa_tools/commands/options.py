"""Parsers of the command line, and the options that several commands share."""

from __future__ import annotations

import argparse
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

import torch

from nsa_layer import support
from nsa_layer.config import NSAConfig
from nsa_layer.cute.memory_plan import RECOMPUTE, MemoryPolicy
from nsa_tools.shape import DATA, DTYPES, Shape, long_tailed, usable_device

DEFAULTS = NSAConfig()
CONFIG_OPTIONS = ("block_size", "block_counts", "q_tile", "window_size", "init_blocks", "local_blocks")
# Options of the documented measurements; "paper" is the model of arXiv:2502.11089 with `NSAConfig.paper()`.
PRESETS: dict[str, dict[str, int]] = {"A": dict(heads=32, kv_heads=8), "B": dict(heads=64, kv_heads=4)}
PRESETS["paper"] = PRESETS["B"] | dict(head_dim=192, head_dim_v=128, compress_size=32, compress_stride=16)
RULES = ("nsa", "index")
UNITS = {"K": 1 << 10, "M": 1 << 20}


class CommandParser(argparse.ArgumentParser):
    """The parser of a command; bad arguments exit with status 2 and one line that says what is wrong."""

    def __init__(self, command: str, description: str) -> None:
        super().__init__(f"python -m nsa_layer {command}", description=description, allow_abbrev=False)
        self.command = command

    def error(self, message: str) -> None:
        self.exit(2, f"{self.command}: {message}\n")

    def refuse_unread(self, argv: list[str], unread: dict[str, tuple[str, ...]]) -> None:
        """An error for options that another one, by which they are listed, has the command not read."""
        flags = [word.partition("=")[0] for word in argv if word.startswith("--")]
        for option, others in unread.items():
            ignored = [flag for flag in flags if flag in others]
            if option in flags and ignored:
                self.error(f"{option} does not read {ignored[0]}: leave one of them out")

    @contextmanager
    def checks(self) -> Iterator[None]:
        """Errors of arguments that the body finds are errors of the command line."""
        try:
            yield
        except (ValueError, NotImplementedError) as error:
            self.error(str(error))


def count(text: str) -> int:
    """A number, such as 65536, 64K or 1M, of at least 1."""
    unit = UNITS.get(text[-1:].upper(), 1)
    try:
        number = int(text if unit == 1 else text[:-1]) * unit
    except ValueError:
        raise argparse.ArgumentTypeError(f"{text!r} is not a number such as 65536, 64K or 1M") from None
    if number < 1:
        raise argparse.ArgumentTypeError(f"must be at least 1, got {text}")
    return number


def output_file(text: str) -> Path:
    """A path that can be written, opened before minutes of work that would be lost; a new file is removed again."""
    path = Path(text)
    try:
        if path.is_dir():
            raise argparse.ArgumentTypeError(f"{text!r} is a folder, expected a file")
        if not path.parent.is_dir():
            raise argparse.ArgumentTypeError(f"{text!r} cannot be written: there is no folder {str(path.parent)!r}")
        is_new = not path.exists()
        with path.open("ab"):
            pass
        if is_new:
            path.unlink()
    except OSError as error:
        raise argparse.ArgumentTypeError(f"{text!r} cannot be written: {error.strerror}") from None
    return path


def add_shape_options(parser: argparse._ActionsContainer, *, seqlen: list[int] | None, runs: bool = True) -> None:
    """The options that `shapes` reads; sizes are counts, lengths are in tokens.

    Args:
        seqlen: the default lengths.
        runs: the command makes calls and writes what it finds. Otherwise calls are those of a GPU.
    """

    def add(flag: str, help: str, **options: object) -> None:
        default = options.get("default")
        parser.add_argument(flag, help=help if default is None else f"{help} (default: {default})", **options)

    add("--seqlen", "lengths, in tokens, such as 64K", type=count, nargs="+", default=seqlen)
    add("--batch", "sequences", type=count, default=1)
    add("--packed", "N packed sequences of uneven lengths instead of a batch", type=count, metavar="N")
    shapes_of = "A: 32 and 8 heads; B: 64 and 4; paper: B with --head-dim 192 --head-dim-v 128 and NSAConfig.paper()"
    add("--shape", shapes_of, choices=PRESETS, default="A")
    add("--heads", "query heads (default: those of --shape)", type=count)
    add("--kv-heads", "key/value heads (default: those of --shape)", type=count)
    add("--head-dim", "of q and k (default: 128, or that of --shape)", type=count)
    add("--head-dim-v", "of v (default: --head-dim)", type=count)
    if runs:
        device = "cuda" if torch.cuda.is_available() else "cpu"
        add("--dtype", "default: bf16 on a GPU, else fp32", choices=DTYPES)
        add("--device", "where to run", default=device)
        add("--backend", "cute, eager or reference (default: that of `nsa`)")
        add("--data", "inputs: q and k change slowly along the sequence, or not", choices=DATA, default=DATA[0])
        add("--json", "also write what was ignored to this file", type=output_file)
    else:
        add("--dtype", "of q, k and v", choices=("fp16", "bf16"), default="bf16")
        parser.set_defaults(device="cpu")
    add("--deterministic", "of NSAConfig", action="store_true")
    add("--rule", "of NSAConfig; index: by an index of tokens, the selected branch alone", choices=RULES, default="nsa")
    add("--index-dim", "of q_index and k_index, with --rule index", type=count, default=32)
    add("--one-key", "one index key for all key/value heads, with --rule index", action="store_true")
    add("--index-loss", "with the index' loss, with --rule index", action="store_true")
    for name in CONFIG_OPTIONS:
        add("--" + name.replace("_", "-"), "of NSAConfig", type=int, default=getattr(DEFAULTS, name))
    add("--compress-size", "of NSAConfig (default: --block-size)", type=int)
    add("--compress-stride", "of NSAConfig (default: --compress-size)", type=int)
    add("--budget", "of MemoryPolicy, in GiB (default: what is free)", type=float, metavar="GIB")
    add("--recompute", "of MemoryPolicy", choices=RECOMPUTE, default="auto")
    add("--mode", "both: backward too", choices=("forward", "both"), default="both")


def add_ungated(parser: argparse._ActionsContainer) -> None:
    """The option that `shapes` reads where a command makes one call, not one with gates and one without."""
    parser.add_argument("--ungated", action="store_true", help="without gate_weight: 1/3 of each branch")


def shapes(args: argparse.Namespace) -> list[Shape]:
    """A shape for each length.

    Raises:
        ValueError: a size does not fit, or there is no such device.
    """
    named = (*CONFIG_OPTIONS, "compress_size", "compress_stride", "deterministic")
    asked = {name: x for name, x in vars(args).items() if x is not None}
    preset = dict(head_dim=128) | PRESETS[args.shape] | asked
    if args.rule != "index" and (args.one_key or args.index_loss):
        raise ValueError("--one-key and --index-loss are for --rule index")
    values = {name: preset.get(name) for name in named}
    if args.rule == "index":
        values |= dict(rule="index", branches=("selected",), q_tile=1)
    config = NSAConfig(**values)
    device = usable_device(args.device)
    dtype = getattr(torch, DTYPES[args.dtype or ("fp32" if device.type == "cpu" else "bf16")])
    Hq, Hkv, D = (preset[name] for name in ("heads", "kv_heads", "head_dim"))
    Dv = args.head_dim_v or args.head_dim or preset.get("head_dim_v", D)
    sizes = dict(B=args.batch, Hq=Hq, Hkv=Hkv, D=D, Dv=Dv)
    if Hq % Hkv:
        raise ValueError(f"--kv-heads must divide --heads, got {Hkv} and {Hq}")
    if args.packed is not None and args.batch != 1:
        raise ValueError(f"--packed is for sequences without a batch, got --batch {args.batch}")
    budget = None if args.budget is None else int(args.budget * (1 << 30))
    policy = MemoryPolicy(budget=budget, recompute=args.recompute)
    ungated = args.rule == "index" or getattr(args, "ungated", False)
    what = dict(backward=args.mode == "both", gate="none" if ungated else "weight")
    what["compress_weights"] = getattr(args, "compress_weights", False)
    what |= dict(index_dim=args.index_dim * (args.rule == "index"), one_key=args.one_key, index_loss=args.index_loss)
    what |= dict(data=getattr(args, "data", "random"), config=config, policy=policy)
    static = dict(dtype=dtype, device=args.device, **sizes, **what)
    lengths = {T: None if args.packed is None else long_tailed(T, args.packed) for T in args.seqlen}
    return [Shape(T=T, lengths=lengths[T], **static) for T in args.seqlen]


def backend_of(shape: Shape, backend: str | None) -> str:
    """The backend that runs a call of this shape, or the error of `support.choose_backend`."""
    return support.choose_backend(backend, shape.call(), torch.device(shape.device))
