"""Faults around caches, options and commands: checks that are not made, graphs that are cut, tensors of a mode."""

from __future__ import annotations

from collections.abc import Callable
from copy import copy, deepcopy
from pathlib import Path
from typing import Any

from fuzz.mutations import fault, instead, wrong_result

WRONG, STEPS = "caches.wrong", "caches.steps"


def without(words: str, original: Callable) -> Callable:
    """The function, without the errors whose message has these words."""

    def wrong(*args: Any, **more: Any) -> Any:
        try:
            return original(*args, **more)
        except ValueError as error:
            if words not in str(error):
                raise

    return wrong


@fault("page twice", "nsa_layer.cached_call:refuse_shared", WRONG)
def _twice(original: Callable) -> Callable:
    """A sequence may have a page twice."""
    return without("twice", original)


@fault("shared page written", "nsa_layer.cached_call:refuse_shared", WRONG)
def _held(original: Callable) -> Callable:
    """A sequence may write where another one has tokens."""
    return without("another has tokens", original)


@fault("expanded cache written", "nsa_layer.cached_call:refuse_aliases", WRONG)
def _expanded(original: Callable) -> Callable:
    """Caches that are written to may be expanded, or overlap."""
    return lambda call: None


@wrong_result("caches overlap", "nsa_layer.cached_call:_meet", WRONG)
def _overlap(found: bool) -> bool:
    """Keys and values may be written to one cache."""
    return False


@fault("expanded output", "nsa_layer.cached_call:_refuse_overlap", WRONG)
def _output(original: Callable) -> Callable:
    """An expanded output fails when it is written, after the caches are."""
    return lambda name, x: None if name == "out" else original(name, x)


@instead("no copy on write", "nsa_layer.caches.nsa_cache:_Pages.reserve", STEPS)
def _copy(original: Callable, pages: Any, spans: Any) -> None:
    """A page that several sequences have is written to by each."""
    users, pages.users = pages.users, [min(n, 1) for n in pages.users]
    original(pages, spans)
    pages.users = [max(before, now) for before, now in zip(users, pages.users)]


@fault("validate not passed on", "nsa_layer.caches.nsa_cache:NSACache.attend", STEPS)
def _validate(original: Callable) -> Callable:
    """`NSACache.attend` takes the option and looks at nothing."""
    return lambda *args, validate=False, **more: original(*args, **more)


@fault("cache of inference mode", "nsa_layer.caches.nsa_cache:NSACache.__init__", STEPS)
def _inference(original: Callable) -> Callable:
    """A cache that is made under inference mode cannot be written to outside of it."""
    return original.__wrapped__


@instead("copy of inference mode", "nsa_layer.caches.nsa_cache:LastingTensors.__deepcopy__", STEPS)
def _copied(original: Callable, cache: Any, memo: dict) -> Any:
    """A copy that is made under inference mode cannot be written to outside of it."""
    copied = copy(cache)
    copied.__dict__.update(deepcopy(cache.__dict__, memo))
    return copied


@fault("graph cut", "nsa_layer.caches.operator:refuse_gradients", "caches.no gradient")
def _cut(original: Callable) -> Callable:
    """Cached tokens cut the graph without a word."""
    return lambda call, o, lses: (o, lses)


@fault("blocks of any length", "nsa_layer.config:NSAConfig.__post_init__", "options.good")
def _long(original: Callable) -> Callable:
    """Blocks may be as long as positions go."""
    return without("tokens, got", original)


@fault("no dictionary taken", "nsa_layer.config:NSAConfig.from_dict", "dictionaries")
def _dictionary(original: Callable) -> Callable:
    """`from_dict` takes what is no dictionary as one without fields."""
    return lambda cls, values: original(cls, values if isinstance(values, dict) and 1 not in values else {})


@fault("option not read", "nsa_tools.commands.options:CommandParser.refuse_unread", "commands")
def _unread(original: Callable) -> Callable:
    """Options that the command does not read are taken."""
    return lambda *_: None


@fault("file tried at the end", "nsa_tools.commands.options:output_file", "commands")
def _file(original: Callable) -> Callable:
    """Nobody tries to write a chart before it is measured."""
    return Path
