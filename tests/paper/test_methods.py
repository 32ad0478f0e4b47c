"""A method is one file: what lies in the package is known by its name, and nothing else is edited for it."""

from __future__ import annotations

import subprocess
import sys

import pytest
import torch

from benchmarks.paper import methods, settings
from benchmarks.paper.settings import CompareSettings, names
from fb_core.apps.demo.pairs import load_pair
from fb_core.apps.pipeline.models import decoder_of
from fb_core.decode.policy import RequestPolicy

FILE = '''
"""Last candidate: at every admitted state the last one of the joint pool."""

from benchmarks.paper.methods import Method
from fb_core.decode.selectors import Selector


class Last(Selector):
    def choose(self, state, pool):
        return len(pool) - 1


METHOD = Method("last-candidate", "Last of {votes}", lambda run, _: run.decoder(Last()).generate_many, timed=("fast",))
'''


class Run:
    """A context of the demo's pair alone."""

    def __init__(self, **options):
        self.pair, self.options = load_pair("plans"), {"slm_k": 3, "llm_k": 3, **options}

    def decoder(self, selector):
        return decoder_of(self.pair.slm, self.pair.llm, selector, RequestPolicy(0.8), **self.options)


def test_a_file_in_the_package_is_a_method(tmp_path, monkeypatch):
    (tmp_path / "last_candidate.py").write_text(FILE)
    monkeypatch.setattr(methods, "__path__", [*methods.__path__, str(tmp_path)])
    monkeypatch.setattr(settings, "METHODS", [*settings.METHODS, str(tmp_path)])
    assert set(names()) - {"last-candidate"} < set(names())
    assert CompareSettings(methods=["greedy", "last-candidate"]).methods == ("greedy", "last-candidate")
    assert "last-candidate" in CompareSettings().methods
    found = methods.method("last-candidate")
    assert found.label.format(name=found.name, votes=8) == "Last of 8"
    asked = [torch.tensor(p.prompt_ids) for p in load_pair("plans").world.problems(2, 1, "validation")]
    plain, fast = (found.decode(Run(max_length=length), None)(asked, 12) for length in (None, 64))
    for one, other in zip(plain, fast, strict=True):
        assert one.events
        assert all(event.choice == len(event.pool) - 1 for event in one.events)
        assert one.token_ids.tolist() == other.token_ids.tolist()
    monkeypatch.undo()
    sys.modules.pop("benchmarks.paper.methods.last_candidate")
    with pytest.raises(ValueError, match=r"Input should be 'greedy', 'direct', .* 'deployed' or 'published'"):
        CompareSettings(methods=["last-candidate"])


@pytest.mark.parametrize("name", [*names(), "external:tuned"])
def test_every_method_says_what_it_is(name):
    found = methods.method(name)
    assert found.name == name.partition(":")[0]
    assert found.label.format(name=name, votes=8)
    assert set(found.timed) <= {"fast", "plain"}
    assert found.seeded or not found.routed


def test_names_need_no_torch():
    code = "import sys, benchmarks.paper.settings as m\nassert len(m.names()) == 19\nassert 'torch' not in sys.modules"
    assert subprocess.run([sys.executable, "-c", code], check=False).returncode == 0
