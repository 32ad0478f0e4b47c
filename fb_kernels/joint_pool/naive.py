"""What `joint_pool` means: an ordered dictionary from id to where it comes from."""

import torch
from torch import Tensor


def joint_pool(slm_ids: Tensor, llm_ids: Tensor) -> tuple[Tensor, Tensor, Tensor]:
    """(ids[..., Ks + Kt] padded with -1, count[...], source[..., Ks + Kt]: bit 1 for the SLM, bit 2 for the LLM)."""
    batch, size = slm_ids.shape[:-1], slm_ids.shape[-1] + llm_ids.shape[-1]
    rows = batch.numel()
    ids = slm_ids.new_full((rows, size), -1)
    count, source = ids.new_zeros(rows, dtype=torch.int32), ids.new_zeros((rows, size), dtype=torch.int32)
    for row in range(rows):
        pool: dict[int, int] = {}
        for bit, ids_of_model in ((1, slm_ids), (2, llm_ids)):
            for token in ids_of_model.reshape(rows, ids_of_model.shape[-1])[row].tolist():
                if token >= 0:  # negative ids are padding
                    pool[token] = pool.get(token, 0) | bit
        count[row] = len(pool)
        for column, (token, bits) in enumerate(pool.items()):
            ids[row, column], source[row, column] = token, bits
    return ids.view(*batch, size), count.view(batch), source.view(*batch, size)
