"""`python -m nsa_layer demo`: train a small byte-level language model with sparse and with dense attention.

Loss curves, a picture of what each query sees, step times, a sample and a checkpoint are written. Ctrl-C stops after
the current step; --resume goes on from there.
"""

from __future__ import annotations

import sys
import time
from dataclasses import fields
from pathlib import Path

from nsa_tools.commands.options import CommandParser
from nsa_tools.demo.demo_config import CPU, EVERYWHERE, GPU, DemoConfig, DemoError

CONVERTERS = {"int": int, "float": float, "str": str}


def build_parser() -> CommandParser:
    """An option for each field of `DemoConfig`, and the folder to write."""
    parser = CommandParser("demo", __doc__)
    parser.add_argument("--out", type=Path, default=Path("nsa-demo"), help="folder to write (default: nsa-demo)")
    parser.add_argument("--resume", action="store_true", help="go on from the checkpoint in --out")
    for field in fields(DemoConfig):
        flag, text = "--" + field.name.replace("_", "-"), field.metadata["help"].replace("%", "%%")
        if field.name in EVERYWHERE:
            text += f" (default: {EVERYWHERE[field.name]})"
        elif field.name in CPU:
            text += f" (default: {CPU[field.name]} on a CPU, {GPU[field.name]} on a GPU)"
        if field.name == "text":
            parser.add_argument(flag, nargs="+", metavar="FILE", help=text)
        else:
            parser.add_argument(flag, type=CONVERTERS[field.type], help=text)
    return parser


def main(argv: list[str]) -> int:
    """Run the command; 0 when it went through, 1 for a loss that is not finite, 128 + signal when stopped."""
    started = time.monotonic()
    parser = build_parser()
    args = vars(parser.parse_args(argv))
    out, resume, device = args.pop("out"), args.pop("resume"), args.pop("device")
    args = {name: value for name, value in args.items() if value is not None}
    from nsa_tools.demo.run import run_demo

    with parser.checks():
        config = DemoConfig.for_device(device, **args)
    try:
        status = run_demo(config, out, resume=resume, started=started)
    except DemoError as error:
        parser.error(str(error))
    except FloatingPointError as error:
        print(f"demo: {error}", file=sys.stderr)
        return 1
    if status == 0:
        print(f"written to {out}/: {', '.join(sorted(path.name for path in out.iterdir()))}")
    return status
