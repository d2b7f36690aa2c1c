/* The entries of the folder: one file for each program, named after its key. Every failure here is only counted. */
#define _GNU_SOURCE
#include <errno.h>
#include <fcntl.h>
#include <stdio.h>
#include <stdlib.h>
#include <string.h>
#include <sys/random.h>
#include <sys/stat.h>
#include <unistd.h>

#include "cache.h"

struct header {
  char magic[MAGIC_SIZE];
  uint8_t checksum[SHA256_SIZE]; /* of all that follows it, in the header and behind */
  uint8_t key[SHA256_SIZE];
  uint64_t size;
  uint64_t compile_ns;
};

static int folder = -1;
static uint64_t folder_max_bytes;

static int is_private(int file, mode_t kind, struct stat *about) {
  return !fstat(file, about) && (about->st_mode & S_IFMT) == kind && about->st_uid == geteuid() &&
         !(about->st_mode & (S_IWGRP | S_IWOTH));
}

const char *open_folder(const char *path, uint64_t max_bytes) {
  struct stat about;
  if ((folder = open(path, O_RDONLY | O_DIRECTORY | O_CLOEXEC)) < 0) return "the folder cannot be opened";
  folder_max_bytes = max_bytes;
  if (is_private(folder, S_IFDIR, &about)) {
    evict(folder, folder_max_bytes, NULL); /* The bound may be smaller than that of earlier processes. */
    return NULL;
  }
  close(folder);
  folder = -1;
  return "the folder belongs to another user, or others can write to it";
}

static void name_of(const struct key *key, char name[NAME_SIZE]) {
  for (int i = 0; i < SHA256_SIZE; i++) sprintf(name + 2 * i, "%02x", key->digest[i]);
}

static void checksum_of(const struct header *header, const struct entry *entry, uint8_t checksum[SHA256_SIZE]) {
  struct sha256 hash;
  size_t start = offsetof(struct header, key);
  sha256_start(&hash);
  sha256_add(&hash, (const char *)header + start, sizeof *header - start);
  sha256_add(&hash, entry->bytes, entry->size);
  sha256_finish(&hash, checksum);
}

/* An error of the file system, such as EIO or ESTALE, says nothing about the content: only a file that ends early is
 * damaged. */
static enum counter read_all(int file, void *to, size_t size) {
  while (size) {
    ssize_t got = read(file, to, size);
    if (got < 0 && errno == EINTR) continue;
    if (got < 0) return COUNT_unreadable;
    if (!got) return COUNT_damaged;
    to = (char *)to + got;
    size -= (size_t)got;
  }
  return COUNT_hits;
}

static int write_all(int file, const void *from, size_t size) {
  while (size) {
    ssize_t put = write(file, from, size);
    if (put < 0 && errno == EINTR) continue;
    if (put <= 0) return 0;
    from = (const char *)from + put;
    size -= (size_t)put;
  }
  return 1;
}

/* Nothing of the file is believed before size, key and checksum are right. */
static enum counter read_file(int file, const struct key *key, struct entry *entry) {
  struct header header;
  struct stat about;
  uint8_t checksum[SHA256_SIZE];
  enum counter outcome;
  if (!is_private(file, S_IFREG, &about)) return COUNT_unreadable;
  if (about.st_size < (off_t)sizeof header) return COUNT_damaged;
  if ((outcome = read_all(file, &header, sizeof header)) != COUNT_hits) return outcome;
  entry->size = (size_t)about.st_size - sizeof header;
  entry->compile_ns = header.compile_ns;
  if (memcmp(header.magic, PROGRAM_MAGIC, MAGIC_SIZE) || memcmp(header.key, key->digest, SHA256_SIZE) ||
      header.size != entry->size)
    return COUNT_damaged;
  if (!(entry->bytes = malloc(entry->size + 1))) return COUNT_unreadable;
  if ((outcome = read_all(file, entry->bytes, entry->size)) != COUNT_hits) return outcome;
  checksum_of(&header, entry, checksum);
  return memcmp(checksum, header.checksum, SHA256_SIZE) ? COUNT_damaged : COUNT_hits;
}

int read_entry(const struct key *key, struct entry *entry) {
  char name[NAME_SIZE];
  name_of(key, name);
  *entry = (struct entry){0};
  int file = openat(folder, name, O_RDONLY | O_NOFOLLOW | O_CLOEXEC | O_NONBLOCK);
  if (file < 0) {
    count(errno == ENOENT ? COUNT_absent : COUNT_unreadable, 1);
    return 0;
  }
  enum counter outcome = read_file(file, key, entry);
  if (outcome == COUNT_hits) {
    futimens(file, NULL); /* Least recently used entries go first. */
    close(file);
    return 1;
  }
  close(file);
  free(entry->bytes);
  count(outcome, 1);
  if (outcome == COUNT_damaged) unlinkat(folder, name, 0);
  return 0;
}

void delete_entry(const struct key *key) {
  char name[NAME_SIZE];
  name_of(key, name);
  unlinkat(folder, name, 0);
}

static int write_file(int file, const struct key *key, const struct entry *entry) {
  struct header header = {.size = entry->size, .compile_ns = entry->compile_ns};
  memcpy(header.magic, PROGRAM_MAGIC, MAGIC_SIZE);
  memcpy(header.key, key->digest, SHA256_SIZE);
  checksum_of(&header, entry, header.checksum);
  return write_all(file, &header, sizeof header) && write_all(file, entry->bytes, entry->size);
}

/* A file under a name that no other process has; -1 if it cannot be created. The process id is no such name: processes
 * of several containers may have the same, and one would rename what another one is writing. */
static int create_temporary(char *name, size_t size) {
  uint64_t number;
  *name = '\0';
  if (getrandom(&number, sizeof number, 0) != (ssize_t)sizeof number) return -1;
  snprintf(name, size, TEMPORARY "%016llx", (unsigned long long)number);
  return openat(folder, name, O_WRONLY | O_CREAT | O_EXCL | O_NOFOLLOW | O_CLOEXEC, 0600);
}

void write_entry(const struct key *key, const struct entry *entry) {
  char name[NAME_SIZE], temporary[64];
  if (sizeof(struct header) + entry->size > folder_max_bytes) {
    count(COUNT_too_large, 1);
    return;
  }
  name_of(key, name);
  int file = create_temporary(temporary, sizeof temporary);
  int is_written = file >= 0 && write_file(file, key, entry);
  if (file >= 0 && close(file)) is_written = 0;
  if (is_written && !renameat(folder, temporary, folder, name)) {
    count(COUNT_saved, 1);
    count(COUNT_saved_bytes, entry->size);
    evict(folder, folder_max_bytes, name);
    return;
  }
  count(COUNT_not_saved, 1);
  unlinkat(folder, temporary, 0);
}
