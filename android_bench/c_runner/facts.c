/* The clock, the cores, and what sysfs tells of them. What cannot be known is left out. */
#define _GNU_SOURCE
#include "bench.h"

#include <dirent.h>
#include <sched.h>
#include <stdio.h>
#include <stdlib.h>
#include <string.h>
#include <time.h>
#include <unistd.h>

static const char CPUS[] = "/sys/devices/system/cpu/cpu%d/cpufreq/%s";

double now_us(void) {
  struct timespec now;
  clock_gettime(CLOCK_MONOTONIC, &now);
  return (double)now.tv_sec * 1e6 + (double)now.tv_nsec / 1e3;
}

double timer_step_us(void) {
  double smallest = 1e9;
  for (int i = 0; i < 1000; i++) {
    double start = now_us(), next;
    while ((next = now_us()) == start) continue;
    if (next - start < smallest) smallest = next - start;
  }
  return smallest;
}

void time_text(char text[40]) {
  struct timespec now;
  struct tm parts;
  clock_gettime(CLOCK_REALTIME, &now);
  gmtime_r(&now.tv_sec, &parts);
  size_t used = strftime(text, 40, "%Y-%m-%dT%H:%M:%S", &parts);
  snprintf(text + used, 40 - used, ".%03ldZ", now.tv_nsec / 1000000);
}

int core_count(void) { return (int)sysconf(_SC_NPROCESSORS_CONF); }

bool file_line(const char *path, char *line, int size) {
  FILE *file = fopen(path, "r");
  bool read = file && fgets(line, size, file);
  if (file) fclose(file);
  if (read) line[strcspn(line, "\n")] = 0;
  return read && line[0];
}

cJSON *peak_memory(void) {
  static const char status[] = "/proc/self/status";
  char line[200];
  double kilobytes = -1;
  FILE *file = fopen(status, "r");
  while (file && kilobytes < 0 && fgets(line, sizeof line, file))
    if (!strncmp(line, "VmHWM:", 6)) kilobytes = atof(line + 6);
  if (file) fclose(file);
  cJSON *found = cJSON_CreateObject();
  cJSON_AddStringToObject(found, "of", "process");
  snprintf(line, sizeof line, "no VmHWM in %s", status);
  cJSON_AddItemToObject(found, "peak_bytes", kilobytes < 0 ? cJSON_CreateNull() : cJSON_CreateNumber(kilobytes * 1024));
  cJSON_AddItemToObject(found, "reason", kilobytes < 0 ? cJSON_CreateString(line) : cJSON_CreateNull());
  return found;
}

static bool core_line(int core, const char *name, char *line, int size) {
  char path[200];
  snprintf(path, sizeof path, CPUS, core, name);
  return file_line(path, line, size);
}

static long core_khz(int core, const char *name) {
  char line[64];
  return core_line(core, name, line, sizeof line) ? atol(line) : 0;
}

int biggest_cores(int *cores, int count) {
  int all = core_count(), found = 0;
  bool *taken = calloc((size_t)all, sizeof *taken);
  while (taken && found < count && found < all) {
    int best = -1;
    for (int core = all - 1; core >= 0; core--) /* of equals the last, as interrupts go to the first */
      if (!taken[core] && (best < 0 || core_khz(core, "cpuinfo_max_freq") > core_khz(best, "cpuinfo_max_freq"))) best = core;
    taken[best] = true;
    cores[found++] = best;
  }
  free(taken);
  return found;
}

bool hold_to_cores(const int *cores, int count) {
  cpu_set_t set;
  CPU_ZERO(&set);
  for (int i = 0; i < count; i++) CPU_SET(cores[i], &set);
  return count && !sched_setaffinity(0, sizeof set, &set);
}

cJSON *per_core(const char *name, bool number) {
  cJSON *list = cJSON_CreateArray();
  bool any = false;
  for (int core = 0; core < core_count(); core++) {
    char line[64];
    bool known = core_line(core, name, line, sizeof line);
    any |= known;
    cJSON *null = number ? cJSON_CreateNull() : cJSON_CreateString("");
    cJSON_AddItemToArray(list, !known ? null : number ? cJSON_CreateNumber(atof(line)) : cJSON_CreateString(line));
    if (known) cJSON_Delete(null);
  }
  if (any) return list;
  cJSON_Delete(list);
  return NULL;
}

void add_if(cJSON *object, const char *name, cJSON *value) {
  if (value) cJSON_AddItemToObject(object, name, value);
}

cJSON *temperatures(void) {
  const char *root = "/sys/class/thermal";
  cJSON *found = cJSON_CreateObject();
  DIR *zones = opendir(root);
  for (struct dirent *zone; zones && (zone = readdir(zones));) {
    char path[400], type[100], value[64];
    if (strncmp(zone->d_name, "thermal_zone", 12)) continue;
    snprintf(path, sizeof path, "%s/%s/type", root, zone->d_name);
    if (!file_line(path, type, sizeof type)) continue;
    snprintf(path, sizeof path, "%s/%s/temp", root, zone->d_name);
    if (file_line(path, value, sizeof value) && !cJSON_HasObjectItem(found, type))
      cJSON_AddNumberToObject(found, type, atof(value) / 1000);
  }
  if (zones) closedir(zones);
  if (found->child) return found;
  cJSON_Delete(found);
  return NULL;
}
