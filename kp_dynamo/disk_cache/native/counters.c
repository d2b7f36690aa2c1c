/* What the cache did in this process, for Python to read. */
#include <stdatomic.h>
#include <stddef.h>

#include "cache.h"

static atomic_uint_fast64_t counters[NUM_COUNTERS];

void count(enum counter which, uint64_t by) { atomic_fetch_add(&counters[which], by); }

EXPORTED const char *kp_cache_counter_name(int which) {
#define KP_NAME(name) #name,
  static const char *const NAMES[] = {KP_COUNTERS(KP_NAME)};
  return which >= 0 && which < NUM_COUNTERS ? NAMES[which] : NULL;
}

EXPORTED uint64_t kp_cache_counter(int which) { return atomic_load(&counters[which]); }
