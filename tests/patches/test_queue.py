"""tree, save, check, status and export on a small repository."""

from __future__ import annotations

import subprocess
from pathlib import Path

import pytest

from patches.digest import tree_hash
from patches.wheel import WHEEL_VARIABLE


def snapshot(folder: Path) -> dict[str, bytes]:
    """Every file below a folder, git's own left out."""
    found = (path for path in sorted(folder.rglob("*")) if path.is_file() and ".git" not in path.parts)
    return {str(path.relative_to(folder)): path.read_bytes() for path in found}


def test_the_tree_is_upstream_and_a_commit_per_patch(sandbox):
    assert sandbox.git("log", "--reverse", "--format=%s").splitlines() == [
        "flash-attn-4 1.0",
        "Count the limit too",
        "Call our own module",
    ]
    assert sandbox.git("rev-list", "--max-parents=0", "HEAD") == sandbox.git("rev-parse", "upstream-1.0")
    assert sandbox.git("status", "--porcelain") == ""
    links = {name: sandbox.tree / name for name in ("nsa_layer", "flash_attn/cute/ours.py")}
    assert all(link.is_symlink() and not str(link.readlink()).startswith("/") for link in links.values())
    assert all(link.resolve() == sandbox.root / name for name, link in links.items())


def test_the_same_queue_gives_the_same_commits(sandbox):
    for name in ("one", "two"):
        sandbox.run("tree", str(sandbox.root / name))
    heads = [
        subprocess.check_output(["git", "-C", sandbox.root / name, "rev-parse", "HEAD"]) for name in ("one", "two")
    ]
    assert heads[0] == heads[1]


def test_the_marker_says_what_the_tree_was_made_from(sandbox):
    marker: dict = {}
    exec((sandbox.tree / "flash_attn/cute/build_info.py").read_text(), marker)
    assert (marker["PIN"], marker["VERSION"]) == ("1.0", "1.0+nsa.1")
    assert marker["PATCHES"] == ("count-the-limit-too", "call-our-own-module")
    assert marker["TREE_HASH"] == tree_hash(sandbox.root, linked=True)


def test_tree_then_save_changes_nothing(sandbox):
    before = snapshot(sandbox.root / "patches")
    sandbox.run("tree", "--force")
    sandbox.run("save")
    assert snapshot(sandbox.root / "patches") == before
    assert "all is well" in sandbox.run("check")


def test_save_takes_any_repository_that_holds_the_base(sandbox, tmp_path):
    clone = tmp_path / "clone"
    subprocess.run(["git", "clone", "--quiet", str(sandbox.tree), str(clone)], check=True)
    before = snapshot(sandbox.root / "patches")
    sandbox.run("save", str(clone))
    assert snapshot(sandbox.root / "patches") == before


def test_save_drops_the_files_of_patches_that_are_gone(sandbox):
    sandbox.git("reset", "--quiet", "--hard", "HEAD~1")
    sandbox.run("save")
    assert [path.name for path in (sandbox.root / "patches").glob("*.patch")] == ["count-the-limit-too.patch"]
    assert "all is well" in sandbox.run("check")


def test_work_that_is_not_saved_is_never_thrown_away(sandbox):
    sandbox.edit("first.py", "result = []", "result = list()")
    assert "not saved yet (1 files changed" in sandbox.run("tree")
    sandbox.commit("Make a list by name")
    (sandbox.root / "flash_attn/cute/new.py").write_text("")
    assert "not saved (commits since it was made)" in sandbox.run("tree", status=1)
    head = sandbox.git("rev-parse", "HEAD")
    sandbox.run("save")
    assert (sandbox.tree / "flash_attn/cute/new.py").is_symlink()
    assert "up to date" in sandbox.run("tree")
    assert sandbox.git("rev-parse", "HEAD") == head


def test_a_folder_with_something_else_in_it_is_left_alone(sandbox, tmp_path):
    (tmp_path / "mine").mkdir()
    (tmp_path / "mine" / "file").write_text("")
    assert "not a tree of the patch queue" in sandbox.run("tree", str(tmp_path / "mine"), status=1)
    assert "no git repository" in sandbox.run("save", str(tmp_path / "mine"), status=1)


def test_a_patch_file_quotes_nothing(sandbox):
    text = sandbox.patch("count-the-limit-too").read_text()
    edits = text[text.index("@@ ") :].splitlines()[1:]
    assert edits == ['s 6 29:29 " + 1"']


@pytest.mark.parametrize(
    ("trailers", "message"),
    [
        ("\nReason: bugfix\nUpstream-Status: Pending\n", "lacks Test"),
        ("\nReason: whim\nUpstream-Status: Pending\nTest: tests/x.py\n", "Reason must be one of feature, hook, bugfix"),
        ("\nReason: hook\nUpstream-Status: Sent\nTest: tests/x.py\n", "Upstream-Status must be Pending | Submitted"),
        ("\nReason: hook\nUpstream-Status: Pending\nTest: x.py\n", "Test must name files below tests/"),
        ("\nReason: hook\nReason: hook\nUpstream-Status: Pending\nTest: tests/x.py\n", "a second Reason"),
        ("\nReason: hook\nCause: hook\n", "found 'Cause: hook'"),
    ],
)
def test_save_refuses_an_incomplete_header(sandbox, trailers, message):
    before = snapshot(sandbox.root / "patches")
    sandbox.edit("first.py", "result = []", "result = list()")
    sandbox.commit("Make a list by name", trailers)
    assert message in sandbox.run("save", status=1)
    assert snapshot(sandbox.root / "patches") == before


def test_save_names_every_commit_that_is_wrong(sandbox):
    for word, subject in (("result = []", "fixup! Count the limit too"), ("return result", "Count the limit too")):
        sandbox.edit("first.py", word, f"{word}  # changed")
        sandbox.commit(subject)
    printed = sandbox.run("save", status=1)
    assert "still to be folded in" in printed and "two commits make a patch of this name" in printed


def test_save_refuses_a_patch_that_quotes_upstream(sandbox):
    sandbox.edit("first.py", "result = []", "result = list()")
    sandbox.commit("Explain the result", body="It stood before\n\n    def the_last_one_counted(limit: int) -> int:\n")
    printed = sandbox.run("save", status=1)
    assert "patches/explain-the-result.patch:5: quotes upstream (flash_attn/cute/first.py:11)" in printed
    sandbox.git("reset", "--quiet", "--hard", "HEAD~1")
    sandbox.edit("first.py", "result = []", "# the_last_one_counted(limit: int) -> int\n    result = list()")
    sandbox.commit("Explain the result")
    printed = sandbox.run("save", status=1)
    assert "patches/explain-the-result.patch:" in printed and "quotes upstream (flash_attn/cute/first.py:11)" in printed


def test_save_refuses_new_files_and_work_in_progress(sandbox):
    sandbox.edit("first.py", "result = []", "result = list()")
    assert "changed and not committed" in sandbox.run("save", status=1)
    (sandbox.tree / "flash_attn/cute/new.py").write_text("NEW = True\n")
    sandbox.git("add", "flash_attn/cute/new.py")
    sandbox.commit("Add a module")
    assert "a new module belongs in flash_attn/cute/" in sandbox.run("save", status=1)


def test_save_takes_only_a_tree_of_the_pinned_wheel(sandbox):
    sandbox.git("tag", "--force", "upstream-1.0", "HEAD~1")
    assert "flash_attn/cute/first.py at upstream-1.0 is not the wheel's" in sandbox.run("save", status=1)
    sandbox.git("tag", "--delete", "upstream-1.0")
    assert "has no tag upstream-1.0" in sandbox.run("save", status=1)


def test_files_come_back_byte_for_byte(sandbox):
    path = sandbox.tree / "flash_attn/cute/second.py"
    data = path.read_bytes().rstrip(b"\n") + "\r\n# größer: ½\r\n# no newline at the end".encode()
    path.write_bytes(data)
    sandbox.commit("End in odd ways")
    sandbox.run("save")
    sandbox.run("tree", "--force")
    assert path.read_bytes() == data
    assert "all is well" in sandbox.run("check")


def test_check_names_file_and_line(sandbox):
    patch = sandbox.patch("count-the-limit-too")
    good = patch.read_text()
    name = "patches/count-the-limit-too.patch"
    cases = [
        ('s 6 29:29 " + 1"', "q 6", f"{name}:11: expected an operation"),
        ("29:29", "30:30", f"{name}:10: flash_attn/cute/first.py comes out wrong"),
        ("s 6 29", "s 99 29", f"{name}:10: does not apply to flash_attn/cute/first.py"),
        ("test_first.py", "test_fifth.py", f"{name}: its test tests/flash_attn/test_fifth.py does not exist"),
        ("test_first.py", "test_first.py::test_it", f"{name}: tests/flash_attn/test_first.py holds no test test_it"),
        ("Base: flash-attn-4 1.0", "Base: flash-attn-4 0.9", f"{name}: Base is flash-attn-4 0.9, the pin is 1.0"),
        ("Test: ", "Test:  ", f"{name}:1: not in the form that `save` writes"),
    ]
    for old, new, message in cases:
        assert old in good
        patch.write_text(good.replace(old, new, 1))
        assert message in sandbox.run("check", status=1)
    patch.write_text(good)
    (sandbox.root / "patches/stray.patch").write_text("")
    (sandbox.root / "UPSTREAM.md").write_text(
        "<!-- written by `python -m patches save`: do not edit -->\nold\n<!-- end -->\n"
    )
    printed = sandbox.run("check", status=1)
    assert "patches/stray.patch: not in patches/series" in printed and "UPSTREAM.md: the table is not" in printed


def test_check_finds_quotations_in_patch_files(sandbox):
    patch = sandbox.patch("count-the-limit-too")
    quoted = "def the_last_one_counted(limit: int) -> int:"
    patch.write_text(patch.read_text().replace("Why it is needed.", quoted))
    assert "patches/count-the-limit-too.patch:3: quotes upstream" in sandbox.run("check", status=1)


def test_a_module_of_ours_never_replaces_one_of_upstream(sandbox):
    (sandbox.root / "flash_attn/cute/first.py").write_text("")
    assert "flash_attn/cute/first.py: upstream or the build has a module" in sandbox.run("check", status=1)


def test_bite_runs_the_test_without_the_patch(sandbox):
    printed = sandbox.run("check", "--bite", status=1)
    assert "count-the-limit-too: tests/flash_attn/test_first.py\n  bites: 1 of 1 fail without it" in printed
    assert "call-our-own-module: tests/flash_attn/test_first.py\n  passes without it" in printed
    assert "every test bites" in sandbox.run("check", "--bite", "count-the-limit-too")
    assert "no patch nonsense" in sandbox.run("check", "--bite", "nonsense", status=1)


def test_bite_leaves_out_the_later_patches_that_build_on_it(sandbox):
    sandbox.edit("first.py", "range(limit + 1)", "range(limit + 1 + 0)")
    sandbox.commit("Count it again")
    sandbox.run("save")
    printed = sandbox.run("check", "--bite", "count-the-limit-too")
    assert "bites: 1 of 1 fail without it and the 2 after it, some of which build on it" in printed
    assert "every test bites" in printed
    assert "bites: 1 of 1 fail without it and" not in sandbox.run("check", "--bite", "count-it-again", status=1)


def test_status_shows_the_table_that_upstream_md_shows(sandbox):
    table = sandbox.run("status")
    row = "| 1 | [Count the limit too](patches/count-the-limit-too.patch) | bugfix | Pending | `first.py` | +1 -1 |"
    assert row in table
    assert table.strip() in (sandbox.root / "UPSTREAM.md").read_text()


def test_the_wheel_must_have_the_pinned_hash(sandbox, monkeypatch):
    path = next(sandbox.wheels.glob("*.whl"))
    path.write_bytes(path.read_bytes() + b"\0")
    printed = sandbox.run("tree", "--force", status=1)
    assert "sha256 expected" in printed and "sha256 found" in printed and "Remedy" in printed
    monkeypatch.setenv(WHEEL_VARIABLE, str(sandbox.wheels / "nothing.whl"))
    assert "which does not exist" in sandbox.run("check", status=1)
    monkeypatch.setenv(WHEEL_VARIABLE, str(sandbox.root))
    assert "which holds no flash_attn_4-1.0-py3-none-any.whl" in sandbox.run("check", status=1)


@pytest.mark.parametrize(
    ("text", "message"),
    [
        ("version = 1.0\n", "upstream.toml:1: expected `key"),
        ('version = "1.0"\n', "upstream.toml: lacks distribution, sha256, release"),
    ],
)
def test_a_broken_pin_is_named(sandbox, text, message):
    (sandbox.root / "patches/upstream.toml").write_text(text)
    assert message in sandbox.run("status", status=1)


def test_a_broken_series_is_named(sandbox):
    (sandbox.root / "patches/series").write_text("count-the-limit-too\ncount-the-limit-too\n")
    assert "patches/series:2: a second count-the-limit-too" in sandbox.run("check", status=1)
    (sandbox.root / "patches/series").write_text("nothing\n")
    assert "nothing.patch: no such file" in sandbox.run("check", status=1)


def test_export_brings_the_modules_that_a_patch_calls(sandbox, tmp_path):
    files = sandbox.run("export").split()
    assert [Path(name).name for name in files] == [
        "0001-Count-the-limit-too.patch",
        "0002-Call-our-own-module.patch",
    ]
    assert "Upstream-Status" not in Path(files[0]).read_text()
    assert "+++ b/flash_attn/cute/ours.py" in Path(files[1]).read_text()
    alone = sandbox.run("export", "call-our-own-module", "--output", str(tmp_path / "one")).split()
    assert len(alone) == 1 and "+++ b/flash_attn/cute/ours.py" in Path(alone[0]).read_text()
    assert "no patch nonsense" in sandbox.run("export", "nonsense", status=1)
