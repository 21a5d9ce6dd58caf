"""`python -m nsa_layer inspect`: print versions, patches, supported features, and the backend that a shape runs on.

This is what a bug report needs; it works without the tools extra.
"""

from __future__ import annotations

import argparse
import json
import os
import platform
import sys
from collections.abc import Callable

import torch

from nsa_layer import support
from nsa_layer.config import NSAConfig
from nsa_layer.fork import fork_status
from nsa_tools.commands.options import CommandParser, count
from nsa_tools.report.results import PACKAGES, version_of
from nsa_tools.shape import DTYPES, Shape

DISTRIBUTIONS = {name: name for name in ("torch", "triton", "torch-c-dlpack-ext")} | PACKAGES
FORK = ("kind", "pin", "version", "location", "detail", "remedy", "patches")

Section = dict[str, object]


def main(argv: list[str]) -> int:
    """Run the command; 1 where --require-patched finds another flash_attn.cute."""
    parser = _parser()
    args = parser.parse_args(argv)
    args.head_dim_v = args.head_dim if args.head_dim_v is None else args.head_dim_v
    status = fork_status()
    report = {
        "versions": versions(),
        "device": device(),
        "flash_attn.cute": {name: getattr(status, name) for name in FORK if getattr(status, name)},
        "support": _or_error(support_table),
        "shape": _or_error(lambda: shape(args)),
    }
    print(json.dumps(report, indent=2) if args.json else _as_text(report))
    if args.require_patched and status.kind != "patched":
        print(f"flash_attn.cute is {status.kind}: {status.detail}\nremedy: {status.remedy}", file=sys.stderr)
        return 1
    return 0


def _parser() -> CommandParser:
    parser = CommandParser("inspect", __doc__)
    parser.add_argument(
        "--require-patched", action="store_true", help="exit 1 where flash_attn.cute is stock, stale or missing"
    )
    parser.add_argument("--json", action="store_true", help="print JSON")
    parser.add_argument("--heads", type=count, default=32, metavar="N", help="query heads (default: 32)")
    parser.add_argument("--kv-heads", type=count, default=8, metavar="N", help="key/value heads (default: 8)")
    parser.add_argument("--head-dim", type=count, default=128, metavar="N", help="of q and k (default: 128)")
    parser.add_argument("--head-dim-v", type=count, metavar="N", help="of v (default: --head-dim)")
    parser.add_argument("--seqlen", type=count, default=8192, metavar="N", help="tokens, such as 64K (default: 8K)")
    parser.add_argument("--dtype", choices=DTYPES, default="bf16", help="default: bf16")
    return parser


def versions() -> Section:
    """Python's, CUDA's and the packages' versions; None for what is not there."""
    values: Section = {"python": f"{platform.python_version()} ({platform.system()} {platform.machine()})"}
    for name, distribution in DISTRIBUTIONS.items():
        values[name] = version_of(distribution)
    return values | {"cuda": torch.version.cuda}


def device() -> Section:
    """The GPU at hand, and what the environment names in its place."""
    values: Section = {"gpu": None, "architecture": None}
    if torch.cuda.is_available():
        major, minor = torch.cuda.get_device_capability()
        values = {"gpu": torch.cuda.get_device_name(), "architecture": f"sm_{major}{minor}"}
    return values | {key: os.environ[key] for key in ("FLASH_ATTENTION_ARCH", "CUTE_DSL_ARCH") if key in os.environ}


def support_table() -> Section:
    """The header and the rows of the table of features of the kernels; other backends have all."""
    cells = {name: list(support.ARCHITECTURES.values()) for name in support.SUPPORTED}
    cells |= {name: ["no"] * len(support.ARCHITECTURES) for name in support.LACKING}
    header = ["feature", *(f"cute sm_{arch}" for arch in support.ARCHITECTURES)]
    return {"header": header, "rows": [[name, *row] for name, row in cells.items()]}


def shape(args: argparse.Namespace) -> Section:
    """The backend that a training step of the shape runs on by default, and why."""
    sizes = dict(Hq=args.heads, Hkv=args.kv_heads, D=args.head_dim, Dv=args.head_dim_v)
    what = Shape(B=1, T=args.seqlen, **sizes, dtype=getattr(torch, DTYPES[args.dtype]), config=NSAConfig())
    backend, reason = explain_backend(what, support.device_arch())
    asked = f"T={what.T} Hq={what.Hq} Hkv={what.Hkv} D={what.D} Dv={what.Dv} {DTYPES[args.dtype]}"
    return {"asked": asked, "backend": backend, "reason": reason}


def explain_backend(shape: Shape, arch: int) -> tuple[str, str]:
    """The backend that a training step of this shape runs on by default on an architecture, and why."""
    if shape.Hq % shape.Hkv:
        return "none", f"{shape.Hq} query heads are no multiple of {shape.Hkv} key/value heads"
    if support.kernel_family(arch) not in support.ARCHITECTURES:
        return "eager", f"no kernels for sm_{arch}" if arch else "no GPU"
    missing = support.missing_feature(shape.call(), arch)
    if missing is None:
        dims = support.kernel_dims(shape.call(), needs_grad=shape.backward)
        padded = "" if dims == (shape.D, shape.Dv) else ", with rows that are copied to D {}, Dv {}".format(*dims)
        return "cute", f"kernels for sm_{support.kernel_family(arch)}{padded}"
    return "none", f"the kernels lack {missing}; backend='eager' has to be named"


def _or_error(section: Callable[[], Section]) -> Section:
    """A section of the report, or the error that it raised: the rest of a bug report is worth having without it."""
    try:
        return section()
    except Exception as error:
        return {"error": f"{type(error).__name__}: {error}"}


def _as_text(report: dict[str, Section]) -> str:
    out: list[str] = []
    for title, values in report.items():
        out.append(title)
        if "rows" in values:
            lines = [values["header"], *values["rows"]]
            widths = [max(map(len, column)) for column in zip(*lines)]
            out += ["  " + "  ".join(map(str.ljust, cells, widths)).rstrip() for cells in lines]
        else:
            width = max(map(len, values))
            for key, value in values.items():
                for number, each in enumerate(value if isinstance(value, (list, tuple)) else [value]):
                    out.append(f"  {key if not number else '':{width}}  {each if each is not None else '-'}")
        out.append("")
    return "\n".join(out).rstrip()
