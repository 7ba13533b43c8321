// Products of the matrix units: E4M3 and BF16 of a warpgroup, FP16 of a warp; and the registers of a warpgroup.
#pragma once

#include <cstdint>

#if defined(STEPGRAPH_EMULATED)
#include "emulated_matrix_units.h"
#else

namespace stepgraph::sm90 {

/// Describes K-major rows of 128 bytes in shared memory, 128-byte swizzle, groups of eight rows 1024 bytes apart: the low
/// word of the descriptor. `address` is a multiple of 1024; the next 32 bytes of the rows stand two units further on, the
/// next row group 64.
__device__ __forceinline__ uint32_t swizzled_rows_low(uint32_t address) {
    constexpr uint32_t ignored_stride = 1U << 16U;
    return ignored_stride | ((address & 0x3FFFFU) >> 4U);
}
/// The high word: the same for all.
constexpr uint32_t swizzled_rows_high = 1U << 30U | 1024 / 16;

__device__ __forceinline__ void wgmma_fence() {
    asm volatile("wgmma.fence.sync.aligned;" ::: "memory");
}
__device__ __forceinline__ void wgmma_commit() {
    asm volatile("wgmma.commit_group.sync.aligned;" ::: "memory");
}
/// Waits until at most `left` of the groups that were committed are not complete.
template <int left>
__device__ __forceinline__ void wgmma_wait() {
    asm volatile("wgmma.wait_group.sync.aligned %0;" ::"n"(left) : "memory");
}

/// Keeps what is computed into a register before this point, and what is read from it behind: the fence orders registers for
/// the matrix units, but says nothing about them to the compiler.
__device__ __forceinline__ void pin(uint32_t& x) {
    asm volatile("" : "+r"(x)::"memory");
}
__device__ __forceinline__ void pin(float& x) {
    asm volatile("" : "+f"(x)::"memory");
}
/// Lets a register hold what it happens to hold: the matrix units overwrite it.
__device__ __forceinline__ void leave_undefined(float& x) {
    asm volatile("" : "=f"(x));
}

#define STEPGRAPH_D8(i)                                                                                         \
    "+f"(d[i]), "+f"(d[i + 1]), "+f"(d[i + 2]), "+f"(d[i + 3]), "+f"(d[i + 4]), "+f"(d[i + 5]), "+f"(d[i + 6]), \
        "+f"(d[i + 7])
#define STEPGRAPH_R8(a, b, c, d, e, f, g, h) "%" #a ", %" #b ", %" #c ", %" #d ", %" #e ", %" #f ", %" #g ", %" #h
#define STEPGRAPH_WGMMA(n, registers, a0, a1, a2, a3, b, p_operand)                                             \
    "{\n.reg .pred p;\n.reg .b64 rows;\nsetp.ne.b32 p, " p_operand ", 0;\nmov.b64 rows, {" b                    \
    "};\nwgmma.mma_async.sync.aligned.m64n" n "k32.f32.e4m3.e4m3 {" registers "}, {" a0 ", " a1 ", " a2 ", " a3 \
    "}, rows, p, 1, 1;\n}\n"
#define STEPGRAPH_OPERANDS "r"(a[0]), "r"(a[1]), "r"(a[2]), "r"(a[3]), "r"(b), "n"(swizzled_rows_high), "r"(accumulate)

/// d += a . b^T for `columns` rows of b, E4M3; the sum begins anew where `accumulate` is 0. d: a thread's share of
/// [64, columns]: d[4*j + i] and d[4*j + 2 + i] are column 8*j + lane%4*2 + i of rows 16*warp + lane/4 and eight below. a:
/// four codes each, a[0] and a[1] those from column lane%4*4 on of the same two rows, a[2] and a[3] those 16 further on.
/// Sums keep some 14 bits below their largest term (DeepSeek-V3, arXiv 2412.19437, section 3.3.2).
template <int columns>
__device__ __forceinline__ void wgmma_e4m3(float (&d)[columns / 2], const uint32_t* a, uint32_t b, int accumulate);

template <>
__device__ __forceinline__ void wgmma_e4m3<16>(float (&d)[8], const uint32_t* a, uint32_t b, int accumulate) {
    asm volatile(STEPGRAPH_WGMMA("16", STEPGRAPH_R8(0, 1, 2, 3, 4, 5, 6, 7), "%8", "%9", "%10", "%11", "%12, %13", "%14")
                 : STEPGRAPH_D8(0)
                 : STEPGRAPH_OPERANDS);
}

template <>
__device__ __forceinline__ void wgmma_e4m3<32>(float (&d)[16], const uint32_t* a, uint32_t b, int accumulate) {
    asm volatile(STEPGRAPH_WGMMA("32", STEPGRAPH_R8(0, 1, 2, 3, 4, 5, 6, 7) ", " STEPGRAPH_R8(8, 9, 10, 11, 12, 13, 14, 15),
                                 "%16", "%17", "%18", "%19", "%20, %21", "%22")
                 : STEPGRAPH_D8(0), STEPGRAPH_D8(8)
                 : STEPGRAPH_OPERANDS);
}

template <>
__device__ __forceinline__ void wgmma_e4m3<64>(float (&d)[32], const uint32_t* a, uint32_t b, int accumulate) {
    asm volatile(STEPGRAPH_WGMMA(
                     "64",
                     STEPGRAPH_R8(0, 1, 2, 3, 4, 5, 6, 7) ", " STEPGRAPH_R8(8, 9, 10, 11, 12, 13, 14, 15) ", " STEPGRAPH_R8(
                         16, 17, 18, 19, 20, 21, 22, 23) ", " STEPGRAPH_R8(24, 25, 26, 27, 28, 29, 30, 31),
                     "%32", "%33", "%34", "%35", "%36, %37", "%38")
                 : STEPGRAPH_D8(0), STEPGRAPH_D8(8), STEPGRAPH_D8(16), STEPGRAPH_D8(24)
                 : STEPGRAPH_OPERANDS);
}

template <>
__device__ __forceinline__ void wgmma_e4m3<128>(float (&d)[64], const uint32_t* a, uint32_t b, int accumulate) {
    asm volatile(
        STEPGRAPH_WGMMA(
            "128",
            STEPGRAPH_R8(0, 1, 2, 3, 4, 5, 6, 7) ", " STEPGRAPH_R8(8, 9, 10, 11, 12, 13, 14, 15) ", " STEPGRAPH_R8(
                16, 17, 18, 19, 20, 21, 22,
                23) ", " STEPGRAPH_R8(24, 25, 26, 27, 28, 29, 30,
                                      31) ", " STEPGRAPH_R8(32, 33, 34, 35, 36, 37, 38,
                                                            39) ", " STEPGRAPH_R8(40, 41, 42, 43, 44, 45, 46,
                                                                                  47) ", " STEPGRAPH_R8(48, 49, 50, 51, 52,
                                                                                                        53, 54,
                                                                                                        55) ","
                                                                                                            " " STEPGRAPH_R8(
                                                                                                                56, 57, 58,
                                                                                                                59, 60, 61,
                                                                                                                62, 63),
            "%64", "%65", "%66", "%67", "%68, %69", "%70")
        : STEPGRAPH_D8(0), STEPGRAPH_D8(8), STEPGRAPH_D8(16), STEPGRAPH_D8(24), STEPGRAPH_D8(32), STEPGRAPH_D8(40),
          STEPGRAPH_D8(48), STEPGRAPH_D8(56)
        : STEPGRAPH_OPERANDS);
}

#undef STEPGRAPH_OPERANDS

#define STEPGRAPH_WGMMA_BF16(n, registers, a, b)                                                                          \
    "{\n.reg .b64 rows, columns;\nmov.b64 rows, {" a "};\nmov.b64 columns, {" b "};\nwgmma.mma_async.sync.aligned.m64n" n \
    "k16.f32.bf16.bf16 {" registers "}, rows, columns, 1, 1, 1, 0, 0;\n}\n"
#define STEPGRAPH_OPERANDS "r"(a), "r"(b), "n"(swizzled_rows_high)

/// d += a . b^T for 64 rows of a and `columns` rows of b, 16 columns deep, BF16, by the low words of their descriptors. d as
/// above.
template <int columns>
__device__ __forceinline__ void wgmma_bf16(float (&d)[columns / 2], uint32_t a, uint32_t b);

template <>
__device__ __forceinline__ void wgmma_bf16<32>(float (&d)[16], uint32_t a, uint32_t b) {
    asm volatile(
        STEPGRAPH_WGMMA_BF16("32", STEPGRAPH_R8(0, 1, 2, 3, 4, 5, 6, 7) ", " STEPGRAPH_R8(8, 9, 10, 11, 12, 13, 14, 15),
                             "%16, %18", "%17, %18")
        : STEPGRAPH_D8(0), STEPGRAPH_D8(8)
        : STEPGRAPH_OPERANDS);
}

template <>
__device__ __forceinline__ void wgmma_bf16<96>(float (&d)[48], uint32_t a, uint32_t b) {
    asm volatile(STEPGRAPH_WGMMA_BF16(
                     "96",
                     STEPGRAPH_R8(0, 1, 2, 3, 4, 5, 6, 7) ", " STEPGRAPH_R8(8, 9, 10, 11, 12, 13, 14, 15) ", " STEPGRAPH_R8(
                         16, 17, 18, 19, 20, 21, 22,
                         23) ", " STEPGRAPH_R8(24, 25, 26, 27, 28, 29, 30,
                                               31) ", " STEPGRAPH_R8(32, 33, 34, 35, 36, 37, 38,
                                                                     39) ", " STEPGRAPH_R8(40, 41, 42, 43, 44, 45, 46, 47),
                     "%48, %50", "%49, %50")
                 : STEPGRAPH_D8(0), STEPGRAPH_D8(8), STEPGRAPH_D8(16), STEPGRAPH_D8(24), STEPGRAPH_D8(32), STEPGRAPH_D8(40)
                 : STEPGRAPH_OPERANDS);
}

#undef STEPGRAPH_D8
#undef STEPGRAPH_R8
#undef STEPGRAPH_WGMMA
#undef STEPGRAPH_WGMMA_BF16
#undef STEPGRAPH_OPERANDS

/// d += a . b^T of a warp, [16, 8] and 16 columns deep, pairs of FP16: places as above, a pair where a code quadruple
/// stands.
__device__ __forceinline__ void mma_f16(float (&d)[4], const uint32_t (&a)[4], uint32_t b0, uint32_t b1) {
    asm volatile(
        "mma.sync.aligned.m16n8k16.row.col.f32.f16.f16.f32 {%0, %1, %2, %3}, {%4, %5, %6, %7}, {%8, %9}, {%0, %1, "
        "%2, %3};"
        : "+f"(d[0]), "+f"(d[1]), "+f"(d[2]), "+f"(d[3])
        : "r"(a[0]), "r"(a[1]), "r"(a[2]), "r"(a[3]), "r"(b0), "r"(b1));
}

/// Sets the registers of each thread of a warpgroup to more, or to fewer, than the kernel began with.
template <int count>
__device__ __forceinline__ void take_registers() {
    asm volatile("setmaxnreg.inc.sync.aligned.u32 %0;" ::"n"(count));
}
template <int count>
__device__ __forceinline__ void leave_registers() {
    asm volatile("setmaxnreg.dec.sync.aligned.u32 %0;" ::"n"(count));
}

}  // namespace stepgraph::sm90

#endif
