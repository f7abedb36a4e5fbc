// Grouped input gradient dx = dh W1 for compute capability 9.0. Rows are sorted by expert; each expert has its own W1.
//
// One thread of a producer warp copies tiles into shared memory by TMA, in a ring of stages. Two warpgroups multiply
// them, 64 rows each. A tile may contain rows of the next expert, which are loaded but not stored. reference.py
// specifies what the kernel computes; the kernel does not depend on torch.
#include <cuda.h>
#include <cuda_bf16.h>
#include <cuda_runtime.h>

#include <cstdint>
#include <vector>

#include "wgmma.cuh"

namespace {

constexpr int BM = 128, BN = 256, BK = 64;
constexpr int STAGES = 4;
constexpr int CONSUMERS = 2;  // warpgroups
constexpr int THREADS = 128 * (1 + CONSUMERS);
constexpr int GROUP = 8;      // row tiles that share columns in the cache
constexpr int LEFT_BYTES = BM * BK * 2, WEIGHT_BYTES = BK * BN * 2, STAGE_BYTES = LEFT_BYTES + WEIGHT_BYTES;
constexpr int BOX = 64;       // columns of a box: 128 bytes, the width of the swizzle
constexpr int BOX_BYTES = BK * BOX * 2;
constexpr int SHARED_BYTES = STAGES * STAGE_BYTES + 1024;  // stages begin at multiples of 1024 bytes

__device__ __forceinline__ uint32_t shared_address(const void* pointer) {
    return static_cast<uint32_t>(__cvta_generic_to_shared(pointer));
}

__device__ __forceinline__ void init(uint64_t* barrier, int arrivals) {
    asm volatile("mbarrier.init.shared::cta.b64 [%0], %1;" ::"r"(shared_address(barrier)), "r"(arrivals));
}

__device__ __forceinline__ void expect(uint64_t* barrier, int bytes) {
    asm volatile("mbarrier.arrive.expect_tx.shared::cta.b64 _, [%0], %1;" ::"r"(shared_address(barrier)), "r"(bytes));
}

__device__ __forceinline__ void arrive(uint64_t* barrier) {
    asm volatile("mbarrier.arrive.shared::cta.b64 _, [%0];" ::"r"(shared_address(barrier)));
}

__device__ __forceinline__ void wait(uint64_t* barrier, int parity) {
    asm volatile(
        "{\n"
        ".reg .pred done;\n"
        "again:\n"
        "mbarrier.try_wait.parity.shared::cta.b64 done, [%0], %1;\n"
        "@!done bra again;\n"
        "}\n" ::"r"(shared_address(barrier)),
        "r"(parity));
}

__device__ __forceinline__ void load(void* to, const CUtensorMap* map, uint64_t* barrier, int column, int row) {
    asm volatile(
        "cp.async.bulk.tensor.2d.shared::cluster.global.mbarrier::complete_tx::bytes [%0], [%1, {%3, %4}], [%2];" ::"r"(
            shared_address(to)),
        "l"(map), "r"(shared_address(barrier)), "r"(column), "r"(row)
        : "memory");
}

// Returns the descriptor of a tile that is swizzled over 128 bytes. `leading` is the number of bytes between boxes of
// columns if columns are contiguous, and is ignored if the inner dimension is. `stride` is the number of bytes between
// groups of eight rows.
__device__ __forceinline__ uint64_t descriptor(const void* tile, int leading, int stride) {
    uint64_t address = shared_address(tile);
    return ((address & 0x3FFFF) >> 4) | (static_cast<uint64_t>(leading >> 4) << 16) |
           (static_cast<uint64_t>(stride >> 4) << 32) | (static_cast<uint64_t>(1) << 62);
}

__global__ void __launch_bounds__(THREADS, 1)
    grouped_product(const __grid_constant__ CUtensorMap left, const CUtensorMap* weights, const int* tile_expert,
                    const int* tile_begin, const int* tile_end, int tiles, int inner, int columns, __nv_bfloat16* out) {
    extern __shared__ uint8_t unaligned[];
    uint8_t* stages = reinterpret_cast<uint8_t*>((reinterpret_cast<uintptr_t>(unaligned) + 1023) & ~uintptr_t(1023));
    __shared__ uint64_t filled[STAGES], emptied[STAGES];

    const int across = (columns + BN - 1) / BN;
    const int group = blockIdx.x / (GROUP * across), first = group * GROUP, size = min(tiles - first, GROUP);
    const int inside = blockIdx.x % (GROUP * across);
    const int tile = first + inside % size, column = inside / size * BN;
    const int begin = tile_begin[tile], end = tile_end[tile];
    const int steps = (inner + BK - 1) / BK;

    if (threadIdx.x == 0) {
        for (int stage = 0; stage < STAGES; ++stage) {
            init(&filled[stage], 1);
            init(&emptied[stage], 4 * CONSUMERS);  // warps
        }
        asm volatile("fence.proxy.async.shared::cta;");
    }
    __syncthreads();

    const int warpgroup = threadIdx.x / 128;
    if (warpgroup == 0) {
        asm volatile("setmaxnreg.dec.sync.aligned.u32 40;");
        if (threadIdx.x == 0) {
            const CUtensorMap* weight = weights + tile_expert[tile];
            // The host has written this memory, which may have held another tensor map before.
            asm volatile("fence.proxy.tensormap::generic.acquire.sys [%0], 128;" ::"l"(weight) : "memory");
            for (int step = 0; step < steps; ++step) {
                const int stage = step % STAGES, round = step / STAGES;
                if (round > 0) wait(&emptied[stage], (round - 1) & 1);
                uint8_t* place = stages + stage * STAGE_BYTES;
                expect(&filled[stage], STAGE_BYTES);
                load(place, &left, &filled[stage], step * BK, begin);
                for (int box = 0; box < BN / BOX; ++box)
                    load(place + LEFT_BYTES + box * BOX_BYTES, weight, &filled[stage], column + box * BOX, step * BK);
            }
        }
        return;
    }

    asm volatile("setmaxnreg.inc.sync.aligned.u32 232;");
    float total[128] = {};
    const int rows = (warpgroup - 1) * 64;
    for (int step = 0; step < steps; ++step) {
        const int stage = step % STAGES;
        wait(&filled[stage], (step / STAGES) & 1);
        const uint8_t* place = stages + stage * STAGE_BYTES;
        asm volatile("wgmma.fence.sync.aligned;" ::: "memory");
#pragma unroll
        for (int k = 0; k < BK; k += 16) {
            const uint64_t a = descriptor(place + rows * BK * 2 + k * 2, 16, 8 * 128);
            const uint64_t b = descriptor(place + LEFT_BYTES + k * BOX * 2, BOX_BYTES, 8 * 128);
            wgmma_m64n256k16(total, a, b);
        }
        asm volatile("wgmma.commit_group.sync.aligned;" ::: "memory");
        // The products of this step stay in flight, so that the tensor cores have work during the wait for the next
        // stage. The products of the previous step are complete, so its stage can be filled again.
        asm volatile("wgmma.wait_group.sync.aligned 1;" ::: "memory");
        if (step > 0 && threadIdx.x % 32 == 0) arrive(&emptied[(step - 1) % STAGES]);
    }
    asm volatile("wgmma.wait_group.sync.aligned 0;" ::: "memory");
    written(total);

    // A thread holds two neighbouring columns of every eight, in two rows.
    const int lane = threadIdx.x % 32, warp = threadIdx.x / 32 % 4;
    const int row = begin + rows + warp * 16 + lane / 4;
    for (int part = 0; part < BN / 8; ++part) {
        const int at = column + part * 8 + lane % 4 * 2;
        if (at >= columns) continue;
        for (int half = 0; half < 2; ++half) {
            if (row + half * 8 >= end) continue;
            __nv_bfloat162 pair =
                __floats2bfloat162_rn(total[part * 4 + half * 2], total[part * 4 + half * 2 + 1]);
            *reinterpret_cast<__nv_bfloat162*>(out + static_cast<int64_t>(row + half * 8) * columns + at) = pair;
        }
    }
}

using Encode = decltype(&cuTensorMapEncodeTiled);

Encode encoder() {
    void* function = nullptr;
    cudaDriverEntryPointQueryResult found;
#if CUDART_VERSION >= 12050
    cudaGetDriverEntryPointByVersion("cuTensorMapEncodeTiled", &function, 12000, cudaEnableDefault, &found);
#else
    cudaGetDriverEntryPoint("cuTensorMapEncodeTiled", &function, cudaEnableDefault, &found);
#endif
    return reinterpret_cast<Encode>(function);
}

bool describe(CUtensorMap* map, const void* data, int64_t rows, int64_t columns, int box_rows) {
    static const Encode encode = encoder();
    if (encode == nullptr) return false;
    const cuuint64_t sizes[2] = {static_cast<cuuint64_t>(columns), static_cast<cuuint64_t>(rows)};
    const cuuint64_t strides[1] = {static_cast<cuuint64_t>(columns) * 2};
    const cuuint32_t box[2] = {BOX, static_cast<cuuint32_t>(box_rows)}, steps[2] = {1, 1};
    return encode(map, CU_TENSOR_MAP_DATA_TYPE_BFLOAT16, 2, const_cast<void*>(data), sizes, strides, box, steps,
                  CU_TENSOR_MAP_INTERLEAVE_NONE, CU_TENSOR_MAP_SWIZZLE_128B, CU_TENSOR_MAP_L2_PROMOTION_L2_256B,
                  CU_TENSOR_MAP_FLOAT_OOB_FILL_NONE) == CUDA_SUCCESS;
}

}  // namespace

static_assert(BK == BOX, "a row of the left tile is one swizzled row");
static_assert(sizeof(CUtensorMap) == 128, "as grouped_product.py reserves");

// Writes the tensor maps of [inner, columns] weights for `grouped_product_run`; a weight that moves needs a new one.
// Returns 0, a cudaError_t, or -1 if a tensor map cannot be encoded.
extern "C" int grouped_product_describe(const void* const* weights, int experts, int64_t inner, int64_t columns,
                                        void* on_device, cudaStream_t stream) {
    std::vector<CUtensorMap> maps(experts);
    for (int expert = 0; expert < experts; ++expert)
        if (!describe(&maps[expert], weights[expert], inner, columns, BK)) return -1;
    cudaError_t error = cudaMemcpyAsync(on_device, maps.data(), experts * sizeof(CUtensorMap), cudaMemcpyHostToDevice, stream);
    if (error == cudaSuccess) error = cudaStreamSynchronize(stream);  // the copy reads `maps`, which ends here
    return error;
}

// Computes out[rows, columns] = left[rows, inner] W in BF16. Returns 0, a cudaError_t, or -1 if the tensor map of
// `left` cannot be encoded.
extern "C" int grouped_product_run(const void* left, int64_t rows, int inner, int columns, const void* weights,
                                   const int* tile_expert, const int* tile_begin, const int* tile_end, int tiles,
                                   void* out, cudaStream_t stream) {
    if (tiles == 0) return 0;
    CUtensorMap map;
    if (!describe(&map, left, rows, inner, BM)) return -1;
    cudaError_t error =
        cudaFuncSetAttribute(grouped_product, cudaFuncAttributeMaxDynamicSharedMemorySize, SHARED_BYTES);
    if (error != cudaSuccess) return error;
    const int across = (columns + BN - 1) / BN;
    grouped_product<<<tiles * across, THREADS, SHARED_BYTES, stream>>>(
        map, static_cast<const CUtensorMap*>(weights), tile_expert, tile_begin, tile_end, tiles, inner, columns,
        static_cast<__nv_bfloat16*>(out));
    return cudaGetLastError();
}
