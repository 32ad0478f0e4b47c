"""What every op is held to on a GPU. Each check takes a `Case`, whose tensors may also lie on the CPU (a dry run)."""

from __future__ import annotations

import fcntl
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from itertools import product
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import Tensor

from fb_kernels._runtime import backend
from fb_kernels.testing import assert_close_to_reference, count_syncs, poisoned_memory

DEVICE = "cuda"
DTYPES = (torch.bfloat16, torch.float16, torch.float32)
Outputs = Tensor | tuple[Tensor, ...]


@dataclass
class Case:
    """One call of an op, and the same in plain torch.

    Attributes:
        op: takes `floats`; index arguments and options are inside.
        plain: the same in plain PyTorch, in the dtype that comes; None for the reference in that dtype.
        floats: what both take.
        trained: how many of the leading floats get gradients.
        differentiable: how many of the leading outputs carry them.
        changes: index tensors of the call with other contents that fit them.
        scale: magnitude at which units in the last place count; see `assert_close_to_reference`.
        gradient_scales: likewise of each gradient, from the upstream ones.
        exact: positions of outputs that are compared bit by bit (indices).
    """

    op: Callable[..., Outputs]
    plain: Callable[..., Outputs] | None
    floats: tuple[Tensor, ...]
    trained: int = 0
    differentiable: int = 0
    changes: Sequence[tuple[Tensor, Tensor]] = ()
    scale: float | None = None
    gradient_scales: Callable[[Sequence[Tensor]], Sequence[Tensor]] | None = None
    exact: tuple[int, ...] = ()

    def call(self) -> tuple[Tensor, ...]:
        return listed(self.op(*self.floats))

    @torch.no_grad()
    def change(self) -> None:
        """Other contents and lengths, in place and without a sync."""
        for value in self.floats:
            value.copy_(-0.5 * value.flip(-1))  # unused slots stay the poisoned ones
        for index, other in self.changes:
            index.copy_(other)


def listed(outputs: Outputs) -> tuple[Tensor, ...]:
    return outputs if isinstance(outputs, tuple) else (outputs,)


def randn(
    *shape: int, dtype: torch.dtype = torch.float32, device: str | torch.device = DEVICE, seed: int = 0
) -> Tensor:
    """The same values on every device."""
    return torch.randn(*shape, generator=torch.Generator().manual_seed(seed)).to(device, dtype)


def shifted(x: Tensor) -> Tensor:
    """The same values, starting one element after a 16-byte boundary."""
    return torch.cat([x.new_zeros(1), x.flatten()])[1:].view(x.shape)


def run_their_kernels(ops: Sequence[str], capability: tuple[int, int]) -> None:
    """Each op takes the first kernel that it has for such a GPU, not another nor plain PyTorch in its place."""
    compiled = capability[0] == 8 or capability == (9, 0)
    for op in ops:
        kinds = [kind for kind in backend.kernels(op, DEVICE) if kind == "triton" or compiled]
        took, why = backend.chosen(op, DEVICE)
        assert took == (kinds[0] if kinds else "reference"), f"{op}: {why}"


def matches_the_reference(case: Case) -> None:
    """Outputs and gradients against the float64 reference on the same device, by the error rule."""
    with poisoned_memory():  # what is not written is NaN
        got = evaluate(case.op, case.floats, case)
    with backend.override("reference"):
        truth = evaluate(case.op, tuple(x.double() for x in case.floats), case)
        plain = evaluate(case.op if case.plain is None else case.plain, case.floats, case)
    outputs = len(got) - case.trained
    assert len(truth) == len(got)
    scales: list[Tensor | float | None] = [case.scale] * outputs + [None] * case.trained
    if case.gradient_scales is not None:
        scales[outputs:] = case.gradient_scales(upstream(case, got[: case.differentiable]))
    for index, (actual, expected, native) in enumerate(zip(got, truth, plain, strict=True)):
        if index in case.exact and index < outputs:
            assert torch.equal(actual, expected)
        else:
            assert_close_to_reference(actual, expected, native, scale=scales[index])


def evaluate(function: Callable[..., Outputs], floats: Sequence[Tensor], case: Case) -> list[Tensor]:
    """Outputs, then gradients of the trained floats for one fixed upstream gradient."""
    leaves = [x.detach().requires_grad_(index < case.trained) for index, x in enumerate(floats)]
    outputs = listed(function(*leaves))
    results = [x.detach() for x in outputs]
    if not case.trained:
        return results
    carriers = outputs[: case.differentiable]
    return results + list(torch.autograd.grad(carriers, leaves[: case.trained], upstream(case, carriers)))


def upstream(case: Case, carriers: Sequence[Tensor]) -> list[Tensor]:
    """The gradients of these outputs."""
    narrow = case.floats[0].dtype
    return [randn(*x.shape, dtype=narrow, device=x.device, seed=9 + i).to(x.dtype) for i, x in enumerate(carriers)]


def repeats_are_bit_equal(case: Case, times: int = 1000) -> None:
    """Also of gradients, a tenth as often."""
    first = case.call()
    for _ in range(times):
        assert all(same(a, b) for a, b in zip(first, case.call(), strict=True))
    if case.trained:
        before = evaluate(case.op, case.floats, case)
        for _ in range(times // 10):
            again = evaluate(case.op, case.floats, case)
            assert all(same(a, b) for a, b in zip(before, again, strict=True))


def same(a: Tensor, b: Tensor) -> bool:
    """Bit by bit, but for which NaN it is."""
    return torch.equal(a, b) or (a.is_floating_point() and torch.equal(a.nan_to_num(7.0), b.nan_to_num(7.0)))


def never_syncs_when_warm(case: Case) -> None:
    case.call()
    if case.floats[0].is_cuda:
        torch.cuda.synchronize()
        torch.cuda.set_sync_debug_mode("error")
        try:
            case.call()
        finally:
            torch.cuda.set_sync_debug_mode("default")
    else:
        with count_syncs() as syncs:
            case.call()
        assert syncs.total == 0, syncs.by_op


def graph_replays_with_new_contents(case: Case) -> None:
    """A captured call, replayed after contents and lengths have changed, gives what an eager call gives."""
    case.call()
    if case.floats[0].is_cuda:
        graph = torch.cuda.CUDAGraph()
        torch.cuda.synchronize()
        with torch.cuda.graph(graph):
            captured = case.call()
        case.change()
        graph.replay()
        torch.cuda.synchronize()
    else:
        case.change()
        captured = case.call()
    for actual, expected in zip(captured, case.call(), strict=True):
        assert same(actual, expected)


def runs_on_a_side_stream(case: Case) -> None:
    """The call follows what its own stream did before, late as that is."""
    before = case.call()
    if case.floats[0].is_cuda:
        stream = torch.cuda.Stream()
        torch.cuda.synchronize()
        with torch.cuda.stream(stream):
            torch.cuda._sleep(20_000_000)  # about 10 ms, in which another stream would see the old contents
            case.change()
            got = case.call()
        torch.cuda.synchronize()
    else:
        case.change()
        got = case.call()
    want = case.call()
    assert all(same(a, b) for a, b in zip(got, want, strict=True))
    assert not all(same(a, b) for a, b in zip(got, before, strict=True))  # the change shows


PROMISES = (repeats_are_bit_equal, never_syncs_when_warm, graph_replays_with_new_contents, runs_on_a_side_stream)


Test = Callable[..., None]


def usual(
    make: Callable[..., Case],
    sizes: Mapping[str, Any],
    *promised: str,
    dtypes: Sequence[torch.dtype] = DTYPES,
    **options: Sequence,
) -> tuple[Test, Test, Test]:
    """Tests of an op: against the reference at all sizes, dtypes and options, its promises, and another device."""
    given = [dict(zip(options, each, strict=True)) for each in product(*options.values())]

    @pytest.mark.parametrize("given", given, ids=str)
    @pytest.mark.parametrize("dtype", dtypes)
    @pytest.mark.parametrize("size", sizes)
    def test_matches_the_reference(size: str, dtype: torch.dtype, given: dict[str, Any]) -> None:
        matches_the_reference(make(sizes[size], dtype, **given))

    @pytest.mark.parametrize("size", promised)
    @pytest.mark.parametrize("promise", PROMISES)
    def test_promises(promise: Callable[[Case], None], size: str) -> None:
        promise(make(sizes[size], torch.bfloat16))

    def test_another_device() -> None:
        matches_the_reference(make(sizes["small"], torch.bfloat16, second_device()))

    return test_matches_the_reference, test_promises, test_another_device


def second_device() -> str:
    """A device that is not the current one."""
    if torch.cuda.device_count() < 2:
        pytest.skip("needs two CUDA devices")
    return f"cuda:{(torch.cuda.current_device() + 1) % torch.cuda.device_count()}"


def needs_memory(gib: int) -> None:
    free, _ = torch.cuda.mem_get_info()
    if free < gib << 30:
        pytest.skip(f"needs {gib} GiB of free GPU memory")


@contextmanager
def large(gib: int) -> Iterator[None]:
    """A test of tensors past 2^31 elements, one at a time on a machine; their memory is given back."""
    place = Path(__file__).resolve().parents[2] / "build"
    place.mkdir(exist_ok=True)
    with (place / "large_tests.lock").open("w") as lock:
        fcntl.flock(lock, fcntl.LOCK_EX)
        needs_memory(gib)
        try:
            yield
        finally:
            torch.cuda.empty_cache()


def filled(*shape: int, seed: int = 0) -> Tensor:
    """A large bfloat16 tensor on the GPU, filled there without a float32 copy."""
    generator = torch.Generator(DEVICE).manual_seed(seed)
    return torch.empty(*shape, dtype=torch.bfloat16, device=DEVICE).normal_(generator=generator)
