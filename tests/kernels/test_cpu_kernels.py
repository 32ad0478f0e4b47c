"""The compiled kernels for CPU tensors: their threads, blocks and vectors, and which calls they take by themselves."""

from __future__ import annotations

import os
import random
import shutil
import subprocess
import sys
from collections.abc import Callable, Iterator, Sequence
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
import torch
from cases import OPS
from cases.base import Case, single
from cases.branch_attention import make as make_branches
from cases.decoder_layer import OP as LAYER
from cases.decoder_layer import make as make_layer
from cases.linear_logprob import OP as LOGPROB
from cases.linear_logprob import make as make_head
from cases.qk_norm_rope import make as make_turned
from cases.rms_norm import make as make_sum
from cases.swiglu import make as make_gated
from test_contract import check, evaluate, same
from ways import VECTORS, running

from fb_kernels._runtime import backend, cpu
from fb_kernels.candidate_head import candidate_head
from fb_kernels.decoder_layer import decoder_layer
from fb_kernels.linear_logprob import linear_logprob
from fb_kernels.qk_norm_rope import qk_norm_rope

INF = float("inf")


@pytest.fixture(params=VECTORS)
def vectors(request: pytest.FixtureRequest) -> Iterator[None]:
    """Every op runs its compiled CPU kernel, and refuses arguments that it was not made for."""
    with running(f"cpu {request.param}"):
        yield


every_width = pytest.mark.usefixtures("vectors")


@every_width
def test_soft_caps_of_every_size() -> None:
    """Logits from where tanh is its argument to where it is 1."""
    bias = torch.cat((torch.linspace(-20, 20, 801), torch.tensor([1e-30, -1e-9, 0.0, INF, -INF, 200.0, -1e30])))
    for x in bias.split(1):  # its own log-prob is 0, its lse the logit
        lse = linear_logprob(torch.zeros(1, 1), torch.zeros(1, 1), torch.zeros(1, dtype=torch.int64), x,
                             softcap=2.0, return_lse=True)[1]  # fmt: skip
        torch.testing.assert_close(lse, (2 * torch.tanh(x.double() / 2)).float(), rtol=4e-7, atol=0)


@pytest.mark.skipif(not Path("/proc/self/task").exists(), reason="no /proc")
def test_threads_are_those_of_torch() -> None:
    """A second thread begins with the first call, which plain operations use too, in the one runtime of the process."""
    code = """
import os, torch
from pathlib import Path
from fb_kernels import skinny_linear; from fb_kernels._runtime import cpu
x, weight = torch.ones(1, 512), torch.ones(1024, 512)
if cpu.why_not():
    raise SystemExit(77)
torch.set_num_threads(2)
counts = [len(os.listdir("/proc/self/task"))]
for run in (lambda: skinny_linear(x, weight), lambda: torch.ones(1 << 20).exp_()):
    run()
    counts.append(len(os.listdir("/proc/self/task")))
paths = {line.split()[-1] for line in Path("/proc/self/maps").read_text().splitlines() if "gomp" in line}
print(counts[1] - counts[0], counts[2] - counts[1], len(paths))
"""
    alone = os.environ | {"OMP_NUM_THREADS": "1"}  # so that importing torch begins none
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, env=alone)
    if done.returncode == 77:
        pytest.skip("the library is not built")
    assert done.stdout.split() == ["1", "0", "1"], done.stderr


def test_a_library_of_other_sources_is_not_used(tmp_path: Path) -> None:
    assert str(cpu.opened(tmp_path / "absent.so")).startswith("cannot be loaded")
    source = tmp_path / "other.cpp"
    source.write_text('extern "C" int fbcpu_abi_version() { return 0; }\n')
    compiler = shutil.which("g++") or shutil.which("clang++")
    subprocess.run([str(compiler), "-shared", "-fPIC", str(source), "-o", str(tmp_path / "other.so")], check=True)
    assert cpu.opened(tmp_path / "other.so") == "built from other sources: install it anew"


WRONG: dict[str, tuple[Callable[..., Any], list[Any]]] = {
    "candidate_head": (
        lambda cu: candidate_head(torch.ones(4, 3), None, torch.ones(3), torch.tensor(cu), eps=0.1),
        [[1, 4], [0, 5], [0, 3, 2], [0, -1, 4], [0, 2, 2**40, 4], [0, 1, 2, 3, 4, 3, 4, 4, 4, 4]],
    ),
    **{
        f"linear_logprob of {str(dtype)[6:]}": (
            lambda ids, dtype=dtype: linear_logprob(*(torch.ones(n, 3).to(dtype) for n in (2, 5)), torch.tensor(ids)),
            [[0, 5], [-1, 9], [-100, 5], [2**40, 0]],
        )
        for dtype in (torch.float32, torch.bfloat16)
    },
    "qk_norm_rope": (lambda positions: rotated(positions=torch.tensor(positions)), [[0, 4], [-1, 0], [2**40, 1]]),
}


def rotated(**changes: Any) -> Any:
    given = {"qkv": torch.ones(2, 6), "cos": torch.ones(4, 2), "sin": torch.ones(4, 2)}
    given |= {"q_weight": None, "k_weight": None, "positions": torch.zeros(2, dtype=torch.int32)} | changes
    return qk_norm_rope(**given, num_heads=1, num_kv_heads=1)


@pytest.mark.parametrize("op", WRONG)
def test_errors_are_those_of_the_reference(op: str) -> None:
    call, values = WRONG[op]
    for value in values:
        said = []
        for way in ("cpu 512", "reference"):
            with running(way), pytest.raises(ValueError, match=f"^{op.split()[0]}: .*expected") as raised:
                call(value)
            said.append(str(raised.value))
        assert said[0] == said[1]
        assert "kernel" not in said[0]


def test_it_runs_without_being_asked_for() -> None:
    """Of every op with a kernel for the CPU: no reference runs."""
    names = [name for name, op in OPS.items() if "cpu" in op.ways]
    with running("cpu 512"), backend.override("auto"), backend.seen() as ran:
        for name in names:
            op = OPS[name]
            evaluate(op.cast(op.make(**op.typical), torch.float32).fresh())
    assert len(names) > 9
    assert {name: ran[name] for name in names} == dict.fromkeys(names, "cpu")


def many_narrow_rows(rows: Sequence[int], width: int, vocabulary: int) -> Case:
    """A call in bfloat16 with all that changes logits, and padding in the head."""
    options = {"logit_scale": 0.4, "softcap": 5.0, "temperature": 0.7}
    return LOGPROB.cast(make_head(rows, width, vocabulary, padding=3, options=options), torch.bfloat16)


@every_width
@pytest.mark.parametrize(("rows", "width", "vocabulary"), [((5, 97), 70, 260), ((16,), 33, 9000), ((3,), 0, 4100)])
def test_log_probs_of_narrow_rows_past_a_block(rows: Sequence[int], width: int, vocabulary: int) -> None:
    """Rows that are not all in memory at once, stretches of the vocabulary of several chunks."""
    case = many_narrow_rows(rows, width, vocabulary)
    check(LOGPROB, case, *evaluate(case))


@every_width
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
def test_a_sequence_has_the_same_bits_in_any_layer_call(dtype: torch.dtype) -> None:
    """In pages with others, in pages alone, and over a flat cache; whatever the number of rows."""
    case = LAYER.cast(
        make_layer(2, model=70, inner=90, half=16, held=50, page=16, sequences=7, wide_tables=True), dtype
    )
    given = case.arguments
    out = case.fresh().run()[0]
    for g, held in enumerate(given["held"].tolist()):
        own = {name: given[name][2 * g : 2 * g + 2].clone() for name in ("hidden", "positions", "slots")}
        own |= {name: given[name][g : g + 1].clone() for name in ("held", "block_table")}
        alone = case.fresh().run(**own)[0]
        pages = given["block_table"][g, : -(-held // 16)].long()
        flat = {name: given[name][pages].flatten(0, 1)[:held].clone() for name in ("k_cache", "v_cache")}
        over = case.run(**own | flat | {"block_table": None, "slots": None})[0]
        assert same([alone, over], [out[2 * g : 2 * g + 2]] * 2)


@every_width
def test_a_nan_with_any_payload_is_seen() -> None:
    case = single(make_branches([([3, 70], 0, 300)], (6, 3), 64))
    case.tensors["prefix_k"][10].view(torch.int32)[..., 0] = 0x7FC00001
    results, grads = evaluate(case)
    assert results[0].isnan().all()
    assert grads[0].isnan().all()


@every_width
def test_any_number_of_threads_gives_the_same_bits() -> None:
    """Also where heads or rows do not share out evenly."""
    attended = single(make_branches([([3, 70, 1], 0, 300), ([1] * 7, 0, 90)], (6, 3), 64))
    frozen = replace(attended, gradients=("q", "k", "v"))
    layer = single(make_layer(3, model=130, inner=1000, half=32, kv_heads=3, repeat=3, held=200, wide_tables=True))
    paged = single(make_layer(2, model=130, inner=1000, half=32, held=200, page=16, sequences=3, wide_tables=True))
    rows = many_narrow_rows((7,), 20, 3000)
    elements = [single(make_sum((5,), 10_000)), single(make_gated((5,), 5_000)), single(make_turned(50, 64))]
    least = min(2 * 12 * 6 * 64 * 90, 3 * 2 * 1000 * 130, 7 * 20 * 3000, 5 * 10_000 * cpu.ELEMENT)
    assert least > 3 * cpu.SHARE  # enough for three threads
    before, found = torch.get_num_threads(), []
    try:
        for threads in (1, 2, 3):
            torch.set_num_threads(threads)
            results, grads = evaluate(attended)
            given = (layer.fresh(), paged.fresh(), paged.cast(torch.bfloat16), *elements)
            parts = [results, grads, evaluate(frozen)[1], *evaluate(attended.cast(torch.bfloat16))]
            parts += [*(case.run() for case in given), *evaluate(rows)[: 1 + (cpu.variant() == "amx")]]  # else torch's
            found.append([x for part in parts for x in part])
    finally:
        torch.set_num_threads(before)
    assert all(same(each, found[0]) for each in found)


@pytest.mark.parametrize(
    ("dtype", "way"), [(torch.float32, "cpu 256"), (torch.bfloat16, "cpu dots"), (torch.bfloat16, "cpu tiles")]
)
def test_a_row_alone_has_the_bits_that_it_has_among_others(dtype: torch.dtype, way: str) -> None:
    """A sequence's row of a whole layer, beside 47 of others."""
    pick = random.Random(0)
    draws = 0
    while draws < 1000:
        model, inner, held = pick.randint(1, 70), pick.randint(1, 70), pick.randint(1, 20)
        case = make_layer(1, model, inner, held=held, page=4, sequences=48, seed=draws, keep="none", wide_tables=True)
        given = LAYER.cast(case, dtype).arguments
        with running(way):
            together = decoder_layer(**given)
            for row in pick.sample(range(48), 20):
                one = {name: given[name][row : row + 1] for name in ("hidden", "positions", "held", "block_table")}
                assert torch.equal(decoder_layer(**given | one)[0], together[row]), (model, inner, held, row)
                draws += 1
