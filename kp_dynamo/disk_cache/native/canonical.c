/* One order for the entries of protobuf maps.
 *
 * torch_xla serializes a program, and C++ writes the entries of a map in another order in each process. Every batched
 * matmul has a map of two entries (`grad_x`, `grad_y`), so equal programs would have different keys.
 */
#include <stdlib.h>
#include <string.h>

#include "cache.h"

enum { VARINT = 0, FIXED64 = 1, DELIMITED = 2, FIXED32 = 5 };

struct reader {
  uint8_t *at, *end;
};

struct field {
  uint8_t *start, *payload, *end; /* of the field with its tag, and of its payload */
  uint64_t number;
  int type;
};

static int read_varint(struct reader *in, uint64_t *value) {
  *value = 0;
  for (int shift = 0; shift < 64 && in->at < in->end; shift += 7) {
    uint8_t byte = *in->at++;
    *value |= (uint64_t)(byte & 0x7f) << shift;
    if (!(byte & 0x80)) return 1;
  }
  return 0;
}

static int read_field(struct reader *in, struct field *field) {
  uint64_t tag, size = 0;
  field->start = in->at;
  if (!read_varint(in, &tag)) return 0;
  field->number = tag >> 3;
  field->type = (int)(tag & 7);
  if (field->type == DELIMITED && !read_varint(in, &size)) return 0;
  field->payload = in->at;
  if (field->type == VARINT && !read_varint(in, &tag)) return 0;
  if (field->type == FIXED64) size = 8;
  if (field->type == FIXED32) size = 4;
  if (field->type != VARINT && field->type != FIXED64 && field->type != DELIMITED && field->type != FIXED32) return 0;
  if (size > (uint64_t)(in->end - in->at)) return 0;
  in->at += size;
  field->end = in->at;
  return 1;
}

static int by_bytes(const void *a, const void *b) {
  const struct field *first = a, *second = b;
  size_t first_size = (size_t)(first->end - first->start), second_size = (size_t)(second->end - second->start);
  int order = memcmp(first->start, second->start, first_size < second_size ? first_size : second_size);
  return order ? order : (first_size > second_size) - (first_size < second_size);
}

/* The entries of a map follow one another; sorted, they fill the same bytes. */
static int sort_run(struct field *entries, size_t number) {
  if (number < 2) return 1;
  uint8_t *start = entries[0].start;
  size_t size = (size_t)(entries[number - 1].end - start), filled = 0;
  uint8_t *sorted = malloc(size);
  if (!sorted) return 0;
  qsort(entries, number, sizeof *entries, by_bytes);
  for (size_t i = 0; i < number; i++) {
    memcpy(sorted + filled, entries[i].start, (size_t)(entries[i].end - entries[i].start));
    filled += (size_t)(entries[i].end - entries[i].start);
  }
  memcpy(start, sorted, size);
  free(sorted);
  return 1;
}

static int sort_map(struct reader in, uint64_t map) {
  struct field field, *run = NULL;
  size_t number = 0, capacity = 0;
  int is_right = 1;
  while (is_right && in.at < in.end && (is_right = read_field(&in, &field))) {
    if (field.number != map || field.type != DELIMITED) {
      is_right = sort_run(run, number);
      number = 0;
      continue;
    }
    if (number == capacity) {
      struct field *more = realloc(run, (capacity = capacity * 2 + 8) * sizeof *run);
      if (!more) {
        is_right = 0;
        break;
      }
      run = more;
    }
    run[number++] = field;
  }
  is_right = is_right && sort_run(run, number);
  free(run);
  return is_right;
}

int sort_map_entries(void *message, size_t size, const uint64_t *path) {
  struct reader in = {message, (uint8_t *)message + size};
  struct field field;
  if (!path[1]) return sort_map(in, path[0]);
  while (in.at < in.end) {
    if (!read_field(&in, &field)) return 0;
    if (field.number == path[0] && field.type == DELIMITED &&
        !sort_map_entries(field.payload, (size_t)(field.end - field.payload), path + 1))
      return 0;
  }
  return 1;
}
