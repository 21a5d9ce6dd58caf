"""The editable install: a tree on Python's path, and what can come between Python and it."""

from __future__ import annotations

import shutil
import subprocess

from patches.materialise import load_pin, load_queue, repository

ROOT = repository()


def test_it_works_from_the_root_and_from_elsewhere(environment, checkout, tmp_path):
    environment.pip("--editable", checkout)
    for cwd in (checkout, tmp_path):
        found, _ = environment.inspect(cwd)
        assert found["kind"] == "patched"
        assert found["location"] == str(checkout / ".tree/flash_attn/cute")
        assert found["patches"] == [patch.name for patch in load_queue(ROOT)]
    code = "import nsa_tools, flash_attn.cute.a_package.module as ours; print(nsa_tools.__file__, ours.__file__)"
    names = ("nsa_tools/__init__.py", "flash_attn/cute/a_package/module.py")
    files = [str(checkout / ".tree" / name) for name in names]
    assert environment.run("-c", code, cwd=tmp_path).stdout.split() == files
    code = "import nsa_layer.fork; print(nsa_layer.fork.require_patched().version)"
    assert environment.run("-c", code, cwd=tmp_path).stdout.strip() == load_pin(ROOT).local_version
    arguments = ("--heads=16", "--kv-heads=2", "--head-dim=64", "--dtype=fp32", "--seqlen=1K")
    printed = environment.run("-m", "nsa_layer", "inspect", *arguments, cwd=checkout).stdout
    assert "T=1024 Hq=16 Hkv=2 D=64 Dv=64 float32" in printed and "cutlass-dsl" in printed
    refused = environment.run("-m", "nsa_layer", "inspect", "--head-dim", "0", cwd=checkout, status=2)
    assert "must be at least 1" in refused.stderr
    refused = environment.run("-m", "nsa_layer", "bench", cwd=tmp_path, status=2)
    assert refused.stderr == "bench needs the tools extra: pip install 'flash-attn-4[tools]'\n"


def test_it_replaces_a_stock_copy_and_hides_behind_a_later_one(environment, checkout, upstream_wheel, tmp_path):
    environment.pip(upstream_wheel)
    found, complaint = environment.inspect(checkout, status=1)
    assert found["kind"] == "stock" and "remedy: install this repository's build" in complaint
    environment.pip("--editable", checkout)
    assert environment.inspect(tmp_path)[0]["kind"] == "patched"
    shutil.unpack_archive(upstream_wheel, environment.site_packages, "zip")  # as another installer would, not pip
    for cwd in (checkout, tmp_path):
        found, complaint = environment.inspect(cwd, status=1)
        assert found["kind"] == "stock"
        assert f"it hides the one in {checkout / '.tree/flash_attn/cute'}" in complaint
        assert f"remedy: remove flash-attn-4 from {environment.site_packages}" in complaint


def test_it_refuses_to_stand_beside_flash_attention_2(environment, checkout, built_wheel):
    found, complaint = environment.inspect(checkout, status=1)
    assert found["kind"] == "missing" and "no flash_attn.cute on Python's path" in complaint
    (environment.site_packages / "flash_attn").mkdir()
    (environment.site_packages / "flash_attn" / "__init__.py").write_text('__version__ = "2.8.3"\n')
    printed = environment.pip("--editable", checkout, status=1)
    assert f"{environment.site_packages} holds a flash_attn package of its own (FlashAttention-2)" in printed
    assert "Remedy: install the wheel" in printed and "Traceback" not in printed
    found, complaint = environment.inspect(checkout, status=1)
    assert found["kind"] == "missing" and "FlashAttention-2" in complaint
    environment.pip(built_wheel)
    assert environment.inspect(checkout)[0]["kind"] == "patched"


def test_a_stale_tree_is_an_error_that_names_the_command(environment, checkout, tmp_path):
    environment.pip("--editable", checkout)
    patch = checkout / "patches" / f"{load_queue(ROOT)[-1].name}.patch"
    patch.rename(tmp_path / patch.name)
    found, complaint = environment.inspect(tmp_path, status=1)
    assert found["kind"] == "stale"
    assert complaint.rstrip().endswith(f"remedy: run `python -m patches tree` in {checkout}")
    (tmp_path / patch.name).rename(patch)
    assert environment.inspect(tmp_path)[0]["kind"] == "patched"

    (checkout / "flash_attn/cute/a_new_module.py").write_text("NEW = True\n")
    assert environment.inspect(tmp_path, status=1)[0]["kind"] == "stale"
    environment.run("-m", "patches", "tree", cwd=checkout)
    assert environment.inspect(tmp_path)[0]["kind"] == "patched"
    # The tree holds a link to it, so what changes in it is there at once.
    (checkout / "flash_attn/cute/a_new_module.py").write_text("NEW = False\n")
    assert environment.inspect(tmp_path)[0]["kind"] == "patched"


def test_it_keeps_work_in_the_tree(environment, checkout):
    environment.pip("--editable", checkout)
    module = checkout / ".tree/flash_attn/cute/__init__.py"
    module.write_text(module.read_text() + "# being worked on\n")
    environment.pip("--editable", checkout)
    assert module.read_text().endswith("# being worked on\n")
    status = ["git", "-C", str(checkout / ".tree"), "status", "--porcelain"]
    assert subprocess.check_output(status, text=True).strip() == "M flash_attn/cute/__init__.py"
