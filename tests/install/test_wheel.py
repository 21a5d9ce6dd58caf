"""The wheel: what is in it, and that it works wherever it is installed."""

from __future__ import annotations

import ast
import email
import os
import subprocess
import sys
import zipfile
from pathlib import Path

import pytest

from patches.materialise import checked_overlay, load_pin, load_queue, own_package_files, patched_files, repository
from patches.wheel import WHEEL_VARIABLE

ROOT = repository()


def test_the_wheel_holds_our_packages_and_nothing_else(built_wheel):
    pin, patched, checkout = load_pin(ROOT), patched_files(ROOT), built_wheel.parents[1]
    own = {**checked_overlay(checkout, patched), **own_package_files(checkout)}
    assert {"nsa_tools/__init__.py", "flash_attn/cute/a_package/module.py"} < set(own)
    with zipfile.ZipFile(built_wheel) as wheel:
        found = {name: wheel.read(name) for name in wheel.namelist()}
    info = f"flash_attn_4-{pin.local_version}.dist-info/"
    code = {name: data for name, data in found.items() if not name.startswith(info)}
    marker = ast.parse(code.pop("flash_attn/cute/build_info.py"))
    assert code == patched | {name: path.read_bytes() for name, path in own.items()}
    values = {node.targets[0].id: ast.literal_eval(node.value) for node in marker.body if isinstance(node, ast.Assign)}
    assert values["PATCHES"] == tuple(patch.name for patch in load_queue(ROOT))
    licences = {name.removeprefix(info + "licenses/") for name in found if name.startswith(info + "licenses/")}
    assert licences == {"LICENSE", "upstream-licenses/LICENSE", "upstream-licenses/AUTHORS"}


def test_the_metadata_is_that_of_a_build_of_the_pin(built_wheel):
    with zipfile.ZipFile(built_wheel) as wheel:
        name = next(name for name in wheel.namelist() if name.endswith("/METADATA"))
        metadata = email.message_from_bytes(wheel.read(name))
    assert (metadata["Name"], metadata["Version"]) == ("flash-attn-4", load_pin(ROOT).local_version)
    assert metadata["Requires-Python"] == ">=3.10"
    required = metadata.get_all("Requires-Dist")
    assert 'nvidia-cutlass-dsl[cu13]==4.8.1; sys_platform == "linux"' in required
    assert 'quack-kernels==0.6.5; sys_platform == "linux"' in required
    assert 'tqdm>=4.67; extra == "tools"' in required and 'accelerate>=1.15; extra == "hf"' in required
    assert {f'flash-attn-4[{extra}]; extra == "test"' for extra in ("tools", "hf")} <= set(required)


def test_the_wheel_replaces_a_stock_copy_everywhere(environment, built_wheel, upstream_wheel, checkout, tmp_path):
    environment.pip(upstream_wheel)
    assert environment.run("-c", "import flash_attn", cwd=tmp_path)
    environment.pip(built_wheel)
    assert len(list(environment.site_packages.glob("flash_attn_4-*.dist-info"))) == 1
    for cwd in (checkout, tmp_path):
        found, _ = environment.inspect(cwd)
        assert found["kind"] == "patched"
        assert found["location"] == str(environment.site_packages / "flash_attn" / "cute")
        assert found["patches"] == [patch.name for patch in load_queue(ROOT)]
    code = "import flash_attn.cute as cute; print(cute.__version__, cute.flash_attn_func.__module__)"
    printed = environment.run("-c", code, cwd=checkout).stdout.split()
    assert printed == [load_pin(ROOT).local_version, "flash_attn.cute.interface"]


def test_without_a_network_the_wheel_has_to_be_given(environment, checkout, upstream_wheel, tmp_path):
    offline = {"PIP_NO_INDEX": "1", "PIP_CONFIG_FILE": os.devnull, "PIP_FIND_LINKS": ""}
    offline["XDG_CACHE_HOME"] = str(tmp_path / "cache")
    printed = environment.pip(checkout, status=1, **offline, **{WHEEL_VARIABLE: ""})
    assert "pip could not download flash-attn-4==" in printed
    assert "Remedy: without a network, set FLASH_ATTN_NSA_UPSTREAM_WHEEL" in printed and "Traceback" not in printed
    environment.pip(checkout, **offline, **{WHEEL_VARIABLE: str(upstream_wheel)})
    assert environment.inspect(tmp_path)[0]["kind"] == "patched"


def test_an_isolated_build_downloads_the_wheel(checkout, tmp_path):
    pip = [sys.executable, "-m", "pip", "--disable-pip-version-check"]
    reachable = subprocess.run([*pip, "download", "--no-deps", "--quiet", "-d", str(tmp_path), "setuptools"])
    if reachable.returncode:
        pytest.skip("no package index at hand")
    variables = {key: value for key, value in os.environ.items() if key != WHEEL_VARIABLE}
    variables["XDG_CACHE_HOME"] = str(tmp_path / "cache")
    command = [*pip, "wheel", "--no-deps", "--quiet", "-w", str(tmp_path / "dist"), str(checkout)]
    subprocess.run(command, env=variables, check=True)
    assert len(list((tmp_path / "dist").glob("flash_attn_4-*+nsa.*.whl"))) == 1
    assert list((tmp_path / "cache/flash-attn-nsa").glob("*.whl"))


def test_a_source_distribution_builds_the_same_wheel(environment, checkout, built_wheel, tmp_path):
    code = "from setuptools import build_meta; print(build_meta.build_sdist('dist'))"
    name = environment.run("-c", code, cwd=checkout).stdout.split()[-1]
    environment.pip(Path(checkout, "dist", name))
    assert environment.inspect(tmp_path)[0]["kind"] == "patched"
    with zipfile.ZipFile(built_wheel) as wheel:
        built = {name: wheel.read(name) for name in wheel.namelist() if ".dist-info/" not in name}
    assert {name: (environment.site_packages / name).read_bytes() for name in built} == built
