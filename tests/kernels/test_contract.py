"""What every op promises in every implementation, at sizes that its declaration in cases/ draws."""

from __future__ import annotations

import itertools
import random
import re
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager, nullcontext
from dataclasses import replace
from functools import partial
from importlib import import_module
from typing import Any

import pytest
import torch
from cases import NAMES, OPS
from cases import case as example
from cases.base import Case, Op, Way, generator, listed, seeds
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st
from launches import count_kernels
from layouts import LAYOUTS, outside
from torch import Tensor
from torch.utils._python_dispatch import TorchDispatchMode
from ways import device_of, names, running

from fb_kernels._runtime import backend, cpu
from fb_kernels.testing import assert_close_to_reference, count_launches, count_syncs, poisoned_memory

HOST = torch.device("cpu")
STRANGE = (torch.nan, torch.inf, -torch.inf, 0.0, 1e4, -1e4)
HOSTILE = ((torch.nan, True), (torch.inf, False), (-torch.inf, False))  # in a whole row, or in its last element


def declared(name: str, way: str) -> tuple[Op, Way]:
    return OPS[name], OPS[name].way(way)


EVERY = [(op, way) for op in OPS for way in names(OPS[op])]
SLOW = [(op, way) for op, way in EVERY if way.startswith(("triton", "cuda"))]  # interpreted or emulated here
ONCE = [(op, way) for op, way in EVERY if not way.startswith("cpu") or way == "cpu 512"]  # whatever its vectors
DIFFERENTIABLE = [  # Hopper's forms have the gradients of the others
    (op, way) for op, way in ONCE if OPS[op].make(**OPS[op].typical).gradients and not way.endswith("=gluon")
]


def promised(pairs: list[tuple[str, str]]) -> Callable:
    """Once for each implementation of each op."""
    return pytest.mark.parametrize(("name", "way"), pairs)


def made(op: Op, way: str, dtype: torch.dtype, sizes: dict[str, Any] | None = None) -> Case:
    """A call of the op, where its implementation wants it."""
    usual = op.typical if op.way(way).typical is None else op.way(way).typical
    return op.cast(op.make(**(usual if sizes is None else sizes)), dtype).on(device_of(way))


def evaluate(
    case: Case, function: Callable[[Case], list[Tensor]] = Case.run, pulled: Sequence[Tensor] = ()
) -> tuple[list[Tensor], list[Tensor]]:
    """Results, then gradients of all that has one for given gradients of the results, or fixed ones."""
    if not case.gradients:
        return function(case), []
    leaves = {name: case.tensors[name].detach().requires_grad_() for name in case.gradients}
    results = function(case.with_(**leaves))
    carriers = [results[place] for place in case.outputs]
    pairs = list(zip(carriers, pulled or upstream(case, results), strict=True))
    reached = [(x, g.to(x.dtype)) for x, g in pairs if x.requires_grad]  # a definition's zeros of nothing are not
    grads: Sequence[Tensor | None] = [None] * len(leaves)
    if reached:
        results_reached, given = zip(*reached, strict=True)
        grads = torch.autograd.grad(results_reached, list(leaves.values()), given, allow_unused=True)
    filled = [torch.zeros_like(x) if g is None else g for g, x in zip(grads, leaves.values(), strict=True)]
    return [x.detach() for x in results], filled


def upstream(case: Case, results: Sequence[Tensor]) -> list[Tensor]:
    """Gradients of the results."""
    return [torch.randn(results[each].shape, generator=generator(each)).to(results[each]) for each in case.outputs]


def check(
    op: Op, case: Case, results: Sequence[Tensor], grads: Sequence[Tensor], pulled: Sequence[Tensor] = ()
) -> None:
    """Against the definition in float64, and plain PyTorch in each result's dtype, all on the host."""
    results, grads, pulled = ([x.to(HOST) for x in each] for each in (results, grads, pulled))
    case = (case if grads else replace(case, gradients=())).on(HOST)
    truths: dict[torch.dtype, tuple[list[Tensor], list[Tensor]]] = {}
    if grads:
        pulled = pulled or upstream(case, results)
    wide = op.cast(case, torch.float64)
    for dtype in {torch.float64, *(x.dtype for x in (*results, *grads) if x.is_floating_point())}:
        truths[dtype] = evaluate(op.cast(case, dtype), lambda each: op.truth(each, results), pulled)
    truth, exact = truths[torch.float64]
    scales = op.scales(case, truth) if op.scales else [None] * len(truth)
    for each, (mine, want, scale) in enumerate(zip(results, truth, scales, strict=True)):
        if mine.is_floating_point():
            if not op.which_strange:
                mine, want = (x.masked_fill(~x.to(mine.dtype).isfinite(), torch.nan) for x in (mine, want))
            assert_close_to_reference(mine, want, truths[mine.dtype][0][each], scale=scale)
        else:
            assert mine.dtype == want.dtype
            assert torch.equal(mine, want)
    if not grads:
        return
    scales = op.gradient_scales(wide, truth, pulled) if op.gradient_scales else [None] * len(grads)
    for place, (mine, want, scale) in enumerate(zip(grads, exact, scales, strict=True)):
        assert mine.dtype == case.tensors[case.gradients[place]].dtype
        assert_close_to_reference(mine, want, truths[mine.dtype][1][place], scale=scale)


def same(one: Sequence[Tensor], other: Sequence[Tensor]) -> bool:
    """Bit by bit, but for which NaN it is."""
    return all(
        torch.equal(a.nan_to_num(7.0), b.nan_to_num(7.0)) and torch.equal(a.isnan(), b.isnan())
        for a, b in zip(one, other, strict=True)
    )


drawing = settings(suppress_health_check=[HealthCheck.too_slow, HealthCheck.data_too_large])


@promised([pair for pair in EVERY if pair not in SLOW])
@drawing
@given(data=st.data())
def test_it_is_the_definition(name: str, way: str, data: st.DataObject) -> None:
    is_the_definition(name, way, data)


@promised(SLOW)
@settings(drawing, max_examples=5)
@given(data=st.data())
def test_a_kernel_is_the_definition(name: str, way: str, data: st.DataObject) -> None:
    is_the_definition(name, way, data)


def is_the_definition(name: str, way: str, data: st.DataObject) -> None:
    """Within rounding, whatever lies around its arguments, which stay as they are; and each time the same."""
    op, taken = declared(name, way)
    sizes, dtype = data.draw(op.sizes if taken.sizes is None else taken.sizes), data.draw(st.sampled_from(taken.dtypes))
    small, pick = data.draw(st.booleans()), random.Random(data.draw(seeds))
    case = op.cast(op.make(**sizes), dtype)
    strange = [each for each in (op.rows if op.hostile is None else op.hostile) if each in case.tensors]
    share = data.draw(st.sampled_from([0.0, 0.0, 0.05, 0.3])) if strange else 0.0
    case = case.with_(**{each: hostile(case.tensors[each], share, pick) for each in strange}).on(device_of(way))
    alike = pick.choice([None, *taken.layouts])
    apart = {each: ["rows apart"] * (each in taken.apart) for each in case.tensors}
    laid = {each: pick.choice([*([alike] if alike else taken.layouts), *apart[each]]) for each in case.tensors}
    with running(way), taken.small() if small else nullcontext():
        runs = []
        for memory in (poisoned_memory, nullcontext):
            views = {each: LAYOUTS[layout](case.tensors[each]) for each, layout in laid.items()}
            around, own = [outside(x) for x in views.values()], {each: x.clone() for each, x in views.items()}
            with memory():  # what is not written is NaN
                runs.append(evaluate(case.with_(**views)))
            given = [x.untyped_storage().data_ptr() for x in views.values()]
            assert all(x.is_contiguous() or x.untyped_storage().data_ptr() in given for x in runs[-1][0])
            kept = [each for each in views if each not in case.written]
            assert same([views[each] for each in kept], [own[each] for each in kept])
            assert same([outside(x) for x in views.values()], around)
    (results, grads), again = runs
    wide = torch.promote_types(dtype, torch.float32)
    floats = [(place, x) for place, x in enumerate(results) if x.is_floating_point()]
    assert all(x.dtype == (wide if place in op.widened else dtype) for place, x in floats)
    assert same(results, again[0])
    assert same(grads, again[1])
    check(op, case, results, [] if share else grads)


@promised([(op, way) for op, way in EVERY if declared(op, way)[1].also])
@pytest.mark.sweep(4)
def test_it_is_the_definition_past_a_block(name: str, way: str, request: pytest.FixtureRequest) -> None:
    """Sizes take turns with dtypes, narrow ones first; with --all each has every one."""
    (op, taken), every = declared(name, way), request.config.getoption("all")
    for (place, sizes), (turn, dtype) in itertools.product(enumerate(taken.also), enumerate(reversed(taken.dtypes))):
        if every or place % len(taken.dtypes) == turn:
            case = made(op, way, dtype, sizes)
            with running(way):
                check(op, case, *evaluate(case.fresh()))


def hostile(x: Tensor, share: float, pick: random.Random) -> Tensor:
    """x with other values in some places, where it has floats."""
    if not x.is_floating_point():
        return x
    source = generator(pick.randrange(100))
    chosen = torch.tensor(STRANGE, dtype=x.dtype)[torch.randint(0, len(STRANGE), x.shape, generator=source)]
    return torch.where(torch.rand(x.shape, generator=source) < share, chosen, x)


def float_rows(op: Op) -> list[str]:
    tensors = op.make(**op.typical).tensors
    return [each for each in op.rows if tensors[each].is_floating_point()]


@promised([(op, way) for op, way in EVERY if float_rows(OPS[op])])
@pytest.mark.sweep(3)
def test_a_row_is_its_own(name: str, way: str) -> None:
    """What it holds reaches no other, and shows in it as it does in the definition."""
    op, taken = declared(name, way)
    slow, tried = (name, way) in SLOW, list(itertools.product(float_rows(op), HOSTILE))
    for dtype in taken.dtypes[:1] if slow else taken.dtypes:
        case = made(op, way, dtype)
        with running(way), taken.small():
            clean = evaluate(case.fresh())
            for row, (argument, (value, whole)) in enumerate(tried[:: 1 + slow]):
                x, along = case.tensors[argument].clone(), op.rows[argument]
                others = [other for other in range(x.shape[along]) if other != row % x.shape[along]]
                others = torch.tensor(others, device=x.device)
                mine = x.select(along, row % x.shape[along])
                (mine[..., -1] if mine.ndim and not whole else mine).fill_(value)
                results, grads = evaluate(case.fresh().with_(**{argument: x}))
                pairs = list(zip(results, clean[0], op.result_rows, strict=False))
                own = zip(case.gradients, grads, clean[1], strict=True)
                pairs += [(grad, before, op.rows[leaf]) for leaf, grad, before in own if leaf in op.rows]
                for out, before, dimension in pairs:
                    assert same([out.index_select(dimension, others)], [before.index_select(dimension, others)])
                check(op, case.with_(**{argument: x}), results, [])


@promised([(op, way) for op, way in EVERY if OPS[op].alone])
def test_a_row_alone_has_the_same_bits(name: str, way: str) -> None:
    op, taken = declared(name, way)
    for dtype in taken.dtypes:
        case = made(op, way, dtype)
        with running(way):
            together = case.run()
            for row in (0, 2, 5):
                one = {each: case.tensors[each].narrow(along, row, 1).clone() for each, along in op.rows.items()}
                for mine, whole, along in zip(case.run(**one), together, op.result_rows, strict=True):
                    assert torch.equal(mine, whole.narrow(along, row, 1))


@promised(DIFFERENTIABLE)
@pytest.mark.sweep(5)
def test_a_gradient_alone_is_the_same(name: str, way: str) -> None:
    """And the gradients through each result sum up to those through all."""
    op, taken = declared(name, way)
    case = made(op, way, taken.dtypes[0])
    with running(way), taken.small():
        every = evaluate(case)[1]
        for leaf, whole in zip(case.gradients, every, strict=True):
            assert same(evaluate(replace(case, gradients=(leaf,)))[1], [whole])
        pulled = upstream(case, case.run())
        each = [
            evaluate(replace(case, outputs=(place,)), pulled=[g])[1]
            for place, g in zip(case.outputs, pulled, strict=True)
        ]
        for parts, whole in zip(zip(*each, strict=True), every, strict=True):
            tolerance = max(1e-4, 4 * torch.finfo(whole.dtype).eps)  # each part is rounded
            torch.testing.assert_close(sum(parts), whole, rtol=tolerance, atol=tolerance)


class Seen(TorchDispatchMode):
    """The calls of `fb::` ops."""

    def __init__(self) -> None:
        super().__init__()
        self.calls: list[tuple[Any, tuple]] = []

    def __torch_dispatch__(self, func: Any, types: Any, args: tuple = (), kwargs: dict | None = None) -> Any:
        if func.namespace == "fb":
            self.calls.append((func, args))
        return func(*args, **kwargs or {})


REFUSAL = (
    r"(\w+): (\w+: expected (a tensor that needs no gradient, got one that needs one|frozen pages, [^\n]+)"
    r"|only first derivatives exist); [^\n]+"
)
OPERATORS = [name for name in torch._C._dispatch_get_all_op_names() if name.startswith("fb::")]


def floats(tensors: dict[str, Any]) -> dict[str, Tensor]:
    return {name: x for name, x in tensors.items() if isinstance(x, Tensor) and x.is_floating_point()}


@contextmanager
def or_refused(name: str) -> Iterator[None]:
    try:
        yield
    except (ValueError, NotImplementedError) as problem:
        sentence = re.fullmatch(REFUSAL, str(problem))
        if sentence is None or not name.startswith(sentence[1]):
            raise


def pulled_through(results: Sequence[Tensor], upstream: Sequence[Tensor], leaf: Tensor) -> Tensor:
    """The gradient to a leaf, which can be differentiated again."""
    pairs = [(x, g.to(x.dtype)) for x, g in zip(results, upstream, strict=True) if x.requires_grad]
    outputs, given = zip(*pairs, strict=True)
    return torch.autograd.grad(outputs, leaf, given, create_graph=True)[0]


@pytest.mark.filterwarnings("error")
@pytest.mark.parametrize("name", OPS)
def test_a_gradient_is_right_or_refused(name: str) -> None:
    """To every floating argument, and the gradient of that gradient; nothing is left out in silence."""
    op, close = OPS[name], partial(torch.testing.assert_close, rtol=1e-4, atol=1e-4, check_dtype=False)
    for sizes, dtype in itertools.product((op.typical, *op.tiny[:1]), (torch.float64, torch.float32)):
        case = op.cast(op.make(**sizes), dtype)
        wide = op.cast(case, torch.float64)
        for leaf in floats(case.tensors):
            x, exact = (each.tensors[leaf].clone().requires_grad_() for each in (case, wide))
            with or_refused(name):
                results = case.fresh().run(**{leaf: x})
                places = [place for place, out in enumerate(results) if out.requires_grad]
                pulled = upstream(replace(case, outputs=tuple(places)), results)
                truth = op.truth(wide.with_(**{leaf: exact}), results)
                grad = pulled_through([results[each] for each in places], pulled, x)
                want = pulled_through([truth[each] for each in places], pulled, exact)
                close(grad, want)
                if want.requires_grad:
                    close(torch.autograd.grad(grad.sum(), x), torch.autograd.grad(want.sum(), exact))


@pytest.mark.filterwarnings("error")
def test_an_operator_has_a_gradient_or_refuses() -> None:
    """To every floating tensor that its schema takes, also where it is called itself."""
    taken: dict[str, set[str]] = {name: set() for name in OPERATORS}
    for case in itertools.chain((op.make(**op.typical) for op in OPS.values()), map(example, NAMES)):
        with Seen() as seen:
            evaluate(case.fresh())
        for operator, arguments in seen.calls:
            given = dict(zip((each.name for each in operator._schema.arguments), arguments, strict=True))
            taken[operator.name().partition(".")[0]] |= {each for each, x in given.items() if isinstance(x, Tensor)}
            for leaf in floats(given):
                own = {each: x.detach().clone() if isinstance(x, Tensor) else x for each, x in given.items()}
                own[leaf].requires_grad_()
                with or_refused(operator._schema.name.removeprefix("fb::")):
                    results = [x for x in listed(operator(*own.values())) if x.requires_grad]
                    assert pulled_through(results, results, own[leaf]).shape == own[leaf].shape
    for name, each in taken.items():
        schema = getattr(torch.ops.fb, name.removeprefix("fb::")).default._schema
        assert each == {x.name for x in schema.arguments if "Tensor" in str(x.type)}, name


@promised(ONCE)
@pytest.mark.sweep(11)
def test_opcheck(name: str, way: str) -> None:
    """Every operator that a call and its gradients come to, as they call it."""
    op, taken = declared(name, way)
    cases = [made(op, way, taken.dtypes[-1])]
    cases += [op.make(**sizes) for sizes in op.tiny] if way == "reference" else []
    for case in cases:
        with running(way):
            checked(case, way)


def checked(case: Case, way: str) -> None:
    with Seen() as seen:
        evaluate(case.fresh())
    assert seen.calls
    with Seen() as alone:
        for leaf in case.gradients:
            evaluate(replace(case, gradients=(leaf,)))
    seen.calls += [call for call in alone.calls if call[0]._schema.name.endswith("_backward")]
    trained = {case.tensors[leaf].data_ptr() for leaf in case.gradients}
    for operator, arguments in seen.calls:
        given = [x.detach().requires_grad_(x.data_ptr() in trained) if isinstance(x, Tensor) else x for x in arguments]
        if operator._schema.name.endswith("_backward"):
            given = [x.detach() if isinstance(x, Tensor) else x for x in given]
        torch.library.opcheck(operator, tuple(given))


@pytest.mark.parametrize("name", [name for name in OPS if OPS[name].tiny])
def test_gradcheck(name: str) -> None:
    op = OPS[name]
    for sizes in op.tiny:
        case = op.make(**sizes)

        def run(*leaves: Tensor, case: Case = case) -> list[Tensor]:
            results = case.run(**dict(zip(case.gradients, leaves, strict=True)))
            return [results[place] for place in case.outputs]

        leaves = [case.tensors[leaf].requires_grad_() for leaf in case.gradients]
        assert torch.autograd.gradcheck(run, leaves)


@pytest.mark.parametrize("name", OPS)
@pytest.mark.sweep(2)
def test_it_compiles_whole(name: str) -> None:
    op = OPS[name]
    case = op.cast(op.make(**op.typical), torch.float32)
    keys = list(case.tensors)

    def run(*values: Tensor) -> list[Tensor]:
        return replace(case, arguments=case.changed(**dict(zip(keys, values, strict=True)))).run()

    torch._dynamo.reset()  # or the same function of many ops reaches a limit
    compiled = torch.compile(run, fullgraph=True, backend="aot_eager")

    def through(function: Callable, case: Case) -> list[Tensor]:
        return listed(function(*(case.tensors[key].clone() for key in keys)))

    own = [case.with_(**{key: case.tensors[key].clone() for key in case.written}) for _ in range(2)]
    eager, mine = (evaluate(each, partial(through, call)) for each, call in zip(own, (run, compiled), strict=True))
    assert same(eager[0], mine[0])
    assert same(eager[1], mine[1])


@promised(ONCE)
@pytest.mark.sweep(3)
def test_one_launch_and_no_sync(name: str, way: str, monkeypatch: pytest.MonkeyPatch) -> None:
    (op, taken), kind = declared(name, way), way.partition(" ")[0]
    case = made(op, way, taken.dtypes[0])
    kernels = (
        count_kernels(monkeypatch, import_module(f"{case.function.__module__}.triton")) if kind == "triton" else []
    )
    with running(way), taken.small() if kind == "triton" else nullcontext():
        case.run()
        chunks = way.endswith("chunked")  # this form runs its first kernel for each of two chunks
        assert len(kernels) == (taken.kernels + chunks if kind == "triton" else 0)
        with count_launches() as launches, count_syncs() as syncs:
            case.run()
        assert (sum(n for each, n in launches.by_op.items() if each.startswith("fb::")), syncs.total) == (1, 0)
        with count_syncs() as syncs:
            evaluate(case)
        assert syncs.total == 0


REFUSED = [(op, way) for op, way in ONCE if way not in ("reference", "device")]


@promised(REFUSED)
def test_what_it_was_not_made_for_is_left_to_others(name: str, way: str) -> None:
    op, taken = declared(name, way)
    kind = way.partition(" ")[0]
    double = [partial(op.make, **op.typical)] if torch.float64 not in taken.dtypes else []
    for make in (*double, *taken.refused):
        with running(way), pytest.MonkeyPatch.context() as patch:
            if kind != "cpu":  # which takes some of them
                patch.setattr(cpu, "library", lambda: "not asked")
            with pytest.raises(ValueError, match=f"{op.name}: expected arguments that the {kind} kernel takes"):
                make().on(device_of(way)).run()
            with backend.override("auto"):
                results = make().on(device_of(way)).run()
            if device_of(way) == HOST:  # no other kernel takes it
                with backend.override("reference"):
                    assert same(results, make().run())
            check(op, make(), results, [])


@pytest.mark.parametrize("which", ["auto", "reference"])
@pytest.mark.parametrize("name", [name for name in OPS if OPS[name].wrong])
def test_bad_arguments(name: str, which: str) -> None:
    """Of a kind, dtype or device that no call takes: test_bad_input.py."""
    op = OPS[name]
    case = op.cast(op.make(**op.typical), torch.float32)
    with backend.override(which):
        for argument, changes, error in op.wrong:
            said = f"{name}: {argument}".replace(f"{name}: layout.", "BranchLayout: ")
            with pytest.raises(error, match=rf"^{said}: expected .*, got .*; .+") as raised:
                case.run(**changes)
            assert raised.type is error
        case.run()
