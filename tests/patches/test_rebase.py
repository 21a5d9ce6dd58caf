"""Moving the pin of a small repository to a next version of its upstream."""

from __future__ import annotations

import zipfile

import pytest

NAME = "flash_attn_4-{}-py3-none-any.whl"


@pytest.fixture
def next_version(sandbox):
    """Makes the wheel of version 1.1 with some of the modules' text replaced."""

    def make(**changes: tuple[str, str]) -> None:
        with (
            zipfile.ZipFile(sandbox.wheels / NAME.format("1.0")) as old,
            zipfile.ZipFile(sandbox.wheels / NAME.format("1.1"), "w") as new,
        ):
            for name in old.namelist():
                text = old.read(name).decode()
                for module, (before, after) in changes.items():
                    if name.endswith(f"/{module}.py"):
                        assert before in text
                        text = text.replace(before, after)
                new.writestr(name, text)

    return make


def test_the_patches_move_to_the_next_version(sandbox, next_version):
    next_version(first=('"""The first', '"""Still the first'), second=('"""The second', '"""Still the second'))
    printed = sandbox.run("rebase", "1.1")
    assert "the pin is flash-attn-4 1.1" in printed and "2 patches" in printed
    assert 'version = "1.1"' in (sandbox.root / "patches/upstream.toml").read_text()
    assert "Base: flash-attn-4 1.1" in sandbox.patch("01-count-the-limit-too").read_text()
    assert sandbox.git("tag") == "upstream-1.1"
    assert "all is well" in sandbox.run("check")


def test_a_patch_that_upstream_took_is_dropped(sandbox, next_version):
    next_version(first=("range(limit)", "range(limit + 1)"))
    assert "taken by upstream, dropped: Count the limit too" in sandbox.run("rebase", "1.1")
    assert sandbox.names == ["01-call-our-own-module"]
    assert "all is well" in sandbox.run("check")


def test_a_conflict_is_left_to_be_resolved(sandbox, next_version):
    next_version(first=("range(limit)", "range(0, limit)"))
    printed = sandbox.run("rebase", "1.1", status=1)
    assert "conflict in patch 'Count the limit too':\n  flash_attn/cute/first.py" in printed
    assert "--continue" in printed and "--abort" in printed
    assert 'version = "1.0"' in (sandbox.root / "patches/upstream.toml").read_text()
    assert "a rebase is under way" in sandbox.run("rebase", "1.1", status=1)
    assert "still in conflict" in sandbox.run("rebase", "--continue", status=1)
    sandbox.git("checkout", "--ours", "flash_attn/cute/first.py")
    sandbox.edit("first.py", "range(0, limit)", "range(0, limit + 1)")
    sandbox.git("add", "flash_attn/cute/first.py")
    assert "the pin is flash-attn-4 1.1" in sandbox.run("rebase", "--continue")
    assert "all is well" in sandbox.run("check")


def test_a_conflict_resolved_upstreams_way_drops_the_patch(sandbox, next_version):
    next_version(first=("range(limit)", "range(0, limit + 1)"))
    sandbox.run("rebase", "1.1", status=1)
    sandbox.git("checkout", "--ours", "flash_attn/cute/first.py")
    sandbox.git("add", "flash_attn/cute/first.py")
    assert "taken by upstream, dropped: Count the limit too" in sandbox.run("rebase", "--continue")
    assert "all is well" in sandbox.run("check")


def test_abort_goes_back(sandbox, next_version):
    head = sandbox.git("rev-parse", "HEAD")
    next_version(first=("range(limit)", "range(0, limit)"))
    sandbox.run("rebase", "1.1", status=1)
    assert "back on flash-attn-4 1.0" in sandbox.run("rebase", "--abort")
    assert sandbox.git("rev-parse", "HEAD") == head and sandbox.git("tag") == "upstream-1.0"
    assert sandbox.git("symbolic-ref", "HEAD") == "refs/heads/patches"
    assert "all is well" in sandbox.run("check")
    assert "no rebase is under way" in sandbox.run("rebase", "--abort", status=1)


def test_what_makes_no_sense_is_refused(sandbox):
    assert "the pin is flash-attn-4 1.0 already" in sandbox.run("rebase", "1.0", status=1)
    assert "not a version" in sandbox.run("rebase", "../1.1", status=1)
    assert "holds no flash_attn_4-1.1-py3-none-any.whl" in sandbox.run("rebase", "1.1", status=1)
    sandbox.edit("first.py", "result = []", "result = list()")
    assert "changed and not committed" in sandbox.run("rebase", "1.1", status=1)
    for arguments in (["rebase"], ["rebase", "1.1", "--abort"], ["check", "count-the-limit-too"]):
        with pytest.raises(SystemExit) as raised:
            sandbox.run(*arguments)
        assert raised.value.code == 2
