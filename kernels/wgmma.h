// Matrix products of a warpgroup, m64nNk16 of FP16 with FP32 sums: a in registers, b in shared memory.
#pragma once

#include <cstdint>

namespace stepgraph::sm90 {

/// Describes K-major rows of 128 bytes in shared memory, 128-byte swizzle, groups of eight rows 1024 bytes apart. `address`
/// is a multiple of 1024; the next 16 FP16 columns stand 32 bytes, two units of the descriptor, further on.
__device__ __forceinline__ uint64_t swizzled_rows(uint32_t address) {
    constexpr uint64_t swizzle_128 = uint64_t{1} << 62U;
    constexpr uint64_t group_stride = uint64_t{1024 / 16} << 32U;
    constexpr uint64_t ignored_stride = uint64_t{1} << 16U;
    return swizzle_128 | group_stride | ignored_stride | ((address & 0x3FFFFU) >> 4U);
}

__device__ __forceinline__ void wgmma_fence() {
    asm volatile("wgmma.fence.sync.aligned;" ::: "memory");
}
/// Keeps what is computed into a register before this point, and what is read from it behind: the fence orders registers for
/// the matrix units, but says nothing about them to the compiler.
__device__ __forceinline__ void pin(uint32_t& x) {
    asm volatile("" : "+r"(x)::"memory");
}
__device__ __forceinline__ void pin(float& x) {
    asm volatile("" : "+f"(x)::"memory");
}

__device__ __forceinline__ void wgmma_commit() {
    asm volatile("wgmma.commit_group.sync.aligned;" ::: "memory");
}
__device__ __forceinline__ void wgmma_wait_all() {
    asm volatile("wgmma.wait_group.sync.aligned 0;" ::: "memory");
}

#define STEPGRAPH_D8(i)                                                                                         \
    "+f"(d[i]), "+f"(d[i + 1]), "+f"(d[i + 2]), "+f"(d[i + 3]), "+f"(d[i + 4]), "+f"(d[i + 5]), "+f"(d[i + 6]), \
        "+f"(d[i + 7])
#define STEPGRAPH_WGMMA(n, registers, a0, a1, a2, a3, b, p_operand)                                                         \
    "{\n.reg .pred p;\nsetp.ne.b32 p, " p_operand ", 0;\nwgmma.mma_async.sync.aligned.m64n" n "k16.f32.f16.f16 {" registers \
    "}, {" a0 ", " a1 ", " a2 ", " a3 "}, " b ", p, 1, 1, 0;\n}\n"
#define STEPGRAPH_OPERANDS "r"(a[0]), "r"(a[1]), "r"(a[2]), "r"(a[3]), "l"(b), "r"(accumulate)

/// d += a . b^T for `columns` rows of b; the sum begins anew where `accumulate` is 0. d: a thread's share of [64, columns]:
/// d[4*j + i] and d[4*j + 2 + i] are column 8*j + lane%4*2 + i of rows 16*warp + lane/4 and eight below. a: pairs of FP16,
/// a[0] and a[1] columns lane%4*2 and the next of the same two rows, a[2] and a[3] those eight columns further on.
template <int columns>
__device__ __forceinline__ void wgmma_f16(float (&d)[columns / 2], const uint32_t* a, uint64_t b, int accumulate);

#define R8(a, b, c, d, e, f, g, h) "%" #a ", %" #b ", %" #c ", %" #d ", %" #e ", %" #f ", %" #g ", %" #h
#define R_0_7 R8(0, 1, 2, 3, 4, 5, 6, 7)
#define R_8_15 R8(8, 9, 10, 11, 12, 13, 14, 15)
#define R_16_23 R8(16, 17, 18, 19, 20, 21, 22, 23)
#define R_24_31 R8(24, 25, 26, 27, 28, 29, 30, 31)
#define R_32_39 R8(32, 33, 34, 35, 36, 37, 38, 39)
#define R_40_47 R8(40, 41, 42, 43, 44, 45, 46, 47)
#define R_48_55 R8(48, 49, 50, 51, 52, 53, 54, 55)
#define R_56_63 R8(56, 57, 58, 59, 60, 61, 62, 63)

template <>
__device__ __forceinline__ void wgmma_f16<16>(float (&d)[8], const uint32_t* a, uint64_t b, int accumulate) {
    asm volatile(STEPGRAPH_WGMMA("16", R_0_7, "%8", "%9", "%10", "%11", "%12", "%13")
                 : STEPGRAPH_D8(0)
                 : STEPGRAPH_OPERANDS);
}

template <>
__device__ __forceinline__ void wgmma_f16<32>(float (&d)[16], const uint32_t* a, uint64_t b, int accumulate) {
    asm volatile(STEPGRAPH_WGMMA("32", R_0_7 ", " R_8_15, "%16", "%17", "%18", "%19", "%20", "%21")
                 : STEPGRAPH_D8(0), STEPGRAPH_D8(8)
                 : STEPGRAPH_OPERANDS);
}

template <>
__device__ __forceinline__ void wgmma_f16<64>(float (&d)[32], const uint32_t* a, uint64_t b, int accumulate) {
    asm volatile(STEPGRAPH_WGMMA("64", R_0_7 ", " R_8_15 ", " R_16_23 ", " R_24_31, "%32", "%33", "%34", "%35", "%36", "%37")
                 : STEPGRAPH_D8(0), STEPGRAPH_D8(8), STEPGRAPH_D8(16), STEPGRAPH_D8(24)
                 : STEPGRAPH_OPERANDS);
}

template <>
__device__ __forceinline__ void wgmma_f16<128>(float (&d)[64], const uint32_t* a, uint64_t b, int accumulate) {
    asm volatile(STEPGRAPH_WGMMA(
                     "128", R_0_7 ", " R_8_15 ", " R_16_23 ", " R_24_31 ", " R_32_39 ", " R_40_47 ", " R_48_55 ", " R_56_63,
                     "%64", "%65", "%66", "%67", "%68", "%69")
                 : STEPGRAPH_D8(0), STEPGRAPH_D8(8), STEPGRAPH_D8(16), STEPGRAPH_D8(24), STEPGRAPH_D8(32), STEPGRAPH_D8(40),
                   STEPGRAPH_D8(48), STEPGRAPH_D8(56)
                 : STEPGRAPH_OPERANDS);
}

#undef R8
#undef R_0_7
#undef R_8_15
#undef R_16_23
#undef R_24_31
#undef R_32_39
#undef R_40_47
#undef R_48_55
#undef R_56_63
#undef STEPGRAPH_D8
#undef STEPGRAPH_WGMMA
#undef STEPGRAPH_OPERANDS

}  // namespace stepgraph::sm90
