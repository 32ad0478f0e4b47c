"""Launch configurations: a pure function of dtype and shape bucket, never searched at run time.

Each op has one function here. It returns the keyword arguments of its kernel's launch (block sizes, `num_warps`,
`num_stages`): those measured on this device, from `fb_kernels._runtime.devices`, or else the defaults below.
"""

from __future__ import annotations

from functools import cache

import torch

from fb_kernels._runtime import devices

Launch = dict[str, int]


def next_power_of_2(n: int) -> int:
    """The smallest power of two that is n or more, at least 1."""
    return 1 << max(n - 1, 0).bit_length()


def swiglu(dtype: torch.dtype, width: int) -> Launch:
    """For `width` columns of the result."""
    block = min(next_power_of_2(width), 2048)
    return _tuned("swiglu", dtype, (block,), {"BLOCK": block, "num_warps": 4 if block <= 1024 else 8})


def skinny_linear(dtype: torch.dtype, form: str) -> Launch:
    """The product of batch-invariant mode, of BLOCK_M outputs of BLOCK_N rows: the same for any number of rows.

    `form` is "unaligned" where rows cannot be read 16 bytes at a time, else "aligned".
    """
    default = {"BLOCK_M": 128, "BLOCK_N": 128, "BLOCK_K": 64, "num_warps": 8, "num_stages": 4}
    if dtype == torch.float32 or form == "unaligned":  # for want of registers
        default |= {"BLOCK_M": 64, "BLOCK_N": 64, "BLOCK_K": 32, "num_stages": 3}
    return _tuned("skinny_linear", dtype, (form,), default)


def linear_logprob_form(dtype: torch.dtype, rows: int, vocab: int, hidden: int) -> str:
    """Either "fused", or "chunked", which runs at cuBLAS's rate, for many float32 rows (neither is measured yet).

    Or "gluon", if it was measured to be faster; never by default.
    """
    default = {"fused": int(rows <= 128 or dtype != torch.float32), "gluon": 0}
    chosen = _tuned("linear_logprob_form", dtype, _head_bucket(rows, vocab, hidden), default)
    return "gluon" if chosen["gluon"] else "fused" if chosen["fused"] else "chunked"


def linear_logprob(dtype: torch.dtype, rows: int, vocab: int, hidden: int, biased: bool) -> Launch:
    """The fused kernel; its tile covers all rows up to 128, so that the weight is read once."""
    if dtype == torch.float32:
        block = min(max(next_power_of_2(rows), 16), 64)
        default = {"BLOCK_M": block, "BLOCK_V": 64, "BLOCK_K": 32, "num_warps": 4, "num_stages": 3}
    elif rows <= 32:
        block = 16 if rows <= 16 else 32
        default = {"BLOCK_M": block, "BLOCK_V": 128, "BLOCK_K": 64, "num_warps": 4, "num_stages": 4}
    elif rows <= 128:
        block = 64 if rows <= 64 else 128
        default = {"BLOCK_M": block, "BLOCK_V": 128, "BLOCK_K": 64, "num_warps": 8, "num_stages": 4}
    else:
        default = {"BLOCK_M": 128, "BLOCK_V": 256, "BLOCK_K": 64, "num_warps": 8}
        default["num_stages"] = 4 if _capability() == 90 else 3  # stages of 48 KB
        if biased and _capability() >= 100:  # a thread holds columns of one row, and the bias of each
            default |= {"BLOCK_V": 128, "num_warps": 4}
    return _tuned("linear_logprob", dtype, _head_bucket(rows, vocab, hidden), default)


def linear_logprob_gluon(dtype: torch.dtype, vocab: int, hidden: int) -> Launch:
    """Hopper's kernel: TILES tiles per split, GROUP row blocks in the L2 cache; the same for any number of rows."""
    default = {"TILES": 4, "GROUP": 32, "BLOCK_M": 128, "BLOCK_V": 256, "BLOCK_K": 64, "STAGES": 4}
    return _tuned("linear_logprob_gluon", dtype, _head_bucket(1, vocab, hidden)[1:], default)


def linear_logprob_chunk_size(dtype: torch.dtype, rows: int) -> Launch:
    """Rows and vocabulary columns of a chunk of logits: 34 MB in float32, both sides long enough for the products."""
    bucket = next_power_of_2(rows)
    default = {"rows": 2048, "columns": min(max((1 << 23) // bucket, 4096), 1 << 15)}
    return _tuned("linear_logprob_chunk_size", dtype, (bucket,), default)


def linear_logprob_chunk(dtype: torch.dtype) -> Launch:
    """The passes over a chunk of logits; BLOCK_M and BLOCK_V divide its sides."""
    return _tuned("linear_logprob_chunk", dtype, (), {"BLOCK_M": 8, "BLOCK_V": 256, "num_warps": 8})


def linear_logprob_merge() -> Launch:
    """The merge of all tiles' statistics: few rows per program, so that a few rows fill the GPU."""
    return _tuned("linear_logprob_merge", torch.float32, (), {"BLOCK_M": 4, "BLOCK_T": 256, "num_warps": 4})


def combine_logprob_partials() -> Launch:
    """BLOCK rows a program, for any number of rows and shards."""
    return _tuned("combine_logprob_partials", torch.float32, (), {"BLOCK": 256, "num_warps": 4})


def _head_bucket(rows: int, vocab: int, hidden: int) -> tuple[int, int, int]:
    return next_power_of_2(rows), next_power_of_2(vocab), next_power_of_2(hidden)


def branch_attention(dtype: torch.dtype, head_dim: int, repeat: int, form: str) -> Launch:
    """Tiles of BLOCK_M packed rows (rows times `repeat` query heads); independent of the batch, as bits must be.

    `form` is "unaligned" if keys cannot be read 16 bytes at a time, else "plain", "window", "capped" or
    "cappedwindow".
    """
    width = max(16, next_power_of_2(head_dim))
    if dtype == torch.float32:
        default = {"BLOCK_M": 64, "BLOCK_N": 32, "num_warps": 8, "num_stages": 2}
    elif form == "unaligned":
        default = {"BLOCK_M": 16 if width > 128 else 32, "BLOCK_N": 16, "num_warps": 8, "num_stages": 2}
    elif width > 128 and _capability() == 90:
        block = 32 if form.endswith("window") else 64  # a window's edges take registers
        default = {"BLOCK_M": block, "BLOCK_N": 16, "num_warps": 8, "num_stages": 3}
    elif width > 128:
        default = {"BLOCK_M": 32, "BLOCK_N": 32, "num_warps": 8, "num_stages": 2}
    elif _capability() < 90:
        default = {"BLOCK_M": 64, "BLOCK_N": 32, "num_warps": 8, "num_stages": 3}
    else:  # the masks of a padded head take registers too
        wide = _capability() == 90 and head_dim == width
        block = (128 if form == "plain" else 64) if wide else 32  # caps and a window's edges take registers
        default = {"BLOCK_M": 128, "BLOCK_N": block, "num_warps": 8, "num_stages": 2 if wide else 3}
        if repeat == 1 and _capability() > 90:  # 128 rows spill; two small programs fit a multiprocessor
            default |= {"BLOCK_M": 64, "num_warps": 4}
    return _tuned("branch_attention", dtype, (width, repeat, form), default | _registers(form == "unaligned"))


def branch_attention_form(dtype: torch.dtype, head_dim: int, repeat: int) -> str:
    """Either "tile", or "gluon" if it was measured to be faster, never by default; independent of the batch."""
    width = max(16, next_power_of_2(head_dim))
    return "gluon" if _tuned("branch_attention_form", dtype, (width, repeat), {"gluon": 0})["gluon"] else "tile"


def branch_attention_gluon(dtype: torch.dtype, head_dim: int, repeat: int) -> Launch:
    """Hopper's kernel: tiles of BLOCK_M rows, STAGES blocks of BLOCK_N keys in shared memory."""
    width = max(16, next_power_of_2(head_dim))
    default = {"BLOCK_M": 128, "BLOCK_N": 128, "STAGES": 3}
    return _tuned("branch_attention_gluon", dtype, (width, repeat), default)


def branch_attention_split(dtype: torch.dtype, head_dim: int, repeat: int, form: str) -> Launch:
    """For branches of one row: tiles of BLOCK_M rows against pieces of CHUNK keys, in blocks of BLOCK_N."""
    width = max(16, next_power_of_2(head_dim))
    tile = {"BLOCK_M": 64, "BLOCK_N": 32, "num_warps": 8}
    if _capability() == 90:  # one warpgroup; two would compute the same scores
        tile |= {"BLOCK_N": 32 if form.endswith("window") else 64, "num_warps": 4}
    if width > 128 or form == "unaligned" or dtype == torch.float32:  # for want of registers
        tile = {"BLOCK_M": 16 if width > 128 and form == "unaligned" else 32, "BLOCK_N": 16, "num_warps": 8}
    default = tile | {"CHUNK": 128, "num_stages": 2 if form == "unaligned" else 3}
    default |= _registers(form == "unaligned" or width > 128)
    return _tuned("branch_attention_split", dtype, (width, repeat, form), default)


def _registers(short: bool) -> Launch:
    """No limit on a thread's registers where they are short: the assembler would spill to fit two programs."""
    return {"maxnreg": 255} if short or _capability() != 90 else {}


def branch_attention_backward(dtype: torch.dtype, head_dim: int, repeat: int, rows: int, form: str) -> Launch:
    """For `rows` rows of a group: tiles of BLOCK_M rows times `repeat` heads and of KEYS keys, and what these meet.

    `form` is "unaligned" where rows cannot be read 16 bytes at a time, else "aligned".
    """
    width = max(16, next_power_of_2(head_dim))
    halvings = (dtype == torch.float32 or width > 128) + (form == "unaligned")  # for want of registers
    block_m = min(max(next_power_of_2(rows * repeat), 16), 64 >> halvings)
    keys = min(max(next_power_of_2(rows), 16), 32 >> min(halvings, 1))
    default = {"BLOCK_M": block_m, "BLOCK_N": 16 if halvings else 32, "KEYS": keys, "KEY_ROWS": keys}
    default |= {"num_warps": 8, "num_stages": 1 if form == "unaligned" else 2}
    if halvings or _capability() != 90:
        default["maxnreg"] = 255  # else the assembler spills a few to have a second program on a multiprocessor
    return _tuned("branch_attention_backward", dtype, (width, block_m, keys, form), default)


def branch_attention_backward_prefix(dtype: torch.dtype, head_dim: int, form: str) -> Launch:
    """For tiles of KEYS keys of the prefix, which read KEY_ROWS packed rows at a time; `form` is "(un)aligned"."""
    width = max(16, next_power_of_2(head_dim))
    if dtype == torch.float32 or width > 128 or form == "unaligned":  # for want of registers
        default = {"KEYS": 16 if dtype == torch.float32 else 32, "KEY_ROWS": 16, "num_stages": 1}
    else:
        default = {"KEYS": 128 if _capability() == 90 else 64, "KEY_ROWS": 32, "num_stages": 3}
    default |= {"num_warps": 8, "maxnreg": 255}
    return _tuned("branch_attention_backward_prefix", dtype, (width, form), default)


def rms_norm(dtype: torch.dtype, width: int) -> Launch:
    """For rows of `width`; longer ones are several blocks."""
    block = min(next_power_of_2(width), 8192)
    return _tuned("rms_norm", dtype, (block,), {"BLOCK": block, "num_warps": _warps(block)})


def rms_norm_backward(dtype: torch.dtype, rows: int, width: int) -> Launch:
    """ROWS rows a program, each of which writes a row of the weight's gradient."""
    block, program_rows = min(next_power_of_2(width), 4096), _rows_each(rows)
    default = {"BLOCK": block, "ROWS": program_rows, "num_warps": _warps(block), **_registers(short=True)}
    return _tuned("rms_norm_backward", dtype, (program_rows, block), default)


def qk_norm_rope(dtype: torch.dtype, head_dim: int) -> Launch:
    """HEADS heads of a row a program."""
    half = next_power_of_2(head_dim // 2)
    default = {"HEADS": max(512 // half, 1), "HALF": half, "num_warps": 4, **_registers(short=True)}
    return _tuned("qk_norm_rope", dtype, (half,), default)


def qk_norm_rope_backward(dtype: torch.dtype, rows: int, head_dim: int) -> Launch:
    """HEADS heads of ROWS rows a program, each of which writes a row of the weights' gradients."""
    half, program_rows = next_power_of_2(head_dim // 2), _rows_each(rows)
    default = {"ROWS": program_rows, "HEADS": max(512 // half, 1), "HALF": half, "num_warps": 4}
    return _tuned("qk_norm_rope_backward", dtype, (program_rows, half), default)


def candidate_head(dtype: torch.dtype, width: int) -> Launch:
    """ROWS rows of a group at once: groups are about that large."""
    block = min(next_power_of_2(width), 512)
    default = {"ROWS": 16, "BLOCK": block, "OFFSETS": 1024, "num_warps": min(max(block // 64, 1), 8)}
    return _tuned("candidate_head", dtype, (block,), default | _registers(short=True))


def candidate_head_backward(dtype: torch.dtype, rows: int, width: int) -> Launch:
    """ROWS rows a program, each of which writes a row of the weights' gradients."""
    block, program_rows = min(next_power_of_2(width), 4096), _rows_each(rows)
    default = {"BLOCK": block, "ROWS": program_rows, "num_warps": _warps(block)}
    return _tuned("candidate_head_backward", dtype, (program_rows, block), default)


def topk_entropy(dtype: torch.dtype, width: int, k: int) -> Launch:
    """BLOCK columns at once, GROUP neighbours of each a group: at least k groups, a power of two."""
    block = max(min(next_power_of_2(width), 4096), 8 * k)
    default = {"BLOCK": block, "GROUP": 8, "STEPS": min(max(128 // k, 1), 16), "num_warps": 8}
    return _tuned("topk_entropy", dtype, (block, k), default)


def merge_attention_states(dtype: torch.dtype, head_dim: int) -> Launch:
    """ROWS heads of `head_dim` a program."""
    width = next_power_of_2(head_dim)
    default = {"ROWS": max(2048 // width, 1), "WIDTH": width, "num_warps": 4}
    return _tuned("merge_attention_states", dtype, (width,), default)


def _warps(block: int) -> int:
    """Warps for a block: one for 512 elements, up to sixteen."""
    return min(max(block // 512, 1), 16)


def _rows_each(rows: int) -> int:
    """Rows a program where its results are added up: four programs a multiprocessor."""
    return max(next_power_of_2(rows) // 512, 1)


def _tuned(op: str, dtype: torch.dtype, bucket: tuple[int | str, ...], default: Launch) -> Launch:
    """The measured configuration of a bucket on the current device, else the default."""
    name = f"{op}/{str(dtype).removeprefix('torch.')}/{'x'.join(map(str, bucket))}"
    measured = devices.launches(_device()).get(name, default)
    return measured if measured.keys() == default.keys() else default  # of a kernel that took other parameters


def hopper() -> bool:
    """Whether kernels are compiled for Hopper, as they also are where there is no GPU."""
    return _capability() == 90


def processors() -> int:
    """Multiprocessors of the current GPU; an H100's where there is none."""
    index = _index()
    return 132 if index is None else torch.cuda.get_device_properties(index).multi_processor_count


def _capability() -> int:
    """Compute capability of the current GPU, 90 for Hopper; 90 if there is no GPU."""
    return _gpu(_index())[0]


def _device() -> str:
    """Name of the current GPU's files; empty without one."""
    return _gpu(_index())[1]


def _index() -> int | None:
    return torch.cuda.current_device() if torch.cuda.is_initialized() else None


@cache
def _gpu(index: int | None) -> tuple[int, str]:
    if index is None:
        return 90, ""
    major, minor = torch.cuda.get_device_capability(index)
    return 10 * major + minor, devices.file_name(torch.cuda.get_device_name(index))
