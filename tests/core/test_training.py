"""Distillation: gradients, sharing of the prefix, learning, sweeps, resuming, processes, and what is refused."""

from __future__ import annotations

import math
from dataclasses import replace
from itertools import combinations

import pytest
import sweep_process
import torch
from limits import HANG
from safetensors.torch import load_file, save_file
from tiny import V, tiny
from warm import context, launched

from fb_core import Optimisation, TokenReranker, TrainingGroup, TrainingTrajectory, train_reranker
from fb_core.models.adapters import adapter_dropouts
from fb_core.models.facts import Cache, causal_lm
from fb_core.models.packed import prefill_packed
from fb_core.rerank.training import RerankerRun, Sweep, validate


def trajectories(n=6, seed=0, rule=None):
    """Random states whose target is put on one candidate; `rule` picks which."""
    g = torch.Generator().manual_seed(seed)
    result = []
    for _ in range(n):
        tokens = torch.randint(V, (12,), generator=g)
        groups = []
        for position in (4, 9):
            candidates = torch.randperm(V, generator=g)[:4]
            best = rule(tokens, candidates) if rule else 0
            groups.append(
                TrainingGroup(position, candidates, torch.nn.functional.one_hot(torch.tensor(best), 4).float())
            )
        result.append(TrainingTrajectory(tokens, groups))
    return result


def highest_id(tokens, candidates):
    return int(candidates.argmax())


@pytest.mark.parametrize(("scope", "n", "chance_beaten"), [("candidate", 120, 0.5), ("sequence", 50, 0.35)])
@pytest.mark.sweep(2)
def test_learns_a_rule_on_the_candidate(scope, n, chance_beaten):
    with torch.random.fork_rng(devices=[]):
        torch.manual_seed(0)  # PEFT initialises the adapter from the global generator
        reranker = TokenReranker.from_base(tiny("qwen3"), rank=8, scope=scope)
    data = trajectories(n, rule=highest_id)
    losses = train_reranker(reranker, data, Optimisation(learning_rate=1e-2, groups_per_step=16, epochs=8))
    assert losses[0] == pytest.approx(torch.tensor(4.0).log().item(), rel=1e-3)  # zero head: uniform
    assert sum(losses[-4:]) / 4 < 0.7 * losses[0]
    with torch.no_grad():
        fresh = trajectories(40, seed=1, rule=highest_id)
        hits = [
            int(reranker.scores(t.tokens[: s.position], s.candidates).argmax()) == int(s.target.argmax())
            for t in fresh
            for s in t.groups
        ]
    assert sum(hits) / len(hits) > chance_beaten  # chance: 0.25


def test_same_seed_same_bits_as_a_sweep_of_one():
    model, data, recipe = tiny("qwen3"), sweep_process.trajectories(), replace(RECIPE, seed=3)
    runs, seen = [], []
    for _ in range(2):
        reranker = rerankers(model)[0]
        torch.manual_seed(7)
        runs.append((train_reranker(reranker, data, recipe, lambda *step: seen.append(step)), trained(reranker)))
    assert runs[0][0] == runs[1][0]
    assert all(torch.equal(a, b) for a, b in zip(runs[0][1], runs[1][1], strict=True))
    sweep = finish(Sweep([RerankerRun(rerankers(model)[0], seed=3)], data, recipe))
    assert runs[0][0] == [loss for (loss,) in sweep.losses]
    assert seen[: sweep.total] == [(index + 1, sweep.total, loss) for index, loss in enumerate(runs[0][0])]


def one_by_one(model, reranker, trajectory, group, column=0):
    """A group's loss by ordinary forwards over a copied cache, the adapter on the candidate rows alone."""
    cache = Cache()
    with torch.no_grad():
        model(input_ids=trajectory.tokens[None, : group.position], past_key_values=cache, use_cache=True)
    for layer in cache.layers:
        layer.keys = layer.keys.repeat(len(group.candidates), 1, 1, 1)
        layer.values = layer.values.repeat(len(group.candidates), 1, 1, 1)
    lm = causal_lm(reranker.adapted)
    hidden = lm.model(input_ids=group.candidates[:, None], past_key_values=cache, use_cache=True)
    score = hidden.last_hidden_state[:, -1] @ reranker.head
    return -(group.target.view(len(score), -1)[:, column] * score.log_softmax(0)).sum()


def trained(reranker):
    return [p for p in reranker.parameters() if p.requires_grad and p.numel()]


def shaken(model, rank=4, dropout=0.0, **options):
    """A reranker whose every parameter matters."""
    with torch.random.fork_rng(devices=[]):
        torch.manual_seed(1)
        reranker = TokenReranker.from_base(model, rank=rank, dropout=dropout, **options)
        with torch.no_grad():
            for parameter in trained(reranker):
                parameter.copy_(torch.randn_like(parameter) * 0.2)
    return reranker


@pytest.mark.parametrize("microbatches", [1, 3])
def test_gradient_equals_the_one_of_32_accumulated_groups(microbatches):
    model = tiny("qwen3")
    reranker = shaken(model)
    data = trajectories(16)
    sweep = Sweep([RerankerRun(reranker)], data, Optimisation(microbatches=microbatches))
    assert sweep.total == 3
    (packed,) = sweep._gradients()
    for trajectory in data:
        for group in trajectory.groups:
            (one_by_one(model, reranker, trajectory, group) / 32).backward()
    separate = torch.cat([p.grad.flatten() for p in trained(reranker)])
    torch.testing.assert_close(packed[:-1], separate, rtol=1e-3, atol=1e-5)


@pytest.mark.parametrize("size", [1, 2, 3, 5, 32, 100])
def test_a_step_holds_its_groups_whatever_the_trajectory(size):
    def contents(trajectories):
        return sorted((group.position, group.candidates.tolist()) for each in trajectories for group in each.groups)

    data = [*sweep_process.trajectories(), TrainingTrajectory(torch.arange(12), trajectories(1)[0].groups * 20)]
    sweep = Sweep([RerankerRun(shaken(tiny("qwen3")))], data, Optimisation(groups_per_step=size, epochs=2))
    steps = [sum(len(trajectory.groups) for trajectory in step) for step in sweep._steps]
    full, rest = divmod(len(contents(data)), size)
    assert steps == ([size] * full + [rest] * (rest > 0)) * 2
    assert sweep.epoch_ends == [len(steps) // 2, len(steps)]
    for epoch in (sweep._steps[: len(steps) // 2], sweep._steps[len(steps) // 2 :]):
        assert contents(trajectory for step in epoch for trajectory in step) == contents(data)


@pytest.mark.parametrize(
    ("warmup", "rates"),
    [
        (0.3, [1 / 3, 2 / 3, 3 / 3, 6 / 6, 5 / 6, 4 / 6, 3 / 6, 2 / 6, 1 / 6]),
        (0.1, [1, 8 / 8, 7 / 8, 6 / 8, 5 / 8, 4 / 8, 3 / 8, 2 / 8, 1 / 8]),
    ],
)
def test_training_equals_a_plain_loop(warmup, rates):
    """Order, clipping, AdamW, warm-up and decay of the recipe, group by group with torch's own parts."""
    model = tiny("qwen3")
    plain, ours = shaken(model), shaken(model)
    data = trajectories(6)
    recipe = Optimisation(learning_rate=1e-3, warmup=warmup, clip=0.5, groups_per_step=5, epochs=3, seed=5)
    sweep, losses, norms, told = Sweep([RerankerRun(ours, recipe.seed)], data, recipe), [], [], []
    while sweep.step < sweep.total:
        losses += sweep.advance()
        norms += sweep.norms
        told.append(sweep.rate)
    assert told == pytest.approx([1e-3 * rate for rate in rates])
    optimizer = torch.optim.AdamW(trained(plain), lr=1e-3, betas=(0.9, 0.999), weight_decay=0.01)
    order = torch.Generator().manual_seed(5)
    epochs = [
        [(data[at], group) for at in torch.randperm(6, generator=order) for group in data[at].groups] for _ in range(3)
    ]
    expected = []
    for step, rate in zip((epoch[at : at + 5] for epoch in epochs for at in (0, 5, 10)), rates, strict=True):
        shares = [one_by_one(model, plain, trajectory, group) for trajectory, group in step]
        loss = torch.stack(shares).mean()
        optimizer.zero_grad()
        loss.backward()
        norm = torch.nn.utils.clip_grad_norm_(trained(plain), 0.5)
        optimizer.param_groups[0]["lr"] = 1e-3 * rate
        optimizer.step()
        expected.append((loss.item(), norm.item()))
    assert losses == pytest.approx([loss for loss, _ in expected], rel=1e-4)
    assert norms == pytest.approx([norm for _, norm in expected], rel=1e-3)
    for a, b in zip(trained(ours), trained(plain), strict=True):
        torch.testing.assert_close(a, b, rtol=1e-3, atol=1e-4)


def rerankers(model, seed=11, **options):
    """Rerankers of a sweep; `seed` of their adapters."""
    options = {"rank": 2, "dropout": 0.3, **options}
    with torch.random.fork_rng(devices=[]):
        torch.manual_seed(seed)
        return [TokenReranker.from_base(model, **options) for _ in range(3)]


def runs_of(model, **options):
    return [
        RerankerRun(r, seed, column)
        for r, seed, column in zip(rerankers(model, **options), (0, 0, 4), (0, 1, 1), strict=True)
    ]


def finish(sweep):
    while sweep.step < sweep.total:
        sweep.advance()
    return sweep


def same(a, b):
    return a.keys() == b.keys() and all(torch.equal(a[name], b[name]) for name in a)


RECIPE = Optimisation(learning_rate=1e-2, groups_per_step=5, epochs=2, microbatches=2)


@pytest.mark.parametrize("scope", ["candidate", "sequence"])
def test_sweep_equals_its_runs_alone(scope):
    model, data = tiny("qwen3"), sweep_process.trajectories()
    together = finish(Sweep(runs_of(model, scope=scope), data, RECIPE))
    for index, run in enumerate(runs_of(model, scope=scope)):
        alone = finish(Sweep([run], data, RECIPE))
        assert [losses[index] for losses in together.losses] == [loss for (loss,) in alone.losses]
        for a, b in zip(trained(together.runs[index].reranker), trained(run.reranker), strict=True):
            assert torch.equal(a, b)
    assert len({tuple(row[i] for row in together.losses) for i in range(3)}) == 3  # they do differ


def test_prefix_runs_once_a_microbatch_for_all_runs(monkeypatch):
    calls, plain = [], prefill_packed
    monkeypatch.setattr(
        "fb_core.rerank.training.prefill_packed",
        lambda model, seqs, at: calls.append([len(s) for s in seqs]) or plain(model, seqs, at),
    )
    train_reranker(TokenReranker.from_base(tiny("qwen3"), rank=4), trajectories(5), Optimisation(groups_per_step=100))
    assert calls == [[9] * 5] * len(calls)  # up to the last state that is trained on
    calls.clear()
    runs, data = runs_of(tiny("qwen3")), sweep_process.trajectories()
    Sweep(runs, data, Optimisation(groups_per_step=100, microbatches=3)).advance()
    assert len(calls) == 3
    assert sum(map(len, calls)) == 7
    validate(runs, data)
    assert len(calls) == 4


def test_order_epochs_and_generators():
    data = sweep_process.trajectories()
    sweep = Sweep(runs_of(tiny("qwen3")), data, RECIPE)
    longer = Sweep(runs_of(tiny("qwen3")), data, replace(RECIPE, epochs=3))
    assert sweep.epoch_ends == longer.epoch_ends[:2]
    assert sweep.epoch_ends[-1] == sweep.total < longer.total == longer.epoch_ends[-1]
    before = torch.random.get_rng_state()
    losses = sweep.advance()
    assert torch.equal(before, torch.random.get_rng_state())
    assert losses == sweep.losses[0]
    torch.manual_seed(99)  # what the caller draws in between has no part in it
    assert longer.advance() == losses
    finish(sweep)
    with pytest.raises(ValueError, match="advance:"):
        sweep.advance()


def test_microbatches_change_rounding_alone():
    model, data = tiny("qwen3"), sweep_process.trajectories()
    sweeps = []
    for count in (1, 2, 4, 50):
        runs = runs_of(model, dropout=0.0)
        sweeps.append(finish(Sweep(runs, data, replace(RECIPE, microbatches=count))))
    for other in sweeps[1:]:
        torch.testing.assert_close(torch.tensor(other.losses), torch.tensor(sweeps[0].losses), rtol=1e-4, atol=1e-5)


def test_resumes_to_the_same_bits_from_any_step(tmp_path):
    """And validation in between changes nothing."""
    model, data = tiny("qwen3"), sweep_process.trajectories()
    sweep, watched = Sweep(runs_of(model), data, RECIPE), Sweep(runs_of(model), data, RECIPE)
    for step in range(sweep.total + 1):
        save_file(sweep.state(), tmp_path / f"{step}.safetensors")
        if step < sweep.total:
            sweep.advance()
            watched.advance()
            validate(watched.runs, data)
    assert same(sweep.state(), watched.state())
    for step in range(sweep.total + 1):
        resumed = Sweep(runs_of(tiny("qwen3"), seed=step), sweep_process.trajectories(), RECIPE)
        resumed.load_state(load_file(tmp_path / f"{step}.safetensors"))
        assert resumed.step == step
        finish(resumed)
        assert resumed.losses == sweep.losses
        assert same(resumed.state(), sweep.state())
        for run, again in zip(sweep.runs, resumed.runs, strict=True):
            assert all(torch.equal(a, b) for a, b in zip(trained(run.reranker), trained(again.reranker), strict=True))


def test_a_trained_reranker_is_saved_alone(tmp_path):
    model, data = tiny("qwen3"), sweep_process.trajectories()
    sweep = finish(Sweep(runs_of(model), data, RECIPE))
    for index, run in enumerate(sweep.runs):
        run.reranker.save_pretrained(tmp_path / str(index))
        again = TokenReranker.from_pretrained(tmp_path / str(index), model)
        state = ([5, 6], [7, 8, 9])
        assert torch.equal(again.scores(*state), run.reranker.scores(*state))
    sizes = {(tmp_path / str(index) / "adapter_model.safetensors").stat().st_size for index in range(3)}
    assert max(sizes) < 4 * sum(p.numel() for p in trained(sweep.runs[0].reranker)) + 8000


def test_a_state_of_another_sweep_is_refused():
    model, data = tiny("qwen3"), sweep_process.trajectories()
    state = Sweep(runs_of(model), data, RECIPE).state()
    first = runs_of(model)[0]
    reseeded = [replace(first, seed=1), *runs_of(model)[1:]]
    for other, words in (
        (Sweep(runs_of(model), data, replace(RECIPE, learning_rate=1e-3)), "optimisation.learning_rate 0.001"),
        (Sweep(runs_of(model), data, replace(RECIPE, microbatches=1)), "optimisation.microbatches 1"),
        (Sweep(runs_of(tiny("qwen3", seed=1)), data, RECIPE), "base"),
        (Sweep(runs_of(model), data[:-1], RECIPE), "trajectories"),
        (Sweep(reseeded, data, RECIPE), "run 0 .*'seed': 1"),
        (Sweep(runs_of(model)[:2], data, RECIPE), "number of runs 2"),
        (Sweep(runs_of(model, alpha=8), data, RECIPE), "'lora_alpha': 8"),
    ):
        before = other.state()
        with pytest.raises(ValueError, match=f"state: .*{words}"):
            other.load_state(state)
        assert same(other.state(), before)
    sweep = Sweep(runs_of(model), data, RECIPE)
    for change, words in (
        ({"about": torch.zeros(3)}, "state of a sweep"),
        ({"about": torch.tensor(list(b"[]"), dtype=torch.uint8)}, "expected base"),
        *(({"losses": torch.zeros(1, 2)}, "in losses"), ({"run.1.exp_avg": torch.zeros(3)}, "in run.1.exp_avg")),
        ({"run.2.parameters": torch.full_like(state["run.2.parameters"], torch.nan)}, "in run.2.parameters"),
    ):
        with pytest.raises(ValueError, match=words):
            sweep.load_state(state | change)
    for name in state:
        with pytest.raises(ValueError, match="state: expected"):
            sweep.load_state({key: value for key, value in state.items() if key != name})


def test_two_processes_have_the_bytes_of_one(tmp_path):
    processes = [
        context().Process(target=sweep_process.train, args=(tmp_path, environment)) for environment in launched(2)
    ]
    for process in processes:
        process.start()
    alone = finish(sweep_process.sweep()).state()
    for process in processes:
        process.join(HANG)
        assert process.exitcode == 0
    for process in range(2):
        assert same(load_file(tmp_path / f"{process}.safetensors"), alone)


class Pretended:
    """An accelerator of two processes whose other one answers `other`."""

    num_processes, process_index = 2, 0

    def __init__(self, other):
        self.other = other

    def gather(self, tensor):
        return torch.cat([tensor, self.other(tensor)])


def test_processes_that_do_not_fit_are_refused():
    model, data = tiny("qwen3"), sweep_process.trajectories()
    with pytest.raises(ValueError, match="at most one per microbatch, 1, got 2; give the optimisation microbatches=2"):
        Sweep(runs_of(model), data, replace(RECIPE, microbatches=1), Pretended(torch.clone))
    with pytest.raises(ValueError, match="processes:"):
        Sweep(runs_of(model), data, RECIPE, Pretended(lambda tensor: tensor + 1))


def test_metrics_equal_a_plain_loop():
    model, data = tiny("qwen3"), sweep_process.trajectories(20)
    flat = TrainingGroup(5, torch.tensor([4, 5, 6]), torch.full((3, 2), 1 / 3))  # no pair differs
    data.append(TrainingTrajectory(data[0].tokens, [flat]))
    runs = [RerankerRun(shaken(model, dropout=0.5), column=1), RerankerRun(rerankers(model)[0])]
    metrics = validate(runs, data)
    for run, measured in zip(runs, metrics, strict=True):
        losses, agreeing, pairs = [], 0.0, 0
        with torch.no_grad():
            for trajectory in data:
                for group in trajectory.groups:
                    losses.append(one_by_one(model, run.reranker, trajectory, group, run.column))
                    score = run.reranker.scores(trajectory.tokens[: group.position], group.candidates)
                    for a, b in combinations(range(len(score)), 2):
                        wanted = float((group.target[a] - group.target[b])[run.column].sign())
                        agreeing += 0.0 if wanted == 0 else 0.5 + 0.5 * wanted * float((score[a] - score[b]).sign())
                        pairs += wanted != 0
        assert measured.cross_entropy == pytest.approx(float(torch.stack(losses).mean()), rel=1e-4)
        assert measured.pairwise_accuracy == agreeing / pairs
    assert metrics[1].pairwise_accuracy == 0.5  # a zero head ties everything
    for whole, apart in zip(metrics, validate(runs, data, groups_at_once=1), strict=True):
        assert whole.cross_entropy == pytest.approx(apart.cross_entropy)
        assert whole.pairwise_accuracy == apart.pairwise_accuracy
    (nothing,) = validate(runs[:1], [TrainingTrajectory(data[0].tokens, [flat])])
    assert nothing.pairwise_accuracy != nothing.pairwise_accuracy


@pytest.mark.parametrize("broken", ["loss", "gradient"])
def test_what_is_not_finite_stops_every_run(broken, monkeypatch):
    model, data = tiny("qwen3"), sweep_process.trajectories()
    runs = runs_of(model)
    sweep = Sweep(runs, data, RECIPE)
    sweep.advance()
    if broken == "loss":
        with torch.no_grad():
            runs[1].reranker.head[0] = torch.inf
    else:
        plain = torch.autograd.grad
        monkeypatch.setattr(
            torch.autograd,
            "grad",
            lambda loss, of: [g * torch.nan if of[0] is runs[1].reranker.head else g for g in plain(loss, of)],
        )
    before = sweep.state()
    with pytest.raises(ValueError, match=f"{broken}: expected .* in step 2 of run 1"):
        sweep.advance()
    assert torch.equal(before["run.0.parameters"], sweep.state()["run.0.parameters"])
    assert not any(layer.training for run in runs for layer in adapter_dropouts(run.reranker.adapted))


def test_bad_input():
    model, tokens = tiny("qwen3"), torch.tensor([1, 2, 3])
    reranker, other, _ = rerankers(model)

    def state(position=2, candidates=(1, 2), target=(0.5, 0.5), tokens=tokens):
        group = TrainingGroup(position, torch.tensor(candidates), torch.tensor(target))
        return lambda: train_reranker(reranker, [TrainingTrajectory(tokens, [group])])

    def runs(*given):
        return lambda: Sweep([RerankerRun(*each) if isinstance(each, tuple) else each for each in given], good)

    good = sweep_process.trajectories()
    doubled = TokenReranker.from_base(tiny("qwen3").double())
    for call, kind, named in (
        *((lambda name=name: Optimisation(**{name: 0}), ValueError, name) for name in ("epochs", "microbatches")),
        *((lambda: Optimisation(groups_per_step=0), ValueError, "groups_per_step"), (state(4), ValueError, "position")),
        (lambda: Optimisation(learning_rate=float("nan")), ValueError, "learning_rate"),
        *((lambda data=d: train_reranker(reranker, data), ValueError, "at least one group") for d in NOTHING),
        *((state(target=(1.0,)), ValueError, "target"), (state(target=(math.nan, 1.0)), ValueError, "target")),
        *((state(1.5), TypeError, "position"), (state(tokens=torch.tensor([V])), ValueError, "ids from 0")),
        *((lambda it=it: train_reranker(it, good), TypeError, "reranker") for it in (None, model)),
        *((lambda it=it: train_reranker(reranker, it), TypeError, "trajectories") for it in (None, [*good, None])),
        *((lambda: Sweep(None, good), TypeError, "runs"), (runs(), ValueError, "runs")),
        (lambda: validate([reranker], good), TypeError, "TokenReranker"),
        (runs((reranker,), (reranker, 1)), ValueError, "of its own"),
        (runs((reranker,), (rerankers(tiny("qwen3"))[0],)), ValueError, "one base model"),
        (runs((reranker,), (other, 0, 2)), ValueError, r"columns \[0, 2\]"),
        *((runs((reranker, 0, -1)), ValueError, r"columns \[-1\]"), (runs((doubled,)), ValueError, "float32")),
    ):
        with pytest.raises(kind, match=named):
            call()
    assert not reranker.training
    assert all(torch.isfinite(p).all() for p in reranker.parameters())


NOTHING = ([], [TrainingTrajectory(torch.arange(3), [])])
