"""tree, save, check, status and export on a small repository."""

from __future__ import annotations

import re
import subprocess
from pathlib import Path

import pytest

from patches.digest import PACKAGES, overlay_files, tree_hash
from patches.materialise import load_pin, load_queue
from patches.overview import overview
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
    links = {name: sandbox.tree / name for name in (*PACKAGES, *overlay_files(sandbox.root))}
    assert all(link.is_symlink() and not str(link.readlink()).startswith("/") for link in links.values())
    assert all(link.resolve() == sandbox.root / name for name, link in links.items())
    # The kernel cache hashes the sources that it finds this way.
    found = {*(sandbox.tree / "flash_attn").rglob("*.py")}
    assert {*links.values()} - found == {sandbox.tree / name for name in PACKAGES}


def test_the_marker_says_what_the_tree_was_made_from(sandbox):
    marker: dict = {}
    exec((sandbox.tree / "flash_attn/cute/build_info.py").read_text(), marker)
    assert (marker["PIN"], marker["VERSION"]) == ("1.0", "1.0+nsa.1")
    assert marker["PATCHES"] == ("01-count-the-limit-too", "02-call-our-own-module")
    assert marker["TREE_HASH"] == tree_hash(sandbox.root, linked=True)


def test_a_tree_is_stale_where_imports_would_find_something_else(sandbox):
    def hashes() -> list[str]:
        return [tree_hash(sandbox.root, linked=linked) for linked in (True, False)]

    before = hashes()
    (sandbox.root / "flash_attn/cute/part/kernel.py").write_text("KERNEL = False\n")
    assert hashes()[0] == before[0] and hashes()[1] != before[1]
    (sandbox.root / "flash_attn/cute/part/new.py").write_text("")
    assert hashes()[0] != before[0] and "upstream and 2 patches" in sandbox.run("tree")
    before = hashes()
    (sandbox.root / "nsa_tools/__init__.py").unlink()
    assert hashes()[0] != before[0] and "upstream and 2 patches" in sandbox.run("tree")
    assert (sandbox.tree / "flash_attn/cute/part/new.py").is_symlink() and not (sandbox.tree / "nsa_tools").exists()


def test_tree_then_save_changes_nothing_in_any_repository_that_holds_the_base(sandbox, tmp_path):
    before = snapshot(sandbox.root / "patches")
    sandbox.run("tree", "--force")
    head = sandbox.git("rev-parse", "HEAD")
    sandbox.run("tree", "--force")
    assert sandbox.git("rev-parse", "HEAD") == head
    subprocess.run(["git", "clone", "--quiet", str(sandbox.tree), str(tmp_path / "clone")], check=True)
    for folder in (sandbox.tree, tmp_path / "clone"):
        sandbox.run("save", str(folder))
        assert snapshot(sandbox.root / "patches") == before
    assert "all is well" in sandbox.run("check")


def test_save_numbers_the_files_and_drops_those_of_patches_that_are_gone(sandbox):
    head = sandbox.git("rev-parse", "HEAD")
    sandbox.git("reset", "--quiet", "--hard", "upstream-1.0")
    sandbox.git("cherry-pick", head, f"{head}~1")
    sandbox.run("save")
    assert sandbox.names == ["01-call-our-own-module", "02-count-the-limit-too"]
    sandbox.git("reset", "--quiet", "--hard", "HEAD~1")
    sandbox.run("save")
    assert sandbox.names == ["01-call-our-own-module"]
    sandbox.patch("01-call-our-own-module").rename(sandbox.patch("07-call-us"))
    printed = sandbox.run("check", status=1)
    assert "patches/07-call-us.patch:1: number and subject make it 01-call-our-own-module; `python -m" in printed
    sandbox.run("tree")
    sandbox.run("save")
    assert sandbox.names == ["01-call-our-own-module"] and "all is well" in sandbox.run("check")


def test_names_do_not_break_off(sandbox):
    words = " ".join(["count"] * 12)  # 71 characters
    sandbox.edit("first.py", "result = []", "result = list()")
    sandbox.commit(f"{words} 12")
    assert "expected a subject of 1 to 72 characters, got 74: 'count count" in sandbox.run("save", status=1)
    sandbox.git("reset", "--quiet", "HEAD~1")
    sandbox.commit(f"{words}.")
    sandbox.run("save")
    assert sandbox.names[2] == "03-" + words.replace(" ", "-")


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


INCOMPLETE = [
    ("\nReason: bugfix\nUpstream-Status: Pending\n", "found Reason, Upstream-Status"),
    ("\nReason: whim\nUpstream-Status: Pending\nTest: tests/x.py\n", "Reason must be one of feature, hook, bugfix"),
    ("\nReason: hook\nUpstream-Status: Sent\nTest: tests/x.py\n", "Upstream-Status must be Pending | Submitted"),
    ("\nReason: hook\nUpstream-Status: Pending\nTest: x.py\n", "Test must name files below tests/"),
    (
        "\nReason: hook\nReason: hook\nUpstream-Status: Pending\nTest: tests/x.py\n",
        "found Reason, Reason, Upstream-Status",
    ),
    ("\nReason: hook\nCause: hook\n", "found Reason, Cause"),
]


def test_save_refuses_an_incomplete_header(sandbox):
    before = snapshot(sandbox.root / "patches")
    for trailers, message in INCOMPLETE:
        sandbox.edit("first.py", "result = []", "result = list()")
        sandbox.commit("Make a list by name", trailers)
        assert message in sandbox.run("save", status=1)
        sandbox.git("reset", "--quiet", "--hard", "HEAD~1")
    assert snapshot(sandbox.root / "patches") == before


def test_save_names_every_commit_that_is_wrong(sandbox):
    for word, subject in (("result = []", "fixup! Count the limit too"), ("return result", "Count the limit too")):
        sandbox.edit("first.py", word, f"{word}  # changed")
        sandbox.commit(subject)
    printed = sandbox.run("save", status=1)
    assert "still to be folded in" in printed and "two commits have the subject 'Count the limit too'" in printed


def test_save_refuses_a_patch_that_quotes_upstream(sandbox):
    sandbox.edit("first.py", "result = []", "result = list()")
    sandbox.commit("Explain the result", body="It stood before\n\n    def the_last_one_counted(limit: int) -> int:\n")
    printed = sandbox.run("save", status=1)
    assert "patches/03-explain-the-result.patch:5: quotes upstream (flash_attn/cute/first.py:11)" in printed
    sandbox.git("reset", "--quiet", "--hard", "HEAD~1")
    sandbox.edit("first.py", "result = []", "# the_last_one_counted(limit: int) -> int\n    result = list()")
    sandbox.commit("Explain the result")
    printed, quoted = sandbox.run("save", status=1), "quotes upstream (flash_attn/cute/first.py:11)"
    assert "patches/03-explain-the-result.patch:" in printed and quoted in printed


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
    patch = sandbox.patch("01-count-the-limit-too")
    good = patch.read_text()
    assert good[good.index("@@ ") :].splitlines()[1:] == ['s 6 29:29 " + 1"']  # nothing of upstream's
    name = "patches/01-count-the-limit-too.patch"
    cases = [
        ('s 6 29:29 " + 1"', "q 6", f"{name}:11: does not apply to flash_attn/cute/first.py: 'q 6': expected"),
        ("29:29", "30:30", f"{name}:10: flash_attn/cute/first.py comes out wrong"),
        ("s 6 29", "s 99 29", f"{name}:11: does not apply to flash_attn/cute/first.py"),
        ("test_first.py", "test_fifth.py", f"{name}: its test tests/flash_attn/test_fifth.py does not exist"),
        ("test_first.py", "test_first.py::test_it", f"{name}: tests/flash_attn/test_first.py holds no test test_it"),
        ("Base: flash-attn-4 1.0", "Base: flash-attn-4 0.9", f"{name}: Base is flash-attn-4 0.9, the pin is 1.0"),
        ("Test: ", "Test:  ", f"{name}:1: not in the form that `save` writes"),
        ("Why it is needed.", "def the_last_one_counted(limit: int) -> int:", f"{name}:3: quotes upstream"),
    ]
    for old, new, message in cases:
        assert old in good
        patch.write_text(good.replace(old, new, 1))
        assert message in sandbox.run("check", status=1)
    patch.write_text(good)
    overview = sandbox.root / "UPSTREAM.md"
    overview.write_text(overview.read_text().replace("Count", "Add"))
    assert "UPSTREAM.md: the table is not" in sandbox.run("check", status=1)


@pytest.mark.parametrize("name", ["first.py", "first/__init__.py", "build_info.py"])
def test_a_module_of_ours_never_replaces_one_of_upstream(sandbox, name):
    (sandbox.root / "flash_attn/cute" / name).parent.mkdir(exist_ok=True)
    (sandbox.root / "flash_attn/cute" / name).write_text("")
    assert f"flash_attn/cute/{name}: upstream or the build has a module" in sandbox.run("check", status=1)


def test_bite_runs_the_test_without_the_patch(sandbox):
    printed = sandbox.run("check", "--bite", status=1)
    assert "01-count-the-limit-too: tests/flash_attn/test_first.py\n  bites: 1 of 1 fail without it" in printed
    assert "02-call-our-own-module: tests/flash_attn/test_first.py\n  passes without it" in printed
    assert "no patch nonsense" in sandbox.run("check", "--bite", "nonsense", status=1)
    # Later patches that build on it are left out too.
    sandbox.edit("first.py", "range(limit + 1)", "range(limit + 1 + 0)")
    sandbox.commit("Count it again")
    sandbox.run("save")
    printed = sandbox.run("check", "--bite", "count-the-limit-too")
    assert "bites: 1 of 1 fail without it and the 2 after it, some of which build on it" in printed
    assert "every test bites" in printed
    assert "bites: 1 of 1 fail without it and" not in sandbox.run("check", "--bite", "count-it-again", status=1)


def test_status_shows_the_table_that_upstream_md_shows(sandbox):
    table = sandbox.run("status")
    assert "| 1 | [Count the limit too](patches/01-count-the-limit-too.patch) | " in table
    assert " | bugfix | ready | `first.py` | +1 -1 |" in table
    first, *_ = queue = load_queue(sandbox.root)
    assert "| after 1 |" in overview(load_pin(sandbox.root), [*queue, first]), "a file that patch 1 changes"
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


def test_a_broken_pin_is_named(sandbox):
    (sandbox.root / "patches/upstream.toml").write_text('version = 1.0\nrelease = "1"\n')
    message = 'upstream.toml: expected a line `key = "value"` for each of distribution, version, sha256, release; found'
    assert f"{message} [('release', '1')]" in sandbox.run("status", status=1)


def test_export_brings_the_modules_that_a_patch_needs_and_ends_with_all(sandbox, tmp_path):
    def brought(file: str) -> list[str]:
        return re.findall(r"^\+\+\+ b/flash_attn/cute/(.*)", Path(file).read_text(), re.MULTILINE)

    files = sandbox.run("export").split()
    assert [Path(name).name for name in files] == [
        "0001-Count-the-limit-too.patch",
        "0002-Call-our-own-module.patch",
        "0003-Add-the-modules-that-callers-import.patch",
    ]
    assert "Upstream-Status" not in Path(files[0]).read_text()
    needed = ["below.py", "ours.py", "part/__init__.py", "part/kernel.py", "part/loads.py", "second.py"]
    assert [brought(file) for file in files] == [["first.py"], needed, ["facade.py"]]
    alone = sandbox.run("export", "call-our-own-module", "--output", str(tmp_path / "one")).split()
    assert [brought(file) for file in alone] == [needed]
    assert "no patch nonsense" in sandbox.run("export", "nonsense", status=1)
