/* The clock, the cores, and what the system tells of itself and its state. What cannot be known is left out. */
#define _GNU_SOURCE
#include "bench.h"

#include <dirent.h>
#include <sched.h>
#include <stdio.h>
#include <stdlib.h>
#include <string.h>
#include <sys/utsname.h>
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

/* First line of a file or of what a command prints, without its end; false where there is none. */
static bool line_of(FILE *stream, bool command, char *line, int size) {
  bool read = stream && fgets(line, size, stream);
  if (stream) (command ? pclose : fclose)(stream);
  if (read) line[strcspn(line, "\n")] = 0;
  return read && line[0];
}

static bool file_line(const char *path, char *line, int size) { return line_of(fopen(path, "r"), false, line, size); }

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

static cJSON *per_core(const char *name, bool number) {
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

static void add_if(cJSON *object, const char *name, cJSON *value) {
  if (value) cJSON_AddItemToObject(object, name, value);
}

static cJSON *property(const char *name) {
  char command[100], line[200];
  snprintf(command, sizeof command, "getprop %s 2>/dev/null", name);
  return line_of(popen(command, "r"), true, line, sizeof line) ? cJSON_CreateString(line) : NULL;
}

static cJSON *temperatures(void) {
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

cJSON *conditions(void) {
  cJSON *found = cJSON_CreateObject();
  add_if(found, "governor", per_core("scaling_governor", false));
  add_if(found, "khz", per_core("scaling_cur_freq", true));
  add_if(found, "thermal", temperatures());
  char line[100];
  if (file_line("/proc/loadavg", line, sizeof line)) cJSON_AddNumberToObject(found, "load", atof(line));
  return found;
}

/* A runner cannot tell a phone from a board; it can tell that it is emulated. `kvcap android adb` asks the device. */
static void add_source(cJSON *device) {
  char exe[300] = "";
  /* of the thread, as qemu shows a program its own name under /proc/self */
  ssize_t size = readlink("/proc/thread-self/exe", exe, sizeof exe - 1);
  bool emulated = getenv("KVCAP_EMULATED") || (size > 0 && strstr(exe, "qemu"));
  cJSON_AddStringToObject(device, "source", emulated ? "emulated" : "host");
  cJSON_AddStringToObject(device, "source_reason",
                          emulated ? "an emulator runs the runner" : "a runner does not say that it is on a phone");
}

cJSON *device_facts(void) {
  struct utsname system;
  uname(&system);
  cJSON *device = cJSON_CreateObject(), *model = property("ro.product.model");
  add_source(device);
  cJSON_AddItemToObject(device, "model", model ? model : cJSON_CreateString(system.machine));
  add_if(device, "soc", property("ro.soc.model"));
  cJSON_AddStringToObject(device, "abi", system.machine);
  cJSON_AddNumberToObject(device, "cores", core_count());
  add_if(device, "core_khz", per_core("cpuinfo_max_freq", true));
  add_if(device, "android", property("ro.build.version.release"));
  cJSON_AddNumberToObject(device, "ram_bytes", (double)sysconf(_SC_PHYS_PAGES) * (double)sysconf(_SC_PAGESIZE));
  return device;
}
