"""What executes PTX (ptx/) does what the PTX manual says, and sees what it should."""

from __future__ import annotations

import struct
from collections.abc import Sequence

import numpy as np
import pytest
import torch
from ptx.launches import reach
from ptx.machine import Launch, Machine
from ptx.memory import Deadlock, Fault, Hazard, Memory
from ptx.program import parse

HEAD = """
.version 8.0
.target sm_90a
.address_size 64
.visible .entry kernel(.param .u64 a, .param .u64 b, .param .u64 c)
{
    .shared .align 16 .b8 place[1024];
    .reg .pred %p<9>; .reg .b16 %h<9>; .reg .b32 %r<99>; .reg .b64 %d<99>;
    mov.u32 %r90, %tid.x;
    mul.wide.u32 %d90, %r90, 4;
    ld.param.u64 %d91, [a]; add.u64 %d91, %d91, %d90;
    ld.param.u64 %d92, [b]; add.u64 %d92, %d92, %d90;
    ld.param.u64 %d93, [c]; add.u64 %d93, %d93, %d90;
    shl.b32 %r91, %r90, 2;
    mov.u32 %r92, place;
    add.u32 %r92, %r92, %r91;
"""
TAIL = "\n    ret;\n}\n"
LOAD = "ld.global.b32 %r1, [%d91]; ld.global.b32 %r2, [%d92];"
NAN = float("nan")


def ran(body: str, *given: np.ndarray, threads: int = 32) -> np.ndarray:
    """What a kernel writes to c, a number of 32 bits a thread."""
    (program,) = parse(HEAD + body + TAIL).values()
    memory, arguments = Memory(), []
    tensors = [torch.from_numpy(np.resize(x, threads).view("i4").copy()) for x in given]
    tensors += [torch.zeros(threads, dtype=torch.int32) for _ in range(3 - len(given))]
    for x in tensors:
        reach(memory, x)
        arguments.append(struct.pack("<Q", x.data_ptr()))
    for seed in range(5):
        Machine(Launch(program, (1, 1, 1), (threads, 1, 1), arguments, 0), memory, seed).run()
    return tensors[2].numpy().view("u4")


def floats(*values: float) -> np.ndarray:
    return np.array(values, "f4")


def whole(*values: int) -> np.ndarray:
    return np.array([value & 0xFFFFFFFF for value in values], "u4")


INSTRUCTIONS: dict[str, tuple[np.ndarray, np.ndarray, np.ndarray]] = {  # of %r1 and %r2: a, b, the result
    "shl.b32": (whole(3, 3, 3), whole(1, 31, 32), whole(6, 1 << 31, 0)),
    "shr.s32": (whole(-8, -8, 8), whole(1, 40, 2), whole(-4, -1, 2)),
    "shr.u32": (whole(-8, -8), whole(28, 32), whole(15, 0)),
    "div.s32": (whole(-7, 7, -7), whole(2, -2, -2), whole(-3, -3, 3)),
    "rem.s32": (whole(-7, 7), whole(2, -2), whole(-1, 1)),
    "mul.hi.s32": (whole(-1, 1 << 30), whole(1, 8), whole(-1, 2)),
    "mul.lo.s32": (whole(-3, 1 << 31), whole(5, 2), whole(-15, 0)),
    "min.s32": (whole(-1, 2), whole(1, 1), whole(-1, 1)),
    "min.u32": (whole(-1, 2), whole(1, 1), whole(1, 1)),
    "max.f32": (floats(NAN, 1, -0.5), floats(2, NAN, -1), floats(2, 1, -0.5).view("u4")),
    "max.NaN.f32": (floats(3, 1), floats(2, 4), floats(3, 4).view("u4")),
    "add.f32": (floats(1e8, 1), floats(1, 2**-25), floats(1e8, 1).view("u4")),
    "div.full.f32": (floats(1, -1), floats(0, 4), floats(np.inf, -0.25).view("u4")),
    "cvt.rn.bf16x2.f32": (floats(1, 3), floats(1 + 2**-8, 1 + 3 * 2**-8), whole(0x3F803F80, 0x40403F82)),
    "and.b32": (whole(12), whole(10), whole(8)),
}


@pytest.mark.parametrize("opcode", INSTRUCTIONS)
def test_an_instruction(opcode: str) -> None:
    a, b, expected = INSTRUCTIONS[opcode]
    got = ran(
        f"ld.global.b32 %r1, [%d91]; ld.global.b32 %r2, [%d92]; {opcode} %r3, %r1, %r2; st.global.b32 [%d93], %r3;",
        a,
        b,
    )
    assert got[: len(expected)].tolist() == expected.tolist()


@pytest.mark.parametrize(
    ("comparison", "expected"), [("eq", "001"), ("ne", "010"), ("neu", "110"), ("ltu", "110"), ("nan", "100")]
)
def test_comparisons_with_nan(comparison: str, expected: str) -> None:
    body = f"{LOAD} setp.{comparison}.f32 %p1, %r1, %r2; selp.b32 %r3, 1, 0, %p1; st.global.b32 [%d93], %r3;"
    assert "".join(map(str, ran(body, floats(NAN, 1, 2), floats(1, 2, 2))[:3])) == expected


def test_lanes_that_loop_apart_meet_again() -> None:
    got = ran("""
        mov.u32 %r1, 0; mov.u32 %r2, 0;
    $L_again:
        add.u32 %r2, %r2, %r1; add.u32 %r1, %r1, 1;
        setp.le.u32 %p1, %r1, %r90;
        @%p1 bra $L_again;
        shfl.sync.bfly.b32 %r3, %r2, 1, 31, -1;
        st.global.b32 [%d93], %r3;""")
    assert got.tolist() == [sum(range((lane ^ 1) + 1)) for lane in range(32)]


def test_sums_of_a_product_of_tiles() -> None:
    """Ones times what each lane holds: its number, twice, in eight rows of each of eight columns."""
    got = ran("""
        mov.b32 %r1, 0x3f803f80; mov.b32 %r9, 0;
        cvt.rn.f32.u32 %r2, %r90; cvt.rn.bf16x2.f32 %r3, %r2, %r2;
        mma.sync.aligned.m16n8k16.row.col.f32.bf16.bf16.f32
            {%r4, %r5, %r6, %r7}, {%r1, %r1, %r1, %r1}, {%r3, %r9}, {%r9, %r9, %r9, %r9};
        st.global.b32 [%d93], %r4;""").view("f4")
    column = 2.0 * np.arange(32).reshape(8, 4).sum(1)
    assert got.tolist() == [column[lane % 4 * 2] for lane in range(32)]


RACES: dict[str, tuple[str, type[AssertionError]]] = {
    "a read that no barrier orders": ("st.shared.b32 [%r92], %r90; ld.shared.b32 %r1, [place];", Hazard),
    "a write over what others read": (
        "st.shared.b32 [%r92], %r90; bar.sync 0; ld.shared.b32 %r1, [place]; st.shared.b32 [%r92], %r1;", Hazard),
    "past the end": ("st.shared.b32 [%r92+1000], %r90;", Fault),
    "an odd address": ("st.shared.b32 [%r92+2], %r90;", Fault),
    "memory that nobody gave": ("mov.u64 %d1, 64; ld.global.b32 %r1, [%d1];", Fault),
    "a barrier that one warp leaves out": (
        "setp.gt.u32 %p1, %r90, 31; @%p1 bra $L_out; bar.sync 0;\n$L_out:", Deadlock),
    "a barrier that nobody completes": (
        "setp.eq.u32 %p1, %r90, 0; @%p1 mbarrier.init.shared::cta.b64 [place], 1; bar.sync 0;"
        "mbarrier.try_wait.parity.shared::cta.b64 %p2, [place], 0;", Deadlock),
    "one arrival too many": (
        "setp.eq.u32 %p1, %r90, 0; @%p1 mbarrier.init.shared::cta.b64 [place], 33; bar.sync 0;"
        "mbarrier.arrive.shared::cta.b64 _, [place], 17;", Hazard),
    "lanes that do not meet": (
        "setp.gt.u32 %p1, %r90, 15; @%p1 bra $L_out; shfl.sync.bfly.b32 %r1, %r90, 16, 31, -1; bra $L_end;\n"
        "$L_out: bar.sync 1, 32;\n$L_end:", Hazard),
    "another warp's write in global memory": (
        "ld.param.u64 %d1, [c]; st.global.b32 [%d93], %r90; ld.global.b32 %r1, [%d1];", Hazard),
}  # fmt: skip


@pytest.mark.parametrize("mistake", RACES)
def test_what_it_sees(mistake: str) -> None:
    body, kind = RACES[mistake]
    with pytest.raises(kind):
        ran(body, threads=64)


ORDERED: Sequence[str] = (
    "st.shared.b32 [%r92], %r90; bar.sync 0; ld.shared.b32 %r1, [place]; bar.sync 0; st.shared.b32 [%r92], %r1;",
    "mov.u32 %r1, 7; st.shared.b32 [place], %r1;",  # the same value from every warp
)


@pytest.mark.parametrize("body", ORDERED)
def test_what_is_ordered_passes(body: str) -> None:
    ran(body, threads=64)
