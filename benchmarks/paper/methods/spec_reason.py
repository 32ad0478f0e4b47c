"""SpecReason: the small model drafts a reasoning step, the large one scores it 0 to 9 and writes it itself if poor.

Definition, until the answer is finished:

1. the SLM writes one step, which ends after the delimiter, at the end of the sequence or at `step_tokens`;
2. the LLM reads the conversation with that step and an instruction to score it, and is asked for one token;
3. a score of `threshold` or more accepts the step, otherwise the LLM writes this step instead.

As everywhere in this package, both models decode greedily, and a generation ends at the end-of-sequence token or at its
length limit. The published software samples at temperature 0.6, stops at the first step with a box or two equal steps,
and treats a score that is not a digit as 0; here the score is the likeliest of the ten digits.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from functools import partial
from typing import Literal

import torch
from torch import Tensor

from benchmarks.paper.methods import Context, Method
from fb_core.apps.pipeline.models import Generate
from fb_core.decode.decoder import Generation, Usage
from fb_core.decode.pair import Pair
from fb_core.llm.local import LLM, Ids, LocalLLM
from fb_core.models.facts import CausalLM, Tokenizer, max_positions
from fb_core.models.tokens import checked_prompts

_INSTRUCTION = (
    "How good is the last step of the reasoning above? Look only at whether it is true and follows from what stands "
    "before it, not at its style. Answer with one digit from 0 (wrong) to 9 (certainly right)."
)
JUDGE = f"\n\n{_INSTRUCTION}\nScore: "
CHATML_JUDGE = f"<|im_end|>\n<|im_start|>user\n{_INSTRUCTION}<|im_end|>\n<|im_start|>assistant\nScore: "
CHUNK = 32  # tokens asked for at once: a continuation cannot be told to stop at the delimiter


@dataclass
class ReasoningStep:
    """One step: drafted by the SLM, scored by the LLM, and rewritten by the LLM if the score was too low."""

    start: int  # index of its first token among the new ones
    length: int  # tokens that were kept
    score: int  # 0 to 9, of the draft
    writer: Literal["slm", "llm"]  # of what was kept
    drafted: int  # tokens of the draft


@dataclass
class SpecReasonGeneration(Generation):
    """A generation without events: the LLM scored every step and wrote those whose `writer` is "llm"."""

    steps: list[ReasoningStep]
    read: int  # positions after the prompt that the LLM computed

    @property
    def usage(self) -> Usage:
        """A score for every step, and a request for every step that the LLM wrote."""
        theirs = [step for step in self.steps if step.writer == "llm"]
        return Usage(len(self.steps) + len(theirs), None, 0, sum(step.length for step in theirs), self.read)


def spec_reason(
    slm: CausalLM,
    llm: LLM | CausalLM,
    prompts: Sequence[Ids],
    max_new_tokens: int = 4096,
    *,
    tokenizer: Tokenizer,
    threshold: float = 7,
    delimiter: str = "\n\n",
    step_tokens: int = 512,
    judge_template: str = JUDGE,
) -> list[SpecReasonGeneration]:
    """Decode many prompts step by step; all prompts draft, are scored and are rewritten together.

    A threshold of 10 leaves every step to the LLM. The template stands between a step and its score, special tokens
    included; an end-of-sequence token after the step is removed before it.
    """
    pair = Pair(slm, llm, tokenizer)
    digits = _digit_ids(tokenizer)
    question = _encoded(tokenizer, judge_template)
    large, small = pair.large(), LocalLLM(slm, tokenizer=tokenizer)
    ends, limit = pair.ends, max_positions(slm)
    checked = [ids.tolist() for ids in checked_prompts("prompts", prompts, slm, room=1)]
    written: list[list[int]] = [[] for _ in checked]
    steps: list[list[ReasoningStep]] = [[] for _ in checked]
    read = [0] * len(checked)

    def room(row: int) -> int:
        left = max_new_tokens - len(written[row])
        return left if limit is None else min(left, limit - len(checked[row]) - len(written[row]))

    def ended(step: list[int]) -> bool:
        return step[-1] in ends or delimiter in tokenizer.decode(step)

    live = list(range(len(checked)))
    while live:
        states = [checked[row] + written[row] for row in live]
        rooms = [min(step_tokens, room(row)) for row in live]
        drafts = write_steps(small, states, rooms, ended)
        shown = [draft[:-1] if draft[-1] in ends else draft for draft in drafts]
        asked = [state + step + question for state, step in zip(states, shown, strict=True)]
        scores = [_score(answer.score_logprob) for answer in large.candidates_many(asked, 1, [digits] * len(asked))]
        poor = [index for index, score in enumerate(scores) if score < threshold]
        rewritten = write_steps(large, [states[index] for index in poor], [rooms[index] for index in poor], ended)
        kept = dict(enumerate(drafts)) | dict(zip(poor, rewritten, strict=True))
        for index, row in enumerate(live):
            start, length, drafted = len(written[row]), len(kept[index]), len(drafts[index])
            writer: Literal["slm", "llm"] = "llm" if index in poor else "slm"
            read[row] += len(shown[index]) + len(question) + length * (index in poor)
            steps[row].append(ReasoningStep(start, length, scores[index], writer, drafted))
            written[row] += kept[index]
        live = [row for index, row in enumerate(live) if kept[index] and kept[index][-1] not in ends and room(row) > 0]
    generations = []
    for tokens, own_steps, positions in zip(written, steps, read, strict=True):
        unread = bool(own_steps) and own_steps[-1].writer == "llm" and own_steps[-1].length > 0  # its last token
        new = torch.tensor(tokens, dtype=torch.int64, device=slm.device)
        generations.append(SpecReasonGeneration(new, [], pair.text(new), own_steps, positions - unread))
    return generations


def write_steps(
    writer: LLM, states: Sequence[list[int]], rooms: Sequence[int], ended: Callable[[list[int]], bool]
) -> list[list[int]]:
    """The writer's greedy step after every state, at most as many tokens as there is room for."""
    steps: list[list[int]] = [[] for _ in states]
    going = list(range(len(states)))
    while going:
        asked, unfinished = [states[index] + steps[index] for index in going], []
        count = min(CHUNK, max(rooms[index] - len(steps[index]) for index in going))
        for index, new in zip(going, writer.complete_many(asked, count), strict=True):
            over = len(new) < count
            for token in new.tolist():
                steps[index].append(token)
                if len(steps[index]) == rooms[index] or ended(steps[index]):
                    over = True
                    break
            if not over:
                unfinished.append(index)
        going = unfinished
    return steps


def _score(digit_logprob: Tensor | None) -> int:
    """The likeliest digit, ties to the lowest."""
    if digit_logprob is None:
        raise ValueError(
            "llm: expected log-probabilities of the ten digits, got None; return them along with the candidates"
        )
    return int(digit_logprob.argmax())


def _digit_ids(tokenizer: Tokenizer) -> list[int]:
    ids = [_encoded(tokenizer, str(digit)) for digit in range(10)]
    if any(len(tokens) != 1 for tokens in ids) or len({tokens[0] for tokens in ids}) < 10:
        raise ValueError(f"tokenizer: expected one token for each digit, got {ids}; use a tokenizer that has them")
    return [tokens[0] for tokens in ids]


def _encoded(tokenizer: Tokenizer, text: str) -> list[int]:
    return list(tokenizer(text, add_special_tokens=False)["input_ids"])


def decode(run: Context, seed: int | None) -> Generate:
    """Decoding with the run's delimiter and judge; its default is `CHATML_JUDGE` for tokenizers of Qwen's kind."""
    models, compare = run.models, run.compare
    judge = compare.judge or (CHATML_JUDGE if "<|im_end|>" in models.tokenizer.get_vocab() else JUDGE)
    options = {"tokenizer": models.tokenizer, "delimiter": compare.delimiter, "judge_template": judge}
    return partial(spec_reason, models.slm, models.llm, **options)


METHOD = Method(
    name="spec-reason",
    label="SpecReason",
    source='Pan et al., "SpecReason: Fast and Accurate Inference-Time Compute via Speculative Reasoning", '
    "arXiv 2504.07891, ruipeterpan/specreason",
    decode=decode,
    timed=("plain",),
)
