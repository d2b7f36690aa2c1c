/* read() and unlinkat() that fail when a test asks for it, for the C files that are linked with this one. */
#include <errno.h>
#include <string.h>
#include <sys/syscall.h>
#include <sys/types.h>

#define OURS __attribute__((visibility("hidden")))

long syscall(long number, ...);

int read_errno, unlink_errno;
const char *not_deleted; /* the name for which unlinkat() fails */

OURS ssize_t read(int file, void *to, size_t size) {
  if (!read_errno) return syscall(SYS_read, file, to, size);
  errno = read_errno;
  return -1;
}

OURS int unlinkat(int folder, const char *name, int flags) {
  if (!not_deleted || strcmp(name, not_deleted)) return (int)syscall(SYS_unlinkat, folder, name, flags);
  errno = unlink_errno;
  return -1;
}
