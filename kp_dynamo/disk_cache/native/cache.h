/* What the files of the disk cache share: counters, the key of a program, and the entries of the folder. */
#ifndef KP_CACHE_H
#define KP_CACHE_H

#include <stdint.h>

#include "pjrt_api.h"
#include "sha256.h"

/* Python looks for these symbols in the library. */
#define EXPORTED __attribute__((visibility("default")))

/* Python reads these by name. `absent`, `damaged`, `unreadable`, `not_loaded`, `no_key` and `dumped` are the misses. */
#define KP_COUNTERS(X)                                                                                                 \
  X(hits) X(absent) X(damaged) X(unreadable) X(not_loaded) X(no_key) X(dumped) X(saved) X(not_saved) X(not_serialized) \
  X(too_large) X(evicted) X(loaded_bytes) X(saved_bytes) X(compile_ns) X(load_ns) X(read_ns) X(avoided_ns)

#define KP_ENUM(name) COUNT_##name,
enum counter { KP_COUNTERS(KP_ENUM) NUM_COUNTERS };

void count(enum counter which, uint64_t by);

struct key { uint8_t digest[SHA256_SIZE]; };

/* Once for each process, before the first key: what does not change after the plugin was loaded. False if the plugin's
 * file cannot be read. */
int note_environment(const char *plugin_path);
/* Whether XLA's flags ask it to write what it compiles into files. */
int has_dump_flags(void);
/* False if the plugin cannot describe itself or its devices; the program is then compiled without the cache. */
int key_of(const struct pjrt_api *api, const struct client_compile *compile, struct key *key);

/* Sorts the entries of a protobuf map in place. `path` lists the fields that lead to it, the map's last, and ends with 0.
 * False if the message is not well formed; some maps may then be sorted. */
int sort_map_entries(void *message, size_t size, const uint64_t *path);

/* An entry's name is its key in hexadecimal, and its first bytes are the magic of its kind. The names begin with
 * TEMPORARY while a file is written. */
enum { NAME_SIZE = 2 * SHA256_SIZE + 1, MAGIC_SIZE = 8 };
#define PROGRAM_MAGIC "KPTPU 1"
#define CAPTURE_MAGIC "KPTPU C1" /* Python writes these. */
#define TEMPORARY ".writing-"

struct entry {
  char *bytes; /* from malloc */
  size_t size;
  uint64_t compile_ns;
};

/* Open the folder. NULL on success, otherwise the reason why it cannot be used. */
const char *open_folder(const char *path, uint64_t max_bytes);
/* True if there is a whole entry for `key`. Every failure is counted; a damaged entry is deleted. */
int read_entry(const struct key *key, struct entry *entry);
void write_entry(const struct key *key, const struct entry *entry);
void delete_entry(const struct key *key);

/* The bound that a user's variable gives, as Python reads it; 0 if it is no number of bytes. */
uint64_t bound_of(const char *text);
/* Deletes the least recently used entries but `written`, a name or NULL, until the folder is within its bound. */
void evict(int folder, uint64_t max_bytes, const char *written);

#endif
