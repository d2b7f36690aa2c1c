/* The part of PJRT's C API that the disk cache uses. A plugin is a shared library that exports GetPjrtApi().
 *
 * The layouts are those of API 0.75, the version of torch_xla 2.9 and its libtpu. Later minor versions only append
 * fields. `struct_size` tells the plugin which fields the caller knows; fields named `out` are written by the plugin.
 * tests/disk_cache/layouts.c compares this file with the header of a real plugin.
 */
#ifndef KP_PJRT_API_H
#define KP_PJRT_API_H

#include <stddef.h>

enum { KP_API_MAJOR = 0, KP_OLDEST_MINOR = 75, KP_NEWEST_MINOR = 115 };

/* Positions in the table of functions, after its head. */
enum {
  ERROR_DESTROY = 0,
  ERROR_GET_CODE = 2,
  CLIENT_PLATFORM_NAME = 12,
  CLIENT_PROCESS_INDEX = 13,
  CLIENT_PLATFORM_VERSION = 14,
  CLIENT_DEVICES = 15,
  CLIENT_ADDRESSABLE_DEVICES = 16,
  CLIENT_COMPILE = 20,
  DESCRIPTION_ID = 23,
  DESCRIPTION_PROCESS_INDEX = 24,
  DESCRIPTION_KIND = 26,
  DESCRIPTION_DEBUG_STRING = 27,
  DEVICE_GET_DESCRIPTION = 29,
  EXECUTABLE_DESTROY = 40,
  EXECUTABLE_SERIALIZE = 49,
  LOADED_GET_EXECUTABLE = 51,
  DESERIALIZE_AND_LOAD = 56,
  NUM_FUNCTIONS_NEEDED,
};

/* The codes of errors that say nothing about the arguments: the same call may succeed later. */
enum { CANCELLED = 1, DEADLINE_EXCEEDED = 4, RESOURCE_EXHAUSTED = 8, ABORTED = 10, UNAVAILABLE = 14 };

/* Takes the address of one of the argument structs below; NULL means success. */
typedef void *(*PjrtFunction)(void *arguments);

struct pjrt_api {
  size_t struct_size;
  void *extensions;
  struct {
    size_t struct_size;
    void *extensions;
    int major, minor;
  } version;
  PjrtFunction functions[];
};

/* The size that a plugin expects in `struct_size`: up to the end of the last field, without padding. */
#define KP_SIZE(type, last) (offsetof(struct type, last) + sizeof(((struct type *)0)->last))

struct error_destroy { size_t struct_size; void *extensions; void *error; };

struct error_get_code { size_t struct_size; void *extensions; const void *error; int code; };

/* PlatformName, PlatformVersion, Kind and DebugString: the text belongs to `of`. */
struct text_of { size_t struct_size; void *extensions; void *of; const char *text; size_t size; };

/* Client_ProcessIndex, DeviceDescription_Id and DeviceDescription_ProcessIndex. */
struct number_of { size_t struct_size; void *extensions; void *of; int number; };

/* Client_Devices and Client_AddressableDevices. */
struct devices_of { size_t struct_size; void *extensions; void *client; void *const *devices; size_t count; };

/* Device_GetDescription and LoadedExecutable_GetExecutable. */
struct part_of { size_t struct_size; void *extensions; void *of; void *part; };

struct program {
  size_t struct_size;
  void *extensions;
  char *code;
  size_t code_size;
  const char *format;
  size_t format_size;
};

struct client_compile {
  size_t struct_size;
  void *extensions;
  void *client;
  const struct program *program;
  const char *options;
  size_t options_size;
  void *executable; /* out */
};

struct executable_destroy { size_t struct_size; void *extensions; void *executable; };

struct executable_serialize {
  size_t struct_size;
  void *extensions;
  const void *executable;
  const char *bytes; /* out, as are the other fields below */
  size_t size;
  void *owner;
  void (*delete_owner)(void *owner);
};

struct deserialize_and_load {
  size_t struct_size;
  void *extensions;
  void *client;
  const char *bytes;
  size_t size;
  void *executable; /* out */
  const char *other_options; /* NULL: the options that it was compiled with */
  size_t other_options_size;
};

/* Whether a call succeeded; frees its error. */
static inline int succeeded(const struct pjrt_api *api, void *error) {
  if (!error) return 1;
  struct error_destroy destroy = {.struct_size = KP_SIZE(error_destroy, error), .error = error};
  api->functions[ERROR_DESTROY](&destroy);
  return 0;
}

/* Whether the call of this error may succeed later. */
static inline int is_transient(const struct pjrt_api *api, const void *error) {
  struct error_get_code got = {.struct_size = KP_SIZE(error_get_code, code), .error = error};
  if (!succeeded(api, api->functions[ERROR_GET_CODE](&got))) return 1;
  return got.code == CANCELLED || got.code == DEADLINE_EXCEEDED || got.code == RESOURCE_EXHAUSTED ||
         got.code == ABORTED || got.code == UNAVAILABLE;
}

#endif
