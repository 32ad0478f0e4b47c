"""The command line as a user meets it."""

from __future__ import annotations

import subprocess
import sys

import pytest


def run(*arguments):
    return subprocess.run(
        [sys.executable, "-c", "from fb_core.cli import main; main()", *arguments], capture_output=True, text=True
    )


def test_help_lists_the_commands():
    result = run("--help")
    assert result.returncode == 0
    assert "demo" in result.stdout
    assert "env" in result.stdout


def test_env_says_what_runs():
    result = run("env")
    assert result.returncode == 0
    assert "branch_attention" in result.stdout


@pytest.mark.parametrize(
    ("arguments", "words"),
    [(("demo", "--seed", "-1"), "seed"), (("demo", "--out", "/dev/null/x"), "futurebridge:"), (("nope",), "nope")],
)
def test_errors_are_one_message_and_no_traceback(arguments, words):
    result = run(*arguments)
    assert result.returncode != 0
    assert words in result.stderr
    assert "Traceback" not in result.stderr


def test_explain_wants_a_run(tmp_path):
    result = run("explain", str(tmp_path), "1")
    assert result.returncode == 2
    assert "expected a run's settings" in result.stderr


def test_a_misspelt_setting_is_named(tmp_path):
    config = tmp_path / "a.yaml"
    config.write_text("models: {slm: a, llm: b}\ncollect: {quantle: 0.9}\n")
    result = run("collect", "--config", str(config))
    assert result.returncode == 2
    assert "collect.quantle" in result.stderr
    assert "Traceback" not in result.stderr
