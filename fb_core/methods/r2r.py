"""R2R: a small network looks at every token the SLM is about to write and has the LLM write the divergent ones.

Source: Fu et al., "R2R: Efficiently Navigating Divergent Reasoning Paths with Small-Large Model Token Routing", arXiv
2505.21600, and its software thu-nics/R2R. Definition:

- router: the SLM's last hidden state, the embedding of its likeliest token and its 100 largest logits (projected to the
  hidden size), side by side, projected to `width`, then residual blocks (layer norm, two linear layers) and one output;
- routing: where the router's probability reaches the threshold (equality routes), the LLM's argmax is appended instead
  of the SLM's; the SLM goes on behind it. The entropy switch does the same with the entropy of the whole distribution;
- labels: a position where both greedy tokens differ is divergent if that changes the outcome, all others are not;
- training: AdamW on the binary cross-entropy, positives weighted by the ratio of both classes;
- threshold: the fewest routed positions whose recall on held-out labels is at least 0.95 (resource/
  default_training_config.json "optimizing", r2r/train/optimizer.py `threshold_optimal_threshold`).

Where the paper has a language model judge whether both continuations say the same, here the LLM's continuations up to
their answers are verified: divergent means wrong behind the SLM's token and right behind the LLM's own. Training runs a
set number of epochs, without the published early stopping on a validation set. The threshold is exact, where the
software looks at 100 values from 0.01 to 0.99.
"""

from __future__ import annotations

import json
import math
import os
from collections.abc import Sequence
from numbers import Integral
from pathlib import Path
from typing import Literal, NamedTuple

import torch
from safetensors import SafetensorError
from safetensors.torch import load_file, save_file
from torch import Tensor, nn
from torch.nn import functional as F
from torch.nn.utils.rnn import pad_sequence

from fb_core import hf
from fb_core.decoding import CollaborativeDecoder, Event, Generation
from fb_core.llm import LLM, MAX_ROWS, Ids, Row, Step, batches, check_max_new_tokens, checked_prompts, lockstep
from fb_core.policy import RequestPolicy
from fb_core.pool import LARGE, SLM, candidate_pool
from fb_core.selectors import LLMPreference
from fb_core.verify import Verifier

Mode = Literal["token", "events", "entropy"]
WEIGHTS, DESCRIPTION, FORMAT = "router.safetensors", "router.json", 1
LARGEST = {"logits_size": 1 << 20, "width": 1 << 16, "blocks": 256, "expansion": 64}


class RouterFeatures(NamedTuple):
    """What the router sees at n positions."""

    hidden: Tensor  # [n, D] float32, behind the final norm
    logits: Tensor  # [n, L] float32, the largest, falling
    embedding: Tensor  # [n, E] float32, of `token`
    token: Tensor  # [n] int64, the SLM's likeliest


class Divergence(NamedTuple):
    """The labels of one trajectory, for every token of its response."""

    differs: Tensor  # [n] bool: SLM and LLM would write another token here
    divergent: Tensor  # [n] bool: and behind the SLM's the LLM no longer finds the right answer


class R2RRouter(nn.Module):
    """The probability that the SLM's next token is divergent: float32, made on the CPU.

    Args:
        slm: the small model whose features it reads; only sizes and a fingerprint are kept.
        logits_size: number of largest logits, clamped to the vocabulary.
        width: of the residual blocks.
        blocks: their number.
        expansion: their inner width by their width.
        dropout: while training.
        seed: of the initial weights; the global generator is left as it was.

    Raises:
        TypeError: `slm` is not a transformers model.
        ValueError: a model in training mode, or a size out of range.
    """

    def __init__(
        self,
        slm: hf.CausalLM,
        *,
        logits_size: int = 100,
        width: int = 1024,
        blocks: int = 6,
        expansion: int = 4,
        dropout: float = 0.1,
        seed: int = 0,
    ) -> None:
        super().__init__()
        hf.check_decodable("slm", slm)
        sizes = {"logits_size": logits_size, "width": width, "blocks": blocks, "expansion": expansion}
        for name, size in sizes.items():
            if not isinstance(size, Integral) or not 1 <= size <= LARGEST[name]:
                raise ValueError(f"{name}: expected 1 to {LARGEST[name]}, got {size}; leave it out for the default")
        if not isinstance(dropout, int | float) or not 0.0 <= dropout < 1.0:
            raise ValueError(f"dropout: expected 0 or more and below 1, got {dropout}; the published value is 0.1")
        self.logits_size = min(logits_size, hf.vocabulary(slm))
        self.settings = {**sizes, "logits_size": self.logits_size, "dropout": dropout}
        self.base = hf.fingerprint(slm)
        hidden, embedding = hf.lm_head(slm).weight.shape[1], slm.get_input_embeddings().weight.shape[1]
        with torch.random.fork_rng(devices=[]):
            torch.manual_seed(seed)
            self.logits_projection = nn.Linear(self.logits_size, hidden)
            self.projection = nn.Linear(2 * hidden + embedding, width)
            self.blocks = nn.ModuleList(
                nn.Sequential(
                    nn.LayerNorm(width),
                    nn.Linear(width, expansion * width),
                    nn.GELU(),
                    nn.Dropout(dropout),
                    nn.Linear(expansion * width, width),
                    nn.Dropout(dropout),
                )
                for _ in range(blocks)
            )
            self.head = nn.Sequential(nn.LayerNorm(width), nn.Linear(width, 1))

    def forward(self, features: RouterFeatures) -> Tensor:
        """The logit [n] of the probability."""
        x = torch.cat([features.hidden, features.embedding, self.logits_projection(features.logits)], -1)
        x = self.projection(x)
        for block in self.blocks:
            x = x + block(x)
        return self.head(x)[:, 0]

    @torch.no_grad()
    def probability(self, features: RouterFeatures) -> Tensor:
        """float32 [n]: that the SLM's token is divergent."""
        return self(features).sigmoid()

    def save_pretrained(self, directory: str | os.PathLike[str]) -> None:
        """Write router.safetensors and router.json, to temporary names first."""
        folder = Path(directory)
        folder.mkdir(parents=True, exist_ok=True)
        description = {"format": FORMAT, "base": self.base, "settings": self.settings}
        weights, about = folder / f".{WEIGHTS}.{os.getpid()}", folder / f".{DESCRIPTION}.{os.getpid()}"
        save_file({name: value.contiguous() for name, value in self.state_dict().items()}, weights)
        about.write_text(json.dumps(description, indent=2))
        os.replace(weights, folder / WEIGHTS)
        os.replace(about, folder / DESCRIPTION)

    @classmethod
    def from_pretrained(cls, directory: str | os.PathLike[str], slm: hf.CausalLM) -> R2RRouter:
        """Load what `save_pretrained` wrote, in eval mode on the device of the SLM that it was trained with.

        Raises:
            TypeError: `slm` is not a transformers model.
            ValueError: missing or damaged files, or another SLM.
        """
        folder = Path(directory)
        try:
            if (size := (folder / DESCRIPTION).stat().st_size) > 1 << 20:
                raise ValueError(f"a description of {size} bytes")
            description = json.loads((folder / DESCRIPTION).read_text(encoding="utf-8"))
            tensors = load_file(folder / WEIGHTS)
        except (OSError, ValueError, RecursionError, SafetensorError) as problem:
            raise ValueError(f"{folder}: expected a router's two files, got {problem}; save it again") from problem
        settings = description.get("settings") if isinstance(description, dict) else None
        if not isinstance(settings, dict) or description.get("format") != FORMAT or set(settings) != SETTINGS:
            raise ValueError(
                f"{folder / DESCRIPTION}: expected format {FORMAT} with its settings, got something else; load it with "
                "the version that wrote it"
            )
        with torch.device("meta"):  # a stated size costs no memory before the weights agree with it
            router = cls(slm, **settings)
        if description.get("base") != router.base:
            raise ValueError(
                f"slm: expected the model that the router in {folder} was trained with, got a {type(slm).__name__} "
                "with other weights or architecture; load that model"
            )
        try:
            router.load_state_dict(tensors, assign=True)
        except RuntimeError as problem:
            raise ValueError(
                f"{folder / WEIGHTS}: expected the weights of its settings, got {' '.join(str(problem).split())}; save "
                "the router again"
            ) from problem
        if any(value.dtype != torch.float32 or not bool(value.isfinite().all()) for value in tensors.values()):
            raise ValueError(f"{folder / WEIGHTS}: expected finite float32 weights, got others; save the router again")
        return router.to(slm.device).eval()


SETTINGS = {*LARGEST, "dropout"}


@torch.no_grad()
def router_features(
    slm: hf.CausalLM,
    trajectories: Sequence[tuple[Ids, Ids]],
    *,
    logits_size: int = 100,
    vocabulary: int | None = None,
    batch_tokens: int = 65536,
) -> list[RouterFeatures]:
    """What the router would see before every token of many responses, teacher-forced in right-padded batches.

    Args:
        slm: the small model, in eval mode.
        trajectories: (prompt [P], response [n]) token ids of each.
        logits_size: number of largest logits, clamped to the vocabulary.
        vocabulary: ids from here on never count; None for all of the model's.
        batch_tokens: the most tokens, padding included, of one batch.

    Returns:
        The n rows of every trajectory, row i before response[i].

    Raises:
        TypeError: ids that are not integers, or `slm` is not a transformers model.
        ValueError: no prompt, an id outside the vocabulary, another device or shape, too many tokens for the model, or
            a model in training mode.
    """
    hf.check_decodable("slm", slm)
    prompts = checked_prompts("prompt", [prompt for prompt, _ in trajectories], slm, room=0)
    responses = [hf.token_ids("response", response, slm) for _, response in trajectories]
    joined = [torch.cat(pair) for pair in zip(prompts, responses, strict=True)]
    checked_prompts("trajectory", joined, slm, room=0)
    found: dict[int, RouterFeatures] = {}
    for rows in batches([len(ids) for ids in joined], 0, batch_tokens):
        ids = pad_sequence([joined[row] for row in rows], batch_first=True)  # causal: nobody sees the padding behind
        for row, hidden in zip(rows, slm.base_model(input_ids=ids, use_cache=False).last_hidden_state, strict=True):
            read = hidden[len(prompts[row]) - 1 : len(joined[row]) - 1]
            parts = [
                _features(slm, part, hf.logits(slm, part)[:, :vocabulary], logits_size) for part in read.split(MAX_ROWS)
            ]
            found[row] = _joined(parts)
    return [found[row] for row in range(len(joined))]


def divergence_labels(
    slm: hf.CausalLM,
    llm: LLM,
    trajectories: Sequence[tuple[Ids, Ids]],
    golds: Sequence[str],
    tokenizer: hf.Tokenizer,
    verifier: Verifier,
    max_new_tokens: int = 4096,
) -> list[Divergence]:
    """Where the SLM's token instead of the LLM's costs the right answer.

    The LLM is asked for its token before every token of a response, and for its continuation behind the SLM's token
    where both differ; where that ends wrong, also for the continuation behind its own.

    Args:
        slm: the small model, in eval mode.
        llm: the large one.
        trajectories: (prompt [P], response [n]) token ids; the published method takes the LLM's own responses.
        golds: the right answer of each.
        tokenizer: the one both models use.
        verifier: judges the answers.
        max_new_tokens: the most tokens of an answer, the response up to the position included.

    Returns:
        The labels of every trajectory, in order.

    Raises:
        TypeError: as `router_features`.
        ValueError: as `router_features`, not one gold for each trajectory, or max_new_tokens below 1.
    """
    check_max_new_tokens(max_new_tokens)
    if len(golds) != len(trajectories):
        raise ValueError(
            f"golds: expected one for each of {len(trajectories)} trajectories, got {len(golds)}; pass them in order"
        )
    known = max(tokenizer.get_vocab().values()) + 1
    features = router_features(slm, trajectories, logits_size=1, vocabulary=known)
    ends = hf.eos_ids(slm) | llm.ends
    prompts = [torch.as_tensor(prompt).tolist() for prompt, _ in trajectories]
    responses = [torch.as_tensor(response).tolist() for _, response in trajectories]
    places = [(row, place) for row, response in enumerate(responses) for place in range(len(response))]
    large = llm.candidates_many([prompts[row] + responses[row][:place] for row, place in places], 1) if places else []
    small = [token for rows in features for token in rows.token.tolist()]

    def right(asked: Sequence[tuple[int, int, int]]) -> list[bool]:
        """Whether the LLM's answer is correct behind each (row, place, token)."""
        answers = [[*responses[row][:place], token] for row, place, token in asked]
        going = [i for i, answer in enumerate(answers) if answer[-1] not in ends and len(answer) < max_new_tokens]
        if going:
            states = [prompts[asked[i][0]] + answers[i] for i in going]
            longest = max(max_new_tokens - len(answers[i]) for i in going)
            for i, rest in zip(going, llm.complete_many(states, longest), strict=True):
                answers[i] = (answers[i] + rest.tolist())[:max_new_tokens]
        texts = [str(tokenizer.decode(answer, skip_special_tokens=True)) for answer in answers]
        return [verdict == "correct" for verdict in verifier.verify_many(texts, [golds[row] for row, _, _ in asked])]

    theirs = [int(answer.ids[0]) for answer in large]
    differing = [i for i, (mine, their) in enumerate(zip(small, theirs, strict=True)) if mine != their]
    saved = right([(*places[i], small[i]) for i in differing])
    lost = [i for i, fine in zip(differing, saved, strict=True) if not fine]
    curable = right([(*places[i], theirs[i]) for i in lost])
    differs, divergent = torch.zeros(2, len(places), dtype=torch.bool)
    differs[differing] = True
    divergent[[i for i, cured in zip(lost, curable, strict=True) if cured]] = True
    lengths = [len(response) for response in responses]
    return [Divergence(*pair) for pair in zip(differs.split(lengths), divergent.split(lengths), strict=True)]


def train_router(
    router: R2RRouter,
    features: Sequence[RouterFeatures],
    labels: Sequence[Tensor],
    *,
    epochs: int = 50,
    batch_size: int = 1024,
    learning_rate: float = 5e-5,
    weight_decay: float = 5e-4,
    recall_factor: float = 1.0,
    seed: int = 0,
) -> list[float]:
    """Train in place; the result is a function of the arguments, and the global generator is left as it was.

    Args:
        router: trained and left in eval mode.
        features: as from `router_features`.
        labels: [n] bool of each, true where the position is divergent.
        epochs: passes over all positions.
        batch_size: positions of one step.
        learning_rate: of AdamW.
        weight_decay: of AdamW.
        recall_factor: times the number of negatives by that of positives is the weight of a positive.
        seed: of the order and of dropout.

    Returns:
        The mean loss of every epoch.

    Raises:
        ValueError: not one label for each row, labels all alike, or a setting out of range.
    """
    for name, count in (("epochs", epochs), ("batch_size", batch_size)):
        if not isinstance(count, Integral) or count < 1:
            raise ValueError(f"{name}: expected 1 or more, got {count}; leave it out for the published value")
    for name, value in (
        ("learning_rate", learning_rate),
        ("weight_decay", weight_decay),
        ("recall_factor", recall_factor),
    ):
        if not 0.0 <= value < math.inf:
            raise ValueError(f"{name}: expected 0 or more, got {value}; leave it out for the published value")
    rows, marks = [len(one.token) for one in features], [len(one) for one in labels]
    if rows != marks:
        raise ValueError(f"labels: expected one for each row of features {rows}, got {marks}; pass them in order")
    device = router.projection.weight.device
    target = torch.cat(list(labels)).to(device, torch.float32) if labels else torch.zeros(0)
    positives = int(target.sum())
    if not 0 < positives < len(target):
        raise ValueError(
            f"labels: expected divergent positions and others, got {positives} of {len(target)} divergent; label more "
            "trajectories"
        )
    every = RouterFeatures(*(part.to(device) for part in _joined(features)))
    weight = torch.tensor((len(target) - positives) / positives * recall_factor, device=device)
    optimizer = torch.optim.AdamW(router.parameters(), learning_rate, weight_decay=weight_decay)
    order, losses = torch.Generator().manual_seed(seed), []
    with torch.random.fork_rng(devices=[device] if device.type == "cuda" else []):
        torch.manual_seed(seed)
        router.train()
        for _ in range(epochs):
            total = torch.zeros((), dtype=torch.float64, device=device)
            for batch in torch.randperm(len(target), generator=order).to(device).split(batch_size):
                logit = router(RouterFeatures(*(part[batch] for part in every)))
                loss = F.binary_cross_entropy_with_logits(logit, target[batch], pos_weight=weight)
                optimizer.zero_grad()
                loss.backward()
                optimizer.step()
                total += loss.detach() * len(batch)
            losses.append(float(total) / len(target))
    router.eval()
    return losses


def recall_threshold(probability: Tensor, divergent: Tensor, min_recall: float = 0.95) -> float:
    """The highest threshold at which enough of the divergent positions are routed, equality routing.

    Args:
        probability: [n] the router's at held-out positions.
        divergent: [n] bool, their labels.
        min_recall: the least share of divergent positions that are routed, above 0 and at most 1.

    Returns:
        one of the probabilities; every position that reaches it is routed, tied ones included.

    Raises:
        ValueError: not one label for each probability, none divergent, a NaN, or min_recall out of range.
    """
    if probability.ndim != 1 or divergent.shape != probability.shape or divergent.dtype != torch.bool:
        raise ValueError(
            f"divergent: expected one bool for each probability [n], got {divergent.dtype} {list(divergent.shape)} for "
            f"{list(probability.shape)}; pass the labels in order"
        )
    if not 0.0 < min_recall <= 1.0:
        raise ValueError(f"min_recall: expected above 0 and at most 1, got {min_recall}; the published value is 0.95")
    positives = probability[divergent].sort(descending=True).values
    if not len(positives) or bool(probability.isnan().any()):
        raise ValueError(
            f"probability: expected numbers and at least one divergent position, got {len(positives)} divergent and "
            f"{int(probability.isnan().sum())} NaN of {len(probability)}; label more trajectories or check the router"
        )
    recall = torch.arange(1, len(positives) + 1, dtype=torch.float64) / len(positives)
    return float(positives[int(torch.searchsorted(recall, min_recall))])


def r2r(
    slm: hf.CausalLM,
    llm: LLM | hf.CausalLM,
    router: R2RRouter | None,
    prompts: Sequence[Ids],
    max_new_tokens: int = 4096,
    *,
    threshold: float,
    mode: Mode = "token",
    policy: RequestPolicy | None = None,
    max_events: int | None = None,
    tokenizer: hf.Tokenizer | tuple[hf.Tokenizer, hf.Tokenizer] | None = None,
    batch_tokens: int = 65536,
) -> list[Generation]:
    """Decode many prompts greedily, routed tokens by the LLM and all others by the SLM.

    Args:
        slm: the small model, in eval mode, used by one thread at a time.
        llm: the large one.
        router: trained for this SLM, in eval mode; None in mode "entropy".
        prompts: [P] int64 each, of any lengths.
        max_new_tokens: the most tokens of a generation.
        threshold: of the router's probability, or of the entropy in nats in mode "entropy"; reaching it routes.
        mode: "token" asks the router at every token; "events" only where the policy would ask the LLM; "entropy" is the
            switch without a router.
        policy: of mode "events", and only of it.
        max_events: the first so many events of a generation are served, then the SLM decodes alone; None for all.
        tokenizer: as in `CollaborativeDecoder`.
        batch_tokens: the most tokens, padding and new ones included, that one batch may hold.

    Returns:
        One generation a prompt, in order. Each routed token is an event: its pool is the SLM's token and the LLM's (one
        entry where they agree), the LLM's chosen. In mode "events" an admitted state that the router leaves to the SLM
        is one too: its pool is the SLM's token alone, its llm_logprob NaN, and the LLM was not asked.

    Raises:
        TypeError: as `CollaborativeDecoder`, or a router that is none.
        ValueError: as `CollaborativeDecoder` and its `generate`, an unknown mode, a policy without its mode or the
            reverse, a router of another SLM or in training mode, or a NaN threshold.
        OSError: the LLM did not answer.
    """
    if mode not in ("token", "events", "entropy"):
        raise ValueError(f"mode: expected 'token', 'events' or 'entropy', got {mode!r}; 'token' is the method's own")
    if (policy is not None) != (mode == "events"):
        raise ValueError(
            f"policy: expected one in mode 'events' alone, got {policy} in mode {mode!r}; add or drop the policy"
        )
    if not isinstance(threshold, int | float) or math.isnan(threshold):
        raise ValueError(f"threshold: expected a number, got {threshold!r}; use inf to never route")
    decoder = CollaborativeDecoder(
        slm,
        llm,
        LLMPreference(),
        policy or RequestPolicy(threshold),
        max_events=0 if max_events is None else max_events,
        tokenizer=tokenizer,
        batch_tokens=batch_tokens,
    )
    _check_router(router, mode, slm)
    check_max_new_tokens(max_new_tokens)
    checked = checked_prompts("prompts", prompts, slm, room=1)
    most = math.inf if max_events is None else max_events
    ends = hf.eos_ids(slm) | decoder.llm.ends
    events: list[list[Event]] = [[] for _ in checked]
    seen: list[Tensor] = []  # the hidden states [B, D] of the step

    def choose(step: Step) -> list[int]:
        logits, hidden = step.logits[:, : decoder.vocabulary], seen.pop()
        seen.clear()
        entropy = torch.special.entr(logits.softmax(-1)).sum(-1) if policy is None else policy.entropy(logits)
        tokens, nats = logits.argmax(-1).tolist(), entropy.tolist()  # the first of equal ones
        for row, value in zip(step.rows, nats, strict=True):
            if math.isnan(value):
                raise ValueError(
                    f"slm: expected finite logits, got NaN or infinite ones at step {step.index} of prompt "
                    f"{row.index}; check its weights and dtype"
                )
        if policy is not None:
            asks = policy.asks(entropy)
        else:
            asks = entropy >= (threshold if mode == "entropy" else -math.inf)
        places = [
            place
            for place, (row, ask) in enumerate(zip(step.rows, asks.tolist(), strict=True))
            if ask and len(events[row.index]) < most
        ]
        if router is not None and places:
            features = _features(slm, hidden[places], logits[places], router.logits_size)
            routed = (router.probability(features) >= threshold).tolist()
            if policy is not None:
                for place in (place for place, go in zip(places, routed, strict=True) if not go):
                    logprob = float(logits[place].log_softmax(-1)[tokens[place]])
                    events[step.rows[place].index].append(
                        Event(step.index, nats[place], [tokens[place]], [SLM], [logprob], [math.nan], None, 0)
                    )
            places = [place for place, go in zip(places, routed, strict=True) if go]
        if places:
            states = [torch.tensor(step.rows[place].tokens) for place in places]
            pools = candidate_pool(logits[places], decoder.llm, states, "joint", 1, 1)
            for place, pool in zip(places, pools, strict=True):
                event = Event(
                    step.index,
                    nats[place],
                    pool.ids.tolist(),
                    pool.sources.tolist(),
                    pool.slm_logprob.tolist(),
                    pool.llm_logprob.tolist(),
                    None,
                    int((pool.sources & LARGE).argmax()),
                )
                events[step.rows[place].index].append(event)
                tokens[place] = event.token
        return tokens

    def done(row: Row) -> bool:
        return row.tokens[-1] in ends

    head = slm.get_output_embeddings()
    with head.register_forward_pre_hook(lambda _, inputs: seen.append(inputs[0][:, -1])):
        rows = lockstep(slm, checked, max_new_tokens, choose, done, batch_tokens)
    generations = []
    for row in rows:
        new = torch.tensor(row.new, device=slm.device)
        generations.append(Generation(new, events[row.index], decoder.text(new)))
    return generations


def _check_router(router: R2RRouter | None, mode: Mode, slm: hf.CausalLM) -> None:
    if mode == "entropy":
        if router is not None:
            raise ValueError("router: expected None in mode 'entropy', got a router; drop it or use another mode")
        return
    if not isinstance(router, R2RRouter):
        raise TypeError(f"router: expected an R2RRouter in mode {mode!r}, got {type(router).__name__}; train one first")
    if router.training:
        raise ValueError("router: expected it in eval mode, got training mode; call .eval() first")
    if router.projection.weight.device != slm.device:
        raise ValueError(
            f"router: expected it on the SLM's device {slm.device}, got {router.projection.weight.device}; move it "
            f"with .to('{slm.device}')"
        )
    if router.base != hf.fingerprint(slm):
        raise ValueError(
            f"router: expected one made for this SLM, got one for other weights than this {type(slm).__name__}'s; "
            "train one on its features"
        )


def _features(slm: hf.CausalLM, hidden: Tensor, logits: Tensor, logits_size: int) -> RouterFeatures:
    """From hidden [n, D] and logits [n, V]."""
    token = logits.argmax(-1)  # the first of equal ones
    largest = logits.topk(min(logits_size, logits.shape[-1])).values
    embedding = slm.get_input_embeddings().weight[token]
    return RouterFeatures(hidden.float(), largest.float(), embedding.float(), token)


def _joined(parts: Sequence[RouterFeatures]) -> RouterFeatures:
    return RouterFeatures(*(torch.cat(column) for column in zip(*parts, strict=True)))
