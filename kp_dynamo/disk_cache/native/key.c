/* The key of a program: SHA-256 over everything that decides what the compiler makes of it, and where it may run. */
#define _GNU_SOURCE
#include <fcntl.h>
#include <stdio.h>
#include <stdlib.h>
#include <string.h>
#include <sys/stat.h>
#include <unistd.h>

#include "cache.h"

/* Increment it when the key or the layout of an entry changes. */
static const char FORMAT[] = "kp_dynamo disk cache 1";
/* The variables that XLA and libtpu read when they start. */
static const char *const VARIABLES[] = {"XLA_FLAGS", "LIBTPU_INIT_ARGS", "TPU_MEGACORE"};

/* Tests give another file. */
#ifndef KP_CPUINFO
#define KP_CPUINFO "/proc/cpuinfo"
#endif

static struct sha256 environment;

/* Lengths in front of name and value: no two lists of parts give the same bytes. */
static void add_part(struct sha256 *hash, const char *name, const void *value, size_t size) {
  uint64_t sizes[2] = {strlen(name), size};
  sha256_add(hash, sizes, sizeof sizes);
  sha256_add(hash, name, sizes[0]);
  if (size) sha256_add(hash, value, size);
}

/* The maps of a program (HloModuleProto: computations.instructions.frontend_attributes.map; frontend_attributes.map) and
 * of its options (CompileOptionsProto: env_option_overrides; and xla_backend_extra_options in its debug_options). */
static const uint64_t PROGRAM_MAPS[][5] = {{3, 2, 68, 1}, {19, 1}}, OPTIONS_MAPS[][5] = {{7}, {3, 3, 500}};

/* As it is, if it is not such a message: then equal programs may have different keys. */
static void add_message(struct sha256 *hash, const char *name, const void *value, size_t size,
                        const uint64_t paths[2][5]) {
  void *sorted = malloc(size + 1);
  if (sorted) memcpy(sorted, value, size);
  int is_sorted = sorted && sort_map_entries(sorted, size, paths[0]) && sort_map_entries(sorted, size, paths[1]);
  add_part(hash, name, is_sorted ? sorted : value, size);
  free(sorted);
}

static void add_sample(struct sha256 *hash, int file, off_t at, size_t size) {
  char *bytes = malloc(size);
  ssize_t got = bytes ? pread(file, bytes, size, at) : -1;
  add_part(hash, "sample", bytes, got > 0 ? (size_t)got : 0);
  free(bytes);
}

/* The version that a CPU plugin reports is a constant, and libtpu's build may change under one version. Its size and
 * samples of it identify the file without reading all of its 200 to 300 MB; its time would differ on each machine. */
static int add_file(struct sha256 *hash, const char *path) {
  enum { NUM_SAMPLES = 32, SAMPLE = 1 << 15, END = 1 << 20 };
  int file = open(path, O_RDONLY | O_CLOEXEC);
  struct stat about;
  if (file < 0) return 0;
  if (fstat(file, &about)) {
    close(file);
    return 0;
  }
  add_part(hash, "plugin size", &about.st_size, sizeof about.st_size);
  add_sample(hash, file, 0, END);
  for (int i = 0; i < NUM_SAMPLES; i++) add_sample(hash, file, about.st_size / NUM_SAMPLES * i, SAMPLE);
  add_sample(hash, file, about.st_size > END ? about.st_size - END : 0, END);
  close(file);
  return 1;
}

/* XLA generates code for the processor's features, on a TPU too if a part of the program runs on the host. */
static void add_processor(struct sha256 *hash) {
  static const char *const FIELDS[] = {"vendor_id", "cpu family", "model", "flags", "Features", "CPU "};
  FILE *file = fopen(KP_CPUINFO, "re");
  char *line = NULL;
  size_t capacity = 0;
  while (file && getline(&line, &capacity, file) > 1) /* An empty line ends the first processor. */
    for (size_t i = 0; i < sizeof FIELDS / sizeof *FIELDS; i++)
      if (!strncmp(line, FIELDS[i], strlen(FIELDS[i]))) add_part(hash, "processor", line, strlen(line));
  free(line);
  if (file) fclose(file);
  long num_processors = sysconf(_SC_NPROCESSORS_ONLN);
  add_part(hash, "num processors", &num_processors, sizeof num_processors);
}

static int is_dumping;

int has_dump_flags(void) { return is_dumping; }

int note_environment(const char *plugin_path) {
  is_dumping = 0;
  sha256_start(&environment);
  add_part(&environment, "format", FORMAT, sizeof FORMAT);
  for (size_t i = 0; i < sizeof VARIABLES / sizeof *VARIABLES; i++) {
    const char *value = getenv(VARIABLES[i]);
    add_part(&environment, value ? VARIABLES[i] : "unset", value, value ? strlen(value) : 0);
    if (value && strstr(value, "xla_dump")) is_dumping = 1;
  }
  int is_read = add_file(&environment, plugin_path);
  add_processor(&environment);
  return is_read;
}

static int add_text(struct sha256 *hash, const struct pjrt_api *api, int function, const char *name, void *of) {
  struct text_of arguments = {.struct_size = KP_SIZE(text_of, size), .of = of};
  if (!succeeded(api, api->functions[function](&arguments))) return 0;
  add_part(hash, name, arguments.text, arguments.size);
  return 1;
}

static int add_number(struct sha256 *hash, const struct pjrt_api *api, int function, const char *name, void *of) {
  struct number_of arguments = {.struct_size = KP_SIZE(number_of, number), .of = of};
  if (!succeeded(api, api->functions[function](&arguments))) return 0;
  add_part(hash, name, &arguments.number, sizeof arguments.number);
  return 1;
}

static int add_device(struct sha256 *hash, const struct pjrt_api *api, void *device) {
  struct part_of about = {.struct_size = KP_SIZE(part_of, part), .of = device};
  return succeeded(api, api->functions[DEVICE_GET_DESCRIPTION](&about)) &&
         add_number(hash, api, DESCRIPTION_ID, "id", about.part) &&
         add_number(hash, api, DESCRIPTION_PROCESS_INDEX, "process", about.part) &&
         add_text(hash, api, DESCRIPTION_KIND, "kind", about.part) &&
         add_text(hash, api, DESCRIPTION_DEBUG_STRING, "description", about.part);
}

/* A program that was compiled for some devices may crash when it is loaded onto others: each device is a part. */
static int add_devices(struct sha256 *hash, const struct pjrt_api *api, int function, const char *name, void *client) {
  struct devices_of found = {.struct_size = KP_SIZE(devices_of, count), .client = client};
  if (!succeeded(api, api->functions[function](&found))) return 0;
  add_part(hash, name, &found.count, sizeof found.count);
  for (size_t i = 0; i < found.count; i++)
    if (!add_device(hash, api, found.devices[i])) return 0;
  return 1;
}

int key_of(const struct pjrt_api *api, const struct client_compile *compile, struct key *key) {
  struct sha256 hash = environment;
  int version[2] = {api->version.major, api->version.minor};
  add_part(&hash, "api", version, sizeof version);
  add_part(&hash, "format", compile->program->format, compile->program->format_size);
  if (compile->program->format_size == 3 && !memcmp(compile->program->format, "hlo", 3))
    add_message(&hash, "program", compile->program->code, compile->program->code_size, PROGRAM_MAPS);
  else
    add_part(&hash, "program", compile->program->code, compile->program->code_size);
  add_message(&hash, "options", compile->options, compile->options_size, OPTIONS_MAPS);
  if (!add_text(&hash, api, CLIENT_PLATFORM_NAME, "platform", compile->client) ||
      !add_text(&hash, api, CLIENT_PLATFORM_VERSION, "platform version", compile->client) ||
      !add_number(&hash, api, CLIENT_PROCESS_INDEX, "process", compile->client) ||
      !add_devices(&hash, api, CLIENT_DEVICES, "devices", compile->client) ||
      !add_devices(&hash, api, CLIENT_ADDRESSABLE_DEVICES, "addressable", compile->client))
    return 0;
  sha256_finish(&hash, key->digest);
  return 1;
}
