/* The folder's bound. It counts programs, captures, and files that are being written. */
#define _GNU_SOURCE
#include <dirent.h>
#include <errno.h>
#include <fcntl.h>
#include <stdlib.h>
#include <string.h>
#include <sys/stat.h>
#include <time.h>
#include <unistd.h>

#include "cache.h"

enum { FORGOTTEN_S = 3600 };

struct found {
  char name[NAME_SIZE];
  uint64_t size;
  struct timespec used;
};

uint64_t bound_of(const char *text) {
  char *end;
  double given = strtod(text, &end);
  return end == text || *end || !(given >= 1 && given < 9e18) ? 0 : (uint64_t)given;
}

static int has_name_of_entry(const char *name) {
  return strlen(name) == NAME_SIZE - 1 && strspn(name, "0123456789abcdef") == NAME_SIZE - 1;
}

static int is_later(const struct timespec *first, const struct timespec *second) {
  return first->tv_sec > second->tv_sec || (first->tv_sec == second->tv_sec && first->tv_nsec > second->tv_nsec);
}

static int by_use(const void *a, const void *b) {
  const struct timespec *first = &((const struct found *)a)->used, *second = &((const struct found *)b)->used;
  return is_later(first, second) - is_later(second, first);
}

/* Files with the name of an entry, and in `total` the size of these and of half-written ones. Deletes what a process
 * that was killed left half written. */
static size_t list_files(int folder, DIR *listing, struct found **all, uint64_t *total) {
  size_t number = 0, capacity = 0;
  struct dirent *item;
  struct stat about;
  while ((item = readdir(listing))) {
    int is_temporary = !strncmp(item->d_name, TEMPORARY, strlen(TEMPORARY));
    if (!is_temporary && !has_name_of_entry(item->d_name)) continue;
    if (fstatat(folder, item->d_name, &about, AT_SYMLINK_NOFOLLOW) || !S_ISREG(about.st_mode)) continue;
    int is_forgotten = is_temporary && time(NULL) - about.st_mtime > FORGOTTEN_S;
    if (is_forgotten && !unlinkat(folder, item->d_name, 0)) continue;
    *total += (uint64_t)about.st_size;
    if (is_temporary) continue;
    if (number == capacity) {
      struct found *more = realloc(*all, (capacity = capacity * 2 + 64) * sizeof **all);
      if (!more) break;
      *all = more;
    }
    struct found *entry = &(*all)[number++];
    memcpy(entry->name, item->d_name, NAME_SIZE);
    entry->size = (uint64_t)about.st_size;
    entry->used = about.st_mtim;
  }
  return number;
}

/* Folders of blobs have files of such names too: only its first bytes show that a file is the cache's. */
static int is_ours(int folder, const char *name) {
  char magic[MAGIC_SIZE];
  int file = openat(folder, name, O_RDONLY | O_NOFOLLOW | O_CLOEXEC | O_NONBLOCK);
  if (file < 0) return 0;
  static const char ZEROS[MAGIC_SIZE];
  ssize_t got = read(file, magic, MAGIC_SIZE);
  close(file);
  if (got >= 0 && !memcmp(magic, ZEROS, (size_t)got)) return 1; /* A power cut leaves an entry empty, or zeros. */
  return got == MAGIC_SIZE &&
         (!memcmp(magic, PROGRAM_MAGIC, MAGIC_SIZE) || !memcmp(magic, CAPTURE_MAGIC, MAGIC_SIZE));
}

/* Keeps the cache's files in the list, and takes the others out of `total`. */
static size_t keep_ours(int folder, struct found *all, size_t number, uint64_t *total) {
  size_t kept = 0;
  for (size_t i = 0; i < number; i++)
    if (is_ours(folder, all[i].name))
      all[kept++] = all[i];
    else
      *total -= all[i].size;
  return kept;
}

/* After the clock was set back, older entries would count as newer than all that are written until it catches up. */
static void end_future(int folder, struct found *all, size_t number) {
  struct timespec now;
  clock_gettime(CLOCK_REALTIME, &now);
  for (size_t i = 0; i < number; i++) {
    if (!is_later(&all[i].used, &now)) continue;
    all[i].used = now;
    utimensat(folder, all[i].name, NULL, AT_SYMLINK_NOFOLLOW);
  }
}

/* Needs no lock: each process does this when it opens the folder and after it wrote, and processes that see the same
 * entries delete the same ones. */
void evict(int folder, uint64_t max_bytes, const char *written) {
  struct found *all = NULL;
  uint64_t total = 0;
  int again = openat(folder, ".", O_RDONLY | O_DIRECTORY | O_CLOEXEC);
  DIR *listing = again < 0 ? NULL : fdopendir(again);
  if (!listing) {
    if (again >= 0) close(again);
    return;
  }
  size_t number = list_files(folder, listing, &all, &total);
  closedir(listing);
  if (total > max_bytes) {
    number = keep_ours(folder, all, number, &total);
    end_future(folder, all, number);
    if (number) qsort(all, number, sizeof *all, by_use);
  }
  for (size_t i = 0; i < number && total > max_bytes; i++) {
    if (written && !strcmp(all[i].name, written)) continue;
    if (!unlinkat(folder, all[i].name, 0))
      count(COUNT_evicted, 1);
    else if (errno != ENOENT) /* Another process has deleted it. */
      continue;
    total -= all[i].size;
  }
  free(all);
}
