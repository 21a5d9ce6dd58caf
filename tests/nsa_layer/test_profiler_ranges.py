"""Profiler ranges name the parts of a call to their observer, and to nothing else."""

from contextlib import contextmanager

import pytest

from nsa_layer.profiler_ranges import COMPONENTS, component, observed


@contextmanager
def _logged(log, name):
    log.append(f"+{name}")
    yield
    log.append(f"-{name}")


def test_ranges_reach_the_observer_and_nothing_afterwards():
    log = []
    with observed(lambda name: _logged(log, name)):
        with component("slc"), component("convert"):
            pass
    with component("gate"):
        pass
    assert log == ["+slc", "+convert", "-convert", "-slc"]


def test_a_failure_inside_is_passed_on_and_ends_the_watch():
    with pytest.raises(ZeroDivisionError), observed(lambda name: _logged([], name)), component("cmp"):
        1 / 0
    with pytest.raises(ZeroDivisionError), component("cmp"):
        1 / 0
    with observed(lambda name: _logged([], name)), pytest.raises(RuntimeError, match="observed already"):
        with observed(lambda name: _logged([], name)):
            pass


def test_a_range_that_nobody_observes_allocates_nothing():
    ranges = [component(name) for name in COMPONENTS]
    assert all(each is ranges[0] for each in ranges)
