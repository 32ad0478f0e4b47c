"""The pages of docs/: snippets run, commands parse, messages are the code's own, tables and links are right."""

from __future__ import annotations

import ast
import inspect
import re
import shlex
import textwrap
from functools import cache
from pathlib import Path
from types import ModuleType

import pytest
import typer
import yaml
from warm import python

import fb_core
import fb_kernels
from benchmarks.pages import figures, reference
from docs import signatures
from fb_core.apps.cli.main import app
from fb_core.apps.settings.pair import PairSettings
from fb_core.apps.settings.run import RunSettings
from fb_kernels import bench, calls
from fb_kernels._runtime import backend, cpu

ROOT = Path(__file__).resolve().parent.parent
DOCS = ROOT / "docs"
PAGES = {path.relative_to(DOCS).as_posix(): path.read_text() for path in sorted(DOCS.rglob("*.md"))}
# Blocks with a literal `(...)` are skipped.
RUN = ("ops.md", "reproduce.md", "scoring.md", "decoding.md")
ELSEWHERE = {  # pages whose Python is run elsewhere, or is a fragment of what an example or a test runs
    "serving.md": "tests/core/test_serve_clients.py",
    "your_decoder.md": "examples/litgpt_decoder.py",
    "scoring.md": "examples/grpo.py",
    "choice.md": "tests/core/test_choice.py",
}
LARGE_MODEL = sorted((ROOT / "examples/llm_server").glob("*.yaml"))


RAY_SERVE = "applications:\n"  # in a file of Ray Serve's


def blocks(page: str, *languages: str) -> list[str]:
    return re.findall(rf"^```(?:{'|'.join(languages)})\n(.*?)^```", PAGES[page], re.MULTILINE | re.DOTALL)


# --- snippets ---------------------------------------------------------------------------------------------------------


def test_every_page_with_python_is_run() -> None:
    assert {page for page in PAGES if blocks(page, "python")} == {*RUN, *ELSEWHERE}
    assert all((ROOT / where).is_file() for where in ELSEWHERE.values())


@pytest.mark.parametrize("page", RUN)
def test_the_python_of_a_page_runs_from_top_to_bottom(page: str, tmp_path: Path) -> None:
    done = python("\n".join(block for block in blocks(page, "python") if "(...)" not in block), tmp_path)
    assert done.returncode == 0, done.stderr


def test_a_decoders_page_is_of_its_example() -> None:
    code = (ROOT / ELSEWHERE["your_decoder.md"]).read_text()
    assert all(textwrap.indent(block, "    ") in code for block in blocks("your_decoder.md", "python"))


@pytest.mark.parametrize("page", ELSEWHERE)
def test_what_a_fragment_imports_is_there(page: str) -> None:
    for block in blocks(page, "python"):
        for node in ast.walk(ast.parse(block)):
            if isinstance(node, ast.ImportFrom) and (node.module or "").startswith("fb_"):
                module = __import__(node.module or "", fromlist=["_"])
                assert all(hasattr(module, name.name) for name in node.names), block


def commands() -> list[tuple[str, str]]:
    """(page, command) of every line that begins with the command, continued lines joined."""
    found = []
    for page in PAGES:
        for block in blocks(page, "bash", "console", ""):
            for line in block.replace("\\\n", " ").splitlines():
                plain = re.sub(r"^([A-Z_]+=\S+ )+", "", line.strip())
                plain = re.sub(r"^.* -m fb_core ", "futurebridge ", plain)
                if plain.startswith("futurebridge "):
                    found.append((page, plain.partition(" #")[0].strip()))
    for file in LARGE_MODEL:
        lines = (line.strip("# ") for line in file.read_text().splitlines())
        found += [(file.name, line) for line in lines if line.startswith("futurebridge ")]
    return found


@pytest.mark.parametrize(("page", "command"), commands())
def test_a_command_is_one_that_the_program_takes(page: str, command: str) -> None:
    name, *arguments = shlex.split(command)[1:]
    program = typer.main.get_command(app)
    known = program.commands[name]  # type: ignore[attr-defined]
    with known.make_context(name, arguments) as context:
        assert context.command is known


def settings(page: str) -> list[str]:
    return [block for block in blocks(page, "yaml") if RAY_SERVE not in block]


@pytest.mark.parametrize("page", [page for page in PAGES if settings(page)])
def test_the_settings_of_a_page_are_known(page: str, tmp_path: Path) -> None:
    for number, block in enumerate(settings(page)):
        values, file = yaml.safe_load(block), tmp_path / f"{number}.yaml"
        if "slm" in values:
            file.write_text(block)
            assert PairSettings.load(file).slm
        else:
            file.write_text(yaml.safe_dump({"models": {"slm": "a", "llm": "b"}} | values))
            assert RunSettings.load(str(file)).models.slm


def test_what_ray_serve_gets_is_known() -> None:
    pytest.importorskip("fastapi")
    schema = pytest.importorskip("ray.serve.schema")
    from fb_core.apps.serve.replicas import ReplicaSettings

    (file,) = (block for block in blocks("serving.md", "yaml") if RAY_SERVE in block)
    (application,) = schema.ServeDeploySchema.model_validate(yaml.safe_load(file)).applications
    (command,) = re.findall(r"^serve run fb_core\.apps\.serve\.replicas:app (.+)$", PAGES["serving.md"], re.MULTILINE)
    assert ReplicaSettings.model_validate(application.args).replicas == 16
    assert ReplicaSettings.model_validate(dict(word.split("=", 1) for word in shlex.split(command))).replicas == 8
    assert application.import_path == "fb_core.apps.serve.replicas:app"


@pytest.mark.parametrize("file", LARGE_MODEL, ids=lambda file: file.stem)
def test_an_examples_server_is_the_one_that_its_commands_name(file: Path) -> None:
    server = RunSettings.load(str(file)).models.llm_server
    assert server is not None
    assert server.flavour == file.stem
    (serve,) = (command for page, command in commands() if page == file.name and " serve " in command)
    wanted = f"--server {server.url} --flavour {server.flavour} --api-key-variable {server.api_key_variable}"
    assert serve.endswith(wanted)
    assert f"--adapter runs/{file.stem}/deployed/seed-0" in serve


# --- messages ---------------------------------------------------------------------------------------------------------


@cache
def messages() -> list[re.Pattern[str]]:
    """The text of every string in the code that could be a message, anything in the place of what varies."""
    found = []
    for path in [*(ROOT / "fb_core").rglob("*.py"), *(ROOT / "fb_kernels").rglob("*.py")]:
        for node in ast.walk(ast.parse(path.read_text())):
            parts = node.values if isinstance(node, ast.JoinedStr) else [node]
            texts = [part.value if isinstance(part, ast.Constant) else None for part in parts]
            if sum(len(text) for text in texts if isinstance(text, str)) > 25:
                found.append(re.compile("".join(".*" if text is None else re.escape(str(text)) for text in texts)))
    return found


SAID = [(page, said) for page in PAGES for said in re.findall(r"^\| `([^`]*: [^`]*)` \|", PAGES[page], re.MULTILINE)]


def test_messages_are_found() -> None:
    assert len([page for page, _ in SAID if page == "troubleshooting.md"]) > 25


@pytest.mark.parametrize(("page", "said"), [one for one in SAID if one[0] == "troubleshooting.md"])
def test_a_message_is_one_of_the_code(page: str, said: str) -> None:
    """Of one that is made of two strings, each part behind another is looked for."""

    def begun(pattern: re.Pattern[str]) -> bool:
        whole = pattern.pattern
        head = whole.partition("`")[0] if said.endswith(" ") else whole  # the message goes on behind a quotation
        return re.search(f"(^|: ){head}$", said) is not None

    assert any(map(begun, messages())), said


def test_a_message_that_is_not_the_codes_is_seen() -> None:
    with pytest.raises(AssertionError):
        test_a_message_is_one_of_the_code("", "llm: expected an unheard-of thing, got none; do something about it")


# --- tables -----------------------------------------------------------------------------------------------------------


def test_the_picture_of_a_layout_is_what_the_op_sees() -> None:
    assert (ROOT / figures.LAYOUT).read_text() == reference.layout_picture()
    seen = reference.seen()
    assert seen[0] == [True] * 4 + [False] * 3 + [True] + [False] * 6
    assert seen[4] == [True] * 4 + [False] * 3 + [False] * 2 + [True] * 3 + [False] * 2
    assert seen[6] == [False] * 4 + [True] * 3 + [False] * 5 + [True] * 2


def test_the_table_of_ops_has_every_op_and_its_tensors() -> None:
    for name in reference.ops():
        _, row = calls.by_name()[name]
        said, at = row.takes, 0
        for argument, parameter in inspect.signature(getattr(fb_kernels, name)).parameters.items():
            if not re.search("Tensor|Layout|Weights|State", str(parameter.annotation)):
                continue
            shown = re.compile(rf"\b{argument}\b").search(said, at)
            assert shown, (name, argument)
            at = shown.end()
        named = set(reference.kernels(name))
        assert (bool(row.cpu), bool(row.cuda)) == ("cpu" in named, "cuda" in named)


@pytest.mark.parametrize("op", reference.ops())
def test_an_op_is_called_with_what_its_row_names(op: str) -> None:
    """And None for what stands in parentheses."""
    *_, row = (line for line in PAGES["ops.md"].splitlines() if line.startswith(f"| `{op}` |"))
    takes, call = row.split(" | ")[1], reference.small(op).fresh()
    named = [name for name in call.arguments if re.search(rf"\b{name}\b", takes)]
    function = getattr(fb_kernels, op)
    function(**{name: None if f"({name}" in takes else call.arguments[name] for name in named})


@pytest.mark.parametrize("op", reference.ops())
@pytest.mark.parametrize("dtype", ["float32", "bfloat16", "float16"])
def test_an_op_takes_the_dtypes_of_the_table(op: str, dtype: str) -> None:
    folder, function = calls.by_name()[op]
    call = reference.small(op).cast(bench.DTYPES[dtype])
    call.fresh().run()
    if isinstance(cpu.library(), str) or not function.cpu:
        return
    with backend.override(f"auto,{folder}=cpu"), backend.seen() as ran:
        short = {"float32": "fp32", "bfloat16": "bf16", "float16": "fp16"}[dtype]
        if short in function.cpu:
            call.fresh().run()
            assert "cpu" in ran.values()
        else:
            with pytest.raises(backend.NotTakenError):
                call.fresh().run()


def test_every_setting_has_a_meaning() -> None:
    rows = [line for line in reference.settings_tables() if line.startswith("| `")]
    assert len(rows) > 80
    assert [row for row in rows if row.rsplit("|", 2)[1].strip() == ""] == []


# --- API --------------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize(("page", "package"), [("api.md", fb_core), ("api.md", fb_kernels)])
def test_an_api_page_has_every_public_name_with_its_own_signature(page: str, package: ModuleType) -> None:
    names = "".join(blocks(page, rf"\{{api\}} {package.__name__}")).split()
    assert sorted(names) == sorted(package.__all__)
    for name in names:
        first, *_ = signatures.described(package.__name__, name)
        public = getattr(package, name)
        if inspect.isfunction(public) or "__init__" in vars(public):
            shown = ast.parse(f"def {first.partition('} ')[2]}: ...".replace("(, ", "(")).body[0]
            assert isinstance(shown, ast.FunctionDef)
            arguments = [argument.arg for argument in ast.walk(shown) if isinstance(argument, ast.arg)]
            assert sorted(arguments) == sorted(inspect.signature(public).parameters), name


# --- links ------------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("page", PAGES)
def test_links_lead_somewhere_in_the_repository(page: str) -> None:
    """`make docs` checks them on the site, anchors as well."""
    for target in re.findall(r"\]\((?!https?:|#)([^)#\s]+)", PAGES[page]):
        assert ((DOCS / page).parent / target).exists(), target


def test_every_page_is_in_the_contents() -> None:
    listed = re.findall(r"^([\w/]+)$", "\n".join(blocks("index.md", r"\{toctree\}")), re.MULTILINE)
    assert {f"{name}.md" for name in listed} == PAGES.keys() - {"index.md"}
