"""The command line as a user meets it."""

from __future__ import annotations

import json
import os
import re
import signal
import socket
import subprocess
import sys
import time
import tracemalloc
from importlib import metadata
from pathlib import Path

import pytest
import yaml
from limits import HANG
from warm import futurebridge as run
from warm import start_futurebridge

from fb_core.apps.cli.main import _folder
from fb_core.apps.settings.pair import PairSettings, ServeSettings
from fb_core.apps.settings.run import SHIPPED, RunSettings, as_yaml, settings_of

ROOT = Path(__file__).resolve().parent.parent


@pytest.mark.parametrize("command", [[], ["train"], ["generate"], ["serve"], ["bench"]])
def test_the_help_has_a_short_option_and_an_example(command):
    short, long = run(*command, "-h"), run(*command, "--help")
    assert short.stdout == long.stdout
    assert "--help" in long.stdout
    shown = " ".join(long.stdout.split())
    assert f"Example: futurebridge {' '.join(command)} " in shown if command else {"demo", "env"} < {*shown.split()}


def test_env_says_what_runs():
    result = run("env")
    assert result.returncode == 0
    assert "branch_attention" in result.stdout


def test_an_op_is_timed_at_a_shape_of_ones_own():
    result = run("bench", "swiglu", "--n", "4", "--f", "64")
    assert result.returncode == 0, result.stderr
    shown = " ".join(result.stdout.split())
    assert "swiglu N=4 F=64, float32" in shown
    assert "fb_kernels, reference" in shown
    assert "torch eager" in shown
    assert " * " in shown


@pytest.mark.parametrize(
    ("arguments", "words"),
    [
        (("demo", "--seed", "-1"), "seed"),
        (("demo", "--out", "/dev/null/x"), "futurebridge:"),
        (("nope",), "nope"),
        (("explain", "nowhere", "1"), "expected a run's settings"),
    ],
)
def test_errors_are_one_message_and_no_traceback(arguments, words):
    result = run(*arguments)
    assert result.returncode != 0
    assert words in result.stderr
    assert "Traceback" not in result.stderr


def test_ctrl_c_says_that_the_same_command_goes_on(tmp_path):
    process = start_futurebridge(("collect", "--config", "tiny", "--run-dir", tmp_path / "run"), tmp_path)
    end = time.monotonic() + HANG
    while not list(tmp_path.glob("run/trajectories/*.json")):
        assert time.monotonic() < end
        assert process.is_alive()
        time.sleep(0.05)
    os.kill(process.pid, signal.SIGINT)
    process.join(HANG)
    told = (tmp_path / "stderr").read_text()
    assert process.exitcode == 130
    assert told.endswith(
        f"futurebridge: stopped; finished work is in {tmp_path / 'run'}, the same command continues it\n"
    )
    assert "Traceback" not in told


def test_what_an_encoding_lacks_is_printed_escaped(tmp_path):
    file = tmp_path / "my.yaml"
    file.write_text('base: tiny\nproblems: {prompt: "{problem} → ?"}\n', encoding="utf-8")
    command = [sys.executable, "-m", "fb_core", "config", "--show", "--config", str(file)]
    own = os.environ | {"PYTHONIOENCODING": "latin-1", "PYTHONPATH": str(ROOT)}
    done = subprocess.run(command, env=own, capture_output=True, text=True)
    assert done.returncode == 0, done.stderr
    assert r"prompt: '{problem} \u2192 ?'" in done.stdout


def test_a_dry_run_asks_no_network(tmp_path):
    with socket.create_server(("127.0.0.1", 0)) as hub:
        hub.setblocking(False)
        own = {name: value for name, value in os.environ.items() if name != "HF_HUB_OFFLINE"}
        own |= {"HF_ENDPOINT": f"http://127.0.0.1:{hub.getsockname()[1]}", "HF_HOME": str(tmp_path)}
        command = [sys.executable, "-m", "fb_core", "collect", "--config", "qwen3-1.7b", "--dry-run"]
        done = subprocess.run(
            command, cwd=tmp_path, env=own | {"PYTHONPATH": str(ROOT)}, capture_output=True, text=True
        )
        with pytest.raises(BlockingIOError):
            hub.accept()
    assert "trajectories: cannot run yet: " in done.stdout, done.stderr


def test_fetch_counts_what_is_here_and_names_what_cannot_be_had():
    found = run("fetch", "--config", "tiny", "--set", "problems.limit=40", "--set", "evaluate.benchmarks=[demo:plans]")
    assert re.search(
        r"^demo:plans: 40 problems\nslm: demo:plans, [\d.]+ GB\nllm: demo:plans, [\d.]+ GB$", found.stdout, re.M
    )
    lost = run("fetch", "--config", "qwen3-1.7b-8b")
    assert lost.returncode == 2
    assert "math-train: expected EleutherAI/hendrycks_math from the hub or its cache" in lost.stderr


@pytest.mark.parametrize("command", ["explain", "collect", "futures", "generate", "chat"])
def test_a_wrong_name_is_answered_before_torch_is_imported(tmp_path, command):
    arguments = {
        "explain": ["nope", "1"],
        "generate": ["hello", "--slm", "a"],
        "chat": ["--slm", "a"],
    }.get(command, ["--config", "nope"])
    code = (
        "import sys\nfrom fb_core.apps.cli.main import main\n"
        "try:\n    main()\nfinally:\n    print(sorted({'torch', 'transformers', 'matplotlib'} & set(sys.modules)))"
    )
    done = subprocess.run([sys.executable, "-c", code, command, *arguments], capture_output=True, text=True)
    assert done.returncode == 2
    assert done.stdout == "[]\n"
    assert "expected" in done.stderr
    assert done.stderr.count("\n") == 1


def test_the_version_is_that_of_the_package():
    result = run("--version")
    assert (result.returncode, result.stdout) == (0, f"futurebridge {metadata.version('futurebridge')}\n")


def test_shells_can_complete():
    assert "--install-completion" in run("--help").stdout
    code = "import sys; sys.argv[0] = 'futurebridge'; from fb_core.apps.cli.main import main; main()"
    asked = {"_FUTUREBRIDGE_COMPLETE": "complete_bash", "COMP_WORDS": "futurebridge ev", "COMP_CWORD": "1"}
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, env=os.environ | asked)
    assert done.stdout.split() == ["evaluate"]


def test_the_help_of_config_names_all_that_is_shipped():
    configs = ROOT / "fb_core" / "apps" / "settings" / "configs"
    shipped = {path.name.removesuffix(".yaml") for path in configs.iterdir()}
    assert len(shipped) > 4
    assert set(SHIPPED) == shipped
    assert all(RunSettings.load(name) for name in shipped)


@pytest.mark.parametrize(
    ("config", "run", "folder"),
    [
        ("qwen3-1.7b", None, "runs/qwen3-1.7b"),
        ("configs/qwen3-1.7b.yaml", None, "runs/qwen3-1.7b"),
        ("tiny", None, "runs/tiny"),
        ("/a/my.run.yaml", None, "runs/my.run"),
        ("tiny", Path("here"), "here"),
    ],
)
def test_a_run_has_the_folder_of_its_settings(config, run, folder):
    assert _folder(config, run) == Path(folder)


UNKNOWN = "Extra inputs are not permitted"
BAD_SETTINGS = {
    "collect: {quantle: 0.9}": [f"collect.quantle: {UNKNOWN}"],
    "trian: {rank: 4}": [f"trian: {UNKNOWN}"],
    "3: 1": ["3: Keys should be strings"],
    "train: {rank: 0}": ["train.rank: Input should be greater than or equal to 1"],
    f"train: {{rank: {10**400}}}": ["train.rank: expected a number below 2**63"],
    f"train: {{horizons: [1], seeds: [{2**63}]}}": ["train.seeds: expected a number below 2**63"],
    f"train: {{temperature: {10**400}}}": ["train.temperature: Input should be a "],
    "train: {rank: x}": ["train.rank: Input should be a valid integer, "],
    "train: {horizons: [256]}": [
        "train.horizons: expected at most score.horizon, 128, got 256; lower train.horizons too, or raise score.horizon"
    ],
    "train: {seeds: [0, 0]}": ["train.seeds: expected different numbers, got one twice; name each once"],
    "score: {horizon: .nan}": ["score.horizon: Input should be a finite number"],
    "collect: {quantile: 2, slm_k: 0}": [
        "collect.quantile: Input should be less than or equal to 1",
        "collect.slm_k: Input should be greater than or equal to 1",
    ],
    "models: {slm: a, llm: b, llm_server: {url: 'http://x', flavor: vllm}}": [f"models.llm_server.flavor: {UNKNOWN}"],
    "models: {slm: a, llm: b, llm_server: {ulr: 'me:s3cret@host'}}": [
        "models.llm_server.url: Field required",
        f"models.llm_server.ulr: {UNKNOWN}",
    ],
    f"problems: {{prompt: {'x' * 50_000}}}": ["problems.prompt: String should match pattern "],
    "a: &a [x, x, x]\nb: &b [*a, *a, *a]\nc: &c [*b, *b, *b]\ntrain: [*c, *c, *c]": [
        "train: Input should be a valid dictionary",
        *(f"{key}: {UNKNOWN}" for key in "abc"),
    ],
}


@pytest.mark.parametrize("text", BAD_SETTINGS)
def test_wrong_settings_are_a_line_each(tmp_path, text):
    config = tmp_path / "a.yaml"
    config.write_text(text if text.startswith("models") else f"models: {{slm: a, llm: b}}\n{text}\n")
    with pytest.raises(ValueError) as raised:
        RunSettings.load(str(config))
    lines = str(raised.value).splitlines()
    assert len(lines) == len(BAD_SETTINGS[text])
    for line, words in zip(lines, BAD_SETTINGS[text], strict=True):
        assert line.startswith(f"{config}: {words}")
        assert len(line) < 300 + len(str(config))
        assert "s3cret" not in line


def test_the_command_prints_them_so(tmp_path):
    config = tmp_path / "a.yaml"
    config.write_text("models: {slm: a, llm: b}\ncollect: {quantle: 0.9}\ntrain: {rank: 0}\n")
    result = run("collect", "--config", str(config))
    assert result.returncode == 2
    assert result.stderr.splitlines() == [
        f"futurebridge: {config}: collect.quantle: {UNKNOWN}",
        f"futurebridge: {config}: train.rank: Input should be greater than or equal to 1",
    ]


CHANGES = {
    ("train.rank=32",): {"train": {"rank": 32}},
    ("train.rank=8", "collect.quantile=0.5", "train.rank=32"): {"train": {"rank": 32}, "collect": {"quantile": 0.5}},
    ("train.learning_rate=5e-5",): {"train": {"learning_rate": 5e-5}},
    ("train.horizons=[4, 8]", "train.seeds=[7]"): {"train": {"horizons": (4, 8), "seeds": (7,)}},
    ("evaluate.benchmarks=[]",): {"evaluate": {"benchmarks": ()}},
    ("evaluate.limit=null",): {"evaluate": {"limit": None}},
    ("train={rank: 4, dropout: 0}",): {"train": {"rank": 4, "dropout": 0.0}},
    ('problems.prompt="{problem} = ?"',): {"problems": {"prompt": "{problem} = ?"}},
}


@pytest.mark.parametrize("changes", CHANGES, ids=" ".join)
def test_what_is_set_goes_over_the_file(changes):
    settings = RunSettings.load("tiny", changes)
    wanted = RunSettings.load("tiny").model_dump()
    for section, parts in CHANGES[changes].items():
        wanted[section] |= parts
    assert settings.model_dump() == wanted


def test_what_is_set_mends_a_file_and_goes_over_its_base(tmp_path):
    config = tmp_path / "a.yaml"
    config.write_text("base: tiny\ntrain: {rank: 0, dropout: 0.5}\n")
    settings = RunSettings.load(str(config), ["train.rank=3"])
    assert (settings.train.rank, settings.train.dropout, settings.score.horizon) == (3, 0.5, 16)


PAIR = "models: {slm: a, llm: b}\n"
ROUNDS = range(1, 9)
HOSTILE = {
    "a0: &a0 [x, x]\n" + "".join(f"a{n}: &a{n} [{', '.join([f'*a{n - 1}'] * 9)}]\n" for n in ROUNDS): "more than 10000",
    "a0: &a0 {x: 1}\n"
    + "".join(f"a{n}: &a{n} {{<<: [{', '.join([f'*a{n - 1}'] * 9)}]}}\n" for n in ROUNDS): "more than 10000 values",
    "\n".join(["-"] * 20_000): "more than 10000 values",
    "a: &a {b: *a}": "a value inside itself",
    "#" * 100_001: "at most 100000 bytes",
    PAIR + "train: {rank: 3}\ntrain: {epochs: 4}": "a key twice, again on line 3",
    PAIR + "train: {rank: 3, 'rank': 4}": "a key twice, again on line 2",
    **{
        PAIR + f"train: {{rank: {number}}}": f"a number of {len(number)} characters"
        for number in ("9" * 5000, "0x" + "f" * 50_000, "1" + ":1" * 20_000, "0." + "1" * 50_000)
    },
    "[" * 50_000: "more than 32 levels",
    "train: {rank: !!int ''}": "a tag that does not fit its value",
}


@pytest.mark.parametrize("text", HOSTILE, ids=lambda text: text[:20])
def test_hostile_settings_are_refused_in_bounded_time_and_memory(tmp_path, text):
    config = tmp_path / "a.yaml"
    config.write_text(text)
    began = time.process_time()
    tracemalloc.start()
    with pytest.raises(ValueError) as raised:
        RunSettings.load(str(config))
    used = tracemalloc.get_traced_memory()[1]
    tracemalloc.stop()
    assert str(raised.value).startswith(f"{config}: ")
    assert HOSTILE[text] in str(raised.value)
    assert "\n" not in str(raised.value)
    assert used < 64 << 20
    assert time.process_time() - began < 20


def test_aliases_and_merges_are_read(tmp_path):
    config = tmp_path / "a.yaml"
    config.write_text(
        "models: {slm: &name a, llm: *name}\ntrain: {rank: &four 4, <<: {dropout: &none 0.0, rank: 5}, epochs: *four}\n"
        "choice: {delta: *none}\n"
    )
    settings = RunSettings.load(str(config))
    assert (settings.models.llm, settings.train.rank, settings.train.epochs, settings.train.dropout) == ("a", 4, 4, 0.0)


NOT_UTF_8 = "expected YAML in UTF-8, got 'utf-8' codec can't decode byte "


@pytest.mark.parametrize(
    ("data", "words"),
    [
        (PAIR.encode("utf-16"), NOT_UTF_8),
        (f"# \xdc\n{PAIR}".encode("latin-1"), NOT_UTF_8),
        (PAIR.encode("utf-8-sig"), None),
        (f"base: base.yaml\n{PAIR}".encode(), NOT_UTF_8),
    ],
    ids=["utf-16", "latin-1", "bom", "base"],
)
def test_settings_are_utf_8(tmp_path, monkeypatch, data, words):
    monkeypatch.chdir(tmp_path)
    Path("a.yaml").write_bytes(data)
    Path("base.yaml").write_bytes(b"\xff")
    if words is None:
        assert RunSettings.load("a.yaml").models.slm == "a"
    else:
        with pytest.raises(ValueError, match=rf"^(a|base)\.yaml: {words}"):
            RunSettings.load("a.yaml")


@pytest.mark.parametrize(
    ("base", "words"),
    [
        ("base.yaml", "base.yaml: expected settings by key, got "),
        ("a.yaml", "a.yaml: expected a base of a.yaml without a base of its own, got one; name that one"),
        ("3", "a.yaml: base: expected a file or a shipped name, got int; name one"),
        ("", "a.yaml: base: expected a file or a shipped name, got NoneType; name one"),
    ],
)
@pytest.mark.parametrize("text", ["", "[1]", "text"])
def test_a_base_must_hold_settings(tmp_path, monkeypatch, base, words, text):
    monkeypatch.chdir(tmp_path)
    Path("a.yaml").write_text(f"base: {base}\n{PAIR}")
    Path("base.yaml").write_text(text)
    with pytest.raises(ValueError) as raised:
        RunSettings.load("a.yaml")
    assert str(raised.value).startswith(words)


NO_CHANGE = "--set: expected KEY=VALUE, got no '=' or no key; name key and value"
NO_VALUE = "expected a value in YAML, got none; put a text into quotes"
BAD_CHANGES = {
    "train.rank": NO_CHANGE,
    "=3": NO_CHANGE,
    "me:s3cret@host": NO_CHANGE,
    "train.rank=[1": f"--set train.rank: {NO_VALUE}",
    "problems.prompt={problem} ?": f"--set problems.prompt: {NO_VALUE}",
    "train.horizons=" + "[" * 100_000: f"--set train.horizons: {NO_VALUE}",
    "train.rank.deep=1": "tiny: train.rank: Input should be a valid integer",
    "train.horizons=[32]": "tiny: train.horizons: expected at most score.horizon, 16, got 32",
    "train.rnk=3": f"tiny: train.rnk: {UNKNOWN}",
    "base=tiny": f"tiny: base: {UNKNOWN}",
    "models.llm_server={url: 'http://me:s3cret@host'}": "tiny: models.llm_server.url: url: expected http",
}


@pytest.mark.parametrize("change", BAD_CHANGES, ids=lambda change: change[:40])
def test_what_cannot_be_set_is_one_sentence(change):
    with pytest.raises(ValueError) as raised:
        RunSettings.load("tiny", [change])
    assert str(raised.value).startswith(BAD_CHANGES[change])
    assert "\n" not in str(raised.value)
    assert "s3cret" not in str(raised.value)


@pytest.mark.parametrize(
    ("name", "other"),
    [
        ("demo:plans", "demo:plans"),
        ("hp/x/t.jsonl", "./hp/x/t.jsonl"),
        ("hp/x/t.jsonl", "{here}/hp/y/../x//t.jsonl"),
        ("hp/x/t.jsonl", "link.jsonl"),
        ("gsm8k=hp/x/t.jsonl", "./hp/x/t.jsonl"),
        ("gsm8k=hp/x/t.jsonl", "math-500=link.jsonl"),
        ("gsm8k", "gsm8k=hp/x/t.jsonl"),
    ],
)
def test_a_benchmark_counts_once_in_an_average(name, other, tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    (tmp_path / "hp" / "x").mkdir(parents=True)
    (tmp_path / "hp" / "y").mkdir()
    (tmp_path / "hp" / "x" / "t.jsonl").touch()
    (tmp_path / "link.jsonl").symlink_to("hp/x/t.jsonl")
    other = other.format(here=tmp_path)
    for names in ([name, other], [other, "demo:words", name]):
        with pytest.raises(ValueError, match=r"evaluate\.benchmarks: expected each once, got ") as raised:
            RunSettings.load("tiny", [f"evaluate.benchmarks={json.dumps(names)}"])
        assert str(raised.value).endswith("the same; leave one out")
    apart = ("gsm8k=hp/x/t.jsonl", "gsm8k=other.jsonl", "hp/t.jsonl", "math-500")
    assert RunSettings.load("tiny", [f"evaluate.benchmarks={json.dumps(apart)}"]).evaluate.benchmarks == apart


def test_settings_are_listed_and_shown(tmp_path):
    listed = run("config")
    assert [line.split()[0] for line in listed.stdout.splitlines()] == list(SHIPPED)
    assert "tiny          " in listed.stdout
    assert 'The demo\'s own pair and problems in its world "plans"' in listed.stdout
    changes = ["--set", "train.learning_rate=1e-7", "--set", 'problems.prompt="{problem}\\n\\nÜberlege: "']
    shown = run("config", "--show", "--config", "tiny", *changes)
    assert shown.returncode == 0, shown.stderr
    assert "weight_decay: 0.01\n" in shown.stdout  # which the file leaves out
    (tmp_path / "mine.yaml").write_text(shown.stdout, encoding="utf-8")
    settings = RunSettings.load(str(tmp_path / "mine.yaml"))
    assert settings == RunSettings.load("tiny", changes[1::2])
    assert (settings.train.learning_rate, settings.problems.prompt) == (1e-7, "{problem}\n\nÜberlege: ")


@pytest.mark.parametrize("name", SHIPPED)
def test_settings_that_are_shown_are_the_same_settings(name, tmp_path):
    settings = RunSettings.load(name)
    (tmp_path / "mine.yaml").write_text(as_yaml(settings), encoding="utf-8")
    assert RunSettings.load(str(tmp_path / "mine.yaml")) == settings


@pytest.mark.parametrize("arguments", [["--show"], ["--config", "tiny"], ["--set", "train.rank=3"]])
def test_settings_are_shown_by_name(arguments):
    done = run("config", *arguments)
    assert (done.returncode, done.stdout) == (2, "")
    assert done.stderr.startswith("futurebridge: config: expected --show with --config NAME")


PAIR_OF = ["--slm", "a", "--llm", "b"]


@pytest.mark.parametrize(
    ("options", "words"),
    [
        (PAIR_OF[:2], "llm: expected llm or server, got neither"),
        ([*PAIR_OF, "--max-length", "1"], "max_length: Input should be greater than or equal to 2"),
        ([*PAIR_OF[:2], "--server", "http://b", "--flavour", "vlm"], "flavour: Input should be 'vllm', 'sglang' or "),
    ],
)
def test_wrong_options_of_a_pair_are_a_line(options, words):
    result = run("generate", "hello", *options)
    assert (result.returncode, result.stderr.count("\n")) == (2, 1)
    assert result.stderr.startswith(f"futurebridge: {words}")


def test_names_of_files_are_looked_for_beside_the_settings_file(tmp_path, monkeypatch):
    """Anything else is as it was given: a hub id, a known set, a file of the current folder, what --set says."""
    (tmp_path / "own" / "small").mkdir(parents=True)
    for name in ("train.jsonl", "test.jsonl", "a=b.jsonl"):
        (tmp_path / "own" / name).touch()
    monkeypatch.chdir(tmp_path)
    (tmp_path / "own" / "base.yaml").write_text("models: {slm: small, llm: me/large}\nverify: {workers: 3}\n")
    (tmp_path / "own" / "my.yaml").write_text(
        "base: base.yaml\nproblems: {train: train.jsonl, held_out: [gsm8k=test.jsonl, math-500, a=b.jsonl]}\n"
        "evaluate: {benchmarks: [test.jsonl, there.jsonl]}\n"
    )
    settings = RunSettings.load("own/my.yaml", ["problems.validation=7"])
    assert (settings.models.slm, settings.models.llm) == ("own/small", "me/large")
    assert settings.problems.train == "own/train.jsonl"
    assert settings.problems.held_out == ("gsm8k=own/test.jsonl", "math-500", "own/a=b.jsonl")
    assert settings.evaluate.benchmarks == ("own/test.jsonl", "there.jsonl")
    assert settings.verify.workers == 3
    assert RunSettings.load("own/my.yaml", ["problems.train=train.jsonl"]).problems.train == "train.jsonl"
    monkeypatch.chdir(tmp_path / "own")
    assert RunSettings.load("my.yaml").problems.train == "train.jsonl"
    (tmp_path / "own" / "pair.yaml").write_text("slm: small\nllm: demo:plans\nadapter: small\n")
    pair = PairSettings.load(tmp_path / "own" / "pair.yaml")
    assert (pair.slm, pair.llm, pair.adapter) == (
        str(tmp_path / "own" / "small"),
        "demo:plans",
        str(tmp_path / "own" / "small"),
    )


@pytest.mark.parametrize("make", [Path.mkdir, Path.touch])
def test_known_names_and_names_at_a_server_are_no_paths(tmp_path, make):
    for name in ("tiny", "qwen3-1.7b", "math-500", "math-train", "gsm8k", "demo:plans", "served"):
        make(tmp_path / name)
    file = tmp_path / "my.yaml"
    sets = {"train": "math-train", "held_out": ["math-500"]}
    file.write_text(yaml.safe_dump({"base": "tiny", "problems": sets, "evaluate": {"benchmarks": ["gsm8k"]}}))
    settings = RunSettings.load(str(file))
    assert (settings.problems.train, settings.problems.held_out) == ("math-train", ("math-500",))
    assert (settings.evaluate.benchmarks, settings.models.slm) == (("gsm8k",), "demo:plans")
    served = {"slm": "demo:plans", "llm": "served", "llm_server": {"url": "http://localhost:8000"}}
    file.write_text(yaml.safe_dump({"models": served}))
    assert RunSettings.load(str(file)).models.llm == "served"
    for server in ({"server": "http://localhost:8000"}, {}):
        file.write_text(yaml.safe_dump({"slm": "demo:plans", "llm": "served"} | server))
        assert PairSettings.load(file, **({} if server else {"server": "http://localhost:8000"})).llm == "served"


def test_a_pair_is_a_file_that_options_override(tmp_path):
    file = tmp_path / "pair.yaml"
    file.write_text("slm: a\nserver: http://b\nthreshold: 0.5\nmax_length: 64\n")
    settings = PairSettings.load(file, threshold="1.5", slm="d", llm="e", adapter=None)
    assert settings == PairSettings(slm="d", llm="e", server="http://b", threshold=1.5, max_length=64)
    file.write_text("slm: a\nllm: b\nmax_lenght: 64\n")
    result = run("generate", "hello", "--pair", str(file))
    assert result.returncode == 2
    assert result.stderr == f"futurebridge: {file}: max_lenght: {UNKNOWN}\n"


@pytest.mark.parametrize("command", ["generate", "chat", "serve"])
def test_the_help_names_all_settings_of_a_pair(command):
    shown = set(re.findall(r"--[\w-]+", run(command, "--help").stdout))
    settings = ServeSettings if command == "serve" else PairSettings
    assert {f"--{name.replace('_', '-')}" for name in settings.model_fields} <= shown


def test_what_kubernetes_calls_the_port_of_a_service_is_none_of_ours():
    assert (
        "llm: expected llm or server" in run("serve", "--slm", "demo:plans", FUTUREBRIDGE_PORT="tcp://10.0.0.5").stderr
    )


@pytest.mark.parametrize("text", ["", "{", "[]", "3", "\xff", "[" * 100_000, '{"a": ' + "1" * 5_000])
def test_damaged_settings_of_a_run_are_one_sentence(tmp_path, text):
    (tmp_path / "settings.json").write_text(text, encoding="latin-1")
    with pytest.raises(ValueError, match=r"settings\.json: (expected|Input should be)") as raised:
        settings_of(tmp_path)
    assert "\n" not in str(raised.value)


def test_generate_takes_a_pair_of_the_demo():
    from fb_core.apps.demo.worlds import WORLDS

    prompt = WORLDS["plans"].problems(1, 0, "test")[0].prompt
    room = ["--max-length", "96", "--max-new-tokens", "45"]
    result = run("generate", prompt, "--slm", "demo:plans", "--llm", "demo:plans", *room)
    assert result.returncode == 0, result.stderr
    assert "boxed" in result.stdout
    result = run("generate", "hello", "--slm", "demo:plans", "--llm", "demo:plans", *room)
    assert result.returncode == 2
    assert "futurebridge: prompt: expected words of the tokenizer's vocabulary, got 'hello'" in result.stderr
    assert "Traceback" not in result.stderr
    result = run("generate", prompt, "--slm", "demo:nope", "--llm", "demo:nope")
    assert result.returncode == 2
    assert "expected one of demo:plans" in result.stderr


@pytest.mark.parametrize(
    "name", ["./nope", "/nope/nope", "nope", "here/nope", "a/b/c", "~/nope", "C:\\models\\nope", ""]
)
def test_a_mistyped_folder_does_not_go_to_the_hub(tmp_path, monkeypatch, name):
    from fb_core.models import checkpoints
    from fb_core.models.checkpoints import checkpoint_hash, checkpoint_size, load_model, load_tokenizer

    def no_hub(*arguments, **options):
        raise AssertionError("asked the hub")

    (tmp_path / "here").mkdir()
    (tmp_path / "work").mkdir()
    monkeypatch.chdir(tmp_path)
    for kind in ("AutoModelForCausalLM", "AutoTokenizer"):
        monkeypatch.setattr(getattr(checkpoints, kind), "from_pretrained", no_hub)
    monkeypatch.setattr(checkpoints, "snapshot_download", no_hub)
    for load in (load_model, load_tokenizer, checkpoint_hash):
        with pytest.raises(OSError, match=re.escape(f"{name}: expected a folder or hub id of a ")):
            load(name)
    assert checkpoint_size("./nope") is None
    with pytest.raises(AssertionError, match="asked the hub"):
        load_tokenizer("owner/name")
