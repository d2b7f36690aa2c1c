/* SHA-256 (FIPS 180-4), so that the library needs nothing but the C library. */
#ifndef KP_SHA256_H
#define KP_SHA256_H

#include <stddef.h>
#include <stdint.h>

enum { SHA256_SIZE = 32 };

struct sha256 {
  uint32_t state[8];
  uint64_t num_bytes;
  uint8_t block[64];
};

void sha256_start(struct sha256 *hash);
void sha256_add(struct sha256 *hash, const void *bytes, size_t size);
void sha256_finish(struct sha256 *hash, uint8_t digest[SHA256_SIZE]);

#endif
