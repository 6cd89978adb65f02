"""Registers, spills and access widths, on lines as cuobjdump, Triton and LLVM print them."""

import pytest

from kerneltune.measuring.assembly import (
    TARGETS,
    Access,
    Kernel,
    Occupancy,
    gcn_accesses,
    gcn_usage,
    narrowed_bits,
    occupancy_of,
    ptx_accesses,
    sass_usage,
    typical_bits,
)

RESOURCES = """
 Function _rmsnorm_fwd_rows:
  REG:79 STACK:0 SHARED:1024 LOCAL:16 CONSTANT[0]:600 TEXTURE:0 SURFACE:0 SAMPLER:0
"""

PTX = """
	ld.param.b64 	%rd1, [_rmsnorm_fwd_rows_param_0];
	ld.global.v4.b32 { %r7, %r8, %r9, %r10 }, [ %rd2 + 0 ];
	@%p3 ld.global.L1::evict_first.L2::cache_hint.v2.b32 { %r11, %r12 }, [ %rd3 + 0 ], %rd4;
	@!%p1 ld.global.cg.b16 { %rs1 }, [ %rd5 + 0 ];
	ld.relaxed.gpu.global.b64 w, [%rd6];
	ld.shared.v4.b32 {%r13, %r14, %r15, %r16}, [%r17];
	st.global.cs.v8.b32 [ %rd7 + 0 ], { %r18, %r19, %r20, %r21, %r22, %r23, %r24, %r25 };
	@%p4 st.global.b8 [ %rd8 + 0 ], { %rs2 };
	cp.async.cg.shared.global [ %r50 + 0 ], [ %rd21 + 0 ], 0x10, %r52;
	@%p5 cp.async.ca.shared.global [ %r51 + 0 ], [ %rd22 + 0 ], 4, 4;
	cp.async.commit_group;
	cp.async.bulk.tensor.2d.shared::cta.global.mbarrier::complete_tx::bytes [%r60], [%rd23, {%r61, %r62}], [%r63];
	atom.global.gpu.relaxed.max.u64 %rd9, [%rd10], %rd11;
"""

GCN = """
	global_load_dwordx4 v[2:5], v[2:3], off
	buffer_load_dwordx2 v[6:7], v8, s[4:7], 0 offen
	buffer_load_dword v6, v8, s[4:7], 0 offen
	buffer_load_ushort v6, v8, s[4:7], 0 offen
	buffer_load_short_d16_hi v6, v8, s[4:7], 0 offen
	global_load_ubyte v1, v2, s[0:1]
	buffer_store_dwordx4 v[0:3], v9, s[4:7], 0 offen
	buffer_store_byte v0, v9, s[4:7], 0 offen
	global_atomic_smax v1, v0, s[6:7]
	ds_read_b128 v[0:3], v4
	s_load_dwordx4 s[4:7], s[0:1], 0x0
amdhsa.kernels:
  - .agpr_count:     0
    .private_segment_fixed_size: 24
    .sgpr_count:     83
    .sgpr_spill_count: 0
    .vgpr_count:     136
    .vgpr_spill_count: 6
"""


def test_sass_and_ptx_give_registers_spills_and_accesses() -> None:
    assert sass_usage(RESOURCES) == (79, 16, 0)
    assert ptx_accesses(PTX) == (
        Access("load", 128, 2),
        Access("load", 64, 2),
        Access("load", 32, 1),
        Access("load", 16, 1),
        Access("store", 256, 1),
        Access("store", 8, 1),
    )


def test_gcn_gives_registers_spills_and_accesses() -> None:
    assert gcn_usage(GCN) == (136, 24, 83)
    assert gcn_accesses(GCN) == (
        Access("load", 128, 1),
        Access("load", 64, 1),
        Access("load", 32, 1),
        Access("load", 16, 2),
        Access("load", 8, 1),
        Access("store", 128, 1),
        Access("store", 8, 1),
    )


def test_usage_and_accesses_of_empty_text_are_zero() -> None:
    assert (sass_usage(""), gcn_usage("")) == ((0, 0, 0), (0, 0, 0))
    assert (ptx_accesses(""), gcn_accesses("")) == ((), ())


def test_typical_bits_is_the_width_that_carries_most_bits() -> None:
    accesses = (Access("load", 128, 2), Access("load", 32, 7), Access("store", 64, 1))
    assert typical_bits(accesses, "load") == 128
    assert typical_bits((Access("load", 128, 1), Access("load", 32, 5)), "load") == 32
    assert typical_bits(accesses, "store") == 64
    assert typical_bits((), "load") == 0


@pytest.mark.parametrize(
    ("after", "bits"),
    [
        ((Access("load", 128, 2), Access("load", 16, 16)), 256),
        ((Access("load", 128, 2),), 0),  # a smaller block
        ((Access("load", 128, 4), Access("load", 32, 1)), 0),  # a further scalar
        ((Access("load", 128, 3), Access("load", 32, 1), Access("store", 8, 16)), 32),
    ],
)
def test_narrowed_bits_are_those_that_narrower_accesses_took_over(after: tuple[Access, ...], bits: int) -> None:
    assert narrowed_bits((Access("load", 128, 4), Access("store", 128, 2)), after, "load") == bits


# occupancy, by hand-computed examples of each limit


@pytest.mark.parametrize(
    ("target", "warps", "registers", "shared", "scalars", "expected"),
    [
        ("sm_90", 4, 32, 0, 0, Occupancy(16, 64, 64, "warps")),
        ("sm_90", 4, 168, 49184, 0, Occupancy(3, 12, 64, "registers")),  # 512 // 168 = 3 warps in each of 4 partitions
        ("sm_90", 8, 40, 32, 0, Occupancy(6, 48, 64, "registers")),
        ("sm_90", 8, 33, 32, 0, Occupancy(6, 48, 64, "registers")),  # 33 is rounded up to 40
        ("sm_90", 4, 32, 100_000, 0, Occupancy(2, 8, 64, "shared memory")),
        ("sm_90", 4, 32, 232448, 0, Occupancy(1, 4, 64, "shared memory")),  # the most that one program may have
        ("sm_90", 1, 16, 0, 0, Occupancy(32, 32, 64, "program slots")),
        ("sm_90", 16, 255, 0, 0, Occupancy(0, 0, 64, "registers")),  # 2 warps in a partition, 8 in all
        ("gfx942", 8, 150, 8192, 0, Occupancy(1, 8, 32, "registers")),
        ("gfx942", 4, 64, 40_000, 0, Occupancy(1, 4, 32, "shared memory")),
        ("gfx950", 4, 64, 40_000, 0, Occupancy(4, 16, 32, "shared memory")),
        ("gfx942", 4, 64, 0, 100, Occupancy(8, 32, 32, "warps")),
        ("gfx942", 4, 64, 0, 102, Occupancy(7, 28, 32, "scalar registers")),
        ("gfx942", 32, 16, 0, 0, Occupancy(0, 0, 32, "threads of a program")),  # 2048 threads
    ],
)
def test_occupancy_is_limited_by_warps_registers_and_shared_memory(
    target: str, warps: int, registers: int, shared: int, scalars: int, expected: Occupancy
) -> None:
    assert occupancy_of(Kernel("kernel", warps, registers, 0, shared, scalars), target) == expected


def test_program_bytes_leave_out_the_reserved_shared_memory() -> None:
    most = {name: target.program_bytes for name, target in TARGETS.items()}
    assert most == {"sm_90": 232448, "sm_100": 232448, "gfx942": 65536, "gfx950": 163840}
