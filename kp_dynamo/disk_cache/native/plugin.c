/* A PJRT plugin that stands in front of another one and keeps its compiled programs on disk.
 *
 * It forwards every function but PJRT_Client_Compile, which first looks the program up. Whatever fails, the plugin
 * behind compiles as if this library were not there; a counter says how often. Before the device starts, Python calls
 * kp_cache_configure. A child process that inherits the library as its plugin, and does not call it, inherits three
 * variables: KP_TPU_CACHE_PLUGIN (the plugin behind), KP_TPU_CACHE_DIR and KP_TPU_CACHE_MAX_BYTES.
 */
#define _GNU_SOURCE
#include <dlfcn.h>
#include <stdio.h>
#include <stdlib.h>
#include <string.h>
#include <time.h>

#include "cache.h"

static const struct pjrt_api *real;
static const char *state = "no device has started";

/* Copies: the caller's texts and the environment may change before the device starts. */
static char *plugin_path, *folder_path;
static uint64_t bound;

EXPORTED const char *kp_cache_state(void) { return state; }

EXPORTED void kp_cache_configure(const char *plugin, const char *folder, uint64_t max_bytes) {
  free(plugin_path);
  free(folder_path);
  plugin_path = strdup(plugin);
  folder_path = strdup(folder);
  bound = max_bytes;
}

static void configure_from_environment(void) {
  const char *plugin = getenv("KP_TPU_CACHE_PLUGIN");
  /* Of a child process that is not to use the cache, and inherits this library all the same. */
  if (!plugin) plugin = getenv("PTXLA_TPU_LIBRARY_PATH");
  const char *folder = getenv("KP_TPU_CACHE_DIR");
  const char *max_bytes = getenv("KP_TPU_CACHE_MAX_BYTES");
  uint64_t given = folder && max_bytes ? bound_of(max_bytes) : 0;
  if (plugin) kp_cache_configure(plugin, given ? folder : "", given);
}

static uint64_t now_ns(void) {
  struct timespec now;
  clock_gettime(CLOCK_MONOTONIC, &now);
  return (uint64_t)now.tv_sec * 1000000000u + (uint64_t)now.tv_nsec;
}

static int load(struct client_compile *compile, const struct key *key) {
  struct entry entry;
  uint64_t start = now_ns();
  if (!read_entry(key, &entry)) return 0;
  uint64_t read_ns = now_ns() - start;
  struct deserialize_and_load arguments = {
      .struct_size = KP_SIZE(deserialize_and_load, other_options_size),
      .client = compile->client,
      .bytes = entry.bytes,
      .size = entry.size,
  };
  void *error = real->functions[DESERIALIZE_AND_LOAD](&arguments);
  free(entry.bytes);
  if (error) {
    count(COUNT_not_loaded, 1);
    if (!is_transient(real, error)) delete_entry(key); /* A full device, for one, is no fault of the program. */
    succeeded(real, error);
    return 0;
  }
  compile->executable = arguments.executable;
  count(COUNT_hits, 1);
  count(COUNT_loaded_bytes, entry.size);
  count(COUNT_load_ns, now_ns() - start);
  count(COUNT_read_ns, read_ns);
  count(COUNT_avoided_ns, entry.compile_ns);
  return 1;
}

static void save(void *loaded, const struct key *key, uint64_t compile_ns) {
  struct part_of got = {.struct_size = KP_SIZE(part_of, part), .of = loaded};
  if (!succeeded(real, real->functions[LOADED_GET_EXECUTABLE](&got))) {
    count(COUNT_not_serialized, 1);
    return;
  }
  struct executable_serialize serialized = {
      .struct_size = KP_SIZE(executable_serialize, delete_owner), .executable = got.part};
  if (succeeded(real, real->functions[EXECUTABLE_SERIALIZE](&serialized))) {
    struct entry entry = {.bytes = (char *)serialized.bytes, .size = serialized.size, .compile_ns = compile_ns};
    write_entry(key, &entry);
    if (serialized.delete_owner) serialized.delete_owner(serialized.owner);
  } else {
    count(COUNT_not_serialized, 1);
  }
  struct executable_destroy destroy = {
      .struct_size = KP_SIZE(executable_destroy, executable), .executable = got.part};
  succeeded(real, real->functions[EXECUTABLE_DESTROY](&destroy));
}

static void *compile_or_load(void *arguments) {
  struct client_compile *compile = arguments;
  struct key key;
  int is_dumped = has_dump_flags(); /* A program that is loaded is not dumped. */
  int has_key = !is_dumped && key_of(real, compile, &key);
  if (!has_key) count(is_dumped ? COUNT_dumped : COUNT_no_key, 1);
  if (has_key && load(compile, &key)) return NULL;
  uint64_t start = now_ns();
  void *error = real->functions[CLIENT_COMPILE](arguments);
  uint64_t compile_ns = now_ns() - start;
  count(COUNT_compile_ns, compile_ns);
  if (!error && has_key) save(compile->executable, &key, compile_ns);
  return error;
}

/* NULL if the cache can work in front of this plugin, otherwise the reason why not. */
static const char *problem_of(const struct pjrt_api *api) {
  static const int USED[] = {
      ERROR_DESTROY,        ERROR_GET_CODE,          CLIENT_PLATFORM_NAME,       CLIENT_PROCESS_INDEX,
      CLIENT_DEVICES,       CLIENT_PLATFORM_VERSION, CLIENT_ADDRESSABLE_DEVICES, CLIENT_COMPILE,
      DESCRIPTION_ID,       DESCRIPTION_KIND,        DESCRIPTION_PROCESS_INDEX,  DEVICE_GET_DESCRIPTION,
      EXECUTABLE_DESTROY,   EXECUTABLE_SERIALIZE,    DESCRIPTION_DEBUG_STRING,   LOADED_GET_EXECUTABLE,
      DESERIALIZE_AND_LOAD};
  if (api->version.major != KP_API_MAJOR || api->version.minor < KP_OLDEST_MINOR ||
      api->version.minor > KP_NEWEST_MINOR)
    return "the plugin has a version of the PJRT C API for which the cache was not made";
  if (api->struct_size < sizeof *api + NUM_FUNCTIONS_NEEDED * sizeof *api->functions)
    return "the plugin's table of functions is too short";
  for (size_t i = 0; i < sizeof USED / sizeof *USED; i++)
    if (!api->functions[USED[i]]) return "the plugin lacks a function that the cache needs";
  if (!folder_path || !*folder_path) return "no folder was given";
  if (!note_environment(plugin_path)) return "the plugin's file cannot be read";
  return open_folder(folder_path, bound);
}

static const struct pjrt_api *load_plugin(const char *path) {
  void *library = path ? dlopen(path, RTLD_NOW | RTLD_LOCAL) : NULL;
  const struct pjrt_api *(*get)(void) = NULL;
  if (library) *(void **)&get = dlsym(library, "GetPjrtApi");
  if (!get) {
    const char *reason = path ? dlerror() : "KP_TPU_CACHE_PLUGIN is not set";
    fprintf(stderr, "kp_dynamo: the disk cache cannot load the PJRT plugin behind it: %s\n", reason);
  }
  return get ? get() : NULL;
}

EXPORTED const struct pjrt_api *GetPjrtApi(void) {
  static struct pjrt_api *mine;
  static int is_loading;
  if (mine || real) return mine ? mine : real;
  if (is_loading) { /* Two installations of this package may each take the other's library for a plugin. */
    fputs("kp_dynamo: the PJRT plugin behind the disk cache is the disk cache itself\n", stderr);
    return NULL;
  }
  if (!plugin_path) configure_from_environment();
  is_loading = 1;
  real = load_plugin(plugin_path);
  is_loading = 0;
  if (!real) return NULL;
  if ((state = problem_of(real))) return real;
  if (!(mine = malloc(real->struct_size))) return real;
  memcpy(mine, real, real->struct_size);
  mine->functions[CLIENT_COMPILE] = compile_or_load;
  return mine;
}
