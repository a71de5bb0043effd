/* What the device is, and what may slow it down: Android's own programs getprop and dumpsys, and sysfs.
 * Only Android's properties make a device real; an emulator that shows itself anywhere makes it emulated. */
#include "bench.h"

#include <stdio.h>
#include <stdlib.h>
#include <string.h>
#include <strings.h>
#include <sys/utsname.h>
#include <unistd.h>

/* What a command prints, at most `size` - 1 bytes; empty where there is no such command. */
static char *output_of(const char *command, char *text, size_t size) {
  FILE *stream = popen(command, "r");
  size_t count = stream ? fread(text, 1, size - 1, stream) : 0;
  char rest[512];
  while (stream && fread(rest, 1, sizeof rest, stream)) continue; /* else it ends by SIGPIPE */
  if (stream) pclose(stream);
  text[count] = 0;
  return text;
}

/* A property of Android, its end stripped; empty where there is none. */
static char *property(const char *name, char *value, size_t size) {
  char command[100];
  snprintf(command, sizeof command, "getprop %s 2>/dev/null", name);
  output_of(command, value, size)[strcspn(value, "\n")] = 0;
  return value;
}

static bool holds(const char *text, const char *const *words) {
  for (; *words; words++)
    for (const char *at = text; *at; at++)
      if (!strncasecmp(at, *words, strlen(*words))) return true;
  return false;
}

/* The property that gives an emulator away, with its value; empty where there is none. */
static char *emulator_mark(char *mark, size_t size) {
  static const char *const set[] = {"ro.kernel.qemu", "ro.boot.qemu", NULL};
  static const char *const names[] = {"ro.hardware", "ro.product.device", "ro.product.model", NULL};
  static const char *const words[] = {"goldfish", "ranchu", "cutf", "vsoc", "sdk_gphone", "emulator", NULL};
  char value[200];
  for (int i = 0; set[i]; i++)
    if (!strcmp(property(set[i], value, sizeof value), "1")) return snprintf(mark, size, "%s=1", set[i]), mark;
  for (int i = 0; names[i]; i++)
    if (holds(property(names[i], value, sizeof value), words)) return snprintf(mark, size, "%s=%s", names[i], value), mark;
  *mark = 0;
  return mark;
}

static void add_source(cJSON *device, const char *asked, const char *android, const char *machine) {
  char exe[300] = "", mark[300], why[400] = "no Android here";
  const char *source = "host";
  /* of the thread, as qemu shows a program its own name under /proc/self */
  ssize_t size = readlink("/proc/thread-self/exe", exe, sizeof exe - 1);
  if (strcmp(asked, "auto")) source = asked, snprintf(why, sizeof why, "--source %s", asked);
  else if (size > 0 && strstr(exe, "qemu")) source = "emulated", snprintf(why, sizeof why, "qemu runs the runner");
  else if (*android && *emulator_mark(mark, sizeof mark)) source = "emulated", snprintf(why, sizeof why, "Android says %s", mark);
  else if (*android && strncmp(machine, "aarch64", 7) && strncmp(machine, "arm", 3))
    source = "emulated", snprintf(why, sizeof why, "Android on %s is no phone", machine);
  else if (*android) source = "real", snprintf(why, sizeof why, "Android's properties name a device and no emulator");
  cJSON_AddStringToObject(device, "source", source);
  cJSON_AddStringToObject(device, "source_reason", why);
}

static void add_text(cJSON *object, const char *name, const char *value, const char *otherwise) {
  if (*value) cJSON_AddStringToObject(object, name, value);
  else if (otherwise) cJSON_AddStringToObject(object, name, otherwise);
  else cJSON_AddNullToObject(object, name);
}

cJSON *device_facts(const char *asked) {
  struct utsname system;
  uname(&system);
  char android[100], maker[200], model[200], whole[450], soc[200], abi[200];
  property("ro.build.version.release", android, sizeof android);
  property("ro.product.manufacturer", maker, sizeof maker);
  property("ro.product.model", model, sizeof model);
  snprintf(whole, sizeof whole, "%s%s%s", maker, *maker && *model ? " " : "", model);
  if (!*property("ro.soc.model", soc, sizeof soc)) property("ro.board.platform", soc, sizeof soc);
  cJSON *device = cJSON_CreateObject();
  add_source(device, asked, android, system.machine);
  add_text(device, "model", whole, system.machine);
  add_text(device, "soc", soc, NULL);
  add_text(device, "abi", property("ro.product.cpu.abi", abi, sizeof abi), system.machine);
  cJSON_AddNumberToObject(device, "cores", core_count());
  add_if(device, "core_khz", per_core("cpuinfo_max_freq", true));
  add_text(device, "android", android, NULL);
  cJSON_AddNumberToObject(device, "ram_bytes", (double)sysconf(_SC_PHYS_PAGES) * (double)sysconf(_SC_PAGESIZE));
  return device;
}

cJSON *conditions(void) {
  char text[16384], *level;
  cJSON *found = cJSON_CreateObject();
  add_if(found, "governor", per_core("scaling_governor", false));
  add_if(found, "khz", per_core("scaling_cur_freq", true));
  add_if(found, "thermal", temperatures());
  output_of("dumpsys battery 2>/dev/null", text, sizeof text);
  if ((level = strstr(text, " level:"))) cJSON_AddNumberToObject(found, "battery_percent", atof(level + 7));
  if (*text) cJSON_AddBoolToObject(found, "charging", strstr(text, "powered: true") != NULL);
  output_of("dumpsys power 2>/dev/null", text, sizeof text);
  if (strstr(text, "mWakefulness=")) cJSON_AddBoolToObject(found, "screen_on", strstr(text, "mWakefulness=Awake") != NULL);
  if (file_line("/proc/loadavg", text, sizeof text)) cJSON_AddNumberToObject(found, "load", atof(text));
  return found;
}
