"""Mistakes in compiled kernels that the executor must see, and the one that an H100 hung on.

At every place of both Hopper kernels' barriers each mistake was tried once; those left out here change nothing that
must hold: waits for a turn, which only order work, and meetings of a warpgroup before a wait of all its warps.
"""

from __future__ import annotations

import re
from collections.abc import Callable
from importlib.util import module_from_spec, spec_from_file_location
from pathlib import Path
from types import ModuleType
from unittest import mock

import pytest
import torch
from cases import OPS, linear_logprob
from cases.base import Case
from cases.branch_attention import OP, TILE, make
from test_contract import check, evaluate

from fb_kernels.branch_attention import gluon as source
from ptx import compiled
from ptx.memory import Deadlock, Hazard
from ptx.program import parse
from ptx.test_cuda import shared_columns
from ptx.test_gluon import gluon, log_probs

INIT = r"(mbarrier\.init\.shared::cta\.b64 \[[^\]]*\], )(\d+);"
ARRIVE = r"@%p\d+ mbarrier\.arrive\.shared::cta\.b64 _, \[[^\]]*\];"
EXPECT = r"(mbarrier\.arrive\.expect_tx\.shared(?:::cta)?\.b64 _, \[[^\]]*\], )(\d+);"
WAIT = r"(?s)\{\s*\.reg \.pred complete;\s*waitLoop:.*?waitLoop;\s*\}"
TRIED = r"(mbarrier\.try_wait\.parity\.shared(?:::cta)?\.b64 complete, \[[^\]]*\], )(%r\d+);"
MEETING = r"bar\.sync \t\d, 128;(?=\s*// begin inline asm\s*@%p\d+ mbarrier\.arrive\.shared)"  # before an arrival
COPY = r"@%p\d+ cp\.async\.bulk[^;]*;"
FENCE = r"fence\.proxy\.async[^;]*;"
PRODUCTS = r"wgmma\.wait_group\.sync\.aligned (\d)"
REGISTERS = r"setmaxnreg\.inc\.sync\.aligned\.u32 \t232;"
Replacement = Callable[[re.Match[str]], str]
MISTAKES: dict[str, tuple[str, int, Replacement]] = {  # where it stands, which of those places, what to write there
    "a barrier that counts one more": (INIT, 1, lambda m: f"{m[1]}{int(m[2]) + 1};"),
    "a barrier that counts one less": (INIT, 3, lambda m: f"{m[1]}{int(m[2]) - 1};"),
    "no arrival at keys read": (ARRIVE, 2, lambda m: ""),
    "two arrivals at values read": (ARRIVE, 3, lambda m: f"{m[0]}\n{m[0]}"),
    "fewer bytes expected": (EXPECT, 0, lambda m: f"{m[1]}{int(m[2]) // 2};"),
    "more bytes expected": (EXPECT, 2, lambda m: f"{m[1]}{int(m[2]) * 2};"),
    "no wait for keys": (WAIT, 1, lambda m: ""),
    "no wait for room": (WAIT, 20, lambda m: ""),
    "a wait for the other parity": (TRIED, 9, lambda m: f".reg .b32 %o<2>; xor.b32 %o1, {m[2]}, 1; {m[1]}%o1;"),
    "no meeting before the arrival": (MEETING, 0, lambda m: ""),
    "a copy left out": (COPY, 2, lambda m: ""),
    "no fence after the barriers' start": (FENCE, 0, lambda m: ""),
    "no fence after values were changed": (FENCE, 1, lambda m: ""),
    "no wait for a product": (PRODUCTS, 1, lambda m: f"wgmma.wait_group.sync.aligned {int(m[1]) + 1}"),
    "more registers than there are": (REGISTERS, 0, lambda m: m[0].replace("232", "256")),
}
HEAD_MISTAKES: dict[str, tuple[str, int, Replacement]] = {  # likewise, of the head's kernel
    "no arrival of one half": (ARRIVE, 2, lambda m: ""),
    "no wait for one half's reading": (WAIT, 2, lambda m: ""),
    "no wait for the other half's reading": (WAIT, 3, lambda m: ""),
    "no meeting before the arrival": (MEETING, 1, lambda m: ""),
    "no wait for the product before": (PRODUCTS, 0, lambda m: f"wgmma.wait_group.sync.aligned {int(m[1]) + 1}"),
}


def mistaken(pattern: str, place: int, replacement: Replacement) -> Callable[[str], str]:
    """A change of Hopper's kernel at one place."""

    def change(text: str) -> str:
        if "_gluon_kernel" not in text:
            return text
        match = list(re.finditer(pattern, text))[place]
        return text[: match.start()] + replacement(match) + text[match.end() :]

    return change


def attention() -> Case:
    """Past the ring, with a branch of more than a block, and a second group."""
    return OP.cast(make([([3, 140], 0, 420), ([6], 5, 60)], (1, 1), 64, longest=TILE), torch.bfloat16)


def attend(case: Case, changed: Callable[[str], str] = str) -> None:
    """Fails in the executor, or if the result is wrong."""
    with gluon("branch_attention", 0, 1, changed):
        results = case.run()
    check(OP, case, results, [])


def score(case: Case, changed: Callable[[str], str]) -> None:
    """Likewise, with the head's kernel."""
    with gluon("linear_logprob", 0, 1, changed):
        results = case.run()
    check(linear_logprob.OP, case, results, [])


def test_without_a_mistake_nothing_is_seen() -> None:
    attend(attention())


@pytest.mark.parametrize("mistake", MISTAKES)
@pytest.mark.sweep(4)
def test_a_mistake_in_hoppers_attention_is_seen(mistake: str) -> None:
    with pytest.raises(AssertionError):
        attend(attention(), mistaken(*MISTAKES[mistake]))


@pytest.mark.parametrize("mistake", HEAD_MISTAKES)
@pytest.mark.sweep(4)
def test_a_mistake_in_hoppers_head_is_seen(mistake: str) -> None:
    with pytest.raises(AssertionError):
        score(log_probs("past the ring"), mistaken(*HEAD_MISTAKES[mistake]))


def carried(tmp_path: Path) -> ModuleType:
    """The kernel with the bound of a nested loop carried by the outer one, of which Gluon keeps the first value."""
    text = Path(source.__file__).read_text()
    inside = re.search(r"\n( +)done = gl\.where\(stretch == low, BLOCK_N, 0\)[^\n]*", text)
    loop = text.rindex("            for stretch in range(low, high + 1):\n", 0, inside.start() if inside else None)
    end = text.index("            mbarrier.arrive(q_empty)")
    assert inside
    lines = [text[:loop], "            done = BLOCK_N\n", text[loop : inside.start()], text[inside.end() : end]]
    file = tmp_path / "carried.py"
    file.write_text("".join([*lines, "                done = 0\n", text[end:]]))
    spec = spec_from_file_location("carried", file)
    assert spec is not None
    assert spec.loader is not None
    module = module_from_spec(spec)
    spec.loader.exec_module(module)
    return module


@pytest.mark.parametrize("groups", [[([3, 1, 14, 10], 0, 20)], [([70, 80, 10], 0, 300)]], ids=["short", "long"])
def test_a_carried_bound_is_seen(groups: list, tmp_path: Path) -> None:
    case = OP.cast(make(groups, (1, 1), 64, longest=TILE), torch.bfloat16)
    changed = mock.patch.object(source, "attend", carried(tmp_path).attend)
    with pytest.raises(AssertionError), changed:
        attend(case)


COMPILED = {  # of csrc/: the op, what stands in its PTX, what it is replaced by
    "warps that do not wait for each other": ("topk_entropy", r"bar\.sync\s+0;", ""),
    "blocks that do not wait for each other's writes": ("branch_attention", "atom.acq_rel.gpu", "atom.relaxed.gpu"),
    "blocks of a cluster that do not wait": ("skinny_linear", r"barrier\.cluster\.wait;", ""),
    "a wait for the kernel before at the end": (
        "topk_entropy",
        r"(?s)griddepcontrol\.wait;(.*?)ret;",
        r"\1griddepcontrol.wait; ret;",
    ),
}


@pytest.mark.parametrize("mistake", COMPILED)
@pytest.mark.sweep(2)
def test_a_mistake_in_a_compiled_kernel_is_seen(mistake: str) -> None:
    name, pattern, replacement = COMPILED[mistake]
    op = OPS[name]
    text = (compiled.folder() / f"{name}.ptx").read_text()
    kernels = parse(re.sub(pattern, replacement, text))
    kernels = {compiled.demangled(kernel): program for kernel, program in kernels.items()}
    case = op.cast(op.make(**op.way("cuda").also[0]), torch.bfloat16)
    if name == "skinny_linear":
        case = shared_columns(torch.bfloat16)
    instead = mock.patch.object(compiled, "programs", return_value=kernels)
    with instead, pytest.raises((Deadlock, Hazard)), compiled.executed(processors=7):
        evaluate(case)
