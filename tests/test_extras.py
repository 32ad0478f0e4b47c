"""What an installation without extras can do: environments made of links to no more than their packages need."""

from __future__ import annotations

import ast
import re
import subprocess
import sys
import tomllib
from collections.abc import Iterable, Mapping
from functools import cache
from importlib import metadata
from pathlib import Path

import pytest
from packaging.requirements import Requirement
from packaging.utils import canonicalize_name
from test_house import PACKAGES, ROOT, SOURCES, imports, relative
from test_wheel import readme_example

from fb_core._util import RUN, require

PROJECT = tomllib.loads((ROOT / "pyproject.toml").read_text())["project"]
EXTRAS = PROJECT["optional-dependencies"]
# What comes with a declared package and is imported for its sake alone.
BROUGHT = {
    "antlr4-python3-runtime": "math-verify",
    "latex2sympy2-extended": "math-verify",
    "sympy": "math-verify",
    "markupsafe": "jinja2",
    "pydantic-core": "pydantic",
    "tqdm": "lm-eval",
}
SENTENCE = ": expected the extra [run] to be installed, got no {}; pip install '.[run]' in the clone"
NO_LM_EVAL = (
    "fb_core.lm_eval: expected the extra [lm-eval] to be installed, got no lm_eval; "
    "pip install '.[lm-eval]' in the clone"
)


def closure(requirements: Iterable[str]) -> set[str]:
    """The distributions that requirements bring, as the installed ones declare it."""
    waiting = [(Requirement(line), "") for line in requirements]
    found: set[tuple[str, str]] = set()  # with an extra
    while waiting:
        wanted, asker = waiting.pop()
        if wanted.marker is not None and not wanted.marker.evaluate({"extra": asker}):
            continue
        for extra in ("", *wanted.extras):
            if (one := (canonicalize_name(wanted.name), extra)) not in found:
                found.add(one)
                waiting += [(Requirement(line), extra) for line in metadata.requires(wanted.name) or ()]
    return {name for name, _ in found}


def names(requirements: Iterable[str]) -> set[str]:
    return {canonicalize_name(Requirement(line).name) for line in requirements}


class Environment:
    """A folder that holds this project and links to distributions, and a Python that sees no other."""

    def __init__(self, folder: Path, distributions: Iterable[str]) -> None:
        self.folder = folder
        for package in PACKAGES:
            (folder / package).symlink_to(ROOT / package)
        for name in distributions:
            distribution = metadata.distribution(name)
            for top in {file.parts[0] for file in distribution.files or ()} - {"..", "__pycache__"}:
                if not (folder / top).exists():
                    (folder / top).symlink_to(Path(distribution.locate_file(top)))

    def run(self, code: str, *arguments: str) -> subprocess.CompletedProcess[str]:
        alone = f"import sys\nsys.path.append({str(self.folder)!r})\n"
        command = [sys.executable, "-I", "-S", "-c", alone + code, *arguments]
        return subprocess.run(command, cwd=self.folder, capture_output=True, text=True)

    def check(self, code: str) -> str:
        done = self.run(code)
        assert done.returncode == 0, done.stderr
        return done.stdout


@pytest.fixture(scope="module")
def torch_alone(tmp_path_factory: pytest.TempPathFactory) -> Environment:
    return Environment(tmp_path_factory.mktemp("torch"), closure(["torch"]))


@pytest.fixture(scope="module")
def core(tmp_path_factory: pytest.TempPathFactory) -> Environment:
    return Environment(tmp_path_factory.mktemp("core"), closure(PROJECT["dependencies"]))


OPS = """
from importlib.util import find_spec
assert not any(map(find_spec, ("numpy", "transformers", "safetensors", "yaml")))
import torch
from torch.nn import functional as F
import fb_kernels
from fb_kernels import env, linear_logprob, rms_norm, skinny_linear, swiglu, topk_entropy
from fb_kernels.testing import assert_close_to_reference as _

torch.manual_seed(0)
hidden, head = torch.randn(6, 16, requires_grad=True), torch.randn(40, 16, requires_grad=True)
tokens = torch.randint(40, (6,))
found = linear_logprob(hidden, head, tokens)
wanted = (hidden @ head.T).log_softmax(-1).gather(1, tokens[:, None])[:, 0]
torch.testing.assert_close(found, wanted)
for ours, theirs in zip(*(torch.autograd.grad(out.sum(), (hidden, head)) for out in (found, wanted))):
    torch.testing.assert_close(ours, theirs)

x, weight = torch.randn(3, 16), torch.randn(16)
torch.testing.assert_close(rms_norm(x, weight, 1e-6)[0], F.rms_norm(x, (16,), weight, 1e-6))
torch.testing.assert_close(skinny_linear(x, head.detach()), x @ head.detach().T)
torch.testing.assert_close(swiglu(x), F.silu(x[:, :8]) * x[:, 8:])
entropy, values, ids = topk_entropy(x, k=4)
torch.testing.assert_close(entropy, torch.distributions.Categorical(logits=values).entropy())
assert torch.equal(ids, x.topk(4).indices)
compiled = torch.compile(swiglu, fullgraph=True, backend="eager")
assert torch.equal(compiled(x), swiglu(x))
print(env.report())
"""


def test_the_ops_need_torch_alone(torch_alone: Environment) -> None:
    report = torch_alone.check(OPS)
    for name in ("transformers", "peft", "numpy", "safetensors"):
        assert re.search(rf"^ +{name} +absent$", report, re.MULTILINE)


METHOD = """
import warnings
warnings.simplefilter("error", RuntimeWarning)
from importlib.util import find_spec
assert not any(map(find_spec, ("math_verify", "pyarrow", "matplotlib", "datasets", "ray")))
import torch
import fb_core
for name in set(fb_core.__all__) - {"Verdict", "Verifier"}:
    getattr(fb_core, name)
from transformers import Qwen3Config, Qwen3ForCausalLM

def tiny(seed):
    torch.manual_seed(seed)
    config = Qwen3Config(vocab_size=50, hidden_size=32, intermediate_size=48, num_hidden_layers=2, head_dim=8,
                         num_attention_heads=4, num_key_value_heads=2, max_position_embeddings=128)
    return Qwen3ForCausalLM(config).eval()

slm, llm = tiny(0), tiny(1)
prefix, candidates, future = torch.arange(3, 10), torch.tensor([4, 7, 9]), torch.tensor([11, 12])
found = fb_core.CompatibilityScorer(slm).score(prefix, candidates, future)
for token, row in zip(candidates, found):
    whole = torch.cat([prefix, token[None], future])
    logprob = slm(whole[None, :-1]).logits[0].log_softmax(-1)
    torch.testing.assert_close(row, logprob[-2:].gather(1, future[:, None])[:, 0], atol=1e-4, rtol=1e-4)

reranker = fb_core.TokenReranker.from_base(slm)
group = fb_core.TrainingGroup(len(prefix), candidates, found.sum(1).softmax(0))
trajectory = fb_core.TrainingTrajectory(torch.cat([prefix, future]), [group])
assert len(fb_core.train_reranker(reranker, [trajectory], fb_core.Optimisation(epochs=2))) == 2
scores = reranker.scores(prefix, candidates)
assert scores.shape == (3,) and scores.std() > 0
reranker.save_pretrained("reranker")
again = fb_core.TokenReranker.from_pretrained("reranker", slm)
torch.testing.assert_close(again.scores(prefix, candidates), scores)

selector, policy = fb_core.FutureBridgeSelector(again), fb_core.RequestPolicy(threshold=0.5)
for kind in (fb_core.CollaborativeDecoder, fb_core.LowLatencyDecoder):
    made = kind(slm, fb_core.LocalLLM(llm), selector, policy).generate(prefix, max_new_tokens=6)
    assert len(made.token_ids) == 6 and made.events, made
fb_core.ServerLLM("http://127.0.0.1:9", vocabulary=50)
print(*(name for name in sys.modules if name.split(".")[0] == "fb_core"))
"""


@pytest.fixture(scope="module")
def at_work(core: Environment) -> subprocess.CompletedProcess[str]:
    return core.run(METHOD)


@pytest.mark.slow
def test_scorer_reranker_and_decoder_need_the_core_alone(at_work: subprocess.CompletedProcess[str]) -> None:
    assert at_work.returncode == 0, at_work.stderr


@pytest.mark.slow
def test_the_examples_of_the_readme_need_the_core_alone(core: Environment) -> None:
    headings = ("## Ops in your own model", "## Score candidates", "## Decode with a pair")
    assert core.check("\n".join(map(readme_example, headings))).count("\n") == 3


@pytest.mark.parametrize("name", ["Verdict", "Verifier"])
def test_the_verifier_names_its_extra(core: Environment, name: str) -> None:
    done = core.run(f"try:\n    from fb_core import {name}\nexcept ImportError as problem:\n    print(problem)")
    assert done.stdout == name + SENTENCE.format("math_verify") + "\n", done.stderr


def test_the_model_of_lm_eval_names_its_extra(core: Environment) -> None:
    done = core.run("try:\n    import fb_core.lm_eval\nexcept ImportError as problem:\n    print(problem)")
    assert done.stdout == NO_LM_EVAL + "\n", done.stderr
    done = core.run("import runpy\nrunpy.run_module('fb_core.lm_eval', run_name='__main__')")
    assert (done.returncode, done.stdout, done.stderr) == (2, "", NO_LM_EVAL + "\n")


def command(*absent: str) -> str:
    """The entry point of pyproject.toml, where packages are absent besides."""
    module, function = PROJECT["scripts"]["futurebridge"].split(":")
    return f"sys.modules.update(dict.fromkeys({absent}))\nfrom {module} import {function}\n{function}()"


@pytest.mark.parametrize("arguments", [(), ("--help",), ("demo",), ("collect", "--config", "tiny")])
def test_the_command_names_its_extra(core: Environment, arguments: tuple[str, ...]) -> None:
    done = core.run(command(), *arguments)
    assert (done.returncode, done.stdout) == (2, "")
    assert done.stderr == "futurebridge" + SENTENCE.format("math_verify, matplotlib, pyarrow") + "\n"


def test_the_command_needs_nothing_to_say_so(core: Environment) -> None:
    done = core.run(command(*RUN, "torch", "transformers"), "--help")
    assert (done.returncode, done.stdout) == (2, "")
    assert done.stderr == "futurebridge" + SENTENCE.format(", ".join(RUN)) + "\n"


@pytest.mark.slow
def test_with_the_extra_all_names_are_there_and_the_command_runs(tmp_path: Path) -> None:
    whole = Environment(tmp_path, closure([*PROJECT["dependencies"], *EXTRAS["run"]]))
    done = whole.run(command(), "collect", "--config", "tiny", "--dry-run")
    assert done.returncode == 0, done.stderr
    assert "at most" in done.stdout
    judged = whole.check(
        "from fb_core import *\n"
        "with Verifier() as verifier:\n"
        r"    print(verifier.verify('\\boxed{\\frac{1}{2}}', '0.5'))"
    )
    assert judged == "correct\n"


@pytest.mark.parametrize("package", RUN)
def test_every_package_of_the_extra_is_asked_for(monkeypatch: pytest.MonkeyPatch, package: str) -> None:
    require("futurebridge", *RUN)
    monkeypatch.setitem(sys.modules, package, None)
    with pytest.raises(ImportError) as caught:
        require("futurebridge", *RUN)
    assert str(caught.value) == "futurebridge" + SENTENCE.format(package)


def home(package: str) -> str:
    """The name under which a package is installed."""
    return canonicalize_name(homes()[package][0])


@cache
def homes() -> Mapping[str, list[str]]:
    return metadata.packages_distributions()


def distributions(path: Path) -> set[str]:
    """What a module imports from others, by the names under which that is installed."""
    roots = {module.partition(".")[0] for module, _ in imports(ast.parse(path.read_text()), relative(path))}
    roots -= {*sys.stdlib_module_names, *PACKAGES}
    return {home(root) for root in roots}


def undeclared(path: Path, *declared: list[str]) -> set[str]:
    known = set().union(*map(names, declared))
    return {name for name in distributions(path) if name not in known and BROUGHT.get(name) not in known}


def test_the_extra_is_what_the_sentence_asks_for() -> None:
    assert {home(package) for package in RUN} == names(EXTRAS["run"])


def test_what_comes_with_a_package_does() -> None:
    lines = {
        canonicalize_name(Requirement(line).name): line
        for line in (*PROJECT["dependencies"], *EXTRAS["run"], *EXTRAS["lm-eval"])
    }
    for name, declared in BROUGHT.items():
        assert name in closure([lines[declared]])


@pytest.mark.parametrize("path", [path for path in SOURCES if relative(path).startswith("fb_kernels/")], ids=relative)
def test_fb_kernels_imports_torch_and_its_kernels_triton(path: Path) -> None:
    extra = {"triton", "numpy"} if relative(path).startswith("fb_kernels/triton/") else {"triton"}
    assert distributions(path) <= {"torch"} | extra


@pytest.mark.slow
def test_what_the_core_imports_is_declared_without_an_extra(at_work: subprocess.CompletedProcess[str]) -> None:
    used = at_work.stdout.split()
    files = {relative(path): path for path in SOURCES}
    assert len(used) > 20
    for module in used:
        file = module.replace(".", "/")
        path = files.get(f"{file}.py") or files[f"{file}/__init__.py"]
        assert undeclared(path, PROJECT["dependencies"]) == set(), relative(path)
    assert {"fb_core.apps.settings.config", "fb_core.verify.verifier", "fb_core.apps.cli.main"}.isdisjoint(used)


@pytest.mark.parametrize("path", SOURCES, ids=relative)
def test_what_is_imported_is_declared(path: Path) -> None:
    wanted = [EXTRAS[extra] for extra in ("run", "gpu", "data", "ray", "lm-eval", "trl", "serve", "serve-ray")]
    assert undeclared(path, PROJECT["dependencies"], *wanted) == set()


def test_an_import_that_is_not_declared_is_seen() -> None:
    assert undeclared(ROOT / "fb_core" / "apps" / "settings" / "config.py", PROJECT["dependencies"]) == {
        "pyyaml",
    }


def test_dev_takes_every_extra_that_installs_everywhere() -> None:
    (own,) = (Requirement(line) for line in EXTRAS["dev"] if line.startswith("futurebridge["))
    assert own.extras == EXTRAS.keys() - {"dev", "flash", "real"}
