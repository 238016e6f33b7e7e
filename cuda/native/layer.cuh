// A synthetic transformer layer for measurements: it has the shape, memory traffic and tensor-core work of a real one.
//
// Matrices are row-major in bf16, sums are fp32. The attention subtracts no maximum before it exponentiates: inputs
// are bounded by construction, so no exponential overflows. This is a load for measurements of slack, not an engine.
#pragma once

#include <cuda_bf16.h>
#include <mma.h>

#include <cstdint>

namespace reprise {
namespace layer {

using nvcuda::wmma::accumulator;
using nvcuda::wmma::col_major;
using nvcuda::wmma::fragment;
using nvcuda::wmma::matrix_a;
using nvcuda::wmma::matrix_b;
using nvcuda::wmma::row_major;
using bf16 = __nv_bfloat16;

using FragmentA = fragment<matrix_a, 16, 16, 16, bf16, row_major>;
using FragmentB = fragment<matrix_b, 16, 16, 16, bf16, row_major>;
using FragmentBTransposed = fragment<matrix_b, 16, 16, 16, bf16, col_major>;
using FragmentSum = fragment<accumulator, 16, 16, 16, float>;

// c[m][n] = a[m][k] * b[k][n]; m and n are multiples of 128, k of 32.
struct GemmArguments {
  const bf16* a;
  const bf16* b;
  bf16* c;
  uint32_t m;
  uint32_t n;
  uint32_t k;
};

// Attention of `tokens` queries over `prefix + tokens` keys, causal. All counts of tokens are multiples of 64.
// queries: [tokens][query_stride], the first heads * 128 values of each row; output: [tokens][heads * 128];
// keys and values: [prefix + tokens][kv_heads][128].
struct AttentionArguments {
  const bf16* queries;
  const bf16* keys;
  const bf16* values;
  bf16* output;
  uint32_t query_stride;
  uint32_t heads;
  uint32_t kv_heads;
  uint32_t prefix;
  uint32_t tokens;
};

constexpr uint32_t kTile = 128;      // rows and columns of a block's result
constexpr uint32_t kDepth = 32;      // columns of a, rows of b in a stage
constexpr uint32_t kPitchA = kDepth + 8;
constexpr uint32_t kPitchB = kTile + 8;
constexpr uint32_t kGemmThreads = 256;

__device__ inline void copy_async(void* shared, const void* global) {
  const uint32_t address = static_cast<uint32_t>(__cvta_generic_to_shared(shared));
  asm volatile("cp.async.cg.shared.global [%0], [%1], 16;" : : "r"(address), "l"(global) : "memory");
}
__device__ inline void commit_async() { asm volatile("cp.async.commit_group;" : : : "memory"); }
template <int kPending>
__device__ inline void wait_async() {
  asm volatile("cp.async.wait_group %0;" : : "n"(kPending) : "memory");
}

struct GemmShared {
  bf16 a[2][kTile][kPitchA];
  bf16 b[2][kDepth][kPitchB];
};
constexpr uint32_t kPitchSum = 20;

__device__ inline void gemm_load(GemmShared& shared, const GemmArguments& arguments, uint32_t stage, uint32_t depth,
                                 uint32_t row, uint32_t column) {
  for (uint32_t piece = threadIdx.x; piece < kTile * kDepth / 8; piece += kGemmThreads) {
    const uint32_t line = piece / (kDepth / 8);
    const uint32_t at = piece % (kDepth / 8) * 8;
    copy_async(&shared.a[stage][line][at], arguments.a + static_cast<uint64_t>(row + line) * arguments.k + depth + at);
  }
  for (uint32_t piece = threadIdx.x; piece < kTile * kDepth / 8; piece += kGemmThreads) {
    const uint32_t line = piece / (kTile / 8);
    const uint32_t at = piece % (kTile / 8) * 8;
    copy_async(&shared.b[stage][line][at],
               arguments.b + static_cast<uint64_t>(depth + line) * arguments.n + column + at);
  }
}

__device__ inline void gemm_tile(const GemmArguments& arguments, uint32_t row, uint32_t column) {
  __shared__ __align__(128) unsigned char memory[sizeof(GemmShared)];
  GemmShared& shared = *reinterpret_cast<GemmShared*>(memory);
  const uint32_t warp = threadIdx.x / 32;
  const uint32_t lane = threadIdx.x % 32;
  const uint32_t warp_row = warp / 4 * 64;
  const uint32_t warp_column = warp % 4 * 32;
  FragmentSum sums[4][2];
  for (auto& line : sums) {
    for (auto& sum : line) nvcuda::wmma::fill_fragment(sum, 0.0f);
  }
  const uint32_t stages = arguments.k / kDepth;
  gemm_load(shared, arguments, 0, 0, row, column);
  commit_async();
  for (uint32_t index = 0; index < stages; ++index) {
    const uint32_t stage = index % 2;
    if (index + 1 < stages) gemm_load(shared, arguments, 1 - stage, (index + 1) * kDepth, row, column);
    commit_async();
    wait_async<1>();
    __syncthreads();
#pragma unroll
    for (uint32_t depth = 0; depth < kDepth; depth += 16) {
      FragmentA a[4];
      FragmentB b[2];
#pragma unroll
      for (uint32_t i = 0; i < 4; ++i) {
        nvcuda::wmma::load_matrix_sync(a[i], &shared.a[stage][warp_row + 16 * i][depth], kPitchA);
      }
#pragma unroll
      for (uint32_t j = 0; j < 2; ++j) {
        nvcuda::wmma::load_matrix_sync(b[j], &shared.b[stage][depth][warp_column + 16 * j], kPitchB);
      }
#pragma unroll
      for (uint32_t i = 0; i < 4; ++i) {
#pragma unroll
        for (uint32_t j = 0; j < 2; ++j) nvcuda::wmma::mma_sync(sums[i][j], a[i], b[j], sums[i][j]);
      }
    }
    __syncthreads();
  }
  // The stages are no longer used: each warp converts its sums in its own part of the memory.
  float* own = reinterpret_cast<float*>(memory) + warp * 16 * kPitchSum;
#pragma unroll
  for (uint32_t i = 0; i < 4; ++i) {
#pragma unroll
    for (uint32_t j = 0; j < 2; ++j) {
      nvcuda::wmma::store_matrix_sync(own, sums[i][j], kPitchSum, nvcuda::wmma::mem_row_major);
      __syncwarp();
      bf16* target = arguments.c + static_cast<uint64_t>(row + warp_row + 16 * i) * arguments.n + column +
                     warp_column + 16 * j;
      const uint32_t line = lane / 2;
      const uint32_t at = lane % 2 * 8;
      for (uint32_t value = 0; value < 8; value += 2) {
        const float2 pair = make_float2(own[line * kPitchSum + at + value], own[line * kPitchSum + at + value + 1]);
        *reinterpret_cast<__nv_bfloat162*>(target + static_cast<uint64_t>(line) * arguments.n + at + value) =
            __float22bfloat162_rn(pair);
      }
      __syncwarp();
    }
  }
}

constexpr uint32_t kHeadValues = 128;
constexpr uint32_t kQueries = 64;   // of a block: 16 for each warp
constexpr uint32_t kKeys = 32;      // of a step
constexpr uint32_t kAttentionThreads = 128;
constexpr uint32_t kPitchKeys = kHeadValues + 8;
constexpr uint32_t kPitchScores = kKeys + 4;
constexpr uint32_t kPitchWeights = kKeys + 8;

struct AttentionShared {
  bf16 keys[kKeys][kPitchKeys];
  bf16 values[kKeys][kPitchKeys];
  float scores[4][16][kPitchScores];
  bf16 weights[4][16][kPitchWeights];
};

__device__ inline void attention_load(AttentionShared& shared, const AttentionArguments& arguments, uint32_t first,
                                      uint32_t kv_head) {
  for (uint32_t piece = threadIdx.x; piece < kKeys * kHeadValues / 8; piece += kAttentionThreads) {
    const uint32_t line = piece / (kHeadValues / 8);
    const uint32_t at = piece % (kHeadValues / 8) * 8;
    const uint64_t offset = (static_cast<uint64_t>(first + line) * arguments.kv_heads + kv_head) * kHeadValues + at;
    copy_async(&shared.keys[line][at], arguments.keys + offset);
    copy_async(&shared.values[line][at], arguments.values + offset);
  }
  commit_async();
  wait_async<0>();
}

// Weights of one row's half of the step; returns their sum.
__device__ inline float attention_weights(AttentionShared& shared, uint32_t warp, uint32_t lane, uint32_t first,
                                          uint32_t last_key) {
  const uint32_t line = lane / 2;
  const uint32_t start = lane % 2 * (kKeys / 2);
  // 1 / sqrt(128), times log2(e) for exp2f.
  constexpr float kScale = 0.08838834764f * 1.44269504f;
  float sum = 0.0f;
  for (uint32_t index = start; index < start + kKeys / 2; ++index) {
    const float score = shared.scores[warp][line][index];
    const bf16 weight = __float2bfloat16(first + index <= last_key ? exp2f(score * kScale) : 0.0f);
    shared.weights[warp][line][index] = weight;
    sum += __bfloat162float(weight);
  }
  return sum;
}

__device__ inline void attention_tile(const AttentionArguments& arguments, uint32_t head, uint32_t first_query) {
  __shared__ __align__(128) unsigned char memory[sizeof(AttentionShared)];
  AttentionShared& shared = *reinterpret_cast<AttentionShared*>(memory);
  const uint32_t warp = threadIdx.x / 32;
  const uint32_t lane = threadIdx.x % 32;
  const uint32_t kv_head = head / (arguments.heads / arguments.kv_heads);
  const uint32_t own_query = first_query + warp * 16;
  FragmentA queries[kHeadValues / 16];
  FragmentSum output[kHeadValues / 16];
#pragma unroll
  for (uint32_t part = 0; part < kHeadValues / 16; ++part) {
    const bf16* source = arguments.queries + static_cast<uint64_t>(own_query) * arguments.query_stride +
                         head * kHeadValues + 16 * part;
    nvcuda::wmma::load_matrix_sync(queries[part], source, arguments.query_stride);
    nvcuda::wmma::fill_fragment(output[part], 0.0f);
  }
  float sum = 0.0f;
  const uint32_t last_key = arguments.prefix + own_query + lane / 2;
  // Keys after the last query of the block have no weight.
  const uint32_t end = arguments.prefix + first_query + kQueries;
  for (uint32_t first = 0; first < end; first += kKeys) {
    attention_load(shared, arguments, first, kv_head);
    __syncthreads();
#pragma unroll
    for (uint32_t column = 0; column < kKeys / 16; ++column) {
      FragmentSum scores;
      nvcuda::wmma::fill_fragment(scores, 0.0f);
#pragma unroll
      for (uint32_t part = 0; part < kHeadValues / 16; ++part) {
        FragmentBTransposed keys;
        nvcuda::wmma::load_matrix_sync(keys, &shared.keys[16 * column][16 * part], kPitchKeys);
        nvcuda::wmma::mma_sync(scores, queries[part], keys, scores);
      }
      nvcuda::wmma::store_matrix_sync(&shared.scores[warp][0][16 * column], scores, kPitchScores,
                                      nvcuda::wmma::mem_row_major);
    }
    __syncwarp();
    sum += attention_weights(shared, warp, lane, first, last_key);
    __syncwarp();
#pragma unroll
    for (uint32_t column = 0; column < kKeys / 16; ++column) {
      FragmentA weights;
      nvcuda::wmma::load_matrix_sync(weights, &shared.weights[warp][0][16 * column], kPitchWeights);
#pragma unroll
      for (uint32_t part = 0; part < kHeadValues / 16; ++part) {
        FragmentB values;
        nvcuda::wmma::load_matrix_sync(values, &shared.values[16 * column][16 * part], kPitchKeys);
        nvcuda::wmma::mma_sync(output[part], weights, values, output[part]);
      }
    }
    __syncthreads();
  }
  sum += __shfl_xor_sync(0xFFFFFFFFu, sum, 1);
  const uint32_t line = lane / 2;
  const uint32_t at = lane % 2 * 8;
#pragma unroll
  for (uint32_t part = 0; part < kHeadValues / 16; ++part) {
    nvcuda::wmma::store_matrix_sync(&shared.scores[warp][0][0], output[part], kPitchScores,
                                    nvcuda::wmma::mem_row_major);
    __syncwarp();
    bf16* target = arguments.output +
                   (static_cast<uint64_t>(own_query + line) * arguments.heads + head) * kHeadValues + 16 * part + at;
    for (uint32_t value = 0; value < 8; ++value) {
      target[value] = __float2bfloat16(shared.scores[warp][line][at + value] / sum);
    }
    __syncwarp();
  }
}

}  // namespace layer
}  // namespace reprise

// Grid: (n / 128, m / 128) blocks of 256 threads.
extern "C" __global__ void __launch_bounds__(256) reprise_gemm(
    const __grid_constant__ reprise::layer::GemmArguments arguments) {
  reprise::layer::gemm_tile(arguments, blockIdx.y * reprise::layer::kTile, blockIdx.x * reprise::layer::kTile);
}

// Grid: (heads, tokens / 64) blocks of 128 threads.
extern "C" __global__ void __launch_bounds__(128) reprise_attention(
    const __grid_constant__ reprise::layer::AttentionArguments arguments) {
  reprise::layer::attention_tile(arguments, blockIdx.x, blockIdx.y * reprise::layer::kQueries);
}

// output[row][i] = silu(input[row][i]) * input[row][width + i]; input has rows of 2 * width values.
extern "C" __global__ void __launch_bounds__(256) reprise_gate(const __nv_bfloat16* input, __nv_bfloat16* output,
                                                                uint32_t rows, uint32_t width) {
  const uint64_t total = static_cast<uint64_t>(rows) * width;
  const uint64_t threads = static_cast<uint64_t>(gridDim.x) * blockDim.x;
  for (uint64_t index = blockIdx.x * static_cast<uint64_t>(blockDim.x) + threadIdx.x; index < total;
       index += threads) {
    const uint64_t row = index / width;
    const uint64_t at = row * 2 * width + index % width;
    const float gate = __bfloat162float(input[at]);
    const float up = __bfloat162float(input[at + width]);
    output[index] = __float2bfloat16(gate / (1.0f + expf(-gate)) * up);
  }
}

// Fills with pseudo-random values in [-scale, scale), the same for equal seeds.
extern "C" __global__ void __launch_bounds__(256) reprise_fill(__nv_bfloat16* output, uint64_t count, uint32_t seed,
                                                                float scale) {
  const uint64_t threads = static_cast<uint64_t>(gridDim.x) * blockDim.x;
  for (uint64_t index = blockIdx.x * static_cast<uint64_t>(blockDim.x) + threadIdx.x; index < count;
       index += threads) {
    uint32_t value = static_cast<uint32_t>(index) * 0x9E3779B9u + seed;
    value = (value ^ (value >> 16)) * 0x85EBCA6Bu;
    value = (value ^ (value >> 13)) * 0xC2B2AE35u;
    value ^= value >> 16;
    const float unit = static_cast<float>(value >> 8) * (2.0f / 16777216.0f) - 1.0f;
    output[index] = __float2bfloat16(unit * scale);
  }
}
