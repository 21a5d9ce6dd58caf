"""Options and files: what NSAConfig and `bench` take and refuse, and that a patch gives back its text."""

from __future__ import annotations

import contextlib
import io
import tempfile
from dataclasses import asdict, fields
from pathlib import Path
from unittest.mock import patch

from hypothesis import strategies as st

from fuzz import strategies
from fuzz.case import Fields, Texts
from fuzz.prop import holds
from nsa_layer import NSAConfig
from nsa_tools.commands import bench
from patches.codec import decode, encode

NAMES = {f.name for f in fields(NSAConfig)}


@holds("options.good or named", strategies.fields, pr=60)
def good_or_named(case: Fields) -> None:
    """A configuration is consistent, or the error names the field that is not, or what is no dictionary of fields."""
    fields_by_name = isinstance(case.values, dict) and NAMES >= {*case.values}
    try:
        config = NSAConfig(**case.values) if fields_by_name else NSAConfig.from_dict(case.values)
    except (TypeError, ValueError) as error:
        words = {*str(error).replace("=", " ").replace(",", " ").split()}
        assert words & (NAMES if fields_by_name else {*NAMES, "NSAConfig"}), f"names nothing: {error}"
        return
    assert fields_by_name, f"{case.values!r} was taken"
    may_be_none = ("window_size", "init_blocks", "local_blocks")
    for name in ("block_size", "span", "stride", "block_counts", "q_tile", *may_be_none):
        value = getattr(config, name)
        assert type(value) is int and value >= (name not in may_be_none), f"{name}={value!r} was taken"
    assert max(config.block_size, config.span) <= 1 << 20, "blocks of any length are taken"
    assert config.block_size % config.stride == config.span % config.stride == 0
    assert config.span == config.block_size or config.by_token
    assert config.q_tile in (1, 2, 4, 8, 16, 32, 64, 128, 256)
    assert config.q_tile % config.block_size == 0 or config.block_size % config.q_tile == 0
    assert config.rule in ("nsa", "seed")
    assert type(config.deterministic) is bool
    assert NSAConfig.from_dict(asdict(config)) == config and config.replace() == config
    assert hash(config) == hash(config.replace())
    for T in (1, config.block_size, 1000):
        assert 0 <= config.list_width(T) <= config.num_blocks(T)
        assert config.compressed_length(T) * config.stride <= T + config.span


@holds("patches.text comes back", strategies.texts, pr=200)
def text_comes_back(case: Texts) -> None:
    """Encoded, written, read and decoded; an unchanged text needs no operation."""
    others = {} if case.other is None else {"other.py": case.other}
    script = encode(case.old, case.new, others)
    assert not any("\n" in line for line in script), "an operation spans two lines"
    assert decode(case.old, script, others) == case.new, "another text came back"
    assert case.old != case.new or not script, "operations for an unchanged text"


UNREAD = (
    "--decode --mode both", "--mode=both --decode", "--decode --packed 2", "--decode --graph",
    "--variants nsa --decode", "--from a.json --mode forward", "--decode --chart FOLDER/a",
)  # fmt: skip
UNWRITABLE = ("FOLDER", "FOLDER/none/a.png", f"FOLDER/{300 * 'a'}.png", "FOLDER/taken.png", "FOLDER/taken.svg")


class _Measures(Exception):
    pass


def words() -> st.SearchStrategy[Fields]:
    unwritable = st.sampled_from(UNWRITABLE).map("--chart={}".format)
    return st.builds(Fields, values=st.one_of(st.sampled_from(UNREAD), unwritable))


@holds("commands.bench refuses first", words, pr=14)
def bench_refuses_first(case: Fields) -> None:
    """Status 2 and a line, before shapes are made; nothing is left behind."""
    with tempfile.TemporaryDirectory() as folder, patch.object(bench, "shapes", side_effect=_Measures):
        (Path(folder) / "taken.svg").mkdir()
        said = io.StringIO()
        try:
            with contextlib.redirect_stderr(said):
                bench.main(["--device=cpu", *case.values.replace("FOLDER", folder).split()])
        except SystemExit as exit:
            assert exit.code == 2 and said.getvalue().count("\n") == 1, said.getvalue()
        except _Measures:
            raise AssertionError(f"{case.values}: taken") from None
        assert [path.name for path in Path(folder).iterdir()] == ["taken.svg"]
