# SPDX-License-Identifier: Apache-2.0
"""Instructions counted by kind, for kernels and their loops."""

from tools.sass.counts import Loop, count, describe, kind_of, parse

CODE = """
	.section	.text.kernel_1,"ax",@progbits
        /*0000*/                   S2R R0, SR_TID.X ;
.L_x_0:
        /*0010*/                   SYNCS.PHASECHK.TRANS64.TRYWAIT P0, [UR4], R5 ;
        /*0020*/              @!P0 BRA `(.L_x_3) ;
.L_x_2:
        /*0030*/                   LDTM.x32 R36, tmem[UR12] ;
        /*0040*/               @P1 FFMA R4, R5, R6, R4 ;
.L_x_1:
        /*0050*/                   MUFU.EX2 R4, R4 ;
        /*0060*/                   UTCHMMA tmem[UR41], gdesc[UR4], tmem[UR32], tmem[UR74], idesc[UR75], UPT ;
        /*0070*/                   UIADD3 UR4, UPT, UPT, UR4, 0x1, URZ ;
        /*0080*/                   STS.128 [R4], R8 ;
        /*0090*/                   FMNMX3 R4, R4, R5, R6 ;
        /*00a0*/                   BRA.U UP0, `(.L_x_1) ;
        /*00b0*/                   BRA.U UP1, `(.L_x_0) ;
        /*00c0*/                   EXIT ;
.L_x_3:
        /*00d0*/                   SYNCS.PHASECHK.TRANS64.TRYWAIT P0, [UR4], R5 ;
        /*00e0*/              @!P0 BRA `(.L_x_3) ;
        /*00f0*/                   BRA `(.L_x_2) ;
        /*0100*/                   NOP ;
	.section	.text.kernel_0,"ax",@progbits
        /*0000*/                   HMMA.16816.F32 R4, R8, R12, R4 ;
        /*0010*/                   EXIT ;
"""


def test_kernels_and_their_outermost_loops():
    first, second = parse(CODE)
    assert (first.name, first.code, first.loops) == ("kernel_0", ("HMMA.16816.F32 R4, R8, R12, R4", "EXIT"), [])
    assert second.loops == [Loop(1, 11)], "neither the loop inside nor the way back from a wait"
    assert count(second.code[1:12]) == {
        "control": 4, "tensor memory": 1, "multiply-add": 1, "special functions": 1, "tensor core": 1, "uniform": 1,
        "shared memory": 1, "other arithmetic": 1,
    }  # fmt: skip
    assert describe(first.code) == "2: 1 tensor core, 1 control"


def test_kinds():
    kinds = {
        "@!P0 FADD R1, R2, R3": "multiply-add", "F2FP.F16.F32.PACK_AB R1, R2, R3": "other arithmetic",
        "IMAD.MOV.U32 R1, RZ, RZ, R2": "multiply-add", "LDSM.16.M88.4 R4, [R8]": "shared memory",
        "STG.E.128 desc[UR4][R2.64], R4": "global memory", "UTMALDG.3D [UR8], [UR4]": "shared memory",
        "BAR.SYNC 0x0": "control", "R2UR UR4, R5": "other arithmetic", "UMOV UR4, 0x1": "uniform",
    }  # fmt: skip
    assert {text: kind_of(text) for text in kinds} == kinds
