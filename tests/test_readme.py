"""The README is short, its figures are those of the committed result files, and its commands run."""

from __future__ import annotations

import re
import shlex
from pathlib import Path

import pytest
from warm import futurebridge

from benchmarks.pages import figures

ROOT = Path(__file__).parent.parent
README = (ROOT / "README.md").read_text()
COMMANDS = [
    line.partition("#")[0].strip()
    for block in re.findall(r"```bash\n(.*?)```", README, re.DOTALL)
    for line in block.splitlines()
    if line.startswith("futurebridge ")
]
STAGES = ("collect", "futures", "score", "train", "evaluate")


@pytest.mark.parametrize("name", figures.RENDERED)
def test_tables_are_generated_from_the_result_files(name):
    text = (ROOT / name).read_text()
    assert figures.RENDERED[name](text, ROOT) == text


def test_the_readme_is_a_first_screen_and_what_follows_from_it():
    lines = README.splitlines()
    assert len(lines) <= 130
    assert lines.index("## Install") < 20
    assert "FutureBridge: Token Selection Beyond Local Preference in Collaborative Decoding" in README
    for target in re.findall(r"\]\(([^)#]+)[^)]*\)", README):
        assert (ROOT / target).exists(), target


def test_the_citation_names_this_version_and_the_paper():
    citation = (ROOT / "CITATION.cff").read_text()
    version = re.search(r'^version = "(.*)"$', (ROOT / "pyproject.toml").read_text(), re.MULTILINE)
    assert version is not None
    assert f"version: {version[1]}" in citation
    assert f"\n## {version[1]}" in (ROOT / "CHANGELOG.md").read_text()
    assert "FutureBridge: Token Selection Beyond Local Preference in Collaborative Decoding" in citation


@pytest.mark.parametrize("block", re.findall(r"```python\n(.*?)```", README, re.DOTALL))
def test_python_of_the_readme_prints_what_it_says(block, capsys):
    exec(block, {})
    said = re.search(r"^print\(.*\)  # (.*)$", block, re.MULTILINE)
    printed = capsys.readouterr().out.splitlines()[-1]
    assert said is None or printed == said[1]


@pytest.mark.parametrize("command", [one for one in COMMANDS if one.split()[1] in STAGES])
def test_stages_of_the_readme_can_be_planned(command, tmp_path):
    arguments = [*shlex.split(command)[1:], "--run-dir", str(tmp_path / "run"), "--dry-run"]
    done = futurebridge(*arguments, cwd=tmp_path)
    assert done.returncode == 0, done.stderr
    assert "at most" in done.stdout


def test_the_pair_of_the_readme_answers(tmp_path):
    (command,) = (one for one in COMMANDS if one.split()[1] == "generate")
    done = futurebridge(*shlex.split(command)[1:], cwd=tmp_path)
    assert done.returncode == 0, done.stderr
    assert "boxed" in done.stdout


def test_every_command_of_the_readme_is_tried_or_needs_a_server():
    tried = {
        one for one in COMMANDS if one.split()[1] in (*STAGES, "generate", "demo", "serve")
    }  # tests/core/test_serve_clients.py
    assert [one for one in COMMANDS if one not in tried and "server=" not in one] == []
