/* Files and JSON: cJSON reads and prints, this asks for fields by name. */
#include "bench.h"

#include <errno.h>
#include <stdarg.h>
#include <stdio.h>
#include <stdlib.h>
#include <string.h>
#include <unistd.h>

void quit(int code, const char *format, ...) {
  va_list given;
  va_start(given, format);
  fputs("kvcap-bench: ", stderr);
  vfprintf(stderr, format, given);
  fputc('\n', stderr);
  va_end(given);
  exit(code);
}

bool fail(Fault *fault, const char *format, ...) {
  va_list given;
  va_start(given, format);
  vsnprintf(fault->text, sizeof fault->text, format, given);
  va_end(given);
  return false;
}

static void *contents(const char *path, size_t *bytes) {
  FILE *file = fopen(path, "rb");
  if (!file) return NULL;
  long size = fseek(file, 0, SEEK_END) ? -1 : ftell(file);
  rewind(file);
  char *data = size < 0 ? NULL : malloc((size_t)size + 1);
  bool whole = data && fread(data, 1, (size_t)size, file) == (size_t)size;
  fclose(file);
  if (!whole) {
    free(data);
    return NULL;
  }
  data[size] = 0;
  *bytes = (size_t)size;
  return data;
}

void *read_file(const char *folder, const char *name, size_t bytes, Fault *fault) {
  char path[4096];
  size_t found;
  snprintf(path, sizeof path, "%s/%s", folder, name);
  void *data = contents(path, &found);
  if (!data) {
    fail(fault, "%s cannot be read: %s", name, strerror(errno));
  } else if (found != bytes) {
    fail(fault, "%s has %zu bytes, needed are %zu", name, found, bytes);
    free(data);
    data = NULL;
  }
  return data;
}

cJSON *parsed(const char *path) {
  size_t bytes;
  char *text = contents(path, &bytes);
  cJSON *found = text ? cJSON_ParseWithLength(text, bytes) : NULL;
  free(text);
  return found;
}

cJSON *read_json(const char *path) {
  if (access(path, R_OK)) quit(2, "%s cannot be read: %s", path, strerror(errno));
  cJSON *found = parsed(path);
  if (!cJSON_IsObject(found)) quit(2, "%s is no JSON object", path);
  return found;
}

static const cJSON *field(const cJSON *object, const char *name, cJSON_bool (*fits)(const cJSON *)) {
  const cJSON *found = cJSON_GetObjectItemCaseSensitive(object, name);
  if (!found || !fits(found)) quit(2, "the plan lacks %s, or it is of another type", name);
  return found;
}

const char *text_of(const cJSON *object, const char *name) {
  return field(object, name, cJSON_IsString)->valuestring;
}

double number_of(const cJSON *object, const char *name) {
  return field(object, name, cJSON_IsNumber)->valuedouble;
}

const cJSON *list_of(const cJSON *object, const char *name) {
  return field(object, name, cJSON_IsArray);
}

bool write_text(const char *text, const char *path, Fault *fault) {
  char part[4096];
  snprintf(part, sizeof part, "%s.part", path);
  FILE *file = fopen(part, "wb");
  size_t size = strlen(text);
  bool done = file && fwrite(text, 1, size, file) == size && !fflush(file) && !fsync(fileno(file));
  int why = errno;
  if (file && fclose(file) && done) done = false, why = errno;
  if (done && !rename(part, path)) return true;
  if (done) why = errno;
  unlink(part);
  return fail(fault, "%s cannot be written: %s", path, strerror(why));
}

bool write_json(const cJSON *value, const char *path, Fault *fault) {
  char *text = cJSON_PrintUnformatted(value);
  bool written = text ? write_text(text, path, fault) : fail(fault, "there is no memory for the result");
  free(text);
  return written;
}
