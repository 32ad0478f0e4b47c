"""What `commit_` means."""

from torch import Tensor

NONE, NAN, EVENT, EOS, LENGTH = range(5)  # the values of `Halt`


def commit_(
    state: tuple[Tensor, Tensor, Tensor, Tensor],  # tokens[B, S], length[B], halt[B], budget[B]
    token: Tensor,  # [B]
    entropy: Tensor,  # [B]
    *,
    threshold: Tensor,  # [] or [B]
    eos_ids: Tensor,  # [n]
    max_length: Tensor,  # [] or [B]
    outcome: Tensor | None = None,  # [B, 3]: halt, token, entropy
) -> None:
    """Each running row appends its token, or halts for the first reason that holds; written in place."""
    tokens, length, halt, budget = state
    threshold, max_length = threshold.expand(len(token)), max_length.expand(len(token))
    for b in range(len(token)):
        if halt[b] != NONE:
            continue
        if entropy[b].isnan() or threshold[b].isnan():
            halt[b] = NAN
        elif entropy[b] > threshold[b] and budget[b] > 0:
            halt[b] = EVENT
        elif token[b] in eos_ids:
            halt[b] = EOS
        elif length[b] >= max_length[b] or length[b] >= tokens.shape[1]:
            halt[b] = LENGTH
        else:
            tokens[b, length[b]] = token[b]
            length[b] += 1
    if outcome is not None:
        for column, values in enumerate((halt, token, entropy)):
            outcome[:, column] = values
