// CRC32C (the Castagnoli polynomial, reflected) of objects, computed by the 32 lanes of a warp.
//
// A warp reads an object in rows of 512 bytes: 16 bytes for each lane, so accesses are coalesced. A word (4 bytes)
// that is `d` bytes before the end of the object contributes `word * x^(8 d)` modulo the polynomial. Each lane has one
// state for each of its four words of a row. From row to row, a state is multiplied by x^(8 * 512), always with the
// same table. At the end, one multiplication for each lane moves its state to its place, and the sum (exclusive or)
// over all lanes is the checksum.
//
// An object whose length is not a multiple of the rows that a warp reads at once is treated as if zeros preceded it:
// leading zeros do not change a state of zero.
//
// The table has one entry for each value of each of the 8 nibbles of a state, and a copy for each lane. Lane `l` reads
// only addresses of bank `l` of shared memory, so look-ups never conflict. On a GPU, the table starts at a multiple of
// kTableAlignment, so that an address is the start of the lane's column with the bits of the nibble.
#pragma once

#include "platform.h"

#if defined(__CUDACC__)
#define REPRISE_TABLE static __constant__ const
#else
#define REPRISE_TABLE static constexpr
#endif

namespace reprise {

constexpr uint32_t kLanes = 32;
constexpr uint32_t kVectorBytes = 16;
constexpr uint32_t kRowBytes = kLanes * kVectorBytes;
// Words of the table: 8 nibbles, 16 values, 32 lanes.
constexpr uint32_t kTableWords = 8 * 16 * kLanes;
// Bytes of the entries of one nibble.
constexpr uint32_t kTableAlignment = 16 * kLanes * 4;
constexpr uint32_t kPolynomial = 0x82F63B78u;
// The coefficient of x^0 is the highest bit.
constexpr uint32_t kOne = 0x80000000u;

// Product of two polynomials modulo the polynomial of CRC32C.
REPRISE_BOTH constexpr uint32_t crc_multiply(uint32_t a, uint32_t b) {
  uint32_t product = 0;
  for (uint32_t bit = kOne; bit != 0; bit >>= 1) {
    product ^= (a & bit) != 0 ? b : 0;
    b = (b >> 1) ^ ((b & 1) != 0 ? kPolynomial : 0);
  }
  return product;
}

// x^(8 * bytes) modulo the polynomial of CRC32C.
constexpr uint32_t crc_power(uint32_t bytes) {
  uint32_t result = kOne;
  uint32_t square = kOne >> 8;
  for (; bytes != 0; bytes >>= 1) {
    if ((bytes & 1) != 0) result = crc_multiply(result, square);
    square = crc_multiply(square, square);
  }
  return result;
}

constexpr uint32_t kRowPower = crc_power(kRowBytes);
constexpr uint32_t kWordPower = crc_power(4);

// Power for the last word of each lane: its distance to the end of the object, with the 4 bytes of the word.
struct LanePowers {
  uint32_t values[kLanes];
  constexpr LanePowers() : values{} {
    for (uint32_t lane = 0; lane < kLanes; ++lane) values[lane] = crc_power(4 + kVectorBytes * (kLanes - 1 - lane));
  }
};
REPRISE_TABLE LanePowers kLanePowers;

// 16 bytes: the unit of all accesses.
struct alignas(16) Vector {
  uint32_t words[4];
};

REPRISE_BOTH inline Vector load_vector(const uint8_t* address) {
  Vector vector;
#if defined(__CUDA_ARCH__)
  const uint4 value = __ldcs(reinterpret_cast<const uint4*>(address));
  vector.words[0] = value.x;
  vector.words[1] = value.y;
  vector.words[2] = value.z;
  vector.words[3] = value.w;
#else
  __builtin_memcpy(&vector, address, sizeof vector);
#endif
  return vector;
}

REPRISE_BOTH inline void store_vector(uint8_t* address, const Vector& vector) {
#if defined(__CUDA_ARCH__)
  __stcs(reinterpret_cast<uint4*>(address),
         make_uint4(vector.words[0], vector.words[1], vector.words[2], vector.words[3]));
#else
  __builtin_memcpy(address, &vector, sizeof vector);
#endif
}

// Fills the part of the table that is the calling thread's.
REPRISE_BOTH inline void crc_fill_table(uint32_t* table, uint32_t thread, uint32_t threads) {
  for (uint32_t entry = thread; entry < 8 * 16; entry += threads) {
    const uint32_t value = crc_multiply((entry & 15) << (4 * (entry >> 4)), kRowPower);
    // The start differs between threads, so that their stores do not conflict.
    for (uint32_t copy = 0; copy < kLanes; ++copy) table[entry * kLanes + ((copy + entry) & 31)] = value;
  }
}

#if defined(__CUDA_ARCH__)
// Loads the entry of a nibble: bits 7 to 10 of `shifted` are its value, `column` is the address of the lane's column.
// Volatile, so that no load moves before the barrier behind which the table is complete.
template <uint32_t kNibble>
__device__ inline uint32_t crc_entry(uint32_t column, uint32_t shifted) {
  uint32_t entry;
  const uint32_t address = (shifted & 0x780) | column;
  asm volatile("ld.shared.u32 %0, [%1+%2];" : "=r"(entry) : "r"(address), "n"(kNibble * kTableAlignment));
  return entry;
}
#endif

// Multiplies a state by x^(8 * 512).
REPRISE_BOTH inline uint32_t crc_next_row(const uint32_t* table, uint32_t lane, uint32_t state) {
#if defined(__CUDA_ARCH__)
  const uint32_t column = static_cast<uint32_t>(__cvta_generic_to_shared(table)) | (lane * 4);
  return crc_entry<0>(column, state << 7) ^ crc_entry<1>(column, state << 3) ^ crc_entry<2>(column, state >> 1) ^
         crc_entry<3>(column, state >> 5) ^ crc_entry<4>(column, state >> 9) ^ crc_entry<5>(column, state >> 13) ^
         crc_entry<6>(column, state >> 17) ^ crc_entry<7>(column, state >> 21);
#else
  uint32_t next = table[((state << 5) & 0x1E0) | lane];
  for (uint32_t nibble = 1; nibble < 8; ++nibble) {
    const uint32_t shifted = nibble == 1 ? state << 1 : state >> (4 * nibble - 5);
    next ^= table[nibble * 16 * kLanes + ((shifted & 0x1E0) | lane)];
  }
  return next;
#endif
}

// Rows that a lane loads before it uses the first of them.
constexpr uint32_t kRowsAtOnce = 4;

// Reads (and copies, if asked to) the lane's part of an object of `bytes` bytes, a multiple of 16. Returns the lane's
// part of the checksum: the checksum is the complement of the exclusive or over all lanes.
template <bool kCopy>
REPRISE_BOTH inline uint32_t crc_lane(const uint8_t* source, uint8_t* destination, uint32_t bytes, uint32_t lane,
                                      const uint32_t* table) {
  constexpr uint32_t kStep = kRowsAtOnce * kRowBytes;
  const uint32_t steps = (bytes + kStep - 1) / kStep;
  uint32_t state[4] = {0, 0, 0, 0};
  // Negative in the zeros that precede the object.
  int64_t position = static_cast<int64_t>(lane * kVectorBytes) - (static_cast<int64_t>(steps) * kStep - bytes);
  for (uint32_t step = 0; step < steps; ++step) {
    Vector row[kRowsAtOnce];
#if defined(__CUDA_ARCH__)
#pragma unroll
#endif
    for (uint32_t index = 0; index < kRowsAtOnce; ++index) {
      const int64_t at = position + index * kRowBytes;
      row[index] = at >= 0 ? load_vector(source + at) : Vector{{0, 0, 0, 0}};
    }
#if defined(__CUDA_ARCH__)
#pragma unroll
#endif
    for (uint32_t index = 0; index < kRowsAtOnce; ++index) {
      const int64_t at = position + index * kRowBytes;
      if (kCopy && at >= 0) store_vector(destination + at, row[index]);
      // CRC32C starts with ones: the same as the complement of the first word.
      if (at == 0) row[index].words[0] = ~row[index].words[0];
#if defined(__CUDA_ARCH__)
#pragma unroll
#endif
      for (uint32_t word = 0; word < 4; ++word) {
        state[word] = crc_next_row(table, lane, state[word]) ^ row[index].words[word];
      }
    }
    position += kStep;
  }
  uint32_t sum = state[0];
#if defined(__CUDA_ARCH__)
#pragma unroll
#endif
  for (uint32_t word = 1; word < 4; ++word) sum = crc_multiply(sum, kWordPower) ^ state[word];
  return crc_multiply(kLanePowers.values[lane], sum);
}

}  // namespace reprise
