"""Registers, spills and access widths, on lines as cuobjdump and LLVM print them."""

from kerneltune.measuring.assembly import Access, Usage, gcn_accesses, gcn_usage, sass_accesses, sass_usage, typical_bits

SASS = """
 Function _rmsnorm_fwd_rows:
  REG:79 STACK:0 SHARED:1024 LOCAL:16 CONSTANT[0]:600 TEXTURE:0 SURFACE:0 SAMPLER:0
	code for sm_90a
        /*0000*/                   LDC R1, c[0x0][0x28] ;                         /* 0x00000a00ff017b82 */
        /*01f0*/               @P0 LDG.E.EF.128 R4, desc[UR8][R8.64] ;            /* 0x0000000808040981 */
        /*0200*/              @!P0 LDG.E.EL.LTC128B.64 R20, desc[UR8][R8.64] ;    /* 0x0020000808140981 */
        /*05a0*/                   LDG.E.STRONG.SYS R37, desc[UR8][R4.64] ;       /* 0x0000000804257981 */
        /*05b0*/             @!UP0 LDG.E.U8.CONSTANT R37, desc[UR8][R4.64] ;      /* 0x0000000804257981 */
        /*05c0*/                   LDS.128 R8, [R2] ;                             /* 0x0000000804257981 */
        /*09a0*/              @!P3 STG.E.64.STRONG.GPU desc[UR8][R46.64], R38 ;   /* 0x000100262e00b986 */
        /*0a30*/                   LDGSTS.E.BYPASS.128 [R2], desc[UR8][R42.64], P4 ;  /* 0x000000002a027fae */
        /*0a40*/                   STG.E.U16 desc[UR8][R46.64], R38 ;             /* 0x000100262e00b986 */
        /*0a60*/                   LDGDEPBAR ;                                    /* 0x00000000000079af */
        /*0a70*/                   RED.E.MAX.STRONG.GPU desc[UR8][R2.64], R9 ;    /* 0x00000000000079af */
        /*10010*/                  LDG.E.256 R4, desc[UR8][R8.64] ;               /* 0x0000000808040981 */
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


def test_sass() -> None:
    assert sass_usage(SASS) == Usage(79, 16)
    assert sass_accesses(SASS) == (
        Access("load", 256, 1),
        Access("load", 128, 2),
        Access("load", 64, 1),
        Access("load", 32, 1),
        Access("load", 8, 1),
        Access("store", 64, 1),
        Access("store", 16, 1),
    )


def test_amdgcn() -> None:
    assert gcn_usage(GCN) == Usage(136, 24, 83)
    assert gcn_accesses(GCN) == (
        Access("load", 128, 1),
        Access("load", 64, 1),
        Access("load", 32, 1),
        Access("load", 16, 2),
        Access("load", 8, 1),
        Access("store", 128, 1),
        Access("store", 8, 1),
    )


def test_nothing_of_nothing() -> None:
    assert (sass_usage(""), gcn_usage("")) == (Usage(0, 0), Usage(0, 0))
    assert (sass_accesses(""), gcn_accesses("")) == ((), ())


def test_the_typical_width_carries_most_bits() -> None:
    accesses = (Access("load", 128, 2), Access("load", 32, 7), Access("store", 64, 1))
    assert typical_bits(accesses, "load") == 128
    assert typical_bits((Access("load", 128, 1), Access("load", 32, 5)), "load") == 32
    assert typical_bits(accesses, "store") == 64
    assert typical_bits((), "load") == 0
