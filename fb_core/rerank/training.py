"""Distillation of rerankers: group cross-entropy against soft targets, one sweep of runs over shared prefix KV."""

from __future__ import annotations

import hashlib
import json
import math
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import asdict, dataclass
from functools import reduce
from itertools import accumulate
from typing import Any, NamedTuple, Protocol

import torch
from torch import Tensor, nn

from fb_core._util import check_count
from fb_core.models.adapters import adapter_dropouts, classifier_config
from fb_core.models.facts import fingerprint
from fb_core.models.packed import Prefix, packs, prefill_packed
from fb_core.models.tokens import check_group, check_position, token_ids
from fb_core.rerank.reranker import CandidateRows, TokenReranker
from fb_core.score.targets import pairwise_agreement
from fb_kernels import group_cross_entropy

VALIDATED_AT_ONCE = 32  # groups in a forward of `validate`
ABOUT = "about"  # entry of a state that describes its sweep: JSON as bytes


@dataclass(frozen=True)
class TrainingGroup:
    """One state: its position in the trajectory, candidates [K], soft targets [K] or [K, h].

    The columns of [K, h] are those of `group_targets`, one per horizon; [K] is one column.
    """

    position: int
    candidates: Tensor
    target: Tensor


@dataclass(frozen=True)
class TrainingTrajectory:
    """One problem's tokens [T] with the states that are trained on."""

    tokens: Tensor
    groups: Sequence[TrainingGroup]


@dataclass(frozen=True)
class Optimisation:
    """How rerankers are optimised; the defaults are the published ones.

    A step's trajectories are divided into `microbatches` contiguous pieces with about equally many groups; no
    trajectory is cut. Each piece is one forward and backward pass, which saves memory and lets that many processes
    share a step. The bits of a step depend on the number of pieces.

    Raises:
        ValueError: a setting out of range.
    """

    learning_rate: float = 2e-4
    weight_decay: float = 0.01
    betas: tuple[float, float] = (0.9, 0.999)
    warmup: float = 0.03
    clip: float = 1.0
    groups_per_step: int = 32
    epochs: int = 3
    seed: int = 0
    microbatches: int = 1

    def __post_init__(self) -> None:
        for name in ("epochs", "groups_per_step", "microbatches"):
            check_count(name, getattr(self, name), 1, "leave it out for the published value")
        for name in ("learning_rate", "weight_decay", "warmup", "clip"):
            if not 0.0 <= (value := getattr(self, name)) < math.inf:
                raise ValueError(f"{name}: expected 0 or more, got {value}; leave it out for the default")


@dataclass(frozen=True)
class RerankerRun:
    """One reranker of a sweep, the seed of its dropout, and its column of the groups' targets [K, h]."""

    reranker: TokenReranker
    seed: int = 0
    column: int = 0

    def __post_init__(self) -> None:
        if not isinstance(self.reranker, TokenReranker):
            kind = type(self.reranker).__name__
            raise TypeError(f"reranker: expected type TokenReranker, got {kind}; make one with TokenReranker.from_base")


class Processes(Protocol):
    """The part of an `accelerate.Accelerator` that a sweep uses."""

    @property
    def num_processes(self) -> int: ...
    @property
    def process_index(self) -> int: ...
    def gather(self, tensor: Any) -> Any: ...


class GroupMetrics(NamedTuple):
    """Mean cross-entropy of groups in nats, and the share of candidate pairs that are ordered as their targets."""

    cross_entropy: float
    pairwise_accuracy: float


class Sweep:
    """Several rerankers on one frozen base, trained in place on the same trajectories, step by step.

    In scope "candidate" the prefixes of a microbatch run once through the frozen base, whatever the number of runs.
    Each run's candidates then follow in a packed forward of their own, so each run gets the same bits as alone. The
    order of the trajectories is drawn from `optimisation.seed` for every epoch; their groups are cut into steps of
    `groups_per_step`, so a trajectory may continue in the next step, and an epoch's last step holds what is left. The
    loss is the mean over the step's groups. The optimiser is AdamW in float32, with linear warm-up and then linear
    decay to zero. Dropout is seeded by run seed, step and microbatch, so there is no generator state to save, and the
    caller's generators are left alone.

    With an accelerator, process p of W computes the microbatches p, p + W, ..., and every process adds the gathered
    gradients in the order of the microbatches. The number of processes therefore changes no bit, given the same number
    of threads in each. Every process makes the sweep with the same arguments and starts from the parameters of process
    0.

    Args:
        runs: rerankers on one base model (the same object); in eval mode between the steps.
        trajectories: the training states.
        optimisation: settings; the published ones if left out.
        accelerator: an `accelerate.Accelerator` under `accelerate launch`.

    Attributes:
        total: the number of steps.
        epoch_ends: the numbers of steps after which an epoch is complete.
        losses: for each step done, one loss per run, nats.
        norms: of the runs' gradients in this process's last step, before clipping.
        rate: the learning rate of that step.

    Raises:
        TypeError: runs or trajectories of another type, ids or positions that are not integers.
        ValueError: no runs, a reranker given twice, different bases, parameters that are not float32, no groups,
            targets without a run's column, an id outside the vocabulary, more processes than microbatches, or processes
            with different arguments.
    """

    def __init__(
        self,
        runs: Sequence[RerankerRun],
        trajectories: Sequence[TrainingTrajectory],
        optimisation: Optimisation | None = None,
        accelerator: Processes | None = None,
    ) -> None:
        checked = _checked(runs, trajectories)
        self.runs = tuple(runs)
        self.optimisation = optimisation or Optimisation()
        self._device = self.runs[0].reranker.base.device
        epochs = _epochs(checked, self.optimisation)
        self._steps = [step for steps in epochs for step in steps]
        self.total = len(self._steps)
        self._about = _about(self.runs, checked, self.optimisation) | {"steps": self.total}
        self._processes = accelerator if accelerator is not None and accelerator.num_processes > 1 else None
        self._check_processes()
        self.epoch_ends = list(accumulate(len(steps) for steps in epochs))
        self.losses: list[list[float]] = []
        self.norms: list[float] = []
        self.rate = 0.0
        self._dropouts = [layer for run in self.runs for layer in adapter_dropouts(run.reranker.adapted)]
        self._parameters = [_trained(run.reranker) for run in self.runs]
        self._tensors: dict[str, Tensor] = {}  # all that a step changes, flat
        self._weights: list[Tensor] = []  # each run's adapter and head, flat
        for index, parameters in enumerate(self._parameters):
            flat = self._gather(torch.cat([parameter.detach().flatten() for parameter in parameters]))[0].clone()
            for parameter, piece in zip(parameters, flat.split([p.numel() for p in parameters]), strict=True):
                parameter.data = piece.view_as(parameter)
            tensors = {"parameters": flat, "exp_avg": torch.zeros_like(flat), "exp_avg_sq": torch.zeros_like(flat)}
            self._tensors |= {f"run.{index}.{name}": tensor for name, tensor in tensors.items()}
            self._weights.append(flat)
        self._optimizer = torch.optim.AdamW(
            self._weights, betas=self.optimisation.betas, weight_decay=self.optimisation.weight_decay
        )
        for index, weight in enumerate(self._weights):
            moments = {name: self._tensors[f"run.{index}.{name}"] for name in ("exp_avg", "exp_avg_sq")}
            self._optimizer.state[weight] = {"step": torch.tensor(0.0), **moments}

    @property
    def step(self) -> int:
        """The number of steps done."""
        return len(self.losses)

    def advance(self) -> list[float]:
        """Take one optimiser step of every run; on an error, of none.

        Returns:
            the runs' losses in nats, the same on all processes.

        Raises:
            ValueError: all steps are done, or a loss or gradient is not finite (every run then keeps its last state).
        """
        if self.step == self.total:
            raise ValueError(f"advance: expected fewer than {self.total} steps done, got all; give more epochs")
        norms, losses = [], []
        for weight, gradient in zip(self._weights, self._gradients(), strict=True):
            weight.grad = gradient[:-1]
            norms.append(nn.utils.clip_grad_norm_(weight, self.optimisation.clip))
            losses.append(gradient[-1])
        measured = torch.stack([torch.stack(losses), torch.stack(norms)]).tolist()
        names = ("loss: expected a finite number", "gradient: expected a finite norm")
        for name, values in zip(names, measured, strict=True):
            for run, value in enumerate(values):
                if not math.isfinite(value):
                    raise ValueError(f"{name}, got {value} in step {self.step + 1} of run {run}; lower the rate")
        self.norms = measured[1]
        self.rate = self.optimisation.learning_rate * _linear(self.step, self.total, self.optimisation.warmup)
        self._optimizer.param_groups[0]["lr"] = self.rate
        self._optimizer.step()
        self._optimizer.zero_grad()
        self.losses.append(measured[0])
        return list(measured[0])

    def state(self) -> dict[str, Tensor]:
        """Everything needed to resume, as copies on the CPU for one safetensors file.

        Returns:
            `run.<i>.parameters`, `.exp_avg` and `.exp_avg_sq`, float32 [n]; `losses`, float32 [steps done, runs];
            `about`, uint8: JSON that describes the sweep.
        """
        about = torch.tensor(list(json.dumps(self._about).encode()), dtype=torch.uint8)
        losses = torch.tensor(self.losses, dtype=torch.float32).view(-1, len(self.runs))
        return {name: tensor.to("cpu", copy=True) for name, tensor in self._tensors.items()} | {
            "losses": losses,
            ABOUT: about,
        }

    def load_state(self, state: Mapping[str, Tensor]) -> None:
        """Resume a sweep of the same runs, trajectories and optimisation; later steps have the same bits.

        Args:
            state: as from `state`; the number of processes may differ.

        Raises:
            ValueError: the state of another sweep, or a damaged one; nothing is changed then.
        """
        again = "take the file that state was saved to"
        try:
            theirs = dict(json.loads(bytes(state[ABOUT].tolist())))
        except (KeyError, TypeError, ValueError, RecursionError) as problem:
            raise ValueError(f"state: expected the state of a sweep, got {problem!r} in {ABOUT}; {again}") from problem
        for name in self._about | theirs:
            if self._about.get(name) != theirs.get(name):
                raise ValueError(
                    f"state: expected {name} {self._about.get(name)}, got {theirs.get(name)}; "
                    "resume with the runs, trajectories and optimisation that it was saved with"
                )
        losses = state.get("losses", torch.empty(0))
        steps = min(losses.numel() // len(self.runs), self.total)
        for name, tensor in (self._tensors | {"losses": torch.empty(steps, len(self.runs))}).items():
            saved = state.get(name, torch.empty(0))
            if saved.shape != tensor.shape or saved.dtype != tensor.dtype or not bool(saved.isfinite().all()):
                raise ValueError(
                    f"state: expected finite float32 {list(tensor.shape)} in {name}, got {saved.dtype} "
                    f"{list(saved.shape)}; {again}"
                )
        for name, tensor in self._tensors.items():
            tensor.copy_(state[name])
        self.losses = losses.tolist()
        for moments in self._optimizer.state.values():
            moments["step"].fill_(self.step)

    def check_step(self) -> None:
        """ValueError if the processes of the sweep are at different steps."""
        steps = self._gather(torch.tensor([self.step], device=self._device)).flatten().tolist()
        if len(set(steps)) > 1:
            raise ValueError(
                f"processes: expected all at one step, got {steps}; let them load the same checkpoint, then start again"
            )

    def _gather(self, tensor: Tensor) -> Tensor:
        """[n] of this process -> [W, n] of all."""
        if self._processes is None:
            return tensor[None]
        return self._processes.gather(tensor).view(-1, len(tensor))

    def _check_processes(self) -> None:
        count = 1 if self._processes is None else self._processes.num_processes
        if count > self.optimisation.microbatches:
            raise ValueError(
                f"processes: expected at most one per microbatch, {self.optimisation.microbatches}, got {count}; "
                f"give the optimisation microbatches={count} or start fewer"
            )
        digest = hashlib.sha256(json.dumps(self._about).encode()).digest()
        digests = self._gather(torch.tensor(list(digest), device=self._device))
        if bool((digests != digests[0]).any()):
            raise ValueError(
                "processes: expected the same runs, trajectories and optimisation in all, got different ones; "
                "build them from the same files in the same order"
            )

    def _gradients(self) -> list[Tensor]:
        """For each run [n + 1], gradient and loss: the microbatches' shares, added in their order."""
        trajectories = self._steps[self.step]
        groups = sum(len(trajectory.groups) for trajectory in trajectories)
        pieces = _pieces(trajectories, self.optimisation.microbatches)
        index, stride = 0, 1
        if self._processes is not None:
            index, stride = self._processes.process_index, self._processes.num_processes
        sums: list[list[Tensor]] = [[] for _ in self.runs]
        with _training(self._dropouts, self._device):
            for first in range(0, len(pieces), stride):
                mine = first + index
                batch = None  # frees its prefixes before the next ones are computed
                batch = _Batch.build(self.runs, pieces[mine]) if mine < len(pieces) else None
                for run, total in enumerate(sums):
                    share = self._share(run, batch, mine, groups)
                    total[:] = [reduce(torch.add, [*total, *self._gather(share)[: len(pieces) - first]])]
        return [total[0] for total in sums]

    def loss(self, scores: Tensor, target: Tensor, cu_group: Tensor) -> Tensor:
        """The loss of scores [N] against targets [N], summed over the groups, which begin at cu_group [G + 1]."""
        return group_cross_entropy(scores, target, cu_group, reduction="sum")

    def _share(self, run: int, batch: _Batch | None, microbatch: int, groups: int) -> Tensor:
        """[n + 1]: gradient and loss of one microbatch as parts of the step's mean; zeros without a microbatch."""
        parameters = self._parameters[run]
        if batch is None:
            return torch.zeros(sum(p.numel() for p in parameters) + 1, device=self._device)
        _seed(self._device, self.runs[run].seed, self.step, microbatch)
        loss = self.loss(batch.scores(self.runs[run].reranker), batch.target[:, run], batch.cu_group) / groups
        gradients = torch.autograd.grad(loss, parameters)
        return torch.cat([*(gradient.flatten() for gradient in gradients), loss.detach()[None]])


def train_reranker(
    reranker: TokenReranker,
    trajectories: Sequence[TrainingTrajectory],
    optimisation: Optimisation | None = None,
    on_step: Callable[[int, int, float], None] | None = None,
) -> list[float]:
    """Train adapter and head in place by group cross-entropy: a `Sweep` of one run.

    Args:
        reranker: as from `TokenReranker.from_base`; in eval mode afterwards.
        trajectories: the training states; the first column of their targets is used.
        optimisation: settings; the published ones if left out.
        on_step: called with (steps done, total steps, loss).

    Returns:
        the loss of every step, nats.

    Raises:
        TypeError: arguments of another type, ids or positions that are not integers.
        ValueError: no groups, a target of another length than its candidates, an id outside the vocabulary, or a loss
            or gradient that is not finite (the reranker then keeps its last finite state).
    """
    optimisation = optimisation or Optimisation()
    sweep = Sweep([RerankerRun(reranker, optimisation.seed)], trajectories, optimisation)
    losses: list[float] = []
    while sweep.step < sweep.total:
        losses += sweep.advance()
        if on_step is not None:
            on_step(sweep.step, sweep.total, losses[-1])
    return losses


@torch.no_grad()
def validate(
    runs: Sequence[RerankerRun], trajectories: Sequence[TrainingTrajectory], groups_at_once: int = VALIDATED_AT_ONCE
) -> list[GroupMetrics]:
    """How well each run's scores fit the targets of held-out groups; prefix KV is shared among the runs.

    Args:
        runs: rerankers on one base model (the same object); in eval mode afterwards.
        trajectories: the held-out states.
        groups_at_once: approximate number of groups in one forward; their prefixes take the memory.

    Returns:
        for each run the mean cross-entropy of the groups against its column of the targets, and the share of candidate
        pairs with different targets that the scores order as the targets do, with ties counted as half (NaN without
        such pairs).

    Raises:
        TypeError: ids or positions that are not integers.
        ValueError: as `Sweep`, or NaN scores.
    """
    checked = _checked(runs, trajectories)
    counts = [len(trajectory.groups) for trajectory in checked]
    sums = [[0.0, 0.0, 0.0] for _ in runs]  # loss, agreeing pairs, comparable pairs
    batch = None
    for first, last in packs(counts, groups_at_once):
        del batch  # frees its prefixes before the next ones are computed
        batch = _Batch.build(runs, checked[first:last])
        for index, run in enumerate(runs):
            scores = batch.scores(run.reranker)
            target = batch.target[:, index]
            sums[index][0] += float(group_cross_entropy(scores, target, batch.cu_group, reduction="sum"))
            sizes = [len(group.candidates) for group in batch.groups]
            columns = (scores.cpu(), target.cpu())
            for score, target in zip(*(column.split(sizes) for column in columns), strict=True):
                agreeing, comparable = pairwise_agreement(score.numpy(), target.numpy())
                sums[index][1] += agreeing
                sums[index][2] += comparable
    return [
        GroupMetrics(loss / sum(counts), agreeing / comparable if comparable else math.nan)
        for loss, agreeing, comparable in sums
    ]


@dataclass(frozen=True)
class _Batch:
    """The G groups of some trajectories with N candidates, the same for all R runs."""

    trajectories: Sequence[TrainingTrajectory]
    groups: list[TrainingGroup]
    rows: CandidateRows | None  # over the frozen prefixes; None where no run is of scope "candidate"
    cu_group: Tensor  # [G + 1]
    target: Tensor  # [N, R]

    @classmethod
    def build(cls, runs: Sequence[RerankerRun], trajectories: Sequence[TrainingTrajectory]) -> _Batch:
        base = runs[0].reranker.base
        groups = [group for trajectory in trajectories for group in trajectory.groups]
        rows = None
        if any(run.reranker.scope == "candidate" for run in runs):
            lengths = [max(group.position for group in trajectory.groups) for trajectory in trajectories]
            cut = [trajectory.tokens[:length] for trajectory, length in zip(trajectories, lengths, strict=True)]
            positions = [[group.position for group in trajectory.groups] for trajectory in trajectories]
            prefixes = [
                Prefix(whole.kv, whole.start, group.position)
                for whole, trajectory in zip(prefill_packed(base, cut, positions), trajectories, strict=True)
                for group in trajectory.groups
            ]
            rows = CandidateRows.of(prefixes, [group.candidates for group in groups])
        ends = accumulate(len(group.candidates) for group in groups)
        cu_group = torch.tensor([0, *ends], dtype=torch.int32, device=base.device)
        return cls(trajectories, groups, rows, cu_group, torch.cat([group.target for group in groups]))

    def scores(self, reranker: TokenReranker) -> Tensor:
        """float32 [N]."""
        if reranker.scope == "candidate" and self.rows is not None:
            return reranker.packed_scores(self.rows)
        return torch.cat(
            [
                reranker.scores(trajectory.tokens[: group.position], group.candidates)
                for trajectory in self.trajectories
                for group in trajectory.groups
            ]
        )


@contextmanager
def _training(dropouts: Sequence[nn.Module], device: torch.device) -> Iterator[None]:
    """Switches the adapters' dropout on, and restores the caller's generators afterwards."""
    with torch.random.fork_rng(devices=[device] if device.type == "cuda" else []):
        try:
            for layer in dropouts:
                layer.train()
            yield
        finally:
            for layer in dropouts:
                layer.eval()


def _seed(device: torch.device, *key: int) -> None:
    """Seed the generator that dropout draws from, and no other."""
    seed = int.from_bytes(hashlib.sha256(repr(key).encode()).digest()[:8], "big")
    generator = torch.cuda.default_generators[device.index] if device.type == "cuda" else torch.default_generator
    generator.manual_seed(seed)


def _linear(step: int, total: int, warmup: float) -> float:
    rising = max(1, math.ceil(total * warmup))
    return (step + 1) / rising if step < rising else max(0.0, (total - step) / max(1, total - rising))


def _epochs(
    trajectories: Sequence[TrainingTrajectory], optimisation: Optimisation
) -> list[list[list[TrainingTrajectory]]]:
    """The epochs, each in its own order and cut into steps of `groups_per_step` groups; the last holds the rest."""
    order = torch.Generator().manual_seed(optimisation.seed)
    epochs = []
    for _ in range(optimisation.epochs):
        steps: list[list[TrainingTrajectory]] = []
        room = 0  # for groups in the last step
        for index in torch.randperm(len(trajectories), generator=order).tolist():
            tokens, groups = trajectories[index].tokens, trajectories[index].groups
            while groups:
                if not room:
                    steps.append([])
                    room = optimisation.groups_per_step
                steps[-1].append(TrainingTrajectory(tokens, groups[:room]))
                taken = len(steps[-1][-1].groups)
                groups, room = groups[taken:], room - taken
        epochs.append(steps)
    return epochs


def _pieces(trajectories: Sequence[TrainingTrajectory], count: int) -> list[list[TrainingTrajectory]]:
    """At most `count` contiguous pieces, none empty: a trajectory goes where its middle is in an even division."""
    ends = list(accumulate(len(trajectory.groups) for trajectory in trajectories))
    pieces: dict[int, list[TrainingTrajectory]] = {}
    for trajectory, end in zip(trajectories, ends, strict=True):
        middle = 2 * end - len(trajectory.groups)
        pieces.setdefault(middle * count // (2 * ends[-1]), []).append(trajectory)
    return list(pieces.values())


def _trained(reranker: TokenReranker) -> list[nn.Parameter]:
    """The parameters that train."""
    parameters = [parameter for parameter in reranker.parameters() if parameter.requires_grad]
    for parameter in parameters:
        if parameter.dtype != torch.float32:
            raise ValueError(
                f"reranker: expected float32 parameters, got {parameter.dtype}; "
                "make it on a base in float32, bfloat16 or float16"
            )
    return parameters


def _about(
    runs: Sequence[RerankerRun], trajectories: Sequence[TrainingTrajectory], optimisation: Optimisation
) -> dict[str, Any]:
    """The description of a sweep that its state holds, as JSON gives it back."""
    about: dict[str, Any] = {"base": fingerprint(runs[0].reranker.base), "number of runs": len(runs)}
    for index, run in enumerate(runs):
        config = classifier_config(run.reranker.adapted)
        about[f"run {index}"] = {
            "seed": run.seed,
            "column": run.column,
            "scope": run.reranker.scope,
            **{name: config[name] for name in ("r", "lora_alpha", "lora_dropout")},
        }
    about |= {f"optimisation.{name}": value for name, value in asdict(optimisation).items()}
    about["trajectories"] = _digest(trajectories)
    return json.loads(json.dumps(about))


def _digest(trajectories: Sequence[TrainingTrajectory]) -> str:
    digest = hashlib.sha256()
    for trajectory in trajectories:
        tensors = [trajectory.tokens]
        for group in trajectory.groups:
            tensors += [torch.tensor(group.position), group.candidates, group.target]
        for tensor in tensors:
            digest.update(repr((tensor.dtype, tuple(tensor.shape))).encode())
            digest.update(tensor.cpu().numpy().tobytes())
    return digest.hexdigest()[:32]


def _checked(runs: Sequence[RerankerRun], trajectories: Sequence[TrainingTrajectory]) -> list[TrainingTrajectory]:
    """The trajectories that have groups, checked, and the rerankers in eval mode."""
    _check_list("runs", runs, RerankerRun)
    _check_list("trajectories", trajectories, TrainingTrajectory)
    rerankers = [run.reranker for run in runs]
    if not rerankers or len({id(reranker) for reranker in rerankers}) < len(rerankers):
        raise ValueError(
            f"runs: expected at least one, each with a reranker of its own, got {len(rerankers)} with "
            f"{len({id(reranker) for reranker in rerankers})}; make one with TokenReranker.from_base for each run"
        )
    if any(reranker.base is not rerankers[0].base for reranker in rerankers):
        raise ValueError("runs: expected rerankers on one base model, got several; make all on the same object")
    for reranker in rerankers:
        reranker.eval()
    checked = [_checked_trajectory(runs, trajectory) for trajectory in trajectories if trajectory.groups]
    if not checked:
        raise ValueError("trajectories: expected at least one group to train on, got none; collect more states")
    return checked


def _check_list(name: str, given: Sequence[Any], kind: type) -> None:
    """TypeError for what is not a list, or holds anything but this kind."""
    others = [each for each in given if not isinstance(each, kind)] if isinstance(given, Sequence) else [given]
    if others:
        got = type(others[0]).__name__
        raise TypeError(f"{name}: expected a list of {kind.__name__}, got {got}; make a {kind.__name__} of each")


def _checked_trajectory(runs: Sequence[RerankerRun], trajectory: TrainingTrajectory) -> TrainingTrajectory:
    """The trajectory with its states checked, targets [K, R] of the runs."""
    base = runs[0].reranker.base
    tokens = token_ids("tokens", trajectory.tokens, base)
    columns = [run.column for run in runs]
    groups = []
    for group in trajectory.groups:
        position = check_position(group.position, len(tokens))
        candidates = check_group(base, position, group.candidates)
        target = group.target[:, None] if group.target.ndim == 1 else group.target
        fits = (
            target.ndim == 2 and len(target) == len(candidates) and 0 <= min(columns) <= max(columns) < target.shape[1]
        )
        if not fits or not bool(target.isfinite().all()):
            raise ValueError(
                f"target: expected one finite number per candidate, [{len(candidates)}] or [{len(candidates)}, h] with "
                f"columns {sorted(set(columns))}, got {list(group.target.shape)} {group.target.tolist()}; "
                "build targets with group_targets"
            )
        target = target[:, columns].to(base.device, torch.float32)
        groups.append(TrainingGroup(position, candidates, target))
    return TrainingTrajectory(tokens, groups)
