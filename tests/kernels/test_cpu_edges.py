"""The compiled kernels for CPU tensors at sizes where C++ leaves undefined what is done with no memory."""

from __future__ import annotations

import shutil
import subprocess
import sys
from pathlib import Path

import pytest

SOURCE = Path(__file__).resolve().parents[2] / "csrc" / "cpu.cpp"
EDGES = """
import itertools, sys
import torch
from pathlib import Path
from fb_kernels import BranchLayout, branch_attention, branch_attention_qkv, candidate_head
from fb_kernels._runtime import backend, cpu
from fb_kernels import linear_logprob, merge_attention_states, qk_norm_rope, rms_norm, skinny_linear, swiglu
from fb_kernels import topk_entropy

library = cpu.opened(Path(sys.argv[1]))
assert not isinstance(library, str), library
cpu.library = lambda: library


def ids(*values):
    return torch.tensor(values, dtype=torch.int32)


layouts = ((ids(0), ids(0, 0)), (ids(0, 0), ids(0, 1)), (ids(0, 1, 2), ids(0, 0, 2, 2)), (ids(0, 40, 43), ids(0, 2)))
for (branch, group), width, prefix in itertools.product(layouts, (3, 8), (0, 5)):
    q, k, v = (torch.randn(int(branch[-1]), heads, width, requires_grad=True) for heads in (4, 2, 2))
    rest, none = torch.randn(prefix, 2, width), ids(*[0] * (len(group) - 1))
    branch_attention(q, k, v, rest, rest, BranchLayout(branch, group, none, none)).sum().backward()
for rows, outputs, width in itertools.product((0, 1, 3), (0, 1, 2, 7), (0, 1, 9)):
    x, weight, norm = torch.randn(rows, width), torch.randn(outputs, width), torch.randn(width)
    skinny_linear(x, weight, torch.randn(outputs), norm_weight=norm)
    skinny_linear(x, weight, residual=torch.randn(rows, outputs))
    skinny_linear(x, weight.repeat(2, 1), swiglu=True)
for rows, held, width in itertools.product((0, 1, 3), (0, 2), (2, 6, 8)):
    table, caches = torch.randn(4, width), torch.randn(2, held + 3, 2, width)
    slots = torch.arange(held, held + rows)
    branch_attention_qkv(
        torch.randn(rows, 8 * width), None, None, table, table, torch.zeros_like(slots), *caches, ids(held), slots,
        num_heads=4, num_kv_heads=2,
    )
    pages, columns = torch.randn(2, 2 * held + 1, 3, 2, width), torch.arange(2 * held).view(2, held)
    free = torch.cat([6 * held + torch.arange(rows), torch.arange(rows) - rows])
    for window in (None, 2):
        branch_attention_qkv(
            torch.randn(2 * rows, 8 * width), None, None, table, table, torch.zeros_like(free), *pages,
            ids(held, held // 2), free, block_table=columns, num_heads=4, num_kv_heads=2, window=window,
        )
for size, value in itertools.product((1, 7, 600), (0.0, float("nan"), -float("inf"))):
    topk_entropy(torch.full((2, size), value), min(size, 64))
values = (1.0, 0.0, float("nan"), float("inf"), -float("inf"), -1e38)
for rows, width, value in itertools.product((0, 1, 3), (0, 1, 9, 40), values):
    x, weight = torch.full((rows, width), value), torch.randn(width)
    rms_norm(x, weight, 1e-6)
    rms_norm(x, weight, 1e-6, torch.randn(rows, width))
    swiglu(torch.cat((x, x), 1))
    for sizes in ((0,), (0, 0, rows), (0, rows, rows)):
        candidate_head(x, weight, weight, ids(*sizes), eps=0.0, head_bias=torch.ones(1))
    candidate_head(x, None, weight, ids(0), eps=0.0)
    for vocabulary, softcap in itertools.product((1, 5, 70), (None, 2.0)):
        head, bias = torch.randn(vocabulary, width), torch.randn(vocabulary)
        target = torch.zeros(rows, dtype=torch.int64)
        linear_logprob(x, head, target, bias, softcap=softcap, temperature=1e-30)
        linear_logprob(x, head, target - 100, valid_vocab=0)
    state, lse = torch.randn(rows, 2, width), torch.full((2, rows), value)
    merge_attention_states(state, lse, state, torch.zeros(2, rows))
    merge_attention_states(state, lse, state, lse)
    table, qkv = torch.randn(4, 2 * width), torch.full((rows, 8 * width), value)
    caches, slots = torch.zeros(2, 5, 1, 2 * width), torch.arange(rows) - 1
    for given in (None, (*caches, slots)):
        qk_norm_rope(
            qkv, table[0], None, table, table, torch.zeros_like(slots), num_heads=2, num_kv_heads=1, kv_out=given
        )
"""


@pytest.mark.slow
def test_nothing_is_undefined_at_the_edges(tmp_path: Path) -> None:
    """Empty and hostile sizes, in a library that stops where C++ says nothing about what happens."""
    compiler, library = shutil.which("g++") or shutil.which("clang++"), tmp_path / "libfb_cpu.so"
    if compiler is None:
        pytest.skip("no C++ compiler")
    flags = ("-std=c++17", "-O0", "-shared", "-fPIC", "-DWIDEST=128", "-fsanitize=undefined")
    stops = ("-fsanitize-undefined-trap-on-error", str(SOURCE), "-o", str(library))
    subprocess.run([compiler, *flags, *stops], check=True)
    done = subprocess.run([sys.executable, "-c", EDGES, str(library)], capture_output=True, text=True)
    assert done.returncode == 0, done.stderr[-2000:]
