"""What is published: the ops as `kernels` loads them, and files whose commands exist."""

from __future__ import annotations

import importlib
import os
import re
import shlex
import subprocess
import sys
import tomllib
from pathlib import Path

import torch
import typer
import yaml

import fb_kernels
from fb_core.apps.cli.main import app

ROOT = Path(__file__).resolve().parent.parent
PUBLISH = ROOT / "publish"


def test_the_library_kernels_loads_the_ops_beside_the_installed_ones(tmp_path):
    import kernels
    from kernels._rust import Digest, DigestAlgorithm

    subprocess.run([sys.executable, PUBLISH / "hub_kernels.py", tmp_path], check=True)
    ops = kernels.get_local_kernel(tmp_path)
    assert ops.__all__ == fb_kernels.__all__
    (loaded,) = kernels.get_loaded_kernels()
    assert {path.name for path in (tmp_path / "build").iterdir()} == {"torch-cpu", "torch-cuda"}
    variant = tmp_path / "build" / "torch-cpu"
    loaded.metadata.digest.validate(Digest.hash_variant(DigestAlgorithm.SHA256, variant))
    for path in variant.rglob("*.py"):
        name = ".".join([ops.__name__, *path.relative_to(variant).with_suffix("").parts]).removesuffix(".__init__")
        if path.name != "gluon.py":  # not in every Triton
            assert Path(str(importlib.import_module(name).__file__)) == path
    hidden, weight = torch.randn(6, 32), torch.randn(100, 32, requires_grad=True)
    target, results = torch.randint(100, (6,)), []
    for package in (fb_kernels, ops):
        logprob = package.linear_logprob(hidden, weight, target)
        results.append((logprob, *torch.autograd.grad(logprob.sum(), weight)))
    torch.testing.assert_close(*results)
    assert hasattr(getattr(torch.ops, ops.__name__), "linear_logprob")


def test_the_image_starts_a_server_of_the_wheel_that_is_copied():
    lines = dict(re.findall(r"^(ENTRYPOINT|CMD) (.+)$", (PUBLISH / "Dockerfile").read_text(), re.MULTILINE))
    name, *arguments = [*yaml.safe_load(lines["ENTRYPOINT"]), *yaml.safe_load(lines["CMD"])][1:]
    documented = re.search(r"futurebridge \\\n +(--host .+)", (PUBLISH / "README.md").read_text())
    assert documented is not None
    for given in (arguments, shlex.split(documented[1])):
        with typer.main.get_command(app).commands[name].make_context(name, given) as context:
            assert context.params["slm"] == "demo:plans"
    extras = tomllib.loads((ROOT / "pyproject.toml").read_text())["project"]["optional-dependencies"]
    assert name in extras
    sent = {line[1:].partition("/")[0] for line in (PUBLISH / "Dockerfile.dockerignore").read_text().split()[1:]}
    assert sent == set(re.findall(r"^COPY (\S+)", (PUBLISH / "Dockerfile").read_text(), re.MULTILINE))


def test_a_runner_and_a_commit_run_what_the_project_has():
    (job,) = yaml.safe_load((ROOT / ".github/workflows/check.yml").read_text())["jobs"].values()
    assert os.access(ROOT / job["steps"][-1]["run"], os.X_OK)
    (repository,) = yaml.safe_load((ROOT / ".pre-commit-config.yaml").read_text())["repos"]
    (hook,) = repository["hooks"]
    assert re.search(rf"^{hook['entry'].removeprefix('make ')}:", (ROOT / "Makefile").read_text(), re.MULTILINE)
    release = yaml.safe_load((ROOT / ".github/workflows/release.yml").read_text())["jobs"]
    assert [release[job].get("needs") for job in ("check", "wheels", "publish")] == [None, "check", "wheels"]
    assert release["check"]["steps"][-1] == job["steps"][-1]
    for form in (ROOT / ".github/ISSUE_TEMPLATE").glob("*.yml"):
        assert {"name", "description", "body"} == yaml.safe_load(form.read_text()).keys()
