"""`python -m nsa_layer inspect`: versions, patches, supported features and the backend of a shape, for a bug report."""

from __future__ import annotations

import argparse
import json
import os
import platform
import sys
from importlib import import_module, metadata
from typing import Any

from nsa_layer.cli.arguments import DTYPES, tokens
from nsa_layer.fork import ForkStatus, fork_status

DISTRIBUTIONS = {
    "torch": "torch",
    "triton": "triton",
    "cutlass-dsl": "nvidia-cutlass-dsl",
    "quack": "quack-kernels",
    "tvm-ffi": "apache-tvm-ffi",
    "torch-c-dlpack-ext": "torch-c-dlpack-ext",
}


def main(argv: list[str]) -> int:
    """Run the command; 1 where --require-patched finds another flash_attn.cute, 2 for bad arguments."""
    parser = _parser()
    args = parser.parse_args(argv)
    args.head_dim_v = args.head_dim if args.head_dim_v is None else args.head_dim_v
    if min(args.heads, args.kv_heads, args.head_dim, args.head_dim_v, args.seqlen) < 1:
        parser.error("heads, dimensions and sequence length must be at least 1")
    status = fork_status()
    report = {
        "versions": versions(),
        "device": device(),
        "flash_attn.cute": _fork_report(status),
        **_guarded("support", support),
        **_guarded("shape", lambda: shape(args)),
    }
    print(json.dumps(report, indent=2) if args.json else _as_text(report))
    if args.require_patched and status.kind != "patched":
        print(f"flash_attn.cute is {status.kind}: {status.detail}\nremedy: {status.remedy}", file=sys.stderr)
        return 1
    return 0


def _parser() -> argparse.ArgumentParser:
    parser = argparse.ArgumentParser(
        prog="python -m nsa_layer inspect",
        description="Print what a bug report needs: versions, architecture, pin and patches, the table of supported "
        "features, and the backend that a shape would take.",
    )
    parser.add_argument(
        "--require-patched", action="store_true", help="exit 1 where flash_attn.cute is stock, stale or missing"
    )
    parser.add_argument("--json", action="store_true", help="print JSON")
    parser.add_argument("--heads", type=int, default=32, metavar="N", help="query heads (default: 32)")
    parser.add_argument("--kv-heads", type=int, default=8, metavar="N", help="key/value heads (default: 8)")
    parser.add_argument("--head-dim", type=int, default=128, metavar="N", help="of q and k (default: 128)")
    parser.add_argument("--head-dim-v", type=int, metavar="N", help="of v (default: --head-dim)")
    parser.add_argument("--seqlen", type=tokens, default=8192, metavar="N", help="tokens, such as 64K (default: 8K)")
    parser.add_argument("--dtype", choices=DTYPES, default="bf16", help="default: bf16")
    return parser


def versions() -> dict[str, str | None]:
    """Python's, CUDA's and the packages' versions; None for what is not there."""
    found: dict[str, str | None] = {"python": f"{platform.python_version()} ({platform.system()} {platform.machine()})"}
    for name, distribution in DISTRIBUTIONS.items():
        try:
            found[name] = metadata.version(distribution)
        except metadata.PackageNotFoundError:
            found[name] = None
    import torch

    found["cuda"] = torch.version.cuda
    return found


def device() -> dict[str, Any]:
    """The GPU at hand, or what the environment names in its place."""
    import torch

    found: dict[str, Any] = {"gpu": None, "architecture": None}
    if torch.cuda.is_available():
        major, minor = torch.cuda.get_device_capability()
        found = {"gpu": torch.cuda.get_device_name(), "architecture": f"sm_{major}{minor}"}
    forced = {key: value for key, value in os.environ.items() if key in ("FLASH_ATTENTION_ARCH", "CUTE_DSL_ARCH")}
    return found | forced


def _fork_report(status: ForkStatus) -> dict[str, Any]:
    report = {
        "kind": status.kind,
        "pin": status.pin,
        "version": status.version,
        "location": status.location,
        "detail": status.detail,
        "remedy": status.remedy,
        "patches": list(status.patches),
    }
    return {key: value for key, value in report.items() if value}


def support() -> dict[str, Any]:
    """The table of supported features."""
    header, rows = import_module("nsa_layer.support").table()
    return {"header": header, "rows": rows}


def shape(args: argparse.Namespace) -> dict[str, Any]:
    """The backend that a training step of the shape takes by default, and why."""
    import torch

    from nsa_layer.config import NSAConfig

    table = import_module("nsa_layer.support")
    D, Dv, dtype = args.head_dim, args.head_dim_v, DTYPES[args.dtype]
    backend, reason = table.explain_backend(
        dtype=getattr(torch, dtype),
        D=D,
        Dv=Dv,
        Hq=args.heads,
        Hkv=args.kv_heads,
        config=NSAConfig(),
        arch=table.device_arch(),
    )
    asked = f"T={args.seqlen} Hq={args.heads} Hkv={args.kv_heads} D={D} Dv={Dv} {dtype}"
    return {"asked": asked, "backend": backend, "reason": reason}


def _guarded(name: str, part) -> dict[str, Any]:
    """A part of the report, or what kept it from being made: the rest of a bug report is worth having without it."""
    try:
        return {name: part()}
    except Exception as error:
        return {name: {"error": f"{type(error).__name__}: {error}"}}


def _as_text(report: dict[str, Any]) -> str:
    out: list[str] = []
    for title, values in report.items():
        out.append(title)
        if "rows" in values:
            out += _table(values["header"], values["rows"])
        else:
            width = max(map(len, values))
            for key, value in values.items():
                for number, item in enumerate(value if isinstance(value, list) else [value]):
                    out.append(f"  {key if not number else '':{width}}  {item if item is not None else '-'}")
        out.append("")
    return "\n".join(out).rstrip()


def _table(header: list[str], rows: list[list[str]]) -> list[str]:
    widths = [max(len(row[column]) for row in (header, *rows)) for column in range(len(header))]
    return ["  " + "  ".join(cell.ljust(width) for cell, width in zip(row, widths)).rstrip() for row in (header, *rows)]
