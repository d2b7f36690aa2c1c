/* A PJRT plugin for tests: a real one (KP_TEST_PLUGIN), of another version or with a fault if a variable asks for it.
 *
 * Plugins of API 0.76 and later refuse the shorter PJRT_ExecuteOptions of torch_xla 2.9: they are widened with zeros.
 */
#define _GNU_SOURCE
#include <dlfcn.h>
#include <stdlib.h>
#include <string.h>

#include "pjrt_api.h"

enum { LOADED_EXECUTE = 55, WIDE_OPTIONS = 112 };

static const struct pjrt_api *real;

/* A test builds the same plugin twice, with different content. */
#ifdef KP_TEST_BUILD
__attribute__((used)) static const char BUILD[] = KP_TEST_BUILD;
#endif

static const char *asked(const char *what) {
  const char *value = getenv("KP_TEST_FAULT");
  return value ? strstr(value, what) : NULL;
}

/* Any function of a real plugin returns an error if `struct_size` is too small. */
static void *an_error(int function) {
  size_t arguments[16] = {1};
  return real->functions[function](arguments);
}

static void *execute(void *arguments) {
  char **options = (char **)arguments + 3, *given = *options, wide[WIDE_OPTIONS] = {0};
  memcpy(wide, given, *(size_t *)given < WIDE_OPTIONS ? *(size_t *)given : WIDE_OPTIONS);
  *(size_t *)wide = WIDE_OPTIONS;
  *options = wide;
  void *error = real->functions[LOADED_EXECUTE](arguments);
  *options = given;
  return error;
}

static void *text(int function, const char *variable, void *arguments) {
  struct text_of *found = arguments;
  void *error = real->functions[function](arguments);
  const char *other = getenv(variable);
  if (!error && other) found->text = other, found->size = strlen(other);
  return error;
}

static void *platform_name(void *arguments) { return text(CLIENT_PLATFORM_NAME, "KP_TEST_PLATFORM", arguments); }
static void *platform_version(void *arguments) { return text(CLIENT_PLATFORM_VERSION, "KP_TEST_VERSION", arguments); }
static void *kind(void *arguments) { return text(DESCRIPTION_KIND, "KP_TEST_KIND", arguments); }
static void *process_index(void *arguments) {
  void *error = real->functions[CLIENT_PROCESS_INDEX](arguments);
  if (!error && getenv("KP_TEST_PROCESS")) ((struct number_of *)arguments)->number = atoi(getenv("KP_TEST_PROCESS"));
  return error;
}
static void *serialize(void *arguments) {
  return asked("serialize") ? an_error(EXECUTABLE_SERIALIZE) : real->functions[EXECUTABLE_SERIALIZE](arguments);
}
static void *deserialize(void *arguments) {
  return asked("load") ? an_error(DESERIALIZE_AND_LOAD) : real->functions[DESERIALIZE_AND_LOAD](arguments);
}
static void *error_code(void *arguments) {
  void *error = real->functions[ERROR_GET_CODE](arguments);
  if (!error && asked("full")) ((struct error_get_code *)arguments)->code = RESOURCE_EXHAUSTED;
  return error;
}
static void *devices(void *arguments) {
  return asked("devices") ? an_error(CLIENT_DEVICES) : real->functions[CLIENT_DEVICES](arguments);
}

__attribute__((visibility("default"))) const struct pjrt_api *GetPjrtApi(void) {
  void *library = dlopen(getenv("KP_TEST_PLUGIN"), RTLD_NOW | RTLD_LOCAL);
  const struct pjrt_api *(*get)(void);
  if (!library) return NULL;
  *(void **)&get = dlsym(library, "GetPjrtApi");
  real = get();
  struct pjrt_api *mine = malloc(real->struct_size);
  memcpy(mine, real, real->struct_size);
  mine->functions[ERROR_GET_CODE] = error_code;
  mine->functions[LOADED_EXECUTE] = execute;
  mine->functions[CLIENT_PLATFORM_NAME] = platform_name;
  mine->functions[CLIENT_PLATFORM_VERSION] = platform_version;
  mine->functions[CLIENT_PROCESS_INDEX] = process_index;
  mine->functions[DESCRIPTION_KIND] = kind;
  mine->functions[EXECUTABLE_SERIALIZE] = asked("missing function") ? NULL : serialize;
  mine->functions[DESERIALIZE_AND_LOAD] = deserialize;
  mine->functions[CLIENT_DEVICES] = devices;
  if (getenv("KP_TEST_MINOR")) mine->version.minor = atoi(getenv("KP_TEST_MINOR"));
  if (asked("major")) mine->version.major = 1;
  if (asked("short table")) mine->struct_size = sizeof *mine + DESERIALIZE_AND_LOAD * sizeof *mine->functions;
  return mine;
}
