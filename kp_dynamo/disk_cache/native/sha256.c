/* SHA-256, as FIPS 180-4 describes it; with the instructions that x86 has for it, ten times as fast. */
#include "sha256.h"

#include <string.h>

/* Tests define KP_PORTABLE. */
#if defined(__x86_64__) && defined(__GNUC__) && !defined(KP_PORTABLE)
#define KP_HAS_INTEL_FORM
#include <cpuid.h>
#include <immintrin.h>
#endif

static const uint32_t ROUND[64] = {
    0x428a2f98, 0x71374491, 0xb5c0fbcf, 0xe9b5dba5, 0x3956c25b, 0x59f111f1, 0x923f82a4, 0xab1c5ed5,
    0xd807aa98, 0x12835b01, 0x243185be, 0x550c7dc3, 0x72be5d74, 0x80deb1fe, 0x9bdc06a7, 0xc19bf174,
    0xe49b69c1, 0xefbe4786, 0x0fc19dc6, 0x240ca1cc, 0x2de92c6f, 0x4a7484aa, 0x5cb0a9dc, 0x76f988da,
    0x983e5152, 0xa831c66d, 0xb00327c8, 0xbf597fc7, 0xc6e00bf3, 0xd5a79147, 0x06ca6351, 0x14292967,
    0x27b70a85, 0x2e1b2138, 0x4d2c6dfc, 0x53380d13, 0x650a7354, 0x766a0abb, 0x81c2c92e, 0x92722c85,
    0xa2bfe8a1, 0xa81a664b, 0xc24b8b70, 0xc76c51a3, 0xd192e819, 0xd6990624, 0xf40e3585, 0x106aa070,
    0x19a4c116, 0x1e376c08, 0x2748774c, 0x34b0bcb5, 0x391c0cb3, 0x4ed8aa4a, 0x5b9cca4f, 0x682e6ff3,
    0x748f82ee, 0x78a5636f, 0x84c87814, 0x8cc70208, 0x90befffa, 0xa4506ceb, 0xbef9a3f7, 0xc67178f2,
};

static uint32_t rotate(uint32_t word, int by) { return word >> by | word << (32 - by); }

static void schedule(uint32_t words[64], const uint8_t *block) {
  for (int i = 0; i < 16; i++, block += 4)
    words[i] = (uint32_t)block[0] << 24 | (uint32_t)block[1] << 16 | (uint32_t)block[2] << 8 | block[3];
  for (int i = 16; i < 64; i++) {
    uint32_t a = words[i - 15], b = words[i - 2];
    uint32_t small0 = rotate(a, 7) ^ rotate(a, 18) ^ a >> 3, small1 = rotate(b, 17) ^ rotate(b, 19) ^ b >> 10;
    words[i] = words[i - 16] + small0 + words[i - 7] + small1;
  }
}

static void compress(uint32_t state[8], const uint8_t *block) {
  uint32_t words[64], s[8];
  schedule(words, block);
  memcpy(s, state, sizeof s);
  for (int i = 0; i < 64; i++) {
    uint32_t large1 = rotate(s[4], 6) ^ rotate(s[4], 11) ^ rotate(s[4], 25);
    uint32_t first = s[7] + large1 + ((s[4] & s[5]) ^ (~s[4] & s[6])) + ROUND[i] + words[i];
    uint32_t large0 = rotate(s[0], 2) ^ rotate(s[0], 13) ^ rotate(s[0], 22);
    uint32_t second = large0 + ((s[0] & s[1]) ^ (s[0] & s[2]) ^ (s[1] & s[2]));
    memmove(s + 1, s, 7 * sizeof *s);
    s[4] += first;
    s[0] = first + second;
  }
  for (int i = 0; i < 8; i++) state[i] += s[i];
}

#ifdef KP_HAS_INTEL_FORM
static int has_instructions(void) {
  static int found = -1; /* A race stores the same value twice. */
  unsigned a, b, c, d;
  if (found < 0) {
    int has_sse41 = __get_cpuid(1, &a, &b, &c, &d) && (c & bit_SSE4_1);
    found = has_sse41 && __get_cpuid_count(7, 0, &a, &b, &c, &d) && (b & 1u << 29);
  }
  return found;
}

/* The instructions hold the state as (a, b, e, f) and (c, d, g, h), and do four rounds with four words. */
__attribute__((target("sha,sse4.1"))) static void compress_with_instructions(uint32_t state[8], const uint8_t *from,
                                                                             size_t num_blocks) {
  const __m128i BIG_ENDIAN_WORDS = _mm_set_epi64x(0x0c0d0e0f08090a0b, 0x0405060700010203);
  __m128i cdab = _mm_shuffle_epi32(_mm_loadu_si128((const __m128i *)state), 0xb1);
  __m128i efgh = _mm_shuffle_epi32(_mm_loadu_si128((const __m128i *)state + 1), 0x1b);
  __m128i abef = _mm_alignr_epi8(cdab, efgh, 8), cdgh = _mm_blend_epi16(efgh, cdab, 0xf0), words[4];
  for (; num_blocks; num_blocks--, from += 64) {
    __m128i abef_before = abef, cdgh_before = cdgh;
#pragma GCC unroll 16
    for (int i = 0; i < 16; i++) {
      __m128i *now = &words[i % 4], last = words[(i + 3) % 4];
      if (i < 4)
        *now = _mm_shuffle_epi8(_mm_loadu_si128((const __m128i *)from + i), BIG_ENDIAN_WORDS);
      else
        *now = _mm_sha256msg2_epu32(_mm_add_epi32(_mm_sha256msg1_epu32(*now, words[(i + 1) % 4]),
                                                  _mm_alignr_epi8(last, words[(i + 2) % 4], 4)),
                                    last);
      __m128i added = _mm_add_epi32(*now, _mm_loadu_si128((const __m128i *)ROUND + i));
      cdgh = _mm_sha256rnds2_epu32(cdgh, abef, added);
      abef = _mm_sha256rnds2_epu32(abef, cdgh, _mm_shuffle_epi32(added, 0x0e));
    }
    abef = _mm_add_epi32(abef, abef_before);
    cdgh = _mm_add_epi32(cdgh, cdgh_before);
  }
  __m128i feba = _mm_shuffle_epi32(abef, 0x1b), dchg = _mm_shuffle_epi32(cdgh, 0xb1);
  _mm_storeu_si128((__m128i *)state, _mm_blend_epi16(feba, dchg, 0xf0));
  _mm_storeu_si128((__m128i *)state + 1, _mm_alignr_epi8(dchg, feba, 8));
}
#endif

static void compress_all(uint32_t state[8], const uint8_t *from, size_t num_blocks) {
#ifdef KP_HAS_INTEL_FORM
  if (has_instructions()) {
    compress_with_instructions(state, from, num_blocks);
    return;
  }
#endif
  for (; num_blocks; num_blocks--, from += 64) compress(state, from);
}

void sha256_start(struct sha256 *hash) {
  static const uint32_t START[8] = {0x6a09e667, 0xbb67ae85, 0x3c6ef372, 0xa54ff53a,
                                    0x510e527f, 0x9b05688c, 0x1f83d9ab, 0x5be0cd19};
  memcpy(hash->state, START, sizeof START);
  hash->num_bytes = 0;
}

void sha256_add(struct sha256 *hash, const void *bytes, size_t size) {
  const uint8_t *from = bytes;
  size_t filled = hash->num_bytes % 64;
  hash->num_bytes += size;
  if (filled + size >= 64 && filled) {
    memcpy(hash->block + filled, from, 64 - filled);
    compress_all(hash->state, hash->block, 1);
    from += 64 - filled;
    size -= 64 - filled;
    filled = 0;
  }
  if (size >= 64) {
    compress_all(hash->state, from, size / 64);
    from += size / 64 * 64;
    size %= 64;
  }
  if (size) memcpy(hash->block + filled, from, size);
}

void sha256_finish(struct sha256 *hash, uint8_t digest[SHA256_SIZE]) {
  static const uint8_t PADDING[64] = {0x80};
  uint64_t num_bits = hash->num_bytes * 8;
  uint8_t length[8];
  for (int i = 0; i < 8; i++) length[i] = (uint8_t)(num_bits >> (56 - 8 * i));
  sha256_add(hash, PADDING, 1 + (119 - hash->num_bytes % 64) % 64);
  sha256_add(hash, length, sizeof length);
  for (int i = 0; i < SHA256_SIZE; i++) digest[i] = (uint8_t)(hash->state[i / 4] >> (24 - 8 * (i % 4)));
}
