"""The commands: python -m patches tree | save | check | rebase | export | status | test-upstream."""

from __future__ import annotations

import argparse
import sys
from pathlib import Path

from patches.bite import bite
from patches.check import check
from patches.errors import QueueError
from patches.export import export
from patches.materialise import load_pin, load_queue, repository
from patches.overview import overview
from patches.rebase import rebase_abort, rebase_continue, rebase_start
from patches.save import save
from patches.tree import DEFAULT, make_tree
from patches.upstream_tests import FILES, test_upstream


def main(argv: list[str] | None = None) -> int:
    """Run one command; 0 where all is well, 1 with a message where not, 2 for a command line that makes no sense."""
    args = _parser().parse_args(argv)
    root = repository(args.repository)
    try:
        return args.run(root, args) or 0
    except QueueError as error:
        print(f"error: {error}", file=sys.stderr)
        return 1
    except KeyboardInterrupt:
        print("interrupted", file=sys.stderr)
        return 130


def _parser() -> argparse.ArgumentParser:
    parser = argparse.ArgumentParser(prog="python -m patches", description="The patch queue over the upstream wheel.")
    parser.add_argument("--repository", type=Path, help="the repository's root, if not the one this is part of")
    commands = parser.add_subparsers(required=True, metavar="COMMAND")

    tree = commands.add_parser("tree", help="write the patched package as a git repository")
    tree.add_argument("folder", nargs="?", type=Path, metavar="DIR", help=f"where (default {DEFAULT})")
    tree.add_argument("--force", action="store_true", help="drop work in it that is not saved")
    tree.set_defaults(run=lambda root, args: make_tree(root, _folder(root, args.folder), force=args.force))

    saving = commands.add_parser("save", help="write patches/ from the commits of a tree")
    saving.add_argument("folder", nargs="?", type=Path, metavar="DIR", help=f"the tree (default {DEFAULT})")
    saving.set_defaults(run=lambda root, args: save(root, _folder(root, args.folder)))

    checking = commands.add_parser("check", help="verify hashes, round trip, headers, tests and UPSTREAM.md")
    biting = "also run each patch's test, or those of the named patches, without that patch"
    checking.add_argument("--bite", nargs="*", metavar="PATCH", help=biting)
    checking.set_defaults(run=_check)

    moving = commands.add_parser("rebase", help="move the pin to another upstream version")
    ways = moving.add_mutually_exclusive_group(required=True)
    ways.add_argument("version", nargs="?", metavar="VERSION")
    ways.add_argument("--continue", dest="go_on", action="store_true", help="after resolving a conflict")
    ways.add_argument("--abort", action="store_true", help="go back to the old pin")
    moving.add_argument("--tree", type=Path, metavar="DIR", help=f"the tree to work in (default {DEFAULT})")
    moving.set_defaults(run=_rebase)

    exporting = commands.add_parser("export", help="write files that `git am` takes on a checkout of upstream")
    exporting.add_argument("patch", nargs="?", metavar="PATCH", help="this patch alone, on plain upstream")
    exporting.add_argument("--output", type=Path, metavar="DIR", help="where (default export/)")
    exporting.set_defaults(run=lambda root, args: export(root, _folder(root, args.output, "export"), args.patch))

    status = commands.add_parser("status", help="print the table of patches")
    status.set_defaults(run=lambda root, args: print(overview(load_pin(root), load_queue(root)), end=""))

    testing = commands.add_parser("test-upstream", help="run upstream's own tests on a GPU, beside what stock does")
    testing.add_argument("checkout", type=Path, help="of upstream at the pin's tag, or the folder an earlier call made")
    testing.add_argument("--stock", action="store_true", help="run the pinned wheel's package, and record what it does")
    testing.add_argument("--any-commit", action="store_true", help="with --stock: take tests of another commit")
    testing.add_argument("--shard", type=_part, default=(1, 1), metavar="K/N", help="the K-th of N parts")
    testing.add_argument("--workers", type=int, metavar="N", help="processes (default: by the GPU's memory)")
    testing.add_argument("--minutes", type=float, default=60, help="begin no case later than this (default 60)")
    testing.add_argument("--only", choices=FILES, metavar="FILE", help="one of: " + ", ".join(FILES))
    testing.add_argument("--kernels", type=Path, metavar="DIR", help="where compiled kernels are kept between parts")
    testing.set_defaults(run=_test_upstream)
    return parser


def _part(text: str) -> tuple[int, int]:
    number, _, count = text.partition("/")
    if not (number.isdigit() and count.isdigit() and 1 <= int(number) <= int(count)):
        raise argparse.ArgumentTypeError(f"{text!r} is no part K/N with 1 <= K <= N")
    return int(number), int(count)


def _folder(root: Path, folder: Path | None, default: str = DEFAULT) -> Path:
    return (folder or root / default).absolute()


def _check(root: Path, args: argparse.Namespace) -> int:
    return check(root) or (0 if args.bite is None else bite(root, args.bite))


def _test_upstream(root: Path, args: argparse.Namespace) -> int:
    names = ("stock", "any_commit", "shard", "workers", "minutes", "only", "kernels")
    return test_upstream(root, args.checkout, **{name: getattr(args, name) for name in names})


def _rebase(root: Path, args: argparse.Namespace) -> int:
    folder = _folder(root, args.tree)
    if args.abort:
        return rebase_abort(root, folder)
    return rebase_continue(root, folder) if args.go_on else rebase_start(root, folder, args.version)


if __name__ == "__main__":
    sys.exit(main())
