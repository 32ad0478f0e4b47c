"""How `commit_` is called."""

from __future__ import annotations

import torch

from fb_kernels import DecodeState
from fb_kernels.calls import Call, Calls, by_definition
from fb_kernels.commit import naive


def commit() -> Call:
    """Five rows, one for each way to end."""

    def ints(*values: int) -> torch.Tensor:
        return torch.tensor(values, dtype=torch.int32)

    state = DecodeState(
        torch.arange(35).view(5, 7), ints(3, 4, 2, 6, 5), halt=ints(0, 0, 3, 0, 0), budget=ints(1, 1, 2, 1, 0)
    )
    return Call(
        "commit_",
        {
            "state": state,
            "token": torch.tensor([9, 5, 6, 9, 8]),
            "entropy": torch.tensor([0.5, 2.0, 0.1, 0.2, 0.3]),
            "threshold": torch.ones(5, dtype=torch.float64),
            "eos_ids": torch.tensor([7, 8]),
            "max_length": ints(6, 6, 6, 6, 6),
        },
        written=("state.tokens", "state.length", "state.halt"),
        least={"entropy": torch.float32, "threshold": torch.float64},
        shape="B=5",
    )


OPS = (
    Calls(
        "commit_",
        commit,
        by_definition(naive.commit_),
        takes="state: DecodeState, token[B], entropy[B], threshold[] or [B], eos_ids[n], max_length[] or [B], "
        "(outcome[B, 3])",
        gives="writes the state",
        cuda="fp32 entropy",
    ),
)
