"""How `benchmarks.tpu_hlo` reads the text of a program. Needs no libtpu."""

from benchmarks.tpu_hlo import count_operations

HLO = """\
%fused_computation.1 (p: bf16[64,128]) -> bf16[128,64] {
  ROOT %copy.9 = bf16[128,64]{0,1} copy(%p)
}

%fused_gather (p.1: bf16[2048,8,64,128], p.2: s32[64]) -> bf16[64,8,64,128] {
  %p.1 = bf16[2048,8,64,128]{3,2,1,0} parameter(0)
  %p.2 = s32[64]{0} parameter(1)
  ROOT %gather.1 = bf16[64,8,64,128]{3,2,1,0} gather(%p.1, %p.2), offset_dims={1,2,3}
}

%fused_scatter (p.3: bf16[2048,8,64,128], p.4: s32[2], p.5: bf16[2,8,128]) -> bf16[2048,8,64,128] {
  %p.3 = bf16[2048,8,64,128]{3,2,1,0} parameter(0)
  %p.4 = s32[2]{0:S(1)} parameter(1)
  %p.5 = bf16[2,8,128]{2,1,0} parameter(2)
  ROOT %scatter.1 = bf16[2048,8,64,128]{3,2,1,0} scatter(%p.3, %p.4, %p.5), to_apply=%set
}

%body.1 (arg: (s32[], bf16[2048,8,64,128])) -> (s32[], bf16[2048,8,64,128]) {
  %pages = bf16[2048,8,64,128]{3,2,1,0:T(8,128)(2,1)} get-tuple-element(%arg), index=1
  %rows = bf16[2,8,128]{2,1,0:T(8,128)(2,1)} get-tuple-element(%arg), index=2
  %scatter_fusion = bf16[2048,8,64,128]{3,2,1,0} fusion(%pages, %at, %rows), calls=%fused_scatter
  %gather_fusion = bf16[64,8,64,128]{3,2,1,0:S(1)} fusion(%pages, %table), calls=%fused_gather
}

ENTRY %main (w: bf16[4096,4096], x: bf16[32,4096]) -> f32[32,4096] {
  %w = bf16[4096,4096]{1,0:T(8,128)(2,1)} parameter(0)
  %x = bf16[32,4096]{1,0:T(8,128)(2,1)S(1)} parameter(1)
  %loop = (s32[], bf16[2048,8,64,128]{3,2,1,0}) while(%start), condition=%c, body=%body.1
  %copy-start = (bf16[4096,4096]{1,0:S(1)}, bf16[4096,4096]{1,0}, u32[]{:S(2)}) copy-start(%w)
  %copy-done = bf16[4096,4096]{1,0:S(1)} copy-done(%copy-start)
  %copy.2 = bf16[4096,4096]{0,1:T(8,128)(2,1)} copy(%w)
  %all-gather = bf16[64,4096]{1,0:S(1)} all-gather(%x), dimensions={0}
  ROOT %dot = f32[32,4096]{1,0:T(8,128)} fusion(%x, %copy-done), kind=kOutput
}
"""
WEIGHT = 4096 * 4096 * 2


def test_loops_copies_and_collectives_are_counted_outside_of_fusions() -> None:
    counts = count_operations(HLO)
    assert (counts["whiles"], counts["collectives"]) == (1, 1)
    assert (counts["copies"], counts["copied_bytes"]) == (1, WEIGHT)
    assert counts["prefetched_bytes"] == WEIGHT


def test_memory_traffic_is_that_of_hbm() -> None:
    gathered = 64 * 8 * 64 * 128 * 2
    prefetch, copy, result = WEIGHT, 2 * WEIGHT, 4 * 32 * 4096
    scattered = 2 * (2 * 8 * 128 * 2)  # read and written
    total = gathered + scattered + prefetch + copy + result
    assert count_operations(HLO)["memory_bytes"] == total
