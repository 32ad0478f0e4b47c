"""The `futurebridge` command."""

from __future__ import annotations

import inspect
import io
import logging
import os
import sys
import time
from collections.abc import Callable, Iterator, Mapping
from contextlib import contextmanager
from importlib import metadata
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any, cast

import typer

from fb_core._util import require
from fb_core.apps.settings.pair import PairSettings, ServeSettings
from fb_core.apps.settings.run import SHIPPED, RunSettings, as_yaml, first_words, settings_of

if TYPE_CHECKING:
    from fb_core.apps.pipeline.commands import Command
    from fb_core.apps.pipeline.run import Engine
    from fb_kernels.bench import Results

app = typer.Typer(
    no_args_is_help=True,
    help="A small language model decodes. At uncertain steps it asks a large one for candidates; a recipe takes one.",
    context_settings={"help_option_names": ["-h", "--help"]},
)
STOPPED = 130  # the exit status of what Ctrl-C ended, by convention


def _version(wanted: bool) -> None:
    if wanted:
        typer.echo(f"futurebridge {metadata.version('futurebridge')}")
        raise typer.Exit


VERSION = typer.Option("--version", callback=_version, is_eager=True, help="Show the version and exit.")


@app.callback()
def _root(version: Annotated[bool, VERSION] = False) -> None:
    """Options of the command itself."""


@contextmanager
def _tell_where_to_continue(folder: Path) -> Iterator[None]:
    """At Ctrl-C, say where finished work is."""
    try:
        yield
    except KeyboardInterrupt:
        typer.echo(f"\nfuturebridge: stopped; finished work is in {folder}, the same command continues it", err=True)
        raise typer.Exit(STOPPED) from None


@app.command(epilog="Example: futurebridge demo --seed 1")
def demo(
    seed: Annotated[int, typer.Option(min=0, help="Seed for fresh problems.")] = 0,
    out: Annotated[Path, typer.Option(help="Folder for the results and the runs.")] = Path("demo-results"),
    retrain: Annotated[bool, typer.Option("--retrain", help="First retrain the model pairs from scratch.")] = False,
) -> None:
    """Run the whole method on tiny trained SLM/LLM pairs and compare it with baselines."""
    from fb_core.apps.processes import import_ahead

    import_ahead("fb_core.apps.cli.demo")  # takes seconds, as it does here
    from fb_core.apps.cli.demo import demo_settings, run_demo

    with _tell_where_to_continue(out):
        run_demo(demo_settings(seed), out, retrain=retrain)


CONFIG = typer.Option(help=f"A YAML file, or a shipped one: {', '.join(SHIPPED)}.")
ConfigOption = Annotated[str, CONFIG]
RunOption = Annotated[Path | None, typer.Option("--run-dir", help="Folder of the run; default runs/<config>.")]
SET_HELP = "Override a setting of the file, such as train.rank=32; repeatable."
SetOption = Annotated[list[str] | None, typer.Option("--set", metavar="KEY=VALUE", help=SET_HELP)]
EngineOption = Annotated[str, typer.Option(help="local, or ray for a cluster whose nodes share the folder.")]
DRY_HELP = "Only show what would be done and its most tokens; no download."
DryOption = Annotated[bool, typer.Option("--dry-run", help=DRY_HELP)]


def _add(command: Command, text: str) -> None:
    """Add the command of a stage, with its help."""

    def stage(
        config: ConfigOption,
        changes: SetOption = None,
        run: RunOption = None,
        engine: EngineOption = "local",
        dry_run: DryOption = False,
    ) -> None:
        if engine not in ("local", "ray"):
            raise ValueError(f"engine: expected local or ray, got {engine!r}; leave it out for this process")
        settings, folder = RunSettings.load(config, changes or ()), _folder(config, run)
        if dry_run:
            os.environ["HF_HUB_OFFLINE"] = "1"  # read when the hub's library is imported
        from fb_core.apps.pipeline.commands import run_command  # imports torch, which takes seconds

        logging.basicConfig(format="%(message)s")
        show = print if dry_run else _show
        with _tell_where_to_continue(folder):
            run_command(command, settings, folder, cast("Engine", engine), dry_run=dry_run, show=show)

    example = f"Example: futurebridge {command} --config tiny --set train.rank=8"
    app.command(command, help=text, epilog=example)(stage)


_add("collect", "Stage 1: SLM trajectories, the request threshold, and the admitted states with their candidates.")
_add("futures", "Stage 2: the LLM's continuation of every state, verified.")
_add("score", "Stage 3: how well the SLM continues from every candidate.")
_add("train", "Stage 4: train rerankers and choose the recipe to deploy; also under `accelerate launch`.")
_add(
    "evaluate",
    "Stage 5: the benchmarks by greedy decoding, S2T, the direct score, FutureBridge and the published recipe.",
)


@app.command(epilog="Example: futurebridge fetch --config qwen3-1.7b")
def fetch(config: ConfigOption, changes: SetOption = None) -> None:
    """Download the models and problems of a run that are not here yet, for a machine without a network."""
    from fb_core.apps.pipeline.models import models_of, read_problems

    settings = RunSettings.load(config, changes or ())
    problems, models = settings.problems, models_of(settings.models)
    for source in dict.fromkeys((problems.train, *problems.held_out, *settings.evaluate.benchmarks)):
        count = len(read_problems(source, problems.limit, "test", problems.seed))
        typer.echo(f"{source}: {count:,} problems")
    for role in ("slm", "llm"):
        typer.echo(f"{role}: {getattr(settings.models, role)}, {models.fetch(role) / 1e9:.3g} GB")


def _folder(config: str, run: Path | None) -> Path:
    """The folder of a run: "qwen3-1.7b" and "my.yaml" give runs/qwen3-1.7b and runs/my."""
    path = Path(config)
    return run or Path("runs") / (path.stem if path.suffix in (".yaml", ".yml") else path.name)


def _show(text: str) -> None:
    """Print Markdown: rendered on a terminal; elsewhere as it is, neither cut nor coloured."""
    from rich.console import Console
    from rich.markdown import Markdown

    console = Console()
    if console.is_terminal:
        console.print(Markdown(text))
    else:
        print(text)


@app.command(epilog="Example: futurebridge config --show --config tiny > my.yaml")
def config(
    config: Annotated[str | None, CONFIG] = None,
    changes: SetOption = None,
    show: Annotated[bool, typer.Option("--show", help="Print all settings as YAML for --config.")] = False,
) -> None:
    """List the shipped settings, or print all values of one, with defaults and the changes of --set."""
    if show and config is not None:
        typer.echo(as_yaml(RunSettings.load(config, changes or ())), nl=False)
    elif show or config is not None or changes:
        raise ValueError("config: expected --show with --config NAME, got one alone; leave out both to list")
    else:
        width = max(map(len, SHIPPED))
        typer.echo("\n".join(f"{name:{width}}  {first_words(name)}" for name in SHIPPED))


@app.command(epilog="Example: futurebridge push runs/tiny/deployed/seed-0 me/my-reranker --private")
def push(
    directory: Annotated[Path, typer.Argument(help="Folder of an adapter, such as runs/tiny/deployed/seed-0.")],
    repo_id: Annotated[str, typer.Argument(help="Repository on the hub, owner/name; created if missing.")],
    private: Annotated[bool, typer.Option("--private", help="Refuse a public repository, make a private one.")] = False,
) -> None:
    """Upload a deployed adapter with its model card to the Hugging Face hub."""
    from fb_core.hub import push_to_hub

    typer.echo(push_to_hub(directory, repo_id, private=private))


@app.command(epilog="Example: futurebridge explain runs/tiny test-17")
def explain(
    run: Annotated[Path, typer.Argument(help="Folder of the run.")],
    problem: Annotated[str, typer.Argument(help="A problem's id, or a part of it that is unique.")],
) -> None:
    """Show how each method solved a problem: the text with its events, their candidates and scores."""
    settings = settings_of(run)
    from rich.console import Console

    from fb_core.apps.cli import explain as viewer

    viewer.explain(settings, run, problem, Console())


@app.command(epilog="Example: futurebridge env --model Qwen/Qwen3-1.7B")
def env(
    model: Annotated[str | None, typer.Option(help="A folder or hub id: show how this model will run.")] = None,
) -> None:
    """Show what is installed, which implementation of each op will run, and why; or how a model will run."""
    if model is None:
        from fb_kernels.env import report

        typer.echo(report())
        return
    from fb_core.models.checkpoints import outlook

    typer.echo("\n".join(outlook(model)))


def _option(name: str, text: str, **more: Any) -> Any:
    """An option with its help, which the environment variable FUTUREBRIDGE_NAME may give too."""
    return typer.Option(help=text, envvar=f"FUTUREBRIDGE_{name.upper()}", show_envvar=False, **more)


def _options(
    helps: Mapping[str, str], kind: type = str, *, environment: bool = False, **more: Any
) -> Callable[[Callable], Callable]:
    """Gives a command an option for each name of `helps`, in place of its keyword arguments.

    With `environment`, FUTUREBRIDGE_NAME counts where an option is not given; `more` is for `typer.Option`.
    """

    def add(command: Callable) -> Callable:
        signature = inspect.signature(command, eval_str=True)
        parameters = [own for own in signature.parameters.values() if own.kind is not inspect.Parameter.VAR_KEYWORD]
        for name, text in helps.items():
            option = _option(name, text, **more) if environment else typer.Option(help=text, **more)
            given: Any = Annotated[kind | None, option]  # type: ignore[valid-type]
            parameters.append(inspect.Parameter(name, inspect.Parameter.KEYWORD_ONLY, default=None, annotation=given))
        command.__signature__ = signature.replace(parameters=parameters)  # type: ignore[attr-defined]
        return command

    return add


SHAPE = {
    "n": "Rows.",
    "d": "Width of the hidden states.",
    "v": "Size of the vocabulary, or of a shard.",
    "f": "Width of the MLP.",
    "g": "Groups.",
    "k": "Candidates per group; k of topk_entropy; inputs of skinny_linear.",
    "m": "Outputs of skinny_linear.",
    "l": "Rows per branch.",
    "p": "Tokens of the prefix.",
    "h": "Tokens of the future.",
    "s": "Shards.",
    "hq": "Query heads.",
    "hkv": "Key heads.",
    "e": "Width of a head.",
}


@app.command(epilog="Example: futurebridge bench linear_logprob --n 512 --d 1024 --v 50000")
@_options(SHAPE, int, min=1)
def bench(
    op: Annotated[str, typer.Argument(help="An op, such as linear_logprob; the docs' page of ops lists all.")],
    dtype: Annotated[
        str | None, typer.Option(help="float32, bfloat16 or float16; default bfloat16 on a GPU, else float32.")
    ] = None,
    device: Annotated[str | None, typer.Option(help="cpu or cuda; default a GPU if there is one.")] = None,
    **shape: int | None,
) -> None:
    """Time one op at your own shape against plain torch; an implementation with wrong results is not timed."""
    from fb_kernels.bench import bench as run

    _show_bench(run(op, {name: size for name, size in shape.items() if size is not None}, dtype, device))


def _milliseconds(seconds: float) -> str:
    return f"{seconds * 1e3:,.0f}" if seconds >= 0.1 else f"{seconds * 1e3:.3g}"


def _show_bench(timed: Results) -> None:
    """Print the results of an op as a table, with the device and versions above it."""
    import torch
    from rich import box
    from rich.console import Console
    from rich.table import Table

    floor = f"; floor {_milliseconds(timed.floor)} ms" if timed.floor else ""
    title = f"{timed.op} {timed.shape}, {timed.dtype}, on {timed.device}, torch {torch.__version__}{floor}"
    caption = (
        "*: the default here. ratio: the fastest alternative's time divided by this one's. floor: torch's time on this "
        "device to copy as many bytes, or for a matrix product of as many operations"
    )
    table = Table(title=title, caption=caption, title_justify="left", caption_justify="left", box=box.SIMPLE)
    table.add_column("")
    for head in ("ms", "ratio", timed.unit, "of floor"):
        table.add_column(head, justify="right", no_wrap=True)
    names = {row: f"fb_kernels, {row.name}{' *' if row.used else ''}" if row.ours else row.name for row in timed.rows}
    for row, name in names.items():
        if row.seconds is not None:
            ratio, rate = timed.ratio(row), timed.rate(row)
            share = f"{timed.floor / row.seconds:.0%}" if timed.floor else ""
            cells = ("" if ratio is None else f"{ratio:.2f}x", "" if rate is None else f"{rate:,.3g}", share)
            table.add_row(name, _milliseconds(row.seconds), *cells)
    console = Console()
    console.print(table)
    for row, name in names.items():
        if row.seconds is None:
            console.print(f"{name}: not timed, {row.fault}", markup=False)


PairFile = Annotated[Path | None, _option("pair", "A YAML file with the settings below.", exists=True, dir_okay=False)]
ENVIRONMENT = "Each option may also be an environment variable such as FUTUREBRIDGE_SLM."


def _settings_options(kind: type[PairSettings]) -> Callable[[Callable], Callable]:
    """Gives a command an option for each setting."""
    helps = {name: " ".join((field.description or "").split()) for name, field in kind.model_fields.items()}
    return _options(helps, environment=True, metavar="VALUE", show_default=False)


@app.command(epilog=f'Example: futurebridge generate "29*9+7*7+9;" --slm demo:plans --llm demo:plans. {ENVIRONMENT}')
@_settings_options(PairSettings)
def generate(
    prompt: Annotated[str | None, typer.Argument(help="The prompt.")] = None,
    pair: PairFile = None,
    file: Annotated[Path | None, typer.Option(help="A file with the prompt.")] = None,
    **given: str | None,
) -> None:
    """Answer one prompt with a pair and an adapter; tokens chosen at events are highlighted."""
    settings = PairSettings.load(pair, **given)
    from rich.console import Console

    from fb_core.apps.cli import chat as terminal

    text = terminal.read_prompt(prompt, file)
    talk, start = terminal.Chat(settings), time.perf_counter()
    generation = talk.answer([{"role": "user", "content": text}], Console())
    typer.secho(terminal.summary(generation, time.perf_counter() - start), dim=True, err=True)


@app.command(epilog=f"Example: futurebridge chat --pair pair.yaml --temperature 0.7. {ENVIRONMENT}")
@_settings_options(PairSettings)
def chat(pair: PairFile = None, **given: str | None) -> None:
    """Chat with a pair and an adapter; /help lists what else can be typed.

    If the conversation outgrows max_length, its oldest turns are dropped; an error ends only the turn.
    """
    settings = PairSettings.load(pair, **given)
    from rich.console import Console

    from fb_core.apps.cli import chat as terminal

    talk, console = terminal.Chat(settings), Console()
    messages: list[dict[str, str]] = []
    notice: dict[str, Any] = {"style": "dim", "highlight": False, "markup": False, "soft_wrap": True}
    console.print(talk.greeting(), **notice)
    while True:
        try:
            text = console.input("[bold]> [/bold]")
        except (EOFError, KeyboardInterrupt):
            break
        if text.strip() in ("", "/quit"):
            break
        if text.strip() in ("/new", "/help"):
            messages = [] if text.strip() == "/new" else messages
            console.print(terminal.HELP, **notice)
            continue
        messages.append({"role": "user", "content": text})
        start = time.perf_counter()
        try:
            generation = talk.answer(messages, console)
        except (KeyboardInterrupt, ValueError, TypeError, OSError) as problem:
            if isinstance(problem, KeyboardInterrupt):
                console.print("\n[dim]stopped[/dim]")
            else:
                _complain(problem)
            messages.pop()
            continue
        messages.append({"role": "assistant", "content": generation.text or ""})
        typer.secho(terminal.summary(generation, time.perf_counter() - start), dim=True, err=True)


@app.command(epilog=f"Example: futurebridge serve --pair pair.yaml --port 8000. {ENVIRONMENT}")
@_settings_options(ServeSettings)
def serve(
    pair: PairFile = None,
    host: Annotated[str, _option("host", "Address to listen on; loopback by default.")] = "127.0.0.1",
    port: Annotated[int, _option("port", "Port to listen on; 0 takes a free one.", min=0, max=65535)] = 8000,
    drain: Annotated[int, _option("drain", "Seconds that requests in progress get at shutdown.", min=0)] = 30,
    page: Annotated[bool, _option("page", "Whether GET / is a page to try prompts on.")] = True,
    **given: str | None,
) -> None:
    """Serve a pair over OpenAI's API: completions and chat completions, streamed or whole."""
    settings = ServeSettings.load(pair, **given)
    require("serve", "starlette", "uvicorn", "prometheus_client", extra="serve")
    from fb_core.apps.serve.run import serve as run

    run(settings, host=host, port=port, drain=drain, page=page)


def _complain(problem: Exception) -> None:
    """Print an error that a user can fix, line by line, escaped: it may quote a model, a server or a file."""
    from fb_core._util import escaped

    for line in str(problem).splitlines():
        typer.secho(f"futurebridge: {escaped(line)}", fg="red", err=True)


def main() -> None:
    """Run a command; an error that a user can fix is printed as one line, wrong settings as one line each."""
    for stream in (sys.stdout, sys.stderr):
        if isinstance(stream, io.TextIOWrapper):
            stream.reconfigure(errors="backslashreplace")  # what a terminal's encoding lacks is no reason to stop
    if not sys.stderr.isatty():
        os.environ.setdefault("TQDM_DISABLE", "1")  # the libraries' progress bars are for terminals
    if "://" in os.environ.get("FUTUREBRIDGE_PORT", ""):  # Kubernetes' link to a service of that name, tcp://...
        del os.environ["FUTUREBRIDGE_PORT"]
    try:
        app()
    except (ValueError, TypeError, OSError, ImportError) as problem:
        _complain(problem)
        raise SystemExit(2) from None
