"""Options and files: what NSAConfig takes and refuses, and that a patch gives back the text it was made from."""

from __future__ import annotations

from dataclasses import asdict, fields

from fuzz import strategies
from fuzz.case import Fields, Texts
from fuzz.prop import holds
from nsa_layer import NSAConfig
from patches.codec import decode, encode

NAMES = {f.name for f in fields(NSAConfig)}


@holds("options.good or named", strategies.fields, pr=30)
def good_or_named(case: Fields) -> None:
    """A configuration is consistent, or the error names what is wrong with it."""
    try:
        config = NSAConfig(**case.values)
    except (TypeError, ValueError) as error:
        assert NAMES & set(str(error).replace("=", " ").replace(",", " ").split()), f"names no field: {error}"
        return
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


@holds("dictionaries.good or named", strategies.dictionaries, pr=30)
def dictionaries(case: Fields) -> None:
    """A dictionary of fields gives a configuration; the error about anything else says what it is of, or the field."""
    try:
        config = NSAConfig.from_dict(case.values)
    except (TypeError, ValueError) as error:
        words = str(error).replace("=", " ").replace(",", " ").split()
        assert "NSAConfig" in words or NAMES & {*words}, f"names nothing: {error}"
        return
    assert isinstance(case.values, dict) and all(name in NAMES for name in case.values), f"{case.values!r} was taken"
    assert NSAConfig.from_dict(asdict(config)) == config


@holds("patches.text comes back", strategies.texts, pr=200)
def text_comes_back(case: Texts) -> None:
    """Encoded, written, read and decoded; an unchanged text needs no operation."""
    others = {} if case.other is None else {"other.py": case.other}
    script = encode(case.old, case.new, others)
    assert not any("\n" in line for line in script), "an operation spans two lines"
    assert decode(case.old, script, others) == case.new, "another text came back"
    assert case.old != case.new or not script, "operations for an unchanged text"
